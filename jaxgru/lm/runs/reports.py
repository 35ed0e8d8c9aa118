"""What a run writes for people: its numbers, `loss.png` and `samples.txt`."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path

from jaxgru.errors import needs, warn
from jaxgru.lm.config import Config
from jaxgru.lm.data.tokenizers import Tokenizer
from jaxgru.lm.files import write_text
from jaxgru.lm.generation import Options, default_prompt, stream_text
from jaxgru.lm.model import Params
from jaxgru.lm.runs.figure import losses_figure, save_figure
from jaxgru.lm.runs.folders import RunInfo
from jaxgru.lm.runs.published import published_for
from jaxgru.lm.training import Epoch, Progress

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


class Events:
    """The numbers of metrics.jsonl as scalars by step, for TensorBoard, in the folder tensorboard/.

    tensorboardX's `SummaryWriter` would write in a thread, in which a full disk is not noticed.

    Raises:
      MissingPackage: tensorboardX is not installed.
    """

    def __init__(self, run: Path, records: Sequence[Epoch]) -> None:
        with needs("tensorboard"):
            from tensorboardX.event_file_writer import EventsWriter
        folder = run / "tensorboard"
        folder.mkdir(exist_ok=True)
        for file in folder.glob("events.*"):  # of the run before it was resumed: written again
            file.unlink()
        self._writer = EventsWriter(str(folder / "events"))
        for record in records:
            self.add(record)

    def add(self, record: Epoch) -> None:
        """Write an epoch."""
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore  made when imported
        from tensorboardX.summary import scalar

        for name, value in record.to_dict().items():
            if name != "step" and value is not None:
                event = Event(wall_time=time.time(), step=record.step, summary=scalar(name, value))
                self._writer.write_event(event)
        self._writer.flush()


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
