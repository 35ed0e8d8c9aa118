"""What a run writes for people: its numbers, `loss.png` and `samples.txt`."""

from __future__ import annotations

import functools
import json
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgru.errors import needs, warn
from jaxgru.lm.config import Config, config_dir, dotted_names, field_value, load_config
from jaxgru.lm.data.tokenizers import Tokenizer
from jaxgru.lm.files import write_text
from jaxgru.lm.generation import Options, default_prompt, stream_text
from jaxgru.lm.model import Params
from jaxgru.lm.runs.figure import losses_figure, save_figure
from jaxgru.lm.runs.folders import RunInfo
from jaxgru.lm.training import Epoch, Progress

NUM_TOKENS = 300  # of samples.txt


def write_losses(run: Path, config: Config, info: RunInfo, progress: Progress) -> None:
    """Write metrics.jsonl and the figure from the records."""
    lines = [json.dumps(record.to_dict()) + "\n" for record in progress.records]
    write_text(run / "metrics.jsonl", "".join(lines))
    title = f"{config.name}, seed {config.training.seed}"
    train = [record.train_loss for record in progress.records]
    validation = [record.val_loss for record in progress.records]
    try:
        figure = losses_figure(title, train, validation, published_losses(config, info))
        save_figure(figure, run / "loss.png")
    except Exception as error:  # the user's settings of matplotlib may need LaTeX, for example
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise  # the disk's fault; not a font that is missing
        _warn_once(f"the figure {run / 'loss.png'} cannot be drawn: {' '.join(str(error).split())}")


def recipe(config: Config) -> dict[str, Any]:
    """Return what decides a model's losses but for the seed: its text's name and its recipe."""
    names = ["data.corpus", *dotted_names("recipe")]
    return {name: field_value(config, name) for name in names if name != "training.seed"}


@functools.cache
def _published_recipe(name: str) -> dict[str, Any]:
    return recipe(load_config(name))


def published_losses(config: Config, info: RunInfo) -> dict[str, Any]:
    """Return what the study reports of this text and recipe: `train_loss`, `val_loss`, by run.

    Nothing for a run that was lengthened: its first epochs had the learning rates of a shorter one.
    """
    for path in (config_dir() / "published").glob("*.toml"):
        if not info.lengthened and _published_recipe(path.stem) == recipe(config):
            return tomllib.loads(path.read_text(encoding="utf-8"))
    return {}


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
