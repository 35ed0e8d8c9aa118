"""What a run has done so far: a record of each epoch, and what a checkpoint stores of the rest."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from jaxgru.lm.config import TrainingConfig
from jaxgru.lm.records import Count, Number, Record, Whole

Loss = Annotated[float, Meta(ge=-(2.0**63), le=2.0**63)]  # nats per token


class Epoch(Record, frozen=True):
    """An epoch: a line of metrics.jsonl."""

    epoch: Count
    step: Count
    learning_rate: Number
    train_loss: Loss
    val_loss: Loss
    tokens_per_second: Number
    seconds: Number
    peak_memory_mb: Number | None = None  # unknown on some operating systems


class Progress(Struct, forbid_unknown_fields=True):
    """The history of a run, which a checkpoint stores as JSON beside the state."""

    records: list[Epoch] = []
    epoch_losses: list[Loss] = []  # of each step of the current epoch
    epoch_seconds: Annotated[float, Meta(ge=0, le=1e18)] = 0.0  # spent on these steps
    best_val_loss: float = math.inf
    best_epoch: Whole = 0  # counted from 1; 0: no epoch is finished
    finished: bool = False

    def __post_init__(self) -> None:
        if math.isnan(self.best_val_loss):
            raise ValueError("its best loss is not a number")
        if self.best_epoch > self.epoch:
            raise ValueError("its best epoch is none of its epochs")

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
        return msgspec.to_builtins(self)

    @classmethod
    def from_dict(cls, stored: Any) -> Progress:
        """Return what was stored. Raises ValueError where no run writes that."""
        return msgspec.convert(stored, cls)
