"""The files of measurements: their contents as types, and how they are read.

These are metrics.jsonl and study.json of a run, docs/study.json, docs/benchmarks.json and
docs/cost.json. A file is checked against its type when it is read, so a damaged one is refused with
one sentence. A page can be made of any data that its type allows.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

try:
    import msgspec
    from msgspec import UNSET, Meta, Struct, UnsetType
except ImportError:
    raise SystemExit("msgspec is not installed; pip install -e '.[docs]' installs it.") from None

from jaxgru.errors import UserError
from jaxgru.lm.config import Config, config_names, from_dict, load_config, to_dict
from jaxgru.lm.evaluation import in_units
from jaxgru.lm.files import read_bytes

MAX_BYTES = 2**23
"""Size limit of a file; 40,000 epochs fit."""

Number = Annotated[int, Meta(ge=-(10**9), le=10**9)] | Annotated[float, Meta(ge=-1e9, le=1e9)]
"""A finite number. An integer stays an integer, so that rewriting a file does not change it."""
Positive = Annotated[float, Meta(gt=0, le=1e18)]
ONE_DEVICE = "-one-device"
"""The end of a contestant's name: its batch is not split."""
MOMENT = r"\A[0-9]{4}(-[0-9]{2}){2}T[0-9]{2}(:[0-9]{2}){2}\Z"  # 2026-02-03T04:05:06
Whole = Annotated[int, Meta(ge=0, le=2**53)]
Count = Annotated[int, Meta(ge=1, le=2**53)]
Orders = Annotated[list[Number], Meta(min_length=8, max_length=8)]
NGrams = Annotated[dict[Literal["astra_alpha", "scribe_alpha"], Orders], Meta(min_length=2)]
"""The losses of counted n-grams, orders 1 to 8, by config."""
PLATEAU_MEAN = 25  # training steps whose mean loss is one number in docs/plateau.json


class RecordError(UserError):
    """A file of measurements cannot be read; the message says which and why."""


class Record(Struct, frozen=True, omit_defaults=True):
    """Base of all records; unknown fields are ignored."""


# --- The study


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
            if section not in ("model", "data"):
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


# --- Benchmarks


class BenchmarkRun(Record):
    """One run of scripts/benchmark.py; a ceiling is in operations, or bytes, per second."""

    hardware: str
    command: str
    versions: dict[str, str]
    rounds: Count
    note: str
    ceilings: dict[str, Positive]


class ContestantTime(Record):
    """One contestant at one task: its time in seconds per call, or why it failed."""

    run: str
    config: str
    kind: Annotated[
        str, Meta(pattern=r"\A(training|forward|layer(_resets)?|sampling_[1-9][0-9]{0,8})\Z")
    ]
    batch_size: Count
    num_tokens: Count
    precision: str
    contestant: str
    operations: Count
    steps_of_a_run: Count | None = None
    failed: str | None = None
    median: Positive | None = None
    min: Positive | None = None
    max: Positive | None = None
    repeats: Count | None = None
    calls: Count | None = None
    compile_seconds: Number | None = None
    memory_bytes: Whole | None | UnsetType = UNSET

    def __post_init__(self) -> None:
        times = self.min, self.median, self.max, self.compile_seconds
        if self.failed is None and (None in times or not self.min <= self.median <= self.max):
            raise ValueError(
                "a measurement needs failed, or compile_seconds and min ≤ median ≤ max"
            )


class Benchmarks(Record):
    """docs/benchmarks.json: runs by the date and time of their start, and measurements."""

    runs: dict[Annotated[str, Meta(pattern=MOMENT)], BenchmarkRun] = {}
    records: list[ContestantTime] = []

    def __post_init__(self) -> None:
        for record in self.records:
            if record.run not in self.runs:
                raise ValueError(f"there is no run {record.run!r}")


# --- How cost grows


class CostPoint(Record):
    """A training step with one size set to `value`; bytes: those that XLA plans, if known."""

    letter: Literal["T", "B", "H"]
    value: Annotated[int, Meta(ge=1, le=2**15)]
    remat: bool
    seconds: Positive
    bytes: Count | None


class CostRun(Record):
    """One run of scripts/bench/cost.py."""

    hardware: str
    date: str
    command: str
    points: list[CostPoint]


# --- Reading and writing

T = TypeVar("T")


def load(path: Path, kind: type[T]) -> T:
    """Read a JSON file that holds a `kind`.

    Raises:
      RecordError: it cannot be read, or holds something else.
    """
    return _decode(path, msgspec.json.Decoder(kind).decode)


def load_or(default: T, path: Path, kind: type[T]) -> T:
    """Read a JSON file as `load` does, or return the default if there is none."""
    return load(path, kind) if path.exists() else default


def load_metrics(path: Path) -> list[Epoch]:
    """Read a run's metrics.jsonl, one record per line. Raises as `load` does."""
    epochs = _decode(path, msgspec.json.Decoder(Epoch).decode_lines)
    if not epochs:
        raise RecordError(f"{path} is empty.")
    return epochs


def dumps(record: Any, indent: int | None = None) -> str:
    """Return the record as JSON, in the form of the files in docs/."""
    return json.dumps(msgspec.to_builtins(record), indent=indent)


def grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> dict[Any, list[T]]:
    """Return lists of items by key, in the order in which the keys first occur."""
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _decode(path: Path, decode: Any) -> Any:
    try:
        data = read_bytes(path, at_most=MAX_BYTES)
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        return decode(data)
    except (ValueError, RecursionError) as error:
        why = str(error).replace(". - at", " - at").removesuffix(".")
        raise RecordError(f"{path} is not a file of measurements: {why}.") from error
