"""What the pages call a model: what it is, and its config's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxgru.lm.config import config_names, load_config


def kind(name: str, changes: Mapping[str, Any] | None = None) -> str:
    """Return what a config's model is: cell, layers × units, and its tokens if not characters.

    Args:
      changes: values by dotted name, which replace the config's.
    """
    config = load_config(name, changes)
    *words, cell = config.model.cell.split("_")
    tokens = "" if config.data.tokenizer == "characters" else ", subwords"
    what = " ".join([*map(str.title, words), cell.upper()])
    return f"{what} {config.model.num_layers} × {config.model.hidden_dim}{tokens}"


def called(name: str) -> str:
    """Return "GRU 2 × 256 (astra_beta)"; of a config that the package does not have, its name."""
    if name not in config_names():
        return name
    return f"{kind(name)} ({name})"
