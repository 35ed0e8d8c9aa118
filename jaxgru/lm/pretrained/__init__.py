"""Trained models: NAME.safetensors and its card NAME.md of each, and losses.json of all.

Here are those of at most 3 MB. The larger ones are a distribution of their own, jaxgru-models, and
in a checkout its folder `models/`. `scripts/maintain/release.py RUN` adds one.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from jaxgru.errors import HOW_TO_INSTALL_MODELS, MissingPackage

__all__ = ["FOLDER", "measured_losses"]

FOLDER = Path(__file__).parent
"""Where the models of at most 3 MB are."""
LARGE_MODELS = FOLDER.parents[2] / "models" / "jaxgru_models"
"""Where a checkout has the larger models."""


def pretrained_names() -> list[str]:
    """Return the names of the trained models that are installed, sorted; `lm.load` takes them."""
    return sorted(pretrained_files())


def pretrained_files() -> dict[str, Path]:
    """Return the files of the trained models that are installed, by name."""
    folders = [FOLDER, *_folders_of_large_models()]
    return {path.stem: path for folder in folders for path in folder.glob("*.safetensors")}


def _folders_of_large_models() -> list[Path]:
    """Return where the larger models are: beside the package in a checkout, or installed."""
    if LARGE_MODELS.is_dir():
        return [LARGE_MODELS]
    spec = importlib.util.find_spec("jaxgru_models")
    if spec is None or spec.submodule_search_locations is None:
        return []
    return [*map(Path, spec.submodule_search_locations)]


def find_pretrained(name: str) -> Path | None:
    """Return the file of a trained model; None: there is none of that name.

    Raises:
      MissingPackage: it is one of the larger models, and these are not installed.
    """
    path = pretrained_files().get(name)
    if path is None and name in measured_losses():
        raise MissingPackage(
            f"{name} is in the package jaxgru-models, which is not installed; "
            f"{HOW_TO_INSTALL_MODELS}."
        )
    return path


def measured_losses(folder: Path = FOLDER) -> dict[str, dict[str, float]]:
    """Return by model its losses on its text's validation split, nats per character.

    They are "windows", with the state kept in windows as in training; "stream", never reset; and
    "stateless", reset before every token. All trained models have them, installed or not.
    """
    return json.loads((folder / "losses.json").read_text(encoding="utf-8"))
