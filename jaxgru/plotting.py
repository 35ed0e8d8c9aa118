"""Figures of a run."""

from __future__ import annotations

import os
from pathlib import Path

from jaxgru.config import PublishedResults


def plot_losses(
    path: Path, title: str, records: list[dict[str, float]], published: PublishedResults
) -> None:
    """Draws a run's losses by epoch (nats a token) with the study's beside them, as a PNG.

    Raises:
      OSError: the file cannot be written; an older figure stays as it is.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    styles = [
        ("train", "C0", published.train_loss, "published, train"),
        ("val", "C1", published.val_loss, "published, one random validation batch"),
    ]
    for kind, color, runs, label in styles:
        for i, run in enumerate(runs):
            epochs = range(1, len(run) + 1)
            axes.plot(epochs, run, f"{color}:", marker=".", markersize=3, lw=1, alpha=0.8,
                      label=label if i == 0 else None)  # fmt: skip
        label = "train" if kind == "train" else "whole validation split"
        epochs = [record["epoch"] for record in records]
        axes.plot(epochs, [record[f"{kind}_loss"] for record in records], color, marker="o",
                  markersize=3, label=label)  # fmt: skip
    axes.set(title=title, xlabel="epoch", ylabel="loss (nats a token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    beside = path.with_name(f".{path.name}")
    figure.savefig(beside, format="png", dpi=120)
    os.replace(beside, path)
