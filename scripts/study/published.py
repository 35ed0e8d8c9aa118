"""What the study reports of its models, as `configs/published/<name>.toml` has it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

from jaxgru.lm.config import config_dir


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
