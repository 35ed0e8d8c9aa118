"""The tables of docs/performance.md and README.md, and the figure, from docs/benchmarks.json."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from bench.contestants import CONTESTANTS
from bench.records import Benchmarks, ContestantTime, save
from jaxgru.printing import counted
from pages.figures import BLUE, INK, LINE, beside, head, svg
from pages.markdown import DOCS, ROOT, table, write_page
from pages.models import called
from pages.records import grouped

Comparison = list[tuple[ContestantTime, dict[str, float]]]
"""jaxgru's record of each task, and the others' times as multiples of its time."""

TABLES = {
    "PPO": (("ppo", "ppo_8"), "float32"),
    "language models": (("training", "forward", "sampling_1", "sampling_64"), "float32"),
    "on a GPU": (("training",), "tf32"),
    "layers": (("resets",), "float32"),
    "acting": (("step_jit", "step"), "float32"),
}
"""The page's tables of times: kinds of tasks, and precision of products."""
IN_README = {
    "jaxgru": "jaxgru",
    "autodiff": "`lax.scan`",
    "nnx": "Flax NNX",
    "haiku": "dm-haiku",
    "torch.nn": "`torch.nn`",
}


def title(record: ContestantTime) -> str:
    """Return the task in words."""
    what, _, count = record.kind.partition("_")
    size, model = f"{record.batch_size} × {record.num_tokens}", called(record.config)
    match what:
        case "sampling":
            writing = "one text" if record.batch_size == 1 else f"{record.batch_size} texts"
            return f"writing {writing}, {model}"
        case "layer" | "resets":
            return f"{record.config}, {size}"
        case "step":
            return f"{record.config}, {counted(record.batch_size, 'row')}{', jitted' * bool(count)}"
        case "ppo":
            return f"{record.config}, {size}{f', {count} seeds at once' * bool(count)}"
        case "training":
            return f"training step, {model}, {size}"
    return f"{what} pass, {model}, {size}"


def unit(kind: str) -> str:
    """Return the unit in which a kind's times are given."""
    if not kind.startswith("sampling"):
        return "µs" if kind.startswith("step") else "ms"
    return "µs per token" if kind == "sampling_1" else "tokens/s"


def value(record: ContestantTime, seconds: float) -> str:
    """Return seconds per call in the kind's unit, with three digits, or all before the point."""
    B, T = record.batch_size, record.num_tokens
    per_unit = {"ms": seconds * 1e3, "µs": seconds * 1e6, "µs per token": seconds / T * 1e6,
                "tokens/s": B * T / seconds}  # fmt: skip
    number = per_unit[unit(record.kind)]
    return f"{number:,.0f}" if number >= 100 else f"{number:.{1 if number >= 10 else 2}f}"


HEAD = ["contestant", "time", "min … max", "jaxgru is … × as fast", "compile"]


def rows(records: Sequence[ContestantTime]) -> list[list[str]]:
    """Return a row of HEAD per contestant, from records of one task."""
    ours = next((r.median for r in records if r.contestant == "jaxgru"), None)
    return [
        [
            r.contestant,
            value(r, r.median),
            " … ".join(value(r, end) for end in _ends(r)),
            f"{r.median / ours:.2f}" if ours else "–",
            f"{r.compile_seconds:.1f} s",
        ]
        for r in records
    ]


def _ends(record: ContestantTime) -> tuple[float, float]:
    """Return the shortest and the longest time; in turn for tokens per second."""
    ends = record.min, record.max
    return ends[::-1] if unit(record.kind) == "tokens/s" else ends


def newest(data: Benchmarks, kinds: Collection[str], precision: str) -> list[ContestantTime]:
    """Return records of these kinds, in order, on the machine that measured jaxgru at them last."""
    records = [r for r in data.records if r.kind in kinds and r.precision == precision]
    runs = [r.run for r in records if r.contestant == "jaxgru"]
    last = data.runs[max(runs)].hardware if runs else None
    here = [r for r in records if data.runs[r.run].hardware == last]
    return sorted(here, key=lambda record: list(kinds).index(record.kind))


def compared(records: Iterable[ContestantTime]) -> Comparison:
    """Return jaxgru's record of each task, and the others' times as multiples of its time.

    Only those of one run are compared, because only they took turns.
    """
    groups = (
        {r.contestant: r for r in same} for same in grouped(records, lambda r: r.task).values()
    )
    return [
        (ours, {name: r.median / ours.median for name, r in of.items() if r.run == ours.run})
        for of in groups
        if (ours := of.get("jaxgru"))
    ]


def with_label(rows: Comparison) -> list[str]:
    """Return the contestants that have a column: those that have a label and were measured."""
    measured = {name for _, faster in rows for name in faster}
    return [name for name, entry in CONTESTANTS.items() if entry.label and name in measured]


def side_by_side(records: Iterable[ContestantTime]) -> str:
    """Return a table of jaxgru's times, and how many times as fast as the others they are."""
    names = with_label(rows := compared(records))
    lines = [
        [title(ours), f"{value(ours, ours.median)} {unit(ours.kind)}",
         *(f"{faster[name]:.2f}×" if name in faster else "–" for name in names[1:])]
        for ours, faster in rows
    ]  # fmt: skip
    return table(["", *(CONTESTANTS[name].label for name in names)], lines, "lr")


def by_size(data: Benchmarks, other: str) -> str:
    """Return a table of another's time with a layer divided by jaxgru's: a column for each H.

    An entry below 1, where jaxgru is slower, is bold.
    """
    records, entries = newest(data, ["layer"], "float32"), {}
    for ours, faster in compared(records):
        cell, H = ours.config.rsplit(", ", 1)
        if other in faster:
            entries.setdefault((cell, ours.batch_size), {})[H] = round(faster[other], 2)
    if not entries:
        return ""
    ratios = [ratio for line in entries.values() for ratio in line.values()]
    sizes = dict.fromkeys(H for line in entries.values() for H in line)
    bold = lambda ratio: f"**{ratio:.2f}**" if ratio < 1 else f"{ratio:.2f}"
    lines = ([*of, *(bold(line[H]) if H in line else "–" for H in sizes)]
             for of, line in entries.items())  # fmt: skip
    run = data.runs[max(record.run for record in records)]
    return (
        f"{run.hardware}; T = {records[0].num_tokens}; medians of {run.rounds} rounds. "
        f"{sum(ratio < 1 for ratio in ratios)} of {len(ratios)} ratios are below 1; "
        f"the median is {statistics.median(ratios):.2f}.\n\n"
        + table(["cell", "rows", *sizes], lines, "lr")
    )


def tables(data: Benchmarks) -> dict[str, str]:
    """Return the page's tables: times, and what the columns are."""
    made = {
        name: side_by_side(newest(data, kinds, precision))
        for name, (kinds, precision) in TABLES.items()
    }
    made["gradients"] = by_size(data, "autodiff")
    made["torch.nn's layers"] = by_size(data, "torch.nn")
    took_part = (
        f"- **{entry.label}**: {entry.text}" for entry in CONTESTANTS.values() if entry.label
    )
    made["contestants"] = "\n".join(took_part)
    return made


def speeds(data: Benchmarks) -> str:
    """Return README's table of training steps in milliseconds: a row per Astra model."""
    steps = [r for r in newest(data, ["training"], "float32") if r.config.startswith("astra")]
    lines = []
    for ours, faster in compared(steps):
        times = [value(ours, faster[name] * ours.median) for name in IN_README]
        lines.append([called(ours.config), f"**{times[0]}**", *times[1:]])
    return table(["model", *IN_README.values()], lines, "lr")


def write(docs: Path, data: Benchmarks) -> None:
    """Write benchmarks.json, performance.md and its figure into the folder; of docs/, README too.

    Raises:
      OSError: the folder cannot be written.
    """
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    save(docs / "benchmarks.json", data)
    steps = compared(newest(data, ["training"], "float32"))
    steps = [step for step in steps if "subwords" not in called(step[0].config)]  # enough to see
    if steps:
        plot_speeds(docs / "figures" / "speed.svg", steps)
    write_page(docs / "performance.md", tables(data))
    if docs.resolve() == DOCS:
        write_page(ROOT / "README.md", {"speeds": speeds(data)})


def plot_speeds(path: Path, steps: Comparison) -> None:
    """Draw the times of `compared` training steps, as multiples of jaxgru's: a group per config.

    Raises:
      OSError: the file cannot be written.
    """
    names = [with_label([step]) for step in steps]
    with svg(path, 1 + 0.23 * sum(len(bars) + 1.5 for bars in names)) as figure:
        axes = figure.subplots()
        y, ticks = 0.0, {}
        for (ours, faster), bars in zip(steps, names, strict=True):
            beside(axes, called(ours.config), (0, y), INK, xytext=(0, 0), weight="bold")
            for i, name in enumerate(bars, 1):
                is_ours, time = name == "jaxgru", faster[name]
                axes.barh(y + i, time, 0.76, color=BLUE if is_ours else LINE, zorder=2)
                text = f"1 ({1e3 * ours.median:,.0f} ms)" if is_ours else f"{time:.2f}"
                beside(axes, text, (time, y + i), BLUE if is_ours else INK)
                ticks[y + i] = CONTESTANTS[name].label
            axes.vlines(1, y + 0.6, y + len(bars) + 0.4, color=BLUE, lw=1, ls="--", zorder=3)
            y += len(bars) + 1.5
        head(axes, "The time of a training step", "jaxgru = 1; shorter is faster")
        axes.set_yticks([*ticks], [*ticks.values()])
        axes.set_xticks([])  # the bars say their lengths
        axes.tick_params("y", length=0)
        axes.grid(visible=False)
        axes.margins(x=0.16)
        axes.set(xlim=(0, None), ylim=(y - 0.9, -0.8))
        axes.spines[:].set_visible(False)
