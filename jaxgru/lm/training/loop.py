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
from jaxtyping import Int

from jaxgru.cells.carry import AnyArray
from jaxgru.errors import UserError
from jaxgru.lm.config import Config
from jaxgru.lm.evaluation import window_loss
from jaxgru.lm.model import Params
from jaxgru.lm.training.optimizer import after_validation, learning_rate, scale_of
from jaxgru.lm.training.records import Epoch, Progress
from jaxgru.lm.training.step import MAX_CHUNK, TrainState, state_shardings, train_steps
from jaxgru.parallel.hardware import peak_memory_mb
from jaxgru.parallel.processes import from_first, in_any_process
from jaxgru.parallel.sharding import one_copy, shard

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
    config: Config, state: TrainState, best: Params | None, progress: Progress,
    train_tokens: Int[AnyArray, "N"], val_tokens: Int[AnyArray, "M"], observer: Observer,
    mesh: Mesh | None = None, end: int | None = None,
) -> tuple[TrainState, Params]:  # fmt: skip
    """Train to the end of the config's epochs; return the last state and the resulting parameters.

    With early stopping (training.patience), training ends after that many consecutive epochs
    without a better validation loss, and the result is the best epoch's parameters.

    `state` is donated, so the caller must not use it again; `best` are the best epoch's parameters,
    if one is finished; `progress` is updated in place. Raises NonFiniteLoss, and KeyboardInterrupt
    where `observer.interrupted` returned True and `on_interrupt` has been called.
    """
    training, schedule = config.training, learning_rate(config.training)
    tokens = jnp.asarray(train_tokens)
    if mesh is not None:
        state = shard(state, state_shardings(state, mesh, training))
        tokens = shard(tokens, NamedSharding(mesh, P()))
    # No step, so that tokens per second exclude compilation
    state, *_ = train_steps(training, state, tokens, jnp.int32(0), mesh, end)
    progress.finished = progress.is_over(training)
    while not progress.finished:
        chunk = 1
        while (done := len(progress.epoch_losses)) < training.steps_per_epoch:
            if in_any_process(observer.interrupted()):  # then all processes stop
                observer.on_interrupt(state, best, progress)
                raise KeyboardInterrupt
            started = time.perf_counter()
            chunk = from_first(min(chunk, training.steps_per_epoch - done))  # its clock decides
            state, losses, n = train_steps(training, state, tokens, jnp.int32(chunk), mesh, end)
            losses = np.asarray(losses)[: int(n)].tolist()
            seconds = time.perf_counter() - started
            if not math.isfinite(losses[-1]):
                raise NonFiniteLoss(
                    f"the training loss is {losses[-1]} at step "
                    f"{progress.epoch * training.steps_per_epoch + done + len(losses)}."
                )
            progress.epoch_losses += losses
            progress.epoch_seconds += seconds
            speed = chunk * training.tokens_per_step / seconds
            observer.on_steps(progress.epoch, done + chunk, losses[-1], speed)
            chunk = int(np.clip(CHUNK_SECONDS * chunk / seconds, 1, MAX_CHUNK))

        observer.on_validation(progress.epoch)
        step, T = int(state.step), training.sequence_length
        val_loss = window_loss(state.evaluated, val_tokens, T, mesh, end)
        val_loss = from_first(val_loss)  # so that all processes decide alike
        if not math.isfinite(val_loss):
            raise NonFiniteLoss(f"the validation loss is {val_loss} after step {step}.")
        rate = schedule(jnp.asarray(step - 1)) * scale_of(state.opt_state)
        if training.schedule == "plateau":
            opt_state = after_validation(training, state.opt_state, val_loss)
            state = dataclasses.replace(state, opt_state=opt_state)
        seconds = progress.epoch_seconds
        record = Epoch(
            epoch=progress.epoch + 1,
            step=step,
            learning_rate=float(f"{rate:.6g}"),
            train_loss=float(np.mean(progress.epoch_losses)),
            val_loss=val_loss,
            tokens_per_second=training.steps_per_epoch * training.tokens_per_step / seconds,
            seconds=seconds,
            peak_memory_mb=peak_memory_mb(),
        )
        progress.records.append(record)
        progress.epoch_losses, progress.epoch_seconds = [], 0.0
        if val_loss < progress.best_val_loss:
            progress.best_val_loss, progress.best_epoch = val_loss, progress.epoch
            best = jax.tree.map(jnp.copy, state.evaluated)  # the next step donates the state
        progress.finished = progress.is_over(training)
        observer.on_epoch(state, best, progress)
    return state, one_copy(best if training.patience else state.evaluated, mesh)
