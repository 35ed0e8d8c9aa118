"""The figures of docs/performance.md and docs/cost.md.

Each `plot_*` function draws one SVG and raises OSError if the file cannot be written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pages.figures import BLUE, INK, LINE, ORANGE, beside, head, svg


def plot_growth(
    path: Path, panels: Mapping[str, Mapping[str, Sequence[Mapping[int, float]]]]
) -> None:
    """Draw a step's time and memory against each size, log-log.

    Args:
      panels: by axis label and by "seconds" or "bytes", two curves, plain and with remat (which may
        be empty): the measured value by size.
    """
    titles = {"seconds": "Time of a step", "bytes": "Memory of a step"}
    with svg(path, 2.1 * len(panels)) as figure:
        grid = figure.subplots(len(panels), 2, squeeze=False, sharex="row", sharey="col")
        for row, (label, measured) in zip(grid, panels.items(), strict=True):
            for axes, (what, curves) in zip(row, measured.items(), strict=True):
                for values, color in zip(curves, (BLUE, ORANGE), strict=True):
                    y = list(values.values())
                    axes.plot(list(values), y, color=color, marker="o", ms=3.5)
                if curves[1] and what == "bytes":
                    last = max(curves[1])
                    beside(
                        axes,
                        "remat",
                        (last, curves[1][last]),
                        ORANGE,
                        xytext=(0, 7),
                        ha="right",
                        va="bottom",
                    )
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
                sizes = sorted(set().union(*curves))[::3]
                axes.set_xticks(sizes, [*map(size, sizes)])
                powers = [10.0**k for k in ((-3, -2, -1, 0) if what == "seconds" else (6, 7, 8, 9))]
                axes.set_yticks(powers, [amount(power, what) for power in powers])
                axes.minorticks_off()
                axes.set_xlabel(label)
        for axes, what in zip(grid[0], titles, strict=True):
            axes.set_title(titles[what])


def size(value: int) -> str:
    """Return a size as the axes write it: 128, 1k, 16k."""
    return f"{value // 1024}k" if value >= 1024 else f"{value}"


def amount(value: float, what: str) -> str:
    """Return a power of ten of "seconds" or "bytes" as the axes write it: 10 ms, 100 MB."""
    if what == "seconds":
        return f"{value:.0f} s" if value >= 1 else f"{1e3 * value:.0f} ms"
    return f"{value / 1e9:.0f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"


def plot_speeds(path: Path, panels: Mapping[str, Mapping[str, tuple[float, float]]]) -> None:
    """Draw how many times as fast jaxgru is: a group of bars per config, a bar per contestant.

    Args:
      panels: by config and contestant, milliseconds, and these as a multiple of jaxgru's.
    """
    heights = {config: len(contestants) + 1.5 for config, contestants in panels.items()}
    with svg(path, 1 + 0.23 * sum(heights.values())) as figure:
        axes = figure.subplots()
        y, ticks = 0.0, {}
        for config, contestants in panels.items():
            axes.annotate(config, (0, y), (-4, 0), textcoords="offset points", ha="right",
                          va="center", weight="bold", color=INK, annotation_clip=False)  # fmt: skip
            for i, (name, (milliseconds, ratio)) in enumerate(contestants.items(), 1):
                ours = name == "jaxgru"
                axes.barh(y + i, ratio, 0.76, color=BLUE if ours else LINE, zorder=2)
                text = f"{milliseconds:,.0f} ms" if ours else f"{ratio:.2f}×"
                beside(axes, text, (ratio, y + i), BLUE if ours else INK)
                ticks[y + i] = name
            y += heights[config]
        axes.axvline(1, color=BLUE, lw=1, ls="--", zorder=3)
        head(axes, "jaxgru trains … × as fast as", "* computes no dropout")
        axes.set_yticks([*ticks], [*ticks.values()])
        axes.set_xticks([0, 1, 2])
        axes.tick_params("y", length=0)
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.16)
        axes.set(xlim=(0, None), ylim=(y - 0.9, -0.8))
        axes.spines["left"].set_visible(False)
