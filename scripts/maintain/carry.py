"""The diagram of README.md: the carry's way through time."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from jaxgru.lm.runs.figure import save_figure
from pages.figures import new_figure


def plot_carry(path: Path, prompt: str = "ROMEO:") -> None:
    """Draw the carry's way through time, over two calls, and what a reset to zero cuts.

    Args:
      prompt: the characters that the model reads, half of them in each call.
    """
    figure = new_figure(9, 6.4)
    titles = (
        "The carry goes from step to step, and out of one call into the next",
        "Reset to zero before every character: each prediction has seen one character",
    )
    for axes, title, is_reset in zip(figure.subplots(2, 1), titles, (False, True), strict=True):
        axes.set_title(title, fontsize=11, loc="left")
        _draw_steps(axes, prompt, is_reset)
    save_figure(figure, path)


def _draw_steps(axes: Any, prompt: str, is_reset: bool) -> None:
    """Draw a step per character; the carry arrives at each cell, or zeros do where it is reset."""
    from matplotlib.patches import FancyBboxPatch

    def box(x: float, y: float, text: str, color: str) -> None:
        style = {"boxstyle": "round,pad=0.02", "facecolor": color, "edgecolor": "0.35", "lw": 0.8}
        axes.add_patch(FancyBboxPatch((x - 0.32, y - 0.2), 0.64, 0.4, zorder=3, **style))
        axes.annotate(text, (x, y), ha="center", va="center", fontsize=9, zorder=4)

    def arrow(
        start: tuple, end: tuple, color: str = "0.35", lw: float = 1.0, ls: str = "-"
    ) -> None:
        style = {"arrowstyle": "-|>", "color": color, "lw": lw, "ls": ls, "shrinkA": 0}
        axes.annotate("", end, start, arrowprops=style | {"shrinkB": 0}, zorder=2)

    half, blue, red = len(prompt) // 2, "C0", "C3"
    places = [x + 0.9 * (x >= half) for x in range(len(prompt))]  # a gap between the calls
    for call, steps in enumerate((places[:half], places[half:])):
        left, right = steps[0] - 0.45, steps[-1] + 0.45
        style = {"boxstyle": "round,pad=0.05", "facecolor": "0.96", "edgecolor": "0.8"}
        axes.add_patch(FancyBboxPatch((left, 0.45), right - left, 2.0, zorder=0, **style))
        name = "logits, carry = apply(params, tokens, carry)"
        if is_reset:
            name = "" if call else "generate(params, key, prompt, num_tokens, stateful=False)"
        axes.annotate(name, (left, -0.32), fontsize=8.5, family="monospace", color="0.25")
        if call == 0:
            axes.annotate("zeros", (left - 0.75, 1.5), ha="center", va="center", fontsize=9)
    for x, character in zip(places, prompt, strict=True):
        axes.annotate(f"{character!r}", (x, 0.12), ha="center", va="center", fontsize=10,
                      family="monospace")  # fmt: skip
        box(x, 0.75, "embed", "#dbe9f6")
        box(x, 1.5, "cell", "#9ecae1")
        box(x, 2.75, "logits", "#fdf0d5")
        for low, high in ((0.25, 0.53), (0.97, 1.28), (1.72, 2.53)):
            arrow((x, low), (x, high))
    ends = [places[0] - 0.9, *places, places[-1] + 0.9]
    for i, (x, to) in enumerate(itertools.pairwise(ends)):
        start, end = x + (0.34 if i else 0.1), to - (0.34 if i < len(places) else 0)
        if not is_reset or i == 0 or i == len(places):
            arrow((start, 1.5), (end, 1.5), blue, 2.4)
            continue
        middle = (start + end) / 2
        axes.plot([start, middle], [1.5, 1.5], color=blue, lw=2.4, zorder=2)
        axes.plot(middle, 1.5, marker="x", color=red, ms=9, mew=2.4, zorder=5)
        axes.annotate("0", (middle, 1.98), ha="center", va="center", fontsize=10, color=red,
                      fontweight="bold", zorder=5)  # fmt: skip
        arrow((middle + 0.02, 1.86), (end, 1.6), red, 1.6)
    axes.annotate("carry out", (ends[-1] + 0.06, 1.5), va="center", fontsize=9, color=blue)
    axes.annotate("carry", ((places[half - 1] + places[half]) / 2, 1.26), ha="center", va="center",
                  fontsize=9, color=blue)  # fmt: skip
    axes.set(xlim=(-1.5, ends[-1] + 0.9), ylim=(-0.45, 3.05))
    axes.set_axis_off()
