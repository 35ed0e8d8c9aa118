"""What is kept of the study: docs/study.json, and the metrics.jsonl and study.json of each run.

Also docs/early_stopping.json and docs/plateau.json.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from jaxgru.lm.config import Config, config_names, from_dict, load_config, to_dict
from jaxgru.lm.evaluation import in_units
from pages.records import Count, Number, Positive, Record, Whole, load_lines

Orders = Annotated[list[Number], Meta(min_length=8, max_length=8)]
NGrams = Annotated[dict[Literal["astra_alpha", "scribe_alpha"], Orders], Meta(min_length=2)]
"""The losses of counted n-grams, orders 1 to 8, by config."""
PLATEAU_MEAN = 25  # training steps whose mean loss is one number in docs/plateau.json


class Epoch(Record, kw_only=True):
    """A line of metrics.jsonl; losses in nats per token."""

    epoch: Count
    step: Count
    learning_rate: Number | None = None
    train_loss: Number
    val_loss: Number
    tokens_per_second: Number
    seconds: Number
    peak_memory_mb: Number | None = None  # unknown on some operating systems


class Cycle(Record):
    """A cycle of greedy stateless text, and the share of the vocabulary that leads into it."""

    text: str
    period: Count
    basin: Number


class Chain(Record):
    """The Markov chain that a model is without its state."""

    kl_to_bigram: Number
    kl_to_frequencies: Number
    cycles: list[Cycle]


class Text(Record):
    """Measures of text, named as in `analysis.state_cost.TEXT_MEASURES`, and two texts to read."""

    share_that_loops: Number | None = None
    median_period: Number | None = None
    median_onset: Number | None = None
    num_words: Whole | None = None
    known_words: Number | None = None
    distinct_1: Number | None = None
    distinct_2: Number | None = None
    distinct_3: Number | None = None
    greedy: str | None = None
    sampled: str | None = None


class MeanLoss(Record, kw_only=True):
    """The loss on nanoGPT's protocol, nats per token."""

    mean: Number
    standard_error: Number


class BestEpoch(MeanLoss, kw_only=True):
    """The loss with the weights of the epoch whose validation loss is the lowest."""

    epoch: Count


class RandomBatches(MeanLoss, kw_only=True):
    """The loss with the last weights, and with the best epoch's."""

    best: BestEpoch | None = None


class RunMeasures(Record):
    """A run's study.json, which `jaxgru.analysis.state_cost` writes; losses in nats per token."""

    num_tokens: Count
    num_characters: Count
    windows: Number
    stream: Number
    stateless: Number
    sensitivity: Number
    memory_curve: Annotated[
        list[tuple[Annotated[int, Meta(ge=1, le=2**31)], Number]], Meta(min_length=1)
    ]
    recovery: Annotated[list[Number], Meta(min_length=1)]
    chain: Chain
    text: dict[str, Text]
    date: str
    hardware: str
    commits: list[str] = []
    random_batches: RandomBatches | None = None

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
