"""What a run writes for people: its numbers, `loss.png` and `samples.txt`."""

from __future__ import annotations

import io
import json
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgru.errors import needs
from jaxgru.files import write_bytes, write_text
from jaxgru.lm.config import Config, config_dir, dotted_names, field_value, load_config
from jaxgru.lm.data.corpus import TINY_SHAKESPEARE
from jaxgru.lm.data.tokenizers import Tokenizer
from jaxgru.lm.generation import Options, default_prompt, stream_text
from jaxgru.lm.model import Params
from jaxgru.lm.runs.folders import RunInfo
from jaxgru.lm.training import Epoch, Progress

NUM_TOKENS = 300  # of samples.txt
# The colors of loss.png are those of the site
INK = "#1f2328"
GREY = "#59636e"
LINE = "#d0d7de"
BLUE = "#0969da"
ORANGE = "#bc4c00"


def write_losses(run: Path, config: Config, info: RunInfo, progress: Progress) -> None:
    """Write metrics.jsonl and the figure from the records."""
    with needs("train"):
        from matplotlib import style

    lines = [json.dumps(record.to_dict()) + "\n" for record in progress.records]
    write_text(run / "metrics.jsonl", "".join(lines))

    title = f"{config.name}, seed {config.training.seed}"
    train = [record.train_loss for record in progress.records]
    validation = [record.val_loss for record in progress.records]
    with style.context("default"):  # the user's own may need LaTeX, for example
        figure = losses_figure(title, train, validation, published_losses(config, info))
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=120)
    write_bytes(run / "loss.png", image.getvalue())


def losses_figure(
    title: str, train: Sequence[float], validation: Sequence[float], published: Mapping[str, Any]
) -> Any:
    """Return a figure of a run's losses per epoch (nats per token), beside published runs'."""
    with needs("train"):  # takes long to import
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(5.2, 4.2), layout="constrained")
    axes = figure.subplots()

    def plot(
        runs: Sequence[Sequence[float]], color: str, line: str, size: int, label: str | None
    ) -> None:
        for losses in runs:
            epochs = range(1, len(losses) + 1)
            axes.plot(epochs, losses, line, color=color, lw=1.8, ms=size, label=label)
            label = None  # once in the legend

    plot([train], BLUE, "o-", 3, "training")
    plot([validation], ORANGE, "o-", 3, "validation")
    plot(published.get("train_loss", []), BLUE, "x", 5, "training, published")
    plot(published.get("val_loss", []), ORANGE, "x", 5, "one validation batch, published")
    axes.set_title(title, loc="left", color=INK, weight="bold")
    # Or a validation loss below the training loss looks like a mistake
    note = "training: over the epoch, with dropout if any; validation: after it, without"
    axes.set_xlabel(f"epoch\n{note}", color=GREY, size=9)
    axes.set_ylabel("loss in nats per token", color=GREY)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.tick_params(colors=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(GREY)
    axes.grid(axis="y", color=LINE, lw=0.6)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, labelcolor=INK)
    return figure


def recipe(config: Config) -> dict[str, Any]:
    """Return what decides a model's losses but for the seed: its text's name and its recipe."""
    names = ["data.corpus", *dotted_names("recipe")]
    return {name: field_value(config, name) for name in names if name != "training.seed"}


def published_losses(config: Config, info: RunInfo) -> dict[str, Any]:
    """Return what the study reports of this text and recipe: `train_loss`, `val_loss`, by run.

    Nothing for a run that was lengthened: its first epochs had the learning rates of a shorter one.
    """
    if info.lengthened or config.data.corpus != TINY_SHAKESPEARE:
        return {}
    for path in (config_dir() / "published").glob("*.toml"):
        if recipe(load_config(path.stem)) == recipe(config):
            return tomllib.loads(path.read_text(encoding="utf-8"))
    return {}


class Events:
    """The numbers of metrics.jsonl as scalars by step, for TensorBoard, in the folder tensorboard/.

    tensorboardX's `SummaryWriter` would write in a thread, in which a full disk is not noticed.
    """

    def __init__(self, run: Path, records: Sequence[Epoch]) -> None:
        with needs("tensorboard"):
            from tensorboardX.event_file_writer import EventsWriter
        folder = run / "tensorboard"
        folder.mkdir(exist_ok=True)
        # Those of the run before it was resumed are written again
        for file in folder.glob("events.*"):
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


def write_samples(
    run: Path, params: Params, config: Config, info: RunInfo, tokenizer: Tokenizer
) -> str:
    """Write samples.txt: text from one prompt, the state kept and reset, at random and greedy.

    Of a model of documents, each is a document. The first one is returned: with the state kept, at
    temperature 0.8.
    """
    separator = config.data.separator
    prompt = ""
    if not separator:
        prompt = default_prompt(info.text_sha256, tokenizer)
    texts: list[str] = []
    parts: list[str] = []
    # Whoever opens the file sees first what the model is for, and last a loop such as " the the"
    for temperature in (0.8, 0.0):
        for stateful in (True, False):
            options = Options(NUM_TOKENS, temperature, stateful=stateful, separator=separator)
            text = "".join(stream_text(params, tokenizer, prompt, options))
            texts.append(text)
            parts.append(f"--- {_title(temperature, stateful)}\n{text}\n")
    write_text(run / "samples.txt", "\n".join(parts))
    return texts[0]


def _title(temperature: float, stateful: bool) -> str:
    """Return how a text of samples.txt was sampled."""
    state = "state kept" if stateful else "state reset before every token"
    if temperature == 0:
        return f"{state}, greedy"
    return f"{state}, temperature {temperature}, seed 0"
