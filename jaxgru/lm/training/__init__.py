"""Training: one step and many steps in `step.py`, a whole run in memory in `loop.py`."""

from jaxgru.lm.training.loop import NonFiniteLoss, Observer, fit
from jaxgru.lm.training.optimizer import (
    after_validation,
    clip_by_global_norm,
    learning_rate,
    optimizer,
)
from jaxgru.lm.training.records import Epoch, Progress
from jaxgru.lm.training.step import (
    TrainState,
    init_state,
    loss_fn,
    starting_from,
    state_shardings,
    train_step,
    train_steps,
)

__all__ = [
    "Epoch", "NonFiniteLoss", "Observer", "Progress", "TrainState", "after_validation",
    "clip_by_global_norm", "fit", "init_state", "learning_rate", "loss_fn", "optimizer",
    "starting_from", "state_shardings", "train_step", "train_steps",
]  # fmt: skip
