"""What is kept of the study: docs/study.json, the files of each run, and what was published."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from jaxgru.analysis.measures import MeanLoss, Measurements, Reset, Text
from jaxgru.errors import UserError
from jaxgru.lm.config import config_dir
from jaxgru.lm.evaluation import in_units
from jaxgru.lm.training import Epoch
from jaxgru.records import Count, Number, Record, Whole
from pages.models import kind


class EpochLoss(MeanLoss, frozen=True, kw_only=True):
    """The loss of random batches with the weights of an epoch."""

    epoch: Count


class RandomBatches(MeanLoss, frozen=True, kw_only=True):
    """The loss of random batches with the last weights, and with the best epoch's."""

    best: EpochLoss | None = None


class StudyText(Text, frozen=True):
    """Measures of a model's text, and two texts to read."""

    greedy: str | None = None
    sampled: str | None = None


class RunMeasures(Measurements, frozen=True, kw_only=True):
    """A run's study.json: what was measured of it, and how."""

    memory_curve: Annotated[list[tuple[Reset, Number]], Meta(min_length=1)]
    recovery: Annotated[list[Number], Meta(min_length=1)]
    text: Mapping[str, StudyText]
    random_batches: RandomBatches | None = None
    date: str
    hardware: str
    commits: list[str] = []

    def per_character(self, loss: float) -> float:
        """Convert nats per token to nats per character."""
        return in_units(loss, self.num_tokens, self.num_characters)["nats_per_character"]


class Run(Record):
    """A run in docs/study.json: a config's name, the fields changed in it, and the measurements."""

    config: str
    changes: dict[str, str | bool | Number]
    seed: Whole
    parameters: Count
    epochs: Annotated[list[Epoch], Meta(min_length=1)]
    measured: RunMeasures = msgspec.field(name="study")

    @property
    def title(self) -> str:
        """The run's config and the changes, without the seed."""
        changes = []
        for name, value in self.changes.items():
            _, _, field = name.partition(".")
            if field.endswith("dropout") and not value:
                changes.append("no dropout")
            else:
                changes.append(f"{field} {value}")
        return ", ".join([self.config, *changes])

    @property
    def called(self) -> str:
        """The title, and before it what the model is: "GRU 1 × 32 (astra_alpha, hidden_dim 32)"."""
        return f"{kind(self.config, self.changes)} ({self.title})"


class Study(Record):
    """docs/study.json: all runs, and the losses of counted n-grams."""

    runs: list[Run]
    ngrams: dict[str, list[Number]] = {}  # by config, orders 1 to 8, nats per character


def load_metrics(path: Path) -> list[Epoch]:
    """Read a run's metrics.jsonl.

    Raises:
      UserError: the file cannot be read, or holds something else.
    """
    try:
        return msgspec.json.Decoder(Epoch).decode_lines(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a file of measurements: {error}.") from error


@dataclass(frozen=True)
class PublishedResults:
    """What the study reports for one model, losses in nats per token by epoch.

    Attributes:
      num_params: the parameter count; 0: none is published.
      train_loss: the mean training loss of each epoch, one list per run; NaN: not reported.
      val_loss: the loss of one random validation batch per epoch, one list per run.
      earlier_train_loss, earlier_val_loss: those of a run of another learning rate schedule.
    """

    num_params: int = 0
    train_loss: Sequence[Sequence[float]] = ()
    val_loss: Sequence[Sequence[float]] = ()
    earlier_train_loss: Sequence[float] = ()
    earlier_val_loss: Sequence[float] = ()


def load_published(name: str) -> PublishedResults:
    """Return what the study reports for a config, by name; nothing if it has no such model."""
    path = config_dir() / "published" / f"{name}.toml"
    if not path.exists():
        return PublishedResults()
    return PublishedResults(**tomllib.loads(path.read_text(encoding="utf-8")))
