"""What is kept of measurements of speed: docs/benchmarks.json."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from jaxgru.lm.records import Count, Number, Positive, Record, Whole

ONE_DEVICE = "-one-device"
"""The end of a contestant's name: its batch is not split."""
MOMENT = r"\A[0-9]{4}(-[0-9]{2}){2}T[0-9]{2}(:[0-9]{2}){2}\Z"  # 2026-02-03T04:05:06


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
        str,
        Meta(pattern=r"\A(training|forward|layer(_resets)?|ppo|(ppo|sampling)_[1-9][0-9]{0,8})\Z"),
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

    @property
    def task(self) -> tuple[str, str, str, int, int, str]:
        """What was measured, and of whom."""
        sizes = self.batch_size, self.num_tokens
        return self.precision, self.config, self.kind, *sizes, self.contestant

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
