"""The figures of docs/study.md.

Each `plot_*` function draws one SVG and raises OSError if the file cannot be written.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxgru.lm.training import Epoch
from pages.figures import BAND, BLUE, GREEN, GREY, ORANGE, beside, head, svg
from pages.models import called, kind
from study.study_records import load_published

COLORS = {"astra_alpha": BLUE, "astra_gamma": ORANGE, "elman_alpha": GREEN}
"""Of the models that are drawn as curves."""


class MemoryCurve(NamedTuple):
    """A model's losses in nats per character, by the tokens k between resets, and without any."""

    points: Sequence[tuple[int, float]]
    stream: float


class Recovery(NamedTuple):
    """What a reset costs at the 1st, 2nd, … prediction after it, in nats per token.

    Attributes:
      last: the last prediction at which the cost is not yet small.
    """

    excess: Sequence[float]
    last: int | str


class Quarter(NamedTuple):
    """The mean of some values, and the places, from 1 on, of the first and the last of them."""

    first: int
    last: int
    mean: float


def plot_memory(path: Path, curves: Mapping[str, MemoryCurve], ngrams: Sequence[float]) -> None:
    """Draw the loss of each model by the number of tokens k between resets of its state.

    An arrow marks what a reset before every token costs the first model.

    Args:
      curves: by model.
      ngrams: the losses of n-gram models, orders 1, 2, …; nats per character.
    """
    ticks = sorted({k for curve in curves.values() for k, _ in curve.points})
    never = 4 * ticks[-1]
    bigrams = ngrams[1]
    with svg(path, 3.9) as figure:
        axes = figure.subplots()
        axes.axhline(bigrams, color=GREY, lw=1, ls="--", zorder=1)
        for name, curve in curves.items():
            _draw_memory(axes, name, curve, never)
        name, curve = next(iter(curves.items()))
        _draw_cost(axes, name, curve, never)
        beside(
            axes,
            "a table of bigram counts",
            (never, bigrams),
            GREY,
            xytext=(-8, -3),
            ha="right",
            va="top",
        )
        head(axes, "What a reset costs", "loss in nats per character; lower is better")
        axes.set_xscale("log", base=2)
        axes.set_xticks([*ticks[::2], never], [*(f"{k:,}" for k in ticks[::2]), "never"])
        axes.minorticks_off()
        axes.margins(y=0.12)  # room for the label of the lowest curve
        axes.set_xlabel("the state is reset every … characters")


def _draw_memory(axes: Any, name: str, curve: MemoryCurve, never: int) -> None:
    """Draw a model's curve; never: where its loss without resets belongs."""
    color = COLORS[name]
    k, losses = zip(*curve.points, strict=True)
    axes.plot([*k, never], [*losses, curve.stream], color=color, marker="o", ms=3.5, zorder=3)
    # Above the label of the curve that is next to it
    va = "bottom" if name == "elman_alpha" else "center"
    beside(axes, in_two_lines(name), (never, curve.stream), color, va=va)


def _draw_cost(axes: Any, name: str, curve: MemoryCurve, never: int) -> None:
    """Draw an arrow from a model's loss without resets to that with one before every token."""
    stream = curve.stream
    reset = dict(curve.points).get(1, stream)
    axes.plot([1, never], [reset, reset], color=BLUE, lw=1, ls=":", zorder=2)
    arrow = {"arrowstyle": "-|>", "color": BLUE, "lw": 1.8, "shrinkA": 4, "shrinkB": 0}
    axes.annotate("", (never, reset), (never, stream), arrowprops=arrow)
    middle = (never, (stream + reset) / 2)
    beside(axes, kind(name), middle, BLUE, xytext=(-8, 12), ha="right")
    beside(
        axes,
        f"{stream:.3f} → {reset:.3f}",
        middle,
        BLUE,
        xytext=(-8, -3),
        weight="bold",
        size=13,
        ha="right",
    )


def in_quarter_octaves(values: Sequence[float]) -> list[Quarter]:
    """Return the first 15 values, then the means of quarters of an octave, with their places.

    Single values of a measured curve fluctuate by more than the curve still falls, and on a
    logarithmic axis they would be drawn ever closer.
    """
    n = len(values)
    quarters = (round(16 * 2 ** (i / 4)) for i in range(1, 40))
    edges = [*range(1, min(n, 16) + 1), *(k for k in quarters if k < n), n + 1]
    return [
        Quarter(first, after - 1, statistics.mean(values[first - 1 : after - 1]))
        for first, after in itertools.pairwise(edges)
    ]


def plot_recovery(path: Path, recoveries: Mapping[str, Recovery], small: float) -> None:
    """Draw by how much a reset raises the loss, by the number of predictions since the reset.

    Args:
      recoveries: by model.
      small: the cost below which a state counts as filled again.
    """
    low = small / 3
    high = 2.0
    with svg(path, 3.7) as figure:
        axes = figure.subplots()
        axes.axhspan(low, small, color=BAND, lw=0, zorder=0)
        for name, recovery in recoveries.items():
            _draw_recovery(axes, name, recovery, small, low)
        axes.legend(loc="upper right")
        axes.annotate(
            f"within {small}",
            (1, low),
            (-4, 5),
            ha="right",
            color=GREY,
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
        )
        head(axes, "A reset state fills again", "extra nats per character after a reset")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = [2**i for i in range(7)]
        names = ["1st", "2nd", *(f"{tick}th" for tick in ticks[2:])]
        names[5] = "32nd"
        axes.set_xticks(ticks, names)
        axes.set_yticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
        axes.minorticks_off()
        which = "which prediction after the reset; both axes are logarithmic"
        axes.set(xlabel=which, xlim=(0.9, 100), ylim=(low, high))


def _draw_recovery(axes: Any, name: str, recovery: Recovery, small: float, low: float) -> None:
    """Draw a model's curve until it stays small, and write after how many predictions it does."""
    color = COLORS[name]
    quarters = in_quarter_octaves(recovery.excess)
    end = 1 + max(i for i, quarter in enumerate(quarters) if quarter.mean >= small)
    curve = [(math.sqrt(q.first * q.last), max(q.mean, low)) for q in quarters]
    x, y = zip(*curve[: end + 1], strict=True)
    axes.plot(x, y, color=color, label=called(name), marker="o", ms=6, markevery=[end])
    beside(axes, f"after {recovery.last}", curve[end], color, weight="bold", size=13)


def plot_epochs(path: Path, runs: Mapping[str, Sequence[Sequence[Epoch]]]) -> None:
    """Draw the losses of each model by epoch, in nats per token: ours as lines, theirs as crosses.

    Args:
      runs: by config, the epochs of each seed.
    """
    rows = math.ceil(len(runs) / 2)
    with svg(path, 2.1 * rows + 0.9) as figure:
        grid = [*figure.subplots(rows, 2, squeeze=False).flat]
        for axes in grid[len(runs) :]:
            axes.set_visible(False)
        for axes, (name, seeds) in zip(grid, runs.items(), strict=False):
            _draw_epochs(axes, name, seeds)
        handles, labels = grid[0].get_legend_handles_labels()
        by_label = dict(zip(labels, handles, strict=True))
        figure.legend(
            by_label.values(),
            by_label.keys(),
            loc="outside upper left",
            ncols=2,
            columnspacing=1,
            handlelength=1.2,
            title="Loss by epoch, in nats per token",
            alignment="left",
            title_fontproperties={"size": 13, "weight": "bold"},
        )


def _draw_epochs(axes: Any, name: str, seeds: Sequence[Sequence[Epoch]]) -> None:
    """Draw the losses of one model."""
    axes.set_title(name, size=11, pad=17)
    axes.annotate(
        kind(name),
        (0, 1),
        (0, 5),
        color=GREY,
        size=9.5,
        xycoords="axes fraction",
        textcoords="offset points",
    )
    published = load_published(name)
    training = [[epoch.train_loss for epoch in epochs] for epochs in seeds]
    validation = [[epoch.val_loss for epoch in epochs] for epochs in seeds]
    _draw_losses(axes, training, published.train_loss, BLUE, "training")
    _draw_losses(axes, validation, published.val_loss, ORANGE, "validation")
    axes.set_xlabel("epoch")
    axes.locator_params(nbins=4)
    axes.locator_params(axis="x", integer=True)


def _draw_losses(
    axes: Any,
    ours: Sequence[Sequence[float]],
    theirs: Sequence[Sequence[float]],
    color: str,
    what: str,
) -> None:
    """Draw the losses of several runs, ours and those of the study."""
    for losses in ours:
        epochs = range(1, len(losses) + 1)
        axes.plot(epochs, losses, color=color, lw=1.2, label=f"{what}, a line per seed")
    for losses in theirs:
        epochs = range(1, len(losses) + 1)
        label = f"{what}, published"
        axes.plot(epochs, losses, color=color, marker="x", ms=4, lw=0, label=label)


RIGHT = (6, 0)
LEFT = (-6, 0)
ABOVE = (0, 6)
BELOW = (0, -6)
SIDES = {
    "astra_alpha": (-6, 5),
    "astra_alpha, hidden_dim 64": (6, -3),
    "astra_alpha, num_layers 2": (1, -6),
    "astra_beta": (-4, 5),
    "best_gru": ABOVE,
    "scribe_alpha": LEFT,
    "scribe_beta": ABOVE,
    "scribe_gamma": BELOW,
    "leviathan": BELOW,
    "elman_alpha": LEFT,
}
"""Where a point is labelled, in points from it, if not on its right: so that no two labels meet."""


def plot_sensitivity(path: Path, points: Mapping[str, tuple[int, float]]) -> None:
    """Draw what a reset before every token costs each model against its number of parameters.

    Args:
      points: by model, parameters and cost, in nats per character.
    """
    with svg(path, 5.4) as figure:
        axes = figure.subplots()
        for name, (parameters, cost) in points.items():
            _draw_point(axes, name, parameters, cost)
        head(axes, "What a reset before every token costs", "extra nats per character")
        axes.set_xscale("log")
        axes.set_xticks([10**k for k in range(4, 8)], ["10k", "100k", "1M", "10M"])
        axes.minorticks_off()
        axes.margins(0.2, 0.1)
        axes.set(xlabel="parameters", ylim=(0, 1.15 * max(cost for _, cost in points.values())))


def _draw_point(axes: Any, name: str, parameters: int, cost: float) -> None:
    """Draw a model as a point with a label; a variant of a config as a ring."""
    color = GREEN if "subwords" in called(name) else BLUE
    inside = "none" if "," in name else color
    axes.plot(parameters, cost, marker="o", ms=6, color=color, mfc=inside)
    offset = SIDES.get(name, RIGHT)
    ha, va = _alignment(*offset)
    beside(
        axes,
        label_of(name),
        (parameters, cost),
        color,
        xytext=offset,
        size=9.5,
        ha=ha,
        va=va,
    )


def _alignment(x: int, y: int) -> tuple[str, str]:
    """Return which side of a label faces its point: `ha` and `va` of one at (x, y) from it."""
    ha = "center"
    if x < 0:
        ha = "right"
    elif x > 0:
        ha = "left"
    va = "center"
    if y > 3:
        va = "bottom"
    elif y < 0:
        va = "top"
    return ha, va


def label_of(name: str) -> str:
    """Return what a point is called: a config's name or, of a variant, the size that it changes."""
    _, _, units = name.partition(", hidden_dim ")
    if units:
        return f"{units} units"
    _, _, layers = name.partition(", num_layers ")
    if layers:
        return f"{layers} layers"
    return in_two_lines(name)


def in_two_lines(name: str) -> str:
    """Return what a model is, and below that its name in brackets."""
    return called(name).replace(" (", "\n(")
