"""Figures: of one run, and of the study."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgru.config import PublishedResults
from jaxgru.files import write_bytes


def plot_losses(
    path: Path, title: str, runs: list[list[dict[str, float]]], published: PublishedResults
) -> None:
    """Draws runs' losses by epoch (nats a token) with the study's beside them, as a PNG.

    Args:
      runs: each run's records, as `metrics.jsonl` holds them.

    Raises:
      OSError: the file cannot be written; an older figure stays as it is.
    """
    from matplotlib.figure import Figure  # takes long to import
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    ours = {"linestyle": "-", "marker": "o", "ms": 3}
    theirs = {"linestyle": ":", "marker": "x", "ms": 5, "zorder": 3}
    for kind, color, name in (
        ("train", "C0", "training"),
        ("val", "C1", "whole validation split"),
    ):
        losses = [[record[f"{kind}_loss"] for record in records] for records in runs]
        _plot_runs(axes, losses, color=color, label=f"{name}, measured", **ours)
    for losses, color, name in (
        (published.train_loss, "black", "training"),
        (published.val_loss, "C3", "one validation batch"),
    ):
        _plot_runs(axes, losses, color=color, label=f"{name}, published", **theirs)
    axes.set(title=title, xlabel="epoch", ylabel="loss (nats a token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, path)


def _plot_runs(axes: Any, runs: Sequence[Sequence[float]], label: str, **style: Any) -> None:
    for i, losses in enumerate(runs):
        epochs = range(1, len(losses) + 1)
        axes.plot(epochs, losses, lw=1, label=label if i == 0 else None, **style)


def plot_memory(
    path: Path, curves: dict[str, tuple[list[tuple[int, float]], float]], ngrams: list[float]
) -> None:
    """Draws what a model loses when its state is put back every k tokens, as a PNG.

    Args:
      curves: by model: the losses by k, and the loss when it is never put back; nats a character.
      ngrams: the losses of counted n-gram models, orders 1, 2, …; nats a character.

    Raises:
      OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # takes long to import

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    never = 2 ** (1 + max(k for points, _ in curves.values() for k, _ in points).bit_length())
    for order, loss in enumerate(ngrams, 1):
        if order == 1:
            continue  # far above all else
        if loss > ngrams[order - 2] - 0.03:
            break  # the lines would lie on one another
        name = {2: "counted bigram", 3: "trigram"}.get(order, f"{order}-gram")
        axes.axhline(loss, color="0.6", lw=0.8, ls="--", zorder=1)
        axes.annotate(
            name,
            (1, loss),
            xycoords=("axes fraction", "data"),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color="0.35",
        )
    for i, (name, (points, stream)) in enumerate(curves.items()):
        k, losses = zip(*points, strict=True)
        axes.plot([*k, never], [*losses, stream], color=f"C{i}", marker="o", ms=3.5, label=name)
    axes.set_xscale("log", base=2)
    ticks = sorted({k for points, _ in curves.values() for k, _ in points})
    names = ["1:\nstateless" if k == 1 else str(k) for k in ticks]
    axes.set_xticks([*ticks, never], [*names, "never"])
    axes.minorticks_off()
    axes.set(
        title="What a recurrent model loses when its state is thrown away",
        xlabel="the state is put back to zeros every … tokens",
        ylabel="loss on the validation split (nats a character)",
    )
    axes.grid(alpha=0.2)
    axes.legend(fontsize=8)
    save_figure(figure, path)


def plot_recovery(path: Path, curves: dict[str, list[float]]) -> None:
    """Draws what a reset still costs (nats a token) by the number of tokens since, as a PNG.

    Args:
      curves: by model, the excess at the 1st, 2nd, … prediction after a reset.

    Raises:
      OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, (name, excess) in enumerate(curves.items()):
        axes.plot(range(1, len(excess) + 1), excess, color=f"C{i}", lw=1.2, label=name)
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
        ylabel="excess over the unbroken stream (nats a token)",
    )
    axes.grid(alpha=0.2)
    axes.legend(fontsize=8)
    save_figure(figure, path)


def plot_sensitivity(path: Path, points: dict[str, tuple[int, float, float]]) -> None:
    """Draws the stateful loss and the sensitivity against the number of parameters, as a PNG.

    Args:
      points: by model: parameters, the loss over one stream, the sensitivity; nats a character.

    Raises:
      OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, column, title in zip(
        figure.subplots(1, 2),
        (2, 1),
        ("Sensitivity: stateless less stateful", "Stateful: one unbroken stream"),
        strict=True,
    ):
        for i, (name, values) in enumerate(points.items()):
            style = {"color": f"C{i % 10}", "marker": "osD^vP*Xph"[i % 10], "alpha": 0.8}
            axes.plot(values[0], values[column], ls="", ms=7, label=name, **style)
        axes.set_xscale("log")
        axes.set(title=title, xlabel="parameters", ylabel="nats a character")
        axes.grid(alpha=0.2)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    save_figure(figure, path)


def plot_cost(path: Path, panels: dict[str, dict[str, list[dict[int, float]]]], title: str) -> None:
    """Draws a step's time and memory against one size after another, log-log, as a PNG.

    Args:
      panels: by axis label, by "seconds" and "bytes", the plain curve and remat's (or none), each
        the measured by size.

    Raises:
      OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    units = {"seconds": ("milliseconds a step", 1e3), "bytes": ("megabytes", 1e-6)}
    grid = figure.subplots(2, len(panels), squeeze=False)
    for column, (label, measured) in enumerate(panels.items()):
        for row, (what, curves) in enumerate(measured.items()):
            axes, (unit, scale) = grid[row][column], units[what]
            for i, (values, name) in enumerate(zip(curves, ("plain", "remat"), strict=True)):
                if values:
                    y = [scale * value for value in values.values()]
                    axes.plot(list(values), y, color=f"C{i}", marker="o", ms=3.5, label=name)
            if curves[0]:  # the line of what is proportional, through the last point
                first, last = min(curves[0]), max(curves[0])
                end = scale * curves[0][last]
                axes.plot([first, last], [end * first / last, end], color="0.6", lw=0.8, ls="--",
                          label="proportional", zorder=1)  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set(xlabel=label, ylabel=unit)
            axes.grid(alpha=0.2)
            axes.legend(fontsize=8)
    figure.suptitle(f"A training step of astra_alpha: {title}", fontsize=10)
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    """Writes a figure as a PNG, whole or not at all. Raises OSError where it cannot."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    write_bytes(path, image.getvalue())
