"""What the study reports for its models, to be shown beside a run's own losses.

The numbers are in `configs/published/<name>.toml`. They are no part of a run's config.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxgru.lm.config import (
    Config,
    config_dir,
    config_names,
    dotted_names,
    field_value,
    load_config,
)

COMPARED = {"data.corpus", *dotted_names("recipe")} - {"training.seed"}
"""The text, by its name, and the recipe: published results are of any seed."""


@dataclass(frozen=True)
class PublishedResults:
    """What the study reports for one model, losses in nats per token by epoch.

    Attributes:
      num_params: the parameter count; 0: none is published.
      train_loss: the mean training loss of each epoch, one list per run; NaN: not reported.
      val_loss: the loss of one random validation batch per epoch, one list per run.
      earlier_train_loss, earlier_val_loss: those of a run of another learning rate schedule.
    """

    num_params: int = 0
    train_loss: Sequence[Sequence[float]] = ()
    val_loss: Sequence[Sequence[float]] = ()
    earlier_train_loss: Sequence[float] = ()
    earlier_val_loss: Sequence[float] = ()


def load_published(name: str) -> PublishedResults:
    """Return what the study reports for a config, by name; nothing if it has no such model."""
    path = config_dir() / "published" / f"{name}.toml"
    if not path.exists():
        return PublishedResults()
    return PublishedResults(**tomllib.loads(path.read_text(encoding="utf-8")))


def published_for(config: Config, lengthened: int = 0) -> PublishedResults:
    """Return what the study reports for a run's text and recipe, whatever the run is called.

    A run with a text or a recipe of its own gets nothing to be compared with, nor does one that was
    lengthened: its first epochs had the learning rates of a shorter run.
    """
    if lengthened:
        return PublishedResults()
    ours = recipe(config)
    for name, theirs in _recipes().items():
        if theirs == ours:
            return load_published(name)
    return PublishedResults()


@functools.cache
def _recipes() -> dict[str, dict[str, Any]]:
    return {name: recipe(load_config(name)) for name in config_names()}


def recipe(config: Config) -> dict[str, Any]:
    """Return every field that changes a model's text or recipe, by dotted name."""
    return {name: field_value(config, name) for name in dotted_names() if name in COMPARED}
