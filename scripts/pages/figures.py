"""What the figures of all pages share."""

from __future__ import annotations

from typing import Any


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of this size in inches."""
    from matplotlib.figure import Figure  # takes long to import

    return Figure(figsize=(width, height), layout="constrained")
