"""Trained models that ship with the package: NAME.safetensors, and its card NAME.md.

`scripts/maintain/release.py RUN` adds one.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent


def pretrained_names() -> list[str]:
    """Return the names of the models that ship with the package, sorted; `lm.load` takes them."""
    return sorted(path.stem for path in FOLDER.glob("*.safetensors"))
