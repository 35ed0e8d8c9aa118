"""The figure of a training run."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgru.errors import needs
from jaxgru.lm.files import write_bytes


def losses_figure(
    title: str, train: Sequence[float], validation: Sequence[float], published: Mapping[str, Any]
) -> Any:
    """Return a figure of a run's losses per epoch (nats per token), beside published ones.

    Args:
      train, validation: the loss of each epoch.
      published: of each published run, the losses of all epochs, as `train_loss` and `val_loss`;
        those of validation are of one batch.

    Raises:
      MissingPackage: matplotlib is not installed.
    """
    with needs("train"):  # takes long to import
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(5.2, 4), layout="constrained")
    axes = figure.subplots()
    for losses, color, name in ((train, "C0", "training"), (validation, "C1", "validation")):
        axes.plot(range(1, len(losses) + 1), losses, f"{color}o-", lw=1, ms=3, label=name)
    for field, color, name in (("train_loss", "C0", "training"),
                               ("val_loss", "C1", "one validation batch")):  # fmt: skip
        for i, losses in enumerate(published.get(field, [])):
            label = None if i else f"{name}, published"
            axes.plot(range(1, len(losses) + 1), losses, f"{color}x:", lw=1, ms=5, label=label)
    axes.set(title=title, xlabel="epoch", ylabel="loss in nats per token")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as a PNG, whole or not at all. Raises OSError where it cannot be written."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    write_bytes(path, image.getvalue())
