"""What a run has done so far: a record of each epoch, and what a checkpoint stores of the rest."""

from __future__ import annotations

import math

from jaxgru.errors import needs
from jaxgru.lm.config import TrainingConfig
from jaxgru.records import Count, Number, Record, Whole

with needs("train"):
    from msgspec import Struct


class Epoch(Record, frozen=True):
    """An epoch: a line of metrics.jsonl."""

    epoch: Count  # from 1
    step: Count  # optimizer steps since the run began
    learning_rate: Number  # of the last step
    train_loss: float  # nats per token, the mean of the epoch's steps
    val_loss: float  # likewise, in windows of the sequence length
    tokens_per_second: Number  # in training, without validation
    seconds: Number  # of training, without validation
    peak_memory_mb: Number | None = None  # in 10⁶ bytes; unknown on some operating systems


class Progress(Struct, forbid_unknown_fields=True):
    """The history of a run, which a checkpoint stores as JSON beside the state."""

    records: list[Epoch] = []
    epoch_losses: list[float] = []  # of each step of the current epoch
    epoch_seconds: float = 0.0  # spent on these steps
    best_val_loss: float = math.inf
    best_epoch: Whole = 0  # counted from 1; 0: no epoch is finished
    finished: bool = False

    @property
    def epoch(self) -> int:
        """The number of finished epochs."""
        return len(self.records)

    def is_over(self, training: TrainingConfig) -> bool:
        """Return whether all epochs are finished, or early stopping has ended the training."""
        return self.epoch >= training.epochs or self.has_stopped_early(training)

    def has_stopped_early(self, training: TrainingConfig) -> bool:
        """Return whether the validation loss has not improved for `patience` epochs."""
        return 0 < training.patience <= self.epoch - self.best_epoch
