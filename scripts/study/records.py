"""What is kept of the study: docs/study.json, and the metrics.jsonl and study.json of each run.

Also docs/early_stopping.json, docs/plateau.json, docs/dynamic.json and docs/ablation.json.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from jaxgru.analysis.state_cost import MeanLoss, StateCost
from jaxgru.lm.config import Config, config_names, from_dict, load_config, to_dict
from jaxgru.lm.evaluation import in_units
from jaxgru.lm.records import Count, Number, Positive, Record, Whole
from jaxgru.lm.training import Epoch
from pages.records import load_lines

Orders = Annotated[list[Number], Meta(min_length=8, max_length=8)]
NGrams = Annotated[dict[Literal["astra_alpha", "scribe_alpha"], Orders], Meta(min_length=2)]
"""The losses of counted n-grams, orders 1 to 8, by config."""
PLATEAU_MEAN = 25  # training steps whose mean loss is one number in docs/plateau.json
DYNAMIC_PARTS = 50  # of the text, for the figure


class EpochLoss(MeanLoss, frozen=True, kw_only=True):
    """The loss of random batches with the weights of an epoch."""

    epoch: Count


class RandomBatches(MeanLoss, frozen=True, kw_only=True):
    """The loss of random batches with the last weights, and with the best epoch's."""

    best: EpochLoss | None = None


class RunMeasures(StateCost, frozen=True, kw_only=True):
    """A run's study.json: the cost of resetting its state, and how it was measured."""

    random_batches: RandomBatches | None = None
    date: str
    hardware: str
    commits: list[str] = []

    def per_character(self, loss: float) -> float:
        """Convert nats per token to nats per character."""
        return in_units(loss, self.num_tokens, self.num_characters)["nats_per_character"]


def may_change(name: str) -> bool:
    """Return whether a run of the study may change this field of its config."""
    varied = "training.dropout", "training.dropout_site", "training.compute_dtype"
    return name in varied or name.startswith(("model.", "data."))


class Run(Record):
    """A run in docs/study.json: a config's name, the fields changed in it, and the measurements."""

    config: str
    changes: dict[str, str | bool | Number]
    seed: Whole
    parameters: Count
    epochs: Annotated[list[Epoch], Meta(min_length=1)]
    measured: RunMeasures = msgspec.field(name="study")

    def __post_init__(self) -> None:
        self.full_config()

    @property
    def best(self) -> Epoch:
        """The epoch of the lowest validation loss."""
        return min(self.epochs, key=lambda epoch: epoch.val_loss)

    @property
    def result_epoch(self) -> int:
        """The epoch whose weights are the run's result: with early stopping, the best."""
        return self.best.epoch if load_config(self.config).training.patience else len(self.epochs)

    def full_config(self) -> Config:
        """Return the config with its changes. Raises ValueError if it is not valid."""
        if self.config not in config_names():
            raise ValueError(f"there is no config {self.config!r}")
        table = to_dict(load_config(self.config))
        for name, value in self.changes.items():
            section, _, field = name.partition(".")
            if not may_change(name):
                raise ValueError(f"a run of the study does not change {name!r}")
            table[section][field] = value
        return from_dict(table)


class Kept(Record):
    """docs/study.json without its n-gram losses, which scripts/report.py always counts again."""

    runs: list[Run]


class Study(Kept):
    """docs/study.json, with its n-gram losses."""

    ngrams: NGrams  # nats per character of each config's text


class EarlyStopping(Record, kw_only=True):
    """docs/early_stopping.json: what one random batch per epoch makes of a run's early stopping."""

    config: str
    draws: Count
    patience: Count
    losses: Annotated[list[Number], Meta(min_length=1)]  # of each epoch, the mean over draws
    noise: Number  # the standard deviation of a batch's loss
    best: Annotated[list[Whole], Meta(min_length=1)]  # in how many draws each epoch was the best

    def __post_init__(self) -> None:
        if len(self.best) != len(self.losses):
            raise ValueError("best and losses have different lengths")

    def share(self, epoch: int) -> str:
        """Return the share of the draws in which this epoch, from 1 on, was the best."""
        return f"{self.best[epoch - 1] / self.draws:.1%}" if epoch <= len(self.best) else "0%"


class DynamicEvaluation(Record, kw_only=True):
    """One of docs/dynamic.json: losses in nats per token, of weights that learn as they read."""

    model: str
    learning_rate: Number
    decay: Number
    every: Count
    static: Number
    dynamic: Number
    num_tokens: Count
    num_characters: Count
    resets: list[tuple[Count, Number, Number]]  # of the state, every so many tokens: both losses
    static_parts: Annotated[list[Number], Meta(min_length=1)]  # of equal parts of the text
    dynamic_parts: Annotated[list[Number], Meta(min_length=1)]
    date: str
    hardware: str
    commit: str | None = None

    def per_character(self, loss: float) -> float:
        """Convert nats per token to nats per character."""
        return in_units(loss, self.num_tokens, self.num_characters)["nats_per_character"]


class Ablation(Record, kw_only=True):
    """One of docs/ablation.json: best_gru's recipe with GRU layers and a change; nats per token."""

    title: str
    seed: Whole
    loss: Number
    date: str
    hardware: str
    commit: str | None = None


class Plateau(Record, kw_only=True):
    """One of docs/plateau.json: the first training losses of a config, by one framework."""

    config: str
    framework: Literal["PyTorch", "jaxgru"]
    batch_size: Count
    learning_rate: Positive
    seed: Whole
    losses: Annotated[list[Number], Meta(min_length=1)]  # of each PLATEAU_MEAN steps, the mean
    constant: list[list[Number]] = []  # after them, the share of each layer; none: not measured
    date: str
    hardware: str
    commit: str | None = None

    def __post_init__(self) -> None:
        if self.constant and len(self.constant) != len(self.losses):
            raise ValueError("constant and losses have different lengths")

    @property
    def key(self) -> tuple[str, str, float, float, int]:
        """What tells this run from others."""
        return self.config, self.framework, -self.batch_size, -self.learning_rate, self.seed

    @property
    def constant_at_first(self) -> float:
        """The share of constant units in the layers above layer 1, after PLATEAU_MEAN steps."""
        return statistics.mean(self.constant[0][1:])

    @property
    def epochs(self) -> list[float]:
        """The mean loss of each whole epoch."""
        size = load_config(self.config).training.steps_per_epoch // PLATEAU_MEAN
        whole = len(self.losses) // size
        return [statistics.mean(self.losses[i * size : (i + 1) * size]) for i in range(whole)]

    @property
    def steps(self) -> int:
        """The number of all steps."""
        return PLATEAU_MEAN * len(self.losses)


def load_metrics(path: Path) -> list[Epoch]:
    """Read a run's metrics.jsonl. Raises as `load_lines` does."""
    return load_lines(path, Epoch)
