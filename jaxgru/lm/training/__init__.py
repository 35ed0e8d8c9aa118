"""Training: `step.py` has one step and many steps, `loop.py` a whole run in memory."""

from jaxgru.lm.training.loop import NonFiniteLoss, Observer, Progress, fit
from jaxgru.lm.training.step import (
    TrainState,
    clip_by_global_norm,
    init_state,
    learning_rate,
    loss_fn,
    optimizer,
    state_shardings,
    train_step,
    train_steps,
)

__all__ = [
    "NonFiniteLoss", "Observer", "Progress", "TrainState", "clip_by_global_norm", "fit",
    "init_state", "learning_rate", "loss_fn", "optimizer", "state_shardings",
    "train_step", "train_steps",
]  # fmt: skip
