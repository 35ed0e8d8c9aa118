"""The figures of docs/performance.md and docs/cost.md.

Each `plot_*` function draws one PNG and raises OSError if the file cannot be written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxgru.lm.runs.figure import save_figure
from pages.figures import new_figure


def plot_growth(
    path: Path, panels: Mapping[str, Mapping[str, Sequence[Mapping[int, float]]]], title: str
) -> None:
    """Draw a step's time and memory against each size, log-log.

    Args:
      panels: by axis label and by "seconds" or "bytes", two curves, plain and with remat (which may
        be empty): the measured value by size.
    """
    figure = new_figure(11, 6)
    units = {"seconds": ("milliseconds per step", 1e3), "bytes": ("megabytes", 1e-6)}
    grid = figure.subplots(2, len(panels), squeeze=False)
    for column, (label, measured) in enumerate(panels.items()):
        for row, (what, curves) in enumerate(measured.items()):
            axes, (unit, scale) = grid[row][column], units[what]
            for i, (values, name) in enumerate(zip(curves, ("plain", "remat"), strict=True)):
                if values:
                    y = [scale * value for value in values.values()]
                    axes.plot(list(values), y, color=f"C{i}", marker="o", ms=3.5, label=name)
            if curves[0]:  # proportional growth, through the last point
                first, last = min(curves[0]), max(curves[0])
                end = scale * curves[0][last]
                axes.plot([first, last], [end * first / last, end], color="0.6", lw=0.8, ls="--",
                          label="proportional", zorder=1)  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set(xlabel=label, ylabel=unit)
            axes.grid(alpha=0.2)
            if axes.lines:
                axes.legend(fontsize=8)
    figure.suptitle(f"A training step of astra_alpha: {title}", fontsize=10, parse_math=False)
    save_figure(figure, path)


def plot_ratios(
    path: Path,
    title: str,
    panels: Mapping[str, Mapping[str, Mapping[str, tuple[float, float, float]]]],
) -> None:
    """Draw times as multiples of jaxgru's: a panel per config, a bar per contestant.

    Args:
      panels: by config, way to compute and contestant, the minimum, median and maximum.
    """
    names: dict[str, dict[str, None]] = {}  # by way, each contestant once
    for ways in panels.values():
        for way, contestants in ways.items():
            names.setdefault(way, {}).update(dict.fromkeys(contestants))
    lines = [line for way in names for line in [(way, None), *((way, n) for n in names[way])]]
    if len(names) == 1:
        lines = lines[1:]  # nothing to tell apart
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    figure = new_figure(9, 0.9 + rows * (0.45 + 0.24 * len(lines)))
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    for axes in grid:
        axes.set_visible(False)
    for axes, (config, ways) in zip(grid, panels.items(), strict=False):
        axes.set_visible(True)
        for y, (way, name) in enumerate(lines):
            if name not in ways.get(way, {}):
                continue
            low, median, high = ways[way][name]
            color = "C0" if name == "jaxgru" else "0.72"
            axes.barh(y, median, 0.72, color=color, zorder=2)
            axes.plot([low, high], [y, y], color="black", lw=1.2, zorder=4)
            axes.annotate(f"{median:.2f}", (high, y), (4, 0), textcoords="offset points",
                          va="center", fontsize=8)  # fmt: skip
        axes.axvline(1, color="black", lw=0.9, ls="--", zorder=3)
        axes.set_title(config, fontsize=10, parse_math=False)
        axes.set_yticks(range(len(lines)), [name or f"{way}:" for way, name in lines], fontsize=9)
        for label, (_, name) in zip(axes.get_yticklabels(), lines, strict=False):
            label.set_fontweight("normal" if name else "bold")
        axes.tick_params("y", length=0)
        axes.margins(x=0.16)
        axes.set(xlim=(0, None), ylim=(len(lines) - 0.5, -0.5))
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10, parse_math=False)
    figure.supxlabel(
        "time as a multiple of jaxgru's; thin lines: fastest and slowest round; * without dropout",
        fontsize=9,
    )
    save_figure(figure, path)
