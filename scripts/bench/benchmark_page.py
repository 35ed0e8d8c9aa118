"""The tables of docs/performance.md and README.md, and the figure, from docs/benchmarks.json."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.benchmark_records import Benchmarks, ContestantTime, save
from bench.contestants import CONTESTANTS
from jaxgru.printing import counted
from pages.figures import BLUE, INK, LINE, beside, head, svg
from pages.markdown import DOCS, ROOT, table, write_page
from pages.measurements import grouped
from pages.models import called


class Comparison(NamedTuple):
    """One task: jaxgru's record, and everybody's time as a multiple of jaxgru's, by contestant."""

    ours: ContestantTime
    multiples: dict[str, float]


TABLES = {
    "PPO": (("ppo", "ppo_8"), "float32"),
    "language models": (("training", "forward", "sampling_1", "sampling_64"), "float32"),
    "on a GPU": (("training",), "tf32"),
    "layers": (("resets",), "float32"),
    "acting": (("step",), "float32"),
}
"""The page's tables of times: kinds of tasks, and precision of products."""
IN_README = {
    "jaxgru": "jaxgru",
    "autodiff": "`lax.scan`",
    "nnx": "Flax NNX",
    "linen": "Flax Linen",
    "equinox": "Equinox",
    "haiku": "dm-haiku",
    "torch.nn": "`torch.nn`",
}
"""The columns of README's tables, of those that were measured."""


def title(record: ContestantTime) -> str:
    """Return the task in words."""
    what, _, number = record.kind.partition("_")
    size = f"{record.batch_size} × {record.num_tokens}"
    model = called(record.config)
    match what:
        case "sampling":
            texts = "one text" if record.batch_size == 1 else f"{record.batch_size} texts"
            return f"writing {texts}, {model}"
        case "layer" | "resets":
            return f"{record.config}, {size}"
        case "step":
            return f"{record.config}, {counted(record.batch_size, 'row')}"
        case "ppo":
            seeds = f", {number} seeds at once" if number else ""
            return f"{record.config}, {size}{seeds}"
        case "training":
            return f"training step, {model}, {size}"
    return f"{what} pass, {model}, {size}"


def unit(kind: str) -> str:
    """Return the unit in which a kind's times are given."""
    if kind == "sampling_1":
        return "µs per token"
    if kind.startswith("sampling"):
        return "tokens/s"
    return "µs" if kind == "step" else "ms"


def value(record: ContestantTime, seconds: float) -> str:
    """Return seconds per call in the kind's unit, with three digits, or all before the point."""
    B = record.batch_size
    T = record.num_tokens
    in_units = {
        "ms": seconds * 1e3,
        "µs": seconds * 1e6,
        "µs per token": seconds / T * 1e6,
        "tokens/s": B * T / seconds,
    }
    number = in_units[unit(record.kind)]
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


HEAD = ["contestant", "time", "min … max", "jaxgru is … × as fast", "compile"]


def rows(records: Sequence[ContestantTime]) -> list[list[str]]:
    """Return a row of HEAD per contestant, from records of one task."""
    ours = next((r.median for r in records if r.contestant == "jaxgru"), None)
    return [
        [
            r.contestant,
            value(r, r.median),
            " … ".join(value(r, seconds) for seconds in _ends(r)),
            f"{r.median / ours:.2f}" if ours else "–",
            f"{r.compile_seconds:.1f} s",
        ]
        for r in records
    ]


def _ends(record: ContestantTime) -> tuple[float, float]:
    """Return the shortest and the longest time; in turn for tokens per second."""
    if unit(record.kind) == "tokens/s":
        return record.max, record.min
    return record.min, record.max


def newest(data: Benchmarks, kinds: Collection[str], precision: str) -> list[ContestantTime]:
    """Return records of these kinds, in order, on the machine that measured jaxgru at them last."""
    records = [r for r in data.records if r.kind in kinds and r.precision == precision]
    runs = [r.run for r in records if r.contestant == "jaxgru"]
    last = data.runs[max(runs)].hardware if runs else None
    here = [r for r in records if data.runs[r.run].hardware == last]
    return sorted(here, key=lambda record: list(kinds).index(record.kind))


def compared(records: Iterable[ContestantTime]) -> list[Comparison]:
    """Return a comparison of each task that jaxgru was measured at.

    Only those of one run are compared, because only they took turns.
    """
    comparisons = []
    for of_task in grouped(records, lambda r: r.task).values():
        by_contestant = {r.contestant: r for r in of_task}
        ours = by_contestant.get("jaxgru")
        if ours is None:
            continue
        multiples = {
            name: r.median / ours.median for name, r in by_contestant.items() if r.run == ours.run
        }
        comparisons.append(Comparison(ours, multiples))
    return comparisons


def with_label(comparisons: Iterable[Comparison]) -> list[str]:
    """Return the contestants that have a column: those that have a label and were measured."""
    measured = {name for comparison in comparisons for name in comparison.multiples}
    return [name for name, entry in CONTESTANTS.items() if entry.label and name in measured]


def side_by_side(records: Iterable[ContestantTime]) -> str:
    """Return a table of jaxgru's times, and how many times as fast as the others they are."""
    comparisons = compared(records)
    names = with_label(comparisons)
    lines = []
    for ours, multiples in comparisons:
        time = f"{value(ours, ours.median)} {unit(ours.kind)}"
        others = (f"{multiples[name]:.2f}×" if name in multiples else "–" for name in names[1:])
        lines.append([title(ours), time, *others])
    return table(["", *(CONTESTANTS[name].label for name in names)], lines, "lr")


def by_size(data: Benchmarks, other: str) -> str:
    """Return a table of another's time with a layer divided by jaxgru's: a column for each H.

    An entry below 1, where jaxgru is slower, is bold.
    """
    records = newest(data, ["layer"], "float32")
    by_layer: dict[tuple[str, int], dict[str, float]] = {}
    for ours, multiples in compared(records):
        cell, H = ours.config.rsplit(", ", 1)
        if other in multiples:
            by_H = by_layer.setdefault((cell, ours.batch_size), {})
            by_H[H] = round(multiples[other], 2)
    if not by_layer:
        return ""
    ratios = [ratio for by_H in by_layer.values() for ratio in by_H.values()]
    sizes = dict.fromkeys(H for by_H in by_layer.values() for H in by_H)
    lines = [
        [cell, num_rows, *(_ratio(by_H.get(H)) for H in sizes)]
        for (cell, num_rows), by_H in by_layer.items()
    ]
    run = data.runs[max(record.run for record in records)]
    return (
        f"{run.hardware}; T = {records[0].num_tokens}; medians of {run.rounds} rounds. "
        f"{sum(ratio < 1 for ratio in ratios)} of {len(ratios)} ratios are below 1; "
        f"the median is {statistics.median(ratios):.2f}.\n\n"
        + table(["cell", "rows", *sizes], lines, "lr")
    )


def _ratio(ratio: float | None) -> str:
    """Return a cell of `by_size`; None: that size was not measured."""
    if ratio is None:
        return "–"
    return f"**{ratio:.2f}**" if ratio < 1 else f"{ratio:.2f}"


def tables(data: Benchmarks) -> dict[str, str]:
    """Return the page's tables: times, and what the columns are."""
    by_name = {
        name: side_by_side(newest(data, kinds, precision))
        for name, (kinds, precision) in TABLES.items()
    }
    by_name["gradients"] = by_size(data, "autodiff")
    by_name["torch.nn's layers"] = by_size(data, "torch.nn")
    columns = [entry for entry in CONTESTANTS.values() if entry.label]
    by_name["contestants"] = "\n".join(f"- **{entry.label}**: {entry.text}" for entry in columns)
    return by_name


def in_readme(data: Benchmarks) -> dict[str, str]:
    """Return README's tables of milliseconds: of layers as `init_gru` makes them, and of models."""
    layers = newest(data, ["resets"], "float32")
    layers = [record for record in layers if record.config == "GRU, H 128"]
    steps = newest(data, ["training"], "float32")
    return {
        "default GRU": _milliseconds("layer", layers),
        "speeds": _milliseconds("model", [r for r in steps if r.config.startswith("astra")]),
    }


def _milliseconds(first: str, records: Iterable[ContestantTime]) -> str:
    """Return a table of README: everybody's time at each task, the shortest of a row bold.

    Args:
      first: what the first column names.
    """
    comparisons = compared(records)
    measured = {name for comparison in comparisons for name in comparison.multiples}
    names = [name for name in IN_README if name in measured]
    lines = []
    for ours, multiples in comparisons:
        task = title(ours) if ours.kind == "resets" else called(ours.config)
        shortest = min(multiples[name] for name in names)
        times = []
        for name in names:
            time = value(ours, multiples[name] * ours.median)
            times.append(f"**{time}**" if multiples[name] == shortest else time)
        lines.append([task, *times])
    return table([first, *(IN_README[name] for name in names)], lines, "lr")


def write(docs: Path, data: Benchmarks) -> None:
    """Write benchmarks.json, performance.md and its figure into the folder; of docs/, README too.

    Raises:
      OSError: the folder cannot be written.
    """
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    save(docs / "benchmarks.json", data)
    steps = compared(newest(data, ["training"], "float32"))
    # Enough to see
    steps = [step for step in steps if "subwords" not in called(step.ours.config)]
    if steps:
        plot_speeds(docs / "figures" / "speed.svg", steps)
    write_page(docs / "performance.md", tables(data))
    if docs.resolve() == DOCS:
        write_page(ROOT / "README.md", in_readme(data))


def plot_speeds(path: Path, steps: Sequence[Comparison]) -> None:
    """Draw the times of `compared` training steps, as multiples of jaxgru's: a group per config.

    Raises:
      OSError: the file cannot be written.
    """
    num_bars = [len(with_label([step])) for step in steps]
    with svg(path, 1 + 0.23 * sum(n + 1.5 for n in num_bars)) as figure:
        axes = figure.subplots()
        ticks: dict[float, str] = {}
        y = 0.0
        for step, n in zip(steps, num_bars, strict=True):
            ticks |= _draw_bars(axes, y, step)
            y += n + 1.5
        head(axes, "The time of a training step", "jaxgru = 1; shorter is faster")
        axes.set_yticks([*ticks], [*ticks.values()])
        axes.set_xticks([])  # the bars say their lengths
        axes.tick_params("y", length=0)
        axes.grid(visible=False)
        axes.margins(x=0.16)
        axes.set(xlim=(0, None), ylim=(y - 0.9, -0.8))
        axes.spines[:].set_visible(False)


def _draw_bars(axes: Any, y: float, step: Comparison) -> dict[float, str]:
    """Draw a config's bars, below its name at y; return where each contestant's label belongs."""
    ours, multiples = step
    names = with_label([step])
    beside(axes, called(ours.config), (0, y), INK, xytext=(0, 0), weight="bold")
    for i, name in enumerate(names, 1):
        time = multiples[name]
        if name == "jaxgru":
            axes.barh(y + i, time, 0.76, color=BLUE, zorder=2)
            beside(axes, f"1 ({1e3 * ours.median:,.0f} ms)", (time, y + i), BLUE)
        else:
            axes.barh(y + i, time, 0.76, color=LINE, zorder=2)
            beside(axes, f"{time:.2f}", (time, y + i), INK)
    axes.vlines(1, y + 0.6, y + len(names) + 0.4, color=BLUE, lw=1, ls="--", zorder=3)
    return {y + i: CONTESTANTS[name].label for i, name in enumerate(names, 1)}
