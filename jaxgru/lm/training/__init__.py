"""Training: one step and many steps in `step.py`, a whole run in memory in `loop.py`."""

from jaxgru.lm.training.loop import Observer, fit
from jaxgru.lm.training.optimizer import optimizer
from jaxgru.lm.training.progress import Epoch, Progress
from jaxgru.lm.training.step import TrainState, init_state, state_shardings, train_step, train_steps

__all__ = [
    "Epoch",
    "Observer",
    "Progress",
    "TrainState",
    "fit",
    "init_state",
    "optimizer",
    "state_shardings",
    "train_step",
    "train_steps",
]
