"""`fit`: a whole run in memory, epoch by epoch, from its current state to its end."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from jaxgru.arrays import AnyArray
from jaxgru.errors import UserError
from jaxgru.lm.config import Config, TrainingConfig
from jaxgru.lm.evaluation import window_loss
from jaxgru.lm.model import Params
from jaxgru.lm.training.optimizer import after_validation, learning_rate, scale_of
from jaxgru.lm.training.progress import Epoch, Progress
from jaxgru.lm.training.step import MAX_CHUNK, TrainState, state_shardings, train_steps
from jaxgru.parallel import from_first, in_any_process, one_copy, peak_memory_mb, shard

CHUNK_SECONDS = 0.5  # the intended duration of a chunk of steps, after which the bar moves


class NonFiniteLoss(UserError):
    """A loss is infinite or NaN; the message says at which step."""


@dataclass
class Observer:
    """Callbacks of `fit`. The defaults do nothing."""

    on_steps: Callable[[int, int, float, float], None] = lambda *_: None
    """Called after a chunk: (epoch from 0, steps done in it, the last loss, tokens per second)."""
    on_validation: Callable[[int], None] = lambda *_: None
    """Called before a validation: (epoch from 0)."""
    on_epoch: Callable[[TrainState, Params | None, Progress], None] = lambda *_: None
    """Called after an epoch, to save: (state, best parameters, progress up to this epoch)."""
    interrupted: Callable[[], bool] = lambda: False
    """Called before each chunk of steps; returns whether to stop."""
    on_interrupt: Callable[[TrainState, Params | None, Progress], None] = lambda *_: None
    """Called before `fit` stops because of `interrupted`, to save."""


def fit(
    config: Config,
    state: TrainState,
    best: Params | None,
    progress: Progress,
    train_tokens: Int[AnyArray, "N"],
    val_tokens: Int[AnyArray, "M"],
    observer: Observer,
    mesh: Mesh | None = None,
    separator_token: int | None = None,
) -> tuple[TrainState, Params]:
    """Train to the end of the config's epochs; return the last state and the resulting parameters.

    With early stopping (training.patience), training ends after that many consecutive epochs
    without a better validation loss, and the result is the best epoch's parameters.

    `state` is donated, so the caller must not use it again; `best` are the best epoch's parameters,
    if one is finished; `progress` is updated in place.

    Raises:
      NonFiniteLoss: a loss is infinite or NaN.
      KeyboardInterrupt: `observer.interrupted` returned True, and `on_interrupt` has been called.
    """
    training = config.training
    tokens = jnp.asarray(train_tokens)
    if mesh is not None:
        state = shard(state, state_shardings(state, mesh, training))
        tokens = shard(tokens, NamedSharding(mesh, P()))

    def run_steps(state: TrainState, number: int) -> tuple[TrainState, Array, Array]:
        return train_steps(training, state, tokens, jnp.int32(number), mesh, separator_token)

    # No step, so that tokens per second exclude compilation
    state, *_ = run_steps(state, 0)
    progress.finished = progress.is_over(training)
    while not progress.finished:
        state = _train_epoch(training, run_steps, state, best, progress, observer)
        observer.on_validation(progress.epoch)
        val_loss = _validation_loss(training, state, val_tokens, mesh, separator_token)
        record = _epoch_record(training, state, progress, val_loss)
        if training.schedule == "plateau":
            opt_state = after_validation(training, state.opt_state, val_loss)
            state = dataclasses.replace(state, opt_state=opt_state)
        if _finish_epoch(progress, record):
            # A copy, because the next step donates the state
            best = jax.tree.map(jnp.copy, state.evaluated)
        progress.finished = progress.is_over(training)
        observer.on_epoch(state, best, progress)
    result = best if training.patience else state.evaluated
    return state, one_copy(result, mesh)


def _train_epoch(
    training: TrainingConfig,
    run_steps: Callable[[TrainState, int], tuple[TrainState, Array, Array]],
    state: TrainState,
    best: Params | None,
    progress: Progress,
    observer: Observer,
) -> TrainState:
    """Take the steps that the current epoch lacks, in chunks of about CHUNK_SECONDS.

    Args:
      run_steps: `train_steps` of a state and a number of steps.
      best: for the observer, if it interrupts the training.
    """
    chunk = 1
    done = len(progress.epoch_losses)
    while done < training.steps_per_epoch:
        # If one process is interrupted, all of them stop
        if in_any_process(observer.interrupted()):
            observer.on_interrupt(state, best, progress)
            raise KeyboardInterrupt
        started = time.perf_counter()
        # The first process decides, because the clocks differ
        chunk = from_first(min(chunk, training.steps_per_epoch - done))
        state, losses, num_done = run_steps(state, chunk)
        losses = np.asarray(losses)[: int(num_done)].tolist()
        seconds = time.perf_counter() - started
        done += len(losses)
        if not math.isfinite(losses[-1]):
            step = progress.epoch * training.steps_per_epoch + done
            raise NonFiniteLoss(f"the training loss is {losses[-1]} at step {step}.")
        progress.epoch_losses += losses
        progress.epoch_seconds += seconds
        tokens_per_second = chunk * training.tokens_per_step / seconds
        observer.on_steps(progress.epoch, done, losses[-1], tokens_per_second)
        chunk = int(np.clip(CHUNK_SECONDS * chunk / seconds, 1, MAX_CHUNK))
    return state


def _validation_loss(
    training: TrainingConfig,
    state: TrainState,
    val_tokens: Int[AnyArray, "M"],
    mesh: Mesh | None,
    separator_token: int | None,
) -> float:
    """Return the validation loss of the evaluated parameters, the same in all processes."""
    loss = window_loss(state.evaluated, val_tokens, training.sequence_length, mesh, separator_token)
    # The first process's, so that all processes decide alike
    loss = from_first(loss)
    if not math.isfinite(loss):
        raise NonFiniteLoss(f"the validation loss is {loss} after step {int(state.step)}.")
    return loss


def _epoch_record(
    training: TrainingConfig, state: TrainState, progress: Progress, val_loss: float
) -> Epoch:
    """Return the record of the current epoch, all of whose steps are done."""
    step = int(state.step)
    rate = learning_rate(training)(jnp.asarray(step - 1)) * scale_of(state.opt_state)
    num_tokens = training.steps_per_epoch * training.tokens_per_step
    return Epoch(
        epoch=progress.epoch + 1,
        step=step,
        learning_rate=float(f"{rate:.6g}"),
        train_loss=float(np.mean(progress.epoch_losses)),
        val_loss=val_loss,
        tokens_per_second=num_tokens / progress.epoch_seconds,
        seconds=progress.epoch_seconds,
        peak_memory_mb=peak_memory_mb(),
    )


def _finish_epoch(progress: Progress, record: Epoch) -> bool:
    """Add the record of the current epoch; return whether its loss is the lowest so far."""
    progress.records.append(record)
    progress.epoch_losses = []
    progress.epoch_seconds = 0.0
    if record.val_loss >= progress.best_val_loss:
        return False
    progress.best_val_loss = record.val_loss
    progress.best_epoch = progress.epoch
    return True
