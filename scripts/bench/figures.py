"""The figure of docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pages.figures import BLUE, INK, LINE, beside, head, svg


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
