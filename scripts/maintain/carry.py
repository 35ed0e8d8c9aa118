"""The diagram of README.md: the carry's way through time."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from pages.figures import BAND, BLUE, GREY, INK, LINE, PALE, RED, svg


def plot_carry(path: Path, prompt: str = "ROMEO:") -> None:
    """Draw the carry's way through time, over two calls, and what a reset cuts.

    Args:
      prompt: the characters that the model reads, half of them in each call.
    """
    titles = ("The carry goes from step to step and from call to call",
              "A reset before every step: the model sees one character")  # fmt: skip
    with svg(path, 4.1) as figure:
        for axes, title, is_reset in zip(figure.subplots(2, 1), titles, (False, True), strict=True):
            axes.set_title(title, fontsize=11.5, pad=4)
            _draw_steps(axes, prompt, is_reset)


def _draw_steps(axes: Any, prompt: str, is_reset: bool) -> None:
    """Draw a step per character; the carry arrives at each cell, or zeros do where it is reset."""
    from matplotlib.patches import FancyBboxPatch

    def box(left: float, low: float, width: float, height: float, **colors: Any) -> None:
        style = {"boxstyle": "round,pad=0,rounding_size=0.1", "lw": 1} | colors
        axes.add_patch(FancyBboxPatch((left, low), width, height, **style))

    def arrow(start: tuple, end: tuple, color: str, lw: float) -> None:
        style = {"arrowstyle": "-|>", "color": color, "lw": lw, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", end, start, arrowprops=style, zorder=2)

    def write(x: float, y: float, text: str, color: str = INK, **options: Any) -> None:
        axes.annotate(text, (x, y), **{"ha": "center", "va": "center", "color": color} | options)

    half = len(prompt) // 2
    places = [x + 0.6 * (x >= half) for x in range(len(prompt))]  # a gap between the calls
    for name, steps in zip(
        ("first call", "next call"), (places[:half], places[half:]), strict=True
    ):
        left, width = steps[0] - 0.45, steps[-1] - steps[0] + 0.9
        box(left, 0.75, width, 1, facecolor=BAND, edgecolor=LINE, zorder=0)
        if not is_reset:
            write(steps[1], 2.5, name, GREY)
    for x, character in zip(places, prompt, strict=True):
        box(x - 0.35, 1, 0.7, 0.5, facecolor=PALE, edgecolor=BLUE, zorder=3)
        write(x, 1.25, "cell", size=10, zorder=4)
        write(x, 0.2, character, family="monospace", size=12, weight="bold")
        arrow((x, 0.4), (x, 0.98), GREY, 1)
        arrow((x, 1.5), (x, 2.15), GREY, 1)
    ends = [places[0] - 0.95, *places, places[-1] + 0.95]
    for i, (x, to) in enumerate(itertools.pairwise(ends)):
        start, end = x + (0.35 if i else 0.1), to - (0.37 if i < len(places) else 0)
        if not is_reset or i in (0, len(places)):
            arrow((start, 1.25), (end, 1.25), BLUE, 2.2)
            continue
        middle = (start + end) / 2
        axes.plot(middle, 1.25, marker="x", color=RED, ms=8, mew=2.2, zorder=5)
        write(middle, 1.72, "0", RED, weight="bold", size=11)
    write(ends[0] - 0.1, 1.25, "zeros", ha="right")
    write(ends[-1] + 0.08, 1.25, "carry", BLUE, ha="left")
    axes.set(xlim=(ends[0] - 0.75, ends[-1] + 0.75), ylim=(0, 2.75 if not is_reset else 2.2))
    axes.set_axis_off()
