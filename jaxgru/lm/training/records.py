"""What a run has done so far: a record of each epoch, and what a checkpoint stores of the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from jaxgru.lm.config import TrainingConfig


@dataclass(frozen=True)
class Epoch:
    """An epoch: a line of metrics.jsonl. Losses are in nats per token."""

    epoch: int  # counted from 1
    step: int
    learning_rate: float
    train_loss: float
    val_loss: float
    tokens_per_second: float
    seconds: float
    peak_memory_mb: float | None = None  # unknown on some operating systems

    def __post_init__(self) -> None:
        for name, value in self.to_dict().items():
            if not _is_number(value):
                raise ValueError(f"{name} of an epoch is not a number")

    def to_dict(self) -> dict[str, int | float]:
        """Return the record as it is written in JSON, without what is unknown."""
        known = dict(vars(self))
        if self.peak_memory_mb is None:
            del known["peak_memory_mb"]
        return known


@dataclass
class Progress:
    """The history of a run, which a checkpoint stores as JSON beside the state."""

    records: list[Epoch] = field(default_factory=list)
    epoch_losses: list[float] = field(default_factory=list)  # of each step of the current epoch
    epoch_seconds: float = 0.0  # spent on the steps of the current epoch
    best_val_loss: float = math.inf
    best_epoch: int = 0  # counted from 1; 0: no epoch is finished
    finished: bool = False

    @property
    def epoch(self) -> int:
        """Return the number of finished epochs."""
        return len(self.records)

    def is_over(self, training: TrainingConfig) -> bool:
        """Return whether training is over, by the number of epochs or by early stopping."""
        waited = self.epoch - self.best_epoch
        return self.epoch >= training.epochs or 0 < training.patience <= waited

    def to_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores; `from_dict` is the inverse."""
        return vars(self) | {"records": [record.to_dict() for record in self.records]}

    @classmethod
    def from_dict(cls, stored: Any) -> Progress:
        """Return what was stored. Raises ValueError or TypeError where no run writes that."""
        progress = cls(**stored)
        records: Any = progress.records  # still as JSON has them
        if not isinstance(records, list) or not isinstance(progress.epoch_losses, list):
            raise ValueError("its records or losses are not a list")
        progress.records = [Epoch(**record) for record in records]
        numbers = *progress.epoch_losses, progress.epoch_seconds, progress.best_val_loss
        if not all(map(_is_number, numbers)) or progress.epoch_seconds < 0:
            raise ValueError("its losses or seconds are not all numbers")
        if type(progress.best_epoch) is not int or not 0 <= progress.best_epoch <= progress.epoch:
            raise ValueError("its best epoch is none of its epochs")
        if type(progress.finished) is not bool:
            raise ValueError("it does not say whether it is finished")
        return progress


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and (abs(value) < 2**63 or value == math.inf)
