"""The figure of a training run."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgru.errors import needs
from jaxgru.lm.files import write_bytes
from jaxgru.lm.runs.published import PublishedResults

Losses = Sequence[Sequence[float]]


def losses_figure(
    title: str, train: Losses, validation: Losses, published: PublishedResults
) -> Any:
    """Return a figure of runs' losses per epoch (nats per token) beside the published ones.

    Args:
      train, validation: of each run, the loss of each epoch.

    Raises:
      MissingPackage: matplotlib is not installed.
    """
    with needs("train"):  # takes long to import
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(5.2, 4), layout="constrained")
    axes = figure.subplots()
    ours = {"linestyle": "-", "marker": "o", "ms": 3}
    theirs = {"linestyle": ":", "marker": "x", "ms": 5, "zorder": 3}
    for losses, color, name in (
        (train, "C0", "training"),
        (validation, "C1", "validation"),
    ):
        _plot_runs(axes, losses, color=color, label=name, **ours)
    for losses, earlier, color, name in (
        (published.train_loss, published.earlier_train_loss, "C0", "training"),
        (published.val_loss, published.earlier_val_loss, "C1", "one validation batch"),
    ):
        _plot_runs(axes, losses, color=color, label=f"{name}, published", **theirs)
        if earlier:
            style = theirs | {"marker": "+"}
            _plot_runs(axes, [earlier], color=color, label=f"{name}, earlier run", **style)
    axes.set(title=title, xlabel="epoch", ylabel="loss in nats per token")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _plot_runs(axes: Any, runs: Losses, label: str, **style: Any) -> None:
    for i, losses in enumerate(runs):
        epochs = range(1, len(losses) + 1)
        style["alpha"] = 1 - 0.6 * i / len(runs)  # the first is the darkest
        axes.plot(epochs, losses, lw=1, label=label if i == 0 else None, **style)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as a PNG, whole or not at all. Raises OSError where it cannot be written."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    write_bytes(path, image.getvalue())
