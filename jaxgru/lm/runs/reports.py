"""What a run writes for people: `metrics.jsonl`, `loss.png` and `samples.txt`."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax

from jaxgru.errors import warn
from jaxgru.lm.config import Config
from jaxgru.lm.data.tokenizers import Tokenizer
from jaxgru.lm.files import write_text
from jaxgru.lm.generation import Options, default_prompt, stream_text
from jaxgru.lm.model import Params
from jaxgru.lm.parallel.hardware import peak_resident_bytes
from jaxgru.lm.runs.figure import plot_losses
from jaxgru.lm.runs.published import published_for
from jaxgru.lm.training import Progress

NUM_TOKENS = 300  # of samples.txt


def write_losses(run: Path, config: Config, progress: Progress) -> None:
    """Write metrics.jsonl and the figure from the records."""
    lines = [json.dumps(record) + "\n" for record in progress.records]
    write_text(run / "metrics.jsonl", "".join(lines))
    title = f"{config.name}, seed {config.training.seed}"
    try:
        plot_losses(run / "loss.png", title, [progress.records], published_for(config))
    except Exception as error:  # the user's settings of matplotlib may need LaTeX, for example
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise  # the disk's fault; not a font that is missing
        _warn_once(f"the figure {run / 'loss.png'} cannot be drawn: {' '.join(str(error).split())}")


def write_samples(run: Path, params: Params, config: Config, tokenizer: Tokenizer) -> None:
    """Write samples.txt: what the model writes after one prompt."""
    text = sample_text(params, tokenizer, default_prompt(config.data, tokenizer))
    write_text(run / "samples.txt", text)


def sample_text(params: Params, tokenizer: Tokenizer, prompt: str) -> str:
    """Return text from one prompt, stateless and stateful, greedy and at temperature 0.8."""
    parts = []
    for temperature in (0.0, 0.8):
        for stateful in (False, True):
            how = "stateful" if stateful else "stateless"
            how += ", greedy" if temperature == 0 else f", temperature {temperature}, seed 0"
            options = Options(NUM_TOKENS, temperature, stateful=stateful)
            text = "".join(stream_text(params, tokenizer, prompt, options))
            parts.append(f"--- {how}\n{text}\n")
    return "\n".join(parts)


def peak_memory() -> dict[str, float]:
    """Return the peak memory in MB of 10⁶ bytes: of the device, or on a CPU of the process."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        peak = statistics["peak_bytes_in_use"]
    else:
        peak = peak_resident_bytes()
    return {"peak_memory_mb": round(peak / 1e6, 1)} if peak else {}


@functools.cache
def _warn_once(sentence: str) -> None:
    warn(sentence)
