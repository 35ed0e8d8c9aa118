"""Trained models that ship with the package: NAME.safetensors, its card NAME.md, and losses.json.

`scripts/maintain/release.py RUN` adds one.
"""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parent


def pretrained_names() -> list[str]:
    """Return the names of the models that ship with the package, sorted; `lm.load` takes them."""
    return sorted(path.stem for path in FOLDER.glob("*.safetensors"))


def measured_losses(folder: Path = FOLDER) -> dict[str, dict[str, float]]:
    """Return by model its losses on its text's validation split, nats per character.

    They are "windows", with the state kept in windows as in training; "stream", never reset; and
    "stateless", reset before every token.
    """
    return json.loads((folder / "losses.json").read_text(encoding="utf-8"))
