"""The figures of docs/study.md.

Each `plot_*` function draws one SVG and raises OSError if the file cannot be written.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxgru.lm.training import Epoch
from pages.figures import BAND, BLUE, GREEN, GREY, ORANGE, beside, head, svg
from pages.models import called, kind
from study.records import load_published

Points = Sequence[tuple[int, float]]

COLORS = {"astra_alpha": BLUE, "astra_gamma": ORANGE, "elman_alpha": GREEN}
"""Of the models that are drawn as curves."""


def plot_memory(
    path: Path, curves: Mapping[str, tuple[Points, float]], ngrams: Sequence[float]
) -> None:
    """Draw the loss of each model by the number of tokens k between resets of its state.

    An arrow marks what a reset before every token costs the first model.

    Args:
      curves: by model, the losses by k and the loss without resets; nats per character.
      ngrams: the losses of n-gram models, orders 1, 2, …; nats per character.
    """
    ticks = sorted({k for points, _ in curves.values() for k, _ in points})
    never = 4 * ticks[-1]
    with svg(path, 3.9) as figure:
        axes = figure.subplots()
        axes.axhline(ngrams[1], color=GREY, lw=1, ls="--", zorder=1)
        for name, (points, stream) in curves.items():
            color = COLORS[name]
            k, losses = zip(*points, strict=True)
            axes.plot([*k, never], [*losses, stream], color=color, marker="o", ms=3.5, zorder=3)
            near = {"va": "bottom"} if name == "elman_alpha" else {}  # above the next curve's label
            beside(axes, in_two_lines(name), (never, stream), color, **near)
        name, (points, kept) = next(iter(curves.items()))
        reset = dict(points).get(1, kept)
        axes.plot([1, never], [reset, reset], color=BLUE, lw=1, ls=":", zorder=2)
        axes.annotate("", (never, reset), (never, kept), arrowprops={
            "arrowstyle": "-|>", "color": BLUE, "lw": 1.8, "shrinkA": 4, "shrinkB": 0,
        })  # fmt: skip
        middle, to_left = (never, (kept + reset) / 2), {"ha": "right", "color": BLUE}
        beside(axes, kind(name), middle, xytext=(-8, 12), **to_left)
        beside(axes, f"{kept:.3f} → {reset:.3f}", middle, xytext=(-8, -3), weight="bold", size=13,
               **to_left)  # fmt: skip
        beside(axes, "a table of bigram counts", (never, ngrams[1]), GREY, xytext=(-8, -3),
               ha="right", va="top")  # fmt: skip
        head(axes, "What a reset costs", "loss in nats per character; lower is better")
        axes.set_xscale("log", base=2)
        axes.set_xticks([*ticks[::2], never], [*(f"{k:,}" for k in ticks[::2]), "never"])
        axes.minorticks_off()
        axes.margins(y=0.12)  # room for the label of the lowest curve
        axes.set_xlabel("the state is reset every … characters")


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


def plot_recovery(
    path: Path, curves: Mapping[str, tuple[Sequence[float], int | str]], filled: float
) -> None:
    """Draw by how much a reset raises the loss, by the number of predictions since the reset.

    Args:
      curves: by model, the excess at the 1st, 2nd, … prediction after a reset, in nats per token;
        and the last of them at which it is not yet below `filled`.
    """
    low, high = filled / 3, 2.0
    with svg(path, 3.7) as figure:
        axes = figure.subplots()
        axes.axhspan(low, filled, color=BAND, lw=0, zorder=0)
        for name, (excess, last) in curves.items():
            color = COLORS[name]
            groups = in_quarter_octaves(excess)
            until = max(i for i, (*_, mean) in enumerate(groups) if mean >= filled) + 2
            curve = [(math.sqrt(first * end), max(mean, low)) for first, end, mean in groups]
            axes.plot(*zip(*curve[:until], strict=True), color=color, label=called(name),
                      marker="o", ms=6, markevery=[until - 1])  # fmt: skip
            beside(axes, f"after {last}", curve[until - 1], color, weight="bold", size=13)
        axes.legend(loc="upper right")
        axes.annotate(f"within {filled}", (1, low), (-4, 5), ha="right", color=GREY,
                      xycoords=("axes fraction", "data"), textcoords="offset points")  # fmt: skip
        head(axes, "A reset state fills again", "extra nats per character after a reset")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = [2**i for i in range(7)]
        axes.set_xticks(ticks, [*map(str, ticks)])
        axes.set_yticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
        axes.minorticks_off()
        axes.set(xlabel="predictions since the reset", xlim=(0.9, 100), ylim=(low, high))


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
            axes.set_title(name, size=11, pad=17)
            axes.annotate(kind(name), (0, 1), (0, 5), color=GREY, size=9.5,
                          xycoords="axes fraction", textcoords="offset points")  # fmt: skip
            published = load_published(name)
            for field, theirs, color, what in (
                ("train_loss", published.train_loss, BLUE, "training"),
                ("val_loss", published.val_loss, ORANGE, "validation"),
            ):
                for epochs in seeds:
                    losses = [getattr(epoch, field) for epoch in epochs]
                    axes.plot(range(1, len(losses) + 1), losses, color=color, lw=1.2, label=what)
                for losses in theirs:
                    axes.plot(range(1, len(losses) + 1), losses, color=color, marker="x", ms=4,
                              lw=0, label=f"{what}, published")  # fmt: skip
            axes.set_xlabel("epoch")
            axes.locator_params(nbins=4)
            axes.locator_params(axis="x", integer=True)
        found = dict(zip(*reversed(grid[0].get_legend_handles_labels()), strict=True))
        figure.legend(found.values(), found.keys(), loc="outside upper left", ncols=2,
                      title="Loss by epoch, in nats per token", alignment="left",
                      title_fontproperties={"size": 13, "weight": "bold"})  # fmt: skip


RIGHT, LEFT, ABOVE, BELOW = (6, 0), (-6, 0), (0, 6), (0, -6)
SIDES = {
    "astra_alpha": (-6, 5), "astra_alpha, hidden_dim 64": (6, -3),
    "astra_alpha, num_layers 2": (1, -6), "astra_beta": (-4, 5), "best_gru": ABOVE,
    "scribe_alpha": LEFT, "scribe_beta": ABOVE, "scribe_gamma": BELOW, "leviathan": BELOW,
    "elman_alpha": LEFT,
}  # fmt: skip
"""Where a point is labelled, in points from it, if not on its right: so that no two labels meet."""


def plot_sensitivity(path: Path, points: Mapping[str, tuple[int, float]]) -> None:
    """Draw what a reset before every token costs each model against its number of parameters.

    Args:
      points: by model, parameters and cost, in nats per character.
    """
    with svg(path, 5.4) as figure:
        axes = figure.subplots()
        for name, (parameters, cost) in points.items():
            color = GREEN if "subwords" in called(name) else BLUE
            axes.plot(parameters, cost, marker="o", ms=6, color=color,
                      mfc="none" if "," in name else color)  # fmt: skip
            x, y = SIDES.get(name, RIGHT)
            beside(axes, label_of(name), (parameters, cost), color, xytext=(x, y), size=9.5,
                   ha="right" if x < 0 else "left" if x else "center",
                   va="bottom" if y > 3 else "top" if y < 0 else "center")  # fmt: skip
        head(axes, "What a reset before every token costs", "extra nats per character")
        axes.set_xscale("log")
        axes.set_xticks([10**k for k in range(4, 8)], ["10k", "100k", "1M", "10M"])
        axes.minorticks_off()
        axes.margins(0.2, 0.1)
        axes.set(xlabel="parameters", ylim=(0, 1.15 * max(cost for _, cost in points.values())))


def label_of(name: str) -> str:
    """Return what a point is called: a config's name or, of a variant, the size that it changes."""
    units, layers = (name.partition(f", {field} ")[2] for field in ("hidden_dim", "num_layers"))
    return f"{units} units" if units else f"{layers} layers" if layers else in_two_lines(name)


def in_two_lines(name: str) -> str:
    """Return what a model is, and below that its name in brackets."""
    return called(name).replace(" (", "\n(")
