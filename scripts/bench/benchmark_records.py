"""What is kept of measurements of speed: docs/benchmarks.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from jaxgru.files import write_text
from jaxgru.records import Count, Number, Record
from pages.measurements import dumps, load_or

Positive = Annotated[float, Meta(gt=0, le=1e18)]


class BenchmarkRun(Record):
    """One run of scripts/benchmark.py."""

    hardware: str
    command: str
    versions: dict[str, str]
    rounds: Count
    note: str


class ContestantTime(Record):
    """One contestant at one task: seconds per call, over the rounds."""

    run: str
    config: str  # or another name of the task
    kind: str  # "training", "sampling_64", …: a task's `kind`
    batch_size: Count
    num_tokens: Count
    precision: str
    contestant: str
    median: Positive
    min: Positive
    max: Positive
    compile_seconds: Number

    @property
    def task(self) -> tuple[str, str, str, int, int]:
        """What was measured."""
        return self.precision, self.kind, self.config, self.batch_size, self.num_tokens

    def __post_init__(self) -> None:
        if not self.min <= self.median <= self.max:
            raise ValueError("a measurement needs min ≤ median ≤ max")


class Benchmarks(Record):
    """docs/benchmarks.json: runs by the date and time of their start, and measurements."""

    runs: dict[str, BenchmarkRun] = {}
    records: list[ContestantTime] = []

    def __post_init__(self) -> None:
        for record in self.records:
            if record.run not in self.runs:
                raise ValueError(f"there is no run {record.run!r}")

    def merged(self, name: str, run: BenchmarkRun, records: list[ContestantTime]) -> Benchmarks:
        """Add a run's records, which replace those of the same tasks on the same hardware.

        Runs without any records left are dropped.
        """
        runs = self.runs | {name: run}
        newest = {}
        for record in [*self.records, *records]:
            newest[runs[record.run].hardware, record.task, record.contestant] = record
        names = sorted({record.run for record in newest.values()})
        return Benchmarks({name: runs[name] for name in names}, [*newest.values()])


def load(path: Path) -> Benchmarks:
    """Read the file's runs and records; none if there is no file.

    Raises:
      UserError: the file holds something else.
    """
    return load_or(Benchmarks(), path, Benchmarks)


def save(path: Path, data: Benchmarks) -> None:
    """Write the data, one run or record per line."""
    runs = ",\n".join(f"{dumps(name)}: {dumps(run)}" for name, run in data.runs.items())
    records = ",\n".join(map(dumps, data.records))
    write_text(path, f'{{"runs": {{\n{runs}\n}},\n"records": [\n{records}\n]}}\n')
