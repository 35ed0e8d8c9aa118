"""Trained models that ship with the package: NAME.safetensors, and its card NAME.md.

`scripts/maintain/release.py RUN` adds one.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent


def pretrained_names() -> list[str]:
    """Return the names of the models that ship with the package, sorted; `lm.load` takes them."""
    return sorted(path.stem for path in FOLDER.glob("*.safetensors"))


def measured_losses(name: str) -> list[float]:
    """Return the losses that a model's card gives, on its text's validation split.

    They are in nats per character: in windows as in training, in one stream, and with a reset at
    every token.
    """
    card = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    return [float(loss) for loss in re.findall(r"^\| state .*? \| .*? \| (.*?) \|", card, re.M)]
