"""`fit`: a whole run in memory, epoch by epoch, from wherever it stands to its end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int

from jaxgru.config import Config, TrainingConfig
from jaxgru.errors import UserError
from jaxgru.evaluation import window_loss
from jaxgru.model import Params
from jaxgru.parallel.processes import anywhere, from_first
from jaxgru.parallel.sharding import one_copy, spread
from jaxgru.training.step import (
    MAX_CHUNK,
    TrainState,
    learning_rate,
    state_shardings,
    train_steps,
)

CHUNK_SECONDS = 0.5  # about how long a chunk of steps takes: how often the bar moves


class NonFiniteLoss(UserError):
    """A loss became infinite or NaN; the message says at which step."""


@dataclass
class Progress:
    """What a run has seen so far, beside its state: everything that a checkpoint keeps as JSON."""

    records: list[dict[str, float]] = field(default_factory=list)  # one per epoch: metrics.jsonl
    epoch_losses: list[float] = field(default_factory=list)  # of the epoch under way, a step each
    epoch_seconds: float = 0.0  # spent on the steps of the epoch under way
    best_val_loss: float = math.inf
    best_epoch: int = 0  # counted from 1; 0: none finished yet
    finished: bool = False

    @property
    def epoch(self) -> int:
        """Epochs finished."""
        return len(self.records)

    def is_over(self, training: TrainingConfig) -> bool:
        """Whether no epoch is left to train, by the number of epochs or by early stopping."""
        waited = self.epoch - self.best_epoch
        return self.epoch >= training.epochs or 0 < training.patience <= waited


@dataclass
class Observer:
    """What `fit` tells the outside, and asks it; each does nothing unless it is replaced."""

    on_steps: Callable[[int, int, float, float], None] = lambda *_: None
    """after a chunk: epoch from 0, steps done in it, last loss, tokens a second"""
    on_validation: Callable[[int], None] = lambda *_: None
    """before a validation: epoch from 0"""
    on_epoch: Callable[[TrainState, Params | None, Progress], None] = lambda *_: None
    """after an epoch, its record in place: save here. Gets the best parameters, too"""
    interrupted: Callable[[], bool] = lambda: False
    """asked after each chunk of steps: whether to stop"""
    on_interrupt: Callable[[TrainState, Params | None, Progress], None] = lambda *_: None
    """it was to stop, and the step is finished: save here"""


def fit(
    config: Config,
    state: TrainState,
    best: Params | None,
    progress: Progress,
    train_tokens: Int[np.ndarray, "N"],
    val_tokens: Int[np.ndarray, "M"],
    observer: Observer,
    mesh: Mesh | None = None,
) -> tuple[TrainState, Params]:
    """Trains from wherever `state` and `progress` stand to the end of the config's epochs.

    Early stopping (training.patience): ends after that many epochs in a row without a better
    validation loss, and the best epoch's parameters are the result. `best` holds them on a run that
    is resumed; None: no epoch has ended yet. The state handed in is donated: use it no more.
    `mesh`: the devices that share each batch; None: the default device alone.

    Returns the last state and the parameters that are the run's result.

    Raises:
      NonFiniteLoss: a training or validation loss is infinite or NaN.
      KeyboardInterrupt: the observer has interrupted it; `on_interrupt` was called.
    """
    training, schedule = config.training, learning_rate(config.training)
    train_tokens, val_tokens = jnp.asarray(train_tokens), jnp.asarray(val_tokens)
    if mesh is not None:
        state = spread(state, state_shardings(state, mesh, training))
        train_tokens = spread(train_tokens, NamedSharding(mesh, P()))
    run_steps = train_steps.lower(
        config.model, training, state, train_tokens, np.int32(1), mesh
    ).compile()  # before the clock starts: tokens per second are of steps, not of the compiler
    progress.finished = progress.is_over(training)
    while not progress.finished:
        chunk = 1
        while (done := len(progress.epoch_losses)) < training.steps_per_epoch:
            if anywhere(observer.interrupted()):  # and all processes stop
                observer.on_interrupt(state, best, progress)
                raise KeyboardInterrupt
            started = time.perf_counter()
            chunk = from_first(min(chunk, training.steps_per_epoch - done))  # clocks differ
            state, losses, n = run_steps(state, train_tokens, np.int32(chunk))
            losses = np.asarray(losses)[: int(n)].tolist()
            seconds = time.perf_counter() - started
            if not math.isfinite(losses[-1]):
                raise NonFiniteLoss(
                    f"the training loss is {losses[-1]} at step "
                    f"{progress.epoch * training.steps_per_epoch + done + len(losses)}."
                )
            progress.epoch_losses += losses
            progress.epoch_seconds += seconds
            observer.on_steps(
                progress.epoch,
                done + chunk,
                losses[-1],
                chunk * training.tokens_per_step / seconds,
            )
            chunk = int(np.clip(CHUNK_SECONDS * chunk / seconds, 1, MAX_CHUNK))

        observer.on_validation(progress.epoch)
        step, T = jnp.asarray(int(state.step)), training.sequence_length
        val_loss = window_loss(one_copy(state.params, mesh), val_tokens, T)
        val_loss = from_first(val_loss)  # the same decisions everywhere
        if not math.isfinite(val_loss):
            raise NonFiniteLoss(f"the validation loss is {val_loss} after step {step}.")
        progress.records.append(
            {
                "epoch": progress.epoch + 1,
                "step": int(step),
                "learning_rate": float(f"{schedule(step - 1):.6g}"),
                "train_loss": float(np.mean(progress.epoch_losses)),
                "val_loss": val_loss,
                "tokens_per_second": training.steps_per_epoch
                * training.tokens_per_step
                / progress.epoch_seconds,
                "seconds": progress.epoch_seconds,
            }
        )
        progress.epoch_losses, progress.epoch_seconds = [], 0.0
        if val_loss < progress.best_val_loss:
            progress.best_val_loss, progress.best_epoch = val_loss, progress.epoch
            if training.patience:
                best = jax.tree.map(jnp.copy, state.params)  # the state's own are donated
        progress.finished = progress.is_over(training)
        observer.on_epoch(state, best, progress)
    return state, one_copy(best if training.patience else state.params, mesh)
