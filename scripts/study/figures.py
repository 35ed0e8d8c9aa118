"""The figures of docs/study.md, but for the losses of each config.

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
from pages.figures import new_figure

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


def plot_dynamic(path: Path, curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    """Draw each model's loss along the text, with fixed weights and with weights that learn.

    Args:
      curves: by model, the losses of equal parts of the text, static and dynamic; nats per
        character.
    """
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    for name, (static, dynamic) in curves.items():
        places = [100 * (i + 0.5) / len(static) for i in range(len(static))]
        color = style_of(name)["color"]
        axes.plot(places, static, lw=0.8, color=color, ls=":")
        axes.plot(places, dynamic, lw=1.3, color=color)
        axes.annotate(name, (places[-1], dynamic[-1]), xytext=(4, 0), va="center",
                      textcoords="offset points", fontsize=8, color=color)  # fmt: skip
    axes.set(
        title="What a model gains that learns as it reads (dotted: fixed weights)",
        xlabel="place in the validation split (%)",
        ylabel="loss (nats per character)",
        xlim=(0, 115),
        xticks=range(0, 101, 20),
    )
    axes.grid(alpha=0.2)
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
