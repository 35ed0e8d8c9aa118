"""Measure how a training step's time and memory grow with T, B and H, and write docs/cost.md."""

from __future__ import annotations

import startup  # noqa: F401

import dataclasses
import datetime
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from bench.figures import plot_growth
from bench.records import CostPoint, CostRun
from bench.timing import Contestant, calling, compiled, measure, planned_memory, start
from jaxgru.cli.options import Parser, run_script
from jaxgru.lm.config import Config, load_config
from jaxgru.lm.files import write_text
from jaxgru.lm.training import init_state, train_step
from jaxgru.parallel.hardware import describe_hardware, keep_freed_memory
from pages.markdown import folded, table, write_page
from pages.records import dumps, load_or

console = Console(highlight=False)


@dataclasses.dataclass(frozen=True)
class Series:
    """One size that grows while the others are fixed; all else is astra_alpha's."""

    letter: Literal["T", "B", "H"]
    field: str
    what: str
    fixed: dict[str, int]
    values: tuple[int, ...]


SERIES = (
    Series("T", "training.sequence_length", "tokens in a sequence",
           {"training.batch_size": 16}, tuple(2**i for i in range(7, 15))),
    Series("B", "training.batch_size", "sequences in a batch", {}, tuple(2**i for i in range(10))),
    Series("H", "model.hidden_dim", "hidden units", {},
           tuple(2**i for i in range(5, 11))),
)  # fmt: skip


def sized(series: Series, value: int, remat: bool) -> Config:
    """Return astra_alpha with the series' sizes."""
    sizes = {**series.fixed, series.field: value}
    return load_config("astra_alpha", {**sizes, "training.remat": remat})


def main() -> None:
    """Read the arguments, measure, and write the page."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--repeats", type=int, default=3, metavar="N", help="rounds (%(default)s)")
    add("--largest", type=int, default=2**14, metavar="SIZE",
        help="the largest T, B or H to measure (%(default)s)")  # fmt: skip
    add("--docs", default="docs", metavar="FOLDER", help="where to write (%(default)s)")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}; it must be at least 1.")
    if (largest := arguments.largest) < 256:
        parser.error(f"--largest is {largest}; it must be at least 256, for two values of T.")
    keep_freed_memory()
    run = CostRun(
        hardware=describe_hardware(),
        date=datetime.date.today().isoformat(),
        command=shlex.join(["python", "-m", "scripts.bench.cost", *sys.argv[1:]]),
        points=measure_all(arguments.repeats, largest),
    )
    save(Path(arguments.docs), run)
    console.print(f"written to {Path(arguments.docs) / 'cost.md'}")


def measure_step(config: Config, repeats: int) -> dict[str, Any]:
    """Return an optimizer step's median seconds on one device, and the bytes that XLA plans."""
    model, training = config.model, config.training
    length = 2 * training.sequence_length + 1000
    tokens = np.random.default_rng(0).integers(model.vocab_size, size=length).astype(np.int32)
    state = init_state(model, training)
    program, _ = compiled(partial(train_step, training), state, jnp.asarray(tokens))
    step = Contestant(calling(lambda: program(state, tokens)[1]))
    seconds = measure({"": start(lambda: step)}, repeats)[""].median
    return {"seconds": seconds, "bytes": planned_memory(program)}


def measure_all(repeats: int, largest: int) -> list[CostPoint]:
    """Measure and print every series up to `largest`, that of T with and without remat."""
    points = []
    for series in SERIES:
        for value in (value for value in series.values if value <= largest):
            for remat in (False, True) if series.letter == "T" else (False,):
                measured = measure_step(sized(series, value, remat), repeats)
                point = CostPoint(letter=series.letter, value=value, remat=remat, **measured)
                memory = "" if point.bytes is None else f"{point.bytes / 1e6:,.1f} MB"
                size = f"{point.letter} = {value:>6}{', remat' * remat}"
                console.print(f"{size}: {1e3 * point.seconds:,.1f} ms  {memory}")
                points.append(point)
    return points


# --- The page


def save(docs: Path, run: CostRun) -> None:
    """Put the run into cost.json, which has one per kind of device, and remake page and figures.

    Raises:
      RecordError: cost.json exists and cannot be read.
    """
    path = docs / "cost.json"
    runs = load_or({}, path, dict[str, CostRun])
    runs[jax.default_backend()] = run
    write(docs, runs)


def write(docs: Path, runs: Mapping[str, CostRun]) -> None:
    """Write cost.json, cost.md and a figure per kind of device."""
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    write_text(docs / "cost.json", dumps(runs, indent=1) + "\n")
    for name, run in runs.items():
        plot_growth(docs / "figures" / f"cost_{name}.svg", panels(run.points))
    write_page(docs / "cost.md", tables(runs))


def tables(runs: Mapping[str, CostRun]) -> dict[str, str]:
    """Return what docs/cost.md has of the runs, under one name."""
    return {"measurements": "\n".join(map(_machine, runs, runs.values()))}


def _machine(name: str, run: CostRun) -> str:
    """Return what was measured on a kind of device, in Markdown."""
    series = "\n".join(table(*rows(series, run.points), "r") for series in SERIES)
    said = "Time and memory grow in proportion to T and B; with remat, memory grows more slowly."
    return f"""## {run.hardware}

![{said}](figures/cost_{name}.svg)

{growth(run.points)}
{folded("The numbers", series)}
Measured {run.date} by `{run.command}`.
"""


def panels(points: Sequence[CostPoint]) -> dict[str, dict[str, list[dict[int, float]]]]:
    """Return the panels of `plot_growth`: by axis label and measure, the curves plain and remat."""
    return {
        f"{series.letter}: {series.what}": {
            what: [curve(points, series.letter, remat, what) for remat in (False, True)]
            for what in ("seconds", "bytes")
        }
        for series in SERIES
    }


def curve(points: Sequence[CostPoint], letter: str, remat: bool, what: str) -> dict[int, float]:
    """Return `what` ("seconds" or "bytes") of one series by size."""
    chosen = (p for p in points if p.letter == letter and p.remat == remat)
    return {p.value: y for p in chosen if (y := getattr(p, what)) is not None}


def exponent(values: Mapping[int, float]) -> float:
    """Return the k of y ∝ sizeᵏ over the larger half of the sizes: the slope in a log-log plot."""
    sizes = sorted(values)[len(values) // 2 - 1 :] if len(values) > 2 else sorted(values)
    if len(sizes) < 2:
        return math.nan
    return float(np.polyfit(np.log(sizes), np.log([values[s] for s in sizes]), 1)[0])


def growth(points: Sequence[CostPoint]) -> str:
    """Say how time and memory grow, and what the longest T takes."""
    time, again = (curve(points, "T", remat, "seconds") for remat in (False, True))
    plain, remat = (curve(points, "T", remat, "bytes") for remat in (False, True))

    def powers(what: str) -> str:
        T, B, H = (exponent(curve(points, letter, False, what)) for letter in "TBH")
        return f"T^{T:.2f}, B^{B:.2f} and H^{H:.2f}"

    said = f"""Time grows as {powers("seconds")}, memory as {powers("bytes")}.
With remat, memory grows as T^{exponent(remat):.2f}. These are slopes over the larger half of
the sizes.
"""
    if both := time.keys() & again.keys() & plain.keys() & remat.keys():
        longest, rows = max(both), SERIES[0].fixed["training.batch_size"]
        said += f"""
A step on {rows} sequences of {longest:,} tokens takes {plain[longest] / 1e6:,.1f} MB. With remat,
it takes {remat[longest] / 1e6:,.1f} MB and {again[longest] / time[longest]:.2f} times as long.
"""
    return said


def rows(series: Series, points: Sequence[CostPoint]) -> tuple[list[str], list[list[str]]]:
    """Return the head of a series' table, and its rows, one per size."""
    kinds = (False, True) if series.letter == "T" else (False,)
    head = [series.letter]
    for remat in kinds:
        head += [f"{what}{', remat' * remat}" for what in ("ms per step", "µs per token", "MB")]
    found = {(p.value, p.remat): p for p in points if p.letter == series.letter}
    lines = []
    for value in sorted({value for value, _ in found}):
        cells = [f"{value:,}"]
        for remat in kinds:
            if (p := found.get((value, remat))) is None:
                cells += ["–"] * 3
                continue
            tokens = sized(series, value, remat).training.tokens_per_step
            cells += [f"{1e3 * p.seconds:,.1f}", f"{1e6 * p.seconds / tokens:.2f}",
                      "–" if p.bytes is None else f"{p.bytes / 1e6:,.1f}"]  # fmt: skip
        lines.append(cells)
    return head, lines


if __name__ == "__main__":
    run_script(main)
