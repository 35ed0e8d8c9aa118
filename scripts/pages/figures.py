"""The figures of docs/: the study's, the benchmark's, how cost grows with size, and the carry.

Each `plot_*` function draws one PNG and raises OSError if the file cannot be written.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgru.lm.runs.figure import save_figure

Points = Sequence[tuple[int, float]]

COLORS = {
    "astra_alpha": "#4f9fdc", "astra_beta": "#1c69ad", "astra_gamma": "#08264f",
    "scribe_alpha": "#f9a03f", "scribe_beta": "#dd5a0c", "scribe_gamma": "#7f2704",
    "leviathan": "#2c9a4b", "elman_alpha": "#a07cc5", "bengio_mlp": "#8c8c8c",
}  # fmt: skip
"""By config: a hue for each family, darker for larger models."""
MARKERS = {"astra": "o", "scribe": "s", "leviathan": "^", "elman": "v", "bengio": "D"}


def style_of(name: str) -> dict[str, str]:
    """Return the color and the marker of a model's curve; `name` begins with its config's name."""
    config = name.partition(",")[0].partition(" ")[0]
    family = config.partition("_")[0]
    return {"color": COLORS.get(config, "black"), "marker": MARKERS.get(family, "x")}


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of this size in inches."""
    from matplotlib.figure import Figure  # takes long to import

    return Figure(figsize=(width, height), layout="constrained")


def plot_memory(
    path: Path, curves: Mapping[str, tuple[Points, float]], ngrams: Sequence[float]
) -> None:
    """Draw the loss of each model by the number of tokens k between resets of its state.

    Two differences of the first model are marked: without its state, from counted bigrams; and with
    k = 16, from no resets.

    Args:
      curves: by model, the losses by k and the loss without resets; nats per character.
      ngrams: the losses of counted n-gram models, orders 1, 2, …; nats per character.
    """
    figure = new_figure(8, 5.2)
    axes = figure.subplots()
    ticks = sorted({k for points, _ in curves.values() for k, _ in points})
    never = 2 ** (1 + ticks[-1].bit_length())
    for order, loss in list(enumerate(ngrams, 1))[1:]:  # order 1 is far above the rest
        if loss > ngrams[order - 2] - 0.03:
            break  # the lines would overlap
        name = {2: "character bigrams", 3: "trigrams"}.get(order, f"{order}-grams")
        axes.axhline(loss, color="0.6", lw=0.8, ls="--", zorder=1)
        axes.annotate(name, (1, loss), xycoords=("axes fraction", "data"), xytext=(3, 0),
                      va="center", textcoords="offset points", fontsize=8,
                      color="0.35")  # fmt: skip
    for i, (name, (points, stream)) in enumerate(curves.items()):
        k, losses = zip(*points, strict=True)
        style = {"lw": 2.4, "ms": 5, "zorder": 4} if i == 0 else {"lw": 1.2, "ms": 3.5}
        axes.plot([*k, never], [*losses, stream], label=name, **style_of(name), **style)
    name, (points, stream) = next(iter(curves.items()))
    losses = dict(points)
    if 1 in losses:
        axes.plot([0.8, 1], [losses[1]] * 2, color="black", lw=0.8, ls=":", zorder=5)
        _mark(axes, 0.8, losses[1], ngrams[1], (95, -3), f"{name} without its state:",
              "counted bigrams")  # fmt: skip
    if 16 in losses:
        axes.plot([16, never], [stream] * 2, color="black", lw=0.8, ls=":", zorder=5)
        _mark(axes, 16, losses[16], stream, (45, 42), f"{name} reset every 16 characters:",
              "never reset")  # fmt: skip
    axes.set_xscale("log", base=2)
    names = ["1:\nstateless" if k == 1 else str(k) for k in ticks]
    axes.set_xticks([*ticks, never], [*names, "never"])
    axes.minorticks_off()
    axes.set(
        title="The loss of a recurrent model whose state is reset",
        xlabel="state reset to zero every … tokens",
        ylabel="loss on the validation split (nats per character)",
    )
    axes.grid(alpha=0.2)
    axes.legend(fontsize=9)
    save_figure(figure, path)


def _mark(
    axes: Any, k: float, loss: float, other: float, offset: tuple[int, int], what: str, than: str
) -> None:
    """Mark with an arrow at k by how much a loss exceeds another; the text is offset in points."""
    ends = {"arrowstyle": "<->", "lw": 1.4, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (k, loss), (k, other), zorder=5, arrowprops=ends)
    word = "worse" if loss >= other else "better"
    axes.annotate(
        f"{what}\n{abs(loss - other):.2f} nats {word} than {than}",
        (k, (loss + other) / 2), offset, textcoords="offset points", fontsize=9, zorder=6,
        bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "0.7"},
        arrowprops={"arrowstyle": "-", "color": "0.4", "lw": 0.8, "relpos": (0, 0.5)},
    )  # fmt: skip


def in_quarter_octaves(values: Sequence[float]) -> list[tuple[int, int, float]]:
    """Return the first 15 values, then the means of quarters of an octave, with their places.

    Single values of a measured curve fluctuate by more than the curve still falls, and on a
    logarithmic axis they would be drawn ever closer.

    Returns:
      for each mean the places, from 1 on, of the first and the last value in it, and the mean.
    """
    n = len(values)
    quarters = (round(16 * 2 ** (i / 4)) for i in range(1, 40))
    edges = [*range(1, min(n, 16) + 1), *(k for k in quarters if k < n), n + 1]
    return [
        (first, after - 1, statistics.mean(values[first - 1 : after - 1]))
        for first, after in itertools.pairwise(edges)
    ]


def plot_recovery(path: Path, curves: Mapping[str, Sequence[float]]) -> None:
    """Draw by how much a reset raises the loss, by the number of predictions since the reset.

    Args:
      curves: by model, the excess at the 1st, 2nd, … prediction after a reset; nats per token.
    """
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    for name, excess in curves.items():
        style = {"color": style_of(name)["color"], "ls": "--" if " " in name else "-"}
        means = in_quarter_octaves(excess)
        places = [math.sqrt(first * last) for first, last, _ in means]
        axes.plot(places, [mean for *_, mean in means], lw=1.2, label=name, **style)
    axes.set_xscale("log", base=2)
    ticks = [2**i for i in range(max(map(len, curves.values())).bit_length())]
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.axhline(0.01, color="0.6", lw=0.8, ls="--")
    axes.annotate("0.01", (0, 0.01), xycoords=("axes fraction", "data"), xytext=(4, 3),
                  textcoords="offset points", fontsize=7, color="0.35")  # fmt: skip
    axes.set(
        title="How long a state takes to fill: the cost of one reset",
        xlabel="predictions since the reset",
        ylabel="excess over the unbroken stream (nats per token)",
    )
    axes.grid(alpha=0.2)
    axes.legend(fontsize=8)
    save_figure(figure, path)


def plot_sensitivity(path: Path, points: Mapping[str, tuple[int, float, float]]) -> None:
    """Draw the stateful loss and the sensitivity against the number of parameters.

    Args:
      points: by model, parameters, the loss on one stream and the sensitivity; nats per character.
    """
    figure = new_figure(11, 4.5)
    for axes, column, title in zip(
        figure.subplots(1, 2),
        (2, 1),
        ("Sensitivity: stateless minus stateful", "Stateful: one unbroken stream"),
        strict=True,
    ):
        for i, (name, values) in enumerate(points.items()):
            style: dict[str, Any] = style_of(name) | {"alpha": 0.75}  # two may lie at one place
            if "," in name:  # a variant: an empty marker of its own
                style |= {"marker": "o<>pP*Xh"[i % 8], "mfc": "none"}
            axes.plot(values[0], values[column], ls="", ms=7, label=name, **style)
        axes.set_xscale("log")
        axes.set(title=title, xlabel="parameters", ylabel="nats per character")
        axes.grid(alpha=0.2)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    save_figure(figure, path)


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
    for axes, title, cut in zip(figure.subplots(2, 1), titles, (False, True), strict=True):
        axes.set_title(title, fontsize=11, loc="left")
        _draw_steps(axes, prompt, cut)
    save_figure(figure, path)


def _draw_steps(axes: Any, prompt: str, cut: bool) -> None:
    """Draw a step per character; the carry arrives at each cell, or zeros do where it is cut."""
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
        if cut:
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
        if not cut or i == 0 or i == len(places):
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
