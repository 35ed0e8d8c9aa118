"""What a run writes for people: `metrics.jsonl`, `loss.png` and `samples.txt`."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from jaxgru.errors import warn
from jaxgru.lm.config import Config
from jaxgru.lm.data.tokenizers import Tokenizer
from jaxgru.lm.files import write_text
from jaxgru.lm.generation import Options, default_prompt, stream_text
from jaxgru.lm.model import Params
from jaxgru.lm.runs.figure import losses_figure, save_figure
from jaxgru.lm.runs.folders import RunInfo
from jaxgru.lm.runs.published import published_for
from jaxgru.lm.training import Progress

NUM_TOKENS = 300  # of samples.txt


def write_losses(run: Path, config: Config, info: RunInfo, progress: Progress) -> None:
    """Write metrics.jsonl and the figure from the records."""
    lines = [json.dumps(record.to_dict()) + "\n" for record in progress.records]
    write_text(run / "metrics.jsonl", "".join(lines))
    title = f"{config.name}, seed {config.training.seed}"
    try:
        losses = (
            [[r.train_loss for r in progress.records]],
            [[r.val_loss for r in progress.records]],
        )
        published = published_for(config, info.lengthened)
        save_figure(losses_figure(title, *losses, published), run / "loss.png")
    except Exception as error:  # the user's settings of matplotlib may need LaTeX, for example
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise  # the disk's fault; not a font that is missing
        _warn_once(f"the figure {run / 'loss.png'} cannot be drawn: {' '.join(str(error).split())}")


def write_samples(run: Path, params: Params, info: RunInfo, tokenizer: Tokenizer) -> str:
    """Write samples.txt: text from one prompt, stateless and stateful, greedy and not.

    Returns the last of the texts: stateful, at temperature 0.8.
    """
    prompt = default_prompt(info.text_sha256, tokenizer)
    parts, text = [], ""
    for temperature in (0.0, 0.8):
        for stateful in (False, True):
            how = "stateful" if stateful else "stateless"
            how += ", greedy" if temperature == 0 else f", temperature {temperature}, seed 0"
            options = Options(NUM_TOKENS, temperature, stateful=stateful)
            text = "".join(stream_text(params, tokenizer, prompt, options))
            parts.append(f"--- {how}\n{text}\n")
    write_text(run / "samples.txt", "\n".join(parts))
    return text


@functools.cache
def _warn_once(sentence: str) -> None:
    warn(sentence)
