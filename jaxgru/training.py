"""Train state, one step, many steps on the device, and `fit`: a whole run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxgru.batching import random_crops, stream_windows
from jaxgru.config import Config, ModelConfig, TrainingConfig
from jaxgru.errors import UserError
from jaxgru.evaluation import token_nll, window_loss
from jaxgru.model import (
    Dropout,
    ModelCarry,
    Params,
    apply,
    init,
    initial_carry,
    round_weights,
)
from jaxgru.processes import anywhere, from_first
from jaxgru.sharding import (
    ROWS,
    gather,
    one_copy,
    row_shardings,
    scatter_mean,
    shardings,
    specs,
    spread,
)

MAX_CHUNK = 64  # steps between two looks at the clock, at most
CHUNK_SECONDS = 0.5  # about how long a chunk of steps takes: how often the bar moves


class NonFiniteLoss(UserError):
    """A loss became infinite or NaN; the message says at which step."""


@struct.dataclass
class TrainState:
    """All that one step needs and changes. The key stays: a step folds its number into it.

    carry is the recurrent state that a step hands to the next, where training reads contiguous
    streams; None where each step begins random crops from zeros.
    """

    params: Params
    opt_state: Any
    key: PRNGKeyArray
    step: Int[Array, ""]
    carry: ModelCarry | None = None


def init_state(model: ModelConfig, training: TrainingConfig, sampling: str = "crops") -> TrainState:
    """A fresh state: weights and the key of batches and dropout both come from the seed.

    sampling: "crops" or "streams", as in `DataConfig`.
    """
    init_key, key = jax.random.split(jax.random.key(training.seed))
    params = init(init_key, model)
    carry = initial_carry(params, training.rows_per_step) if sampling == "streams" else None
    step = jnp.zeros((), jnp.int32)
    return TrainState(params, optimizer(training).init(params), key, step, carry)


def state_shardings(state: TrainState, mesh: Mesh, training: TrainingConfig) -> TrainState:
    """Where a state lies on a mesh: see `shardings`; each device has its own rows of the carry."""
    rest = shardings(state.replace(carry=None), mesh, training.shard_parameters)
    return rest.replace(carry=row_shardings(state.carry, mesh))


def learning_rate(training: TrainingConfig) -> optax.Schedule:
    """Cosine annealing stepped once an epoch: lr·(1 + cos(πe/E))/2 in epoch e = 0 … E−1.

    Loshchilov & Hutter 2016 (arXiv 1608.03983), eq. 5, without restarts and down to 0.
    """

    def schedule(step: Int[Array, ""]) -> Float[Array, ""]:
        epoch = step // training.steps_per_epoch
        return training.learning_rate * (1 + jnp.cos(jnp.pi * epoch / training.epochs)) / 2

    return schedule


def optimizer(training: TrainingConfig) -> optax.GradientTransformation:
    """Clipping to a global norm, then AdamW with weight decay on EVERY parameter, biases too."""
    return optax.chain(
        clip_by_global_norm(training.max_grad_norm),
        optax.adamw(
            learning_rate(training),
            b1=training.beta1,
            b2=training.beta2,
            eps=training.epsilon,
            weight_decay=training.weight_decay,
        ),
    )


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """g · min(1, max_norm / (‖g‖ + 1e-6)), as `torch.nn.utils.clip_grad_norm_` computes it.

    `optax.clip_by_global_norm` lacks the 1e-6, which is enough to tell two trajectories apart.
    """

    def update(grads, state, params=None):
        scale = jnp.minimum(1.0, max_norm / (optax.tree.norm(grads) + 1e-6))
        return jax.tree.map(lambda g: g * scale, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def loss_fn(
    params: Params,
    inputs: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    dropout: Dropout | None = None,
    remat: bool = False,
    carry: ModelCarry | None = None,
    unroll: str = "auto",
) -> tuple[Float[Array, ""], ModelCarry]:
    """Mean cross-entropy of a batch, nats per token, and the state after it; carry None: zeros.

    unroll: how the layers are computed, as in `ModelConfig`.

    With remat, the gradient keeps only the state at the start of each of about √T parts of the
    sequence, and computes a part's activations anew when it comes to it (Chen et al. 2016, arXiv
    1604.06174): memory for 2√T steps in place of T, for one more forward pass.
    """
    if not remat:
        logits, carry = apply(params, inputs, carry, dropout, unroll)
        return token_nll(logits, targets).mean(), carry
    B, T = inputs.shape
    length = math.isqrt(T)
    whole = T - T % length

    @partial(jax.checkpoint, prevent_cse=False)  # within a scan, nothing is merged anyway
    def part(carry: ModelCarry, of_part: tuple) -> tuple[ModelCarry, Float[Array, ""]]:
        start, inputs, targets = of_part
        masks = dropout and dropout.replace(first_step=start)
        logits, carry = apply(params, inputs, carry, masks, unroll)
        return carry, token_nll(logits, targets).sum()

    def parts(tokens: Int[Array, "B T"]) -> Int[Array, "parts B length"]:
        return tokens[:, :whole].reshape(B, -1, length).swapaxes(0, 1)

    carry = initial_carry(params, B) if carry is None else carry
    starts = jnp.arange(0, whole, length)
    carry, sums = jax.lax.scan(part, carry, (starts, parts(inputs), parts(targets)))
    total = sums.sum()
    if whole < T:
        carry, last = part(carry, (whole, inputs[:, whole:], targets[:, whole:]))
        total += last
    return total / (B * T), carry


def train_step(
    model: ModelConfig,
    training: TrainingConfig,
    state: TrainState,
    tokens: Int[Array, "N"],
    mesh: Mesh | None = None,
) -> tuple[TrainState, Float[Array, ""]]:
    """One optimizer step on one batch of random crops; returns the loss before the step.

    Where the state has a carry, the batch is the streams' next windows (`stream_windows`), from the
    state after those before them; the gradient ends at a window's start. This is truncated
    backpropagation through time (Williams & Peng 1990, Neural Computation 2(4)).

    With a mesh (`data_mesh`), each device takes its share of the batch's rows; the gradients are
    those of the whole batch, to the rounding of one sum. Tokens are then on all devices, the state
    as `state_shardings` says. Where parameters are cut (ZeRO stage 3, Rajbhandari et al. 2020,
    arXiv 1910.02054), each device gathers them for the step and keeps its piece of the mean
    gradient.
    """
    crop_key, dropout_key = jax.random.split(jax.random.fold_in(state.key, state.step))
    sizes = training.rows_per_step, training.sequence_length
    if state.carry is None:
        carry, batch = None, random_crops(crop_key, tokens, *sizes)
    else:
        *batch, from_zeros = stream_windows(tokens, state.step, *sizes)
        carry = jax.tree.map(lambda h: jnp.where(from_zeros, 0, h), state.carry)

    def loss_and_grads(params, carry, inputs, targets, dropout_key, first_row=0):
        def of_part(carry, inputs, targets, first_row):
            dropout = Dropout(dropout_key, model.dropout, model.dropout_site, first_row)

            def loss(params):
                if model.compute_dtype != "float32":
                    params = round_weights(params, model.compute_dtype)
                return loss_fn(
                    params, inputs, targets, dropout, training.remat, carry, model.unroll
                )

            (value, new_carry), grads = jax.value_and_grad(loss, has_aux=True)(params)
            return (value, grads), None if carry is None else new_carry

        rows = carry, inputs, targets
        return mean_of_parts(of_part, training.gradient_accumulation, rows, first_row)

    if mesh is None or mesh.size == 1:
        (loss, grads), carry = loss_and_grads(state.params, carry, *batch, dropout_key)
        return _update(training, state, grads, carry), loss

    cuts = specs(state.params, mesh, training.shard_parameters)

    def share(params, carry, inputs, targets, dropout_key):
        first_row = jax.lax.axis_index(ROWS) * len(inputs)
        params = gather(params, cuts)
        (loss, grads), carry = loss_and_grads(
            params, carry, inputs, targets, dropout_key, first_row
        )
        return jax.lax.pmean(loss, ROWS), scatter_mean(grads, cuts), carry

    run = jax.shard_map(
        share,
        mesh=mesh,
        in_specs=(cuts, P(ROWS), P(ROWS), P(ROWS), P()),
        out_specs=(P(), cuts, P(ROWS)),
        check_vma=False,
    )
    loss, grads, carry = run(state.params, carry, *batch, dropout_key)
    state = _update(training, state, grads, carry)
    where = state_shardings(state, mesh, training)  # as it came: it goes round a loop
    return jax.lax.with_sharding_constraint(state, where), loss


def _update(
    training: TrainingConfig, state: TrainState, grads: Params, carry: ModelCarry | None
) -> TrainState:
    updates, opt_state = optimizer(training).update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(params, opt_state, state.key, state.step + 1, carry)


def mean_of_parts(
    of_part: Callable[..., tuple[Any, Any]],
    num_parts: int,
    rows: tuple[Any, ...],
    first_row: int | Int[Array, ""],
) -> tuple[Any, Any]:
    """`of_part(*rows, first_row)` of a batch, by parts: the memory of one.

    The parts are equal, so the mean of their means is the mean of the whole.

    Args:
      of_part: returns means over its rows, and arrays of its rows; loss and gradients, and a carry.
      rows: arrays (or trees of them) whose first axis is the batch's rows.
      first_row: the number of the first of them.

    Returns:
      The means of the whole batch, and the arrays of all of its rows.
    """
    if num_parts == 1:
        return of_part(*rows, first_row)
    parts = jax.tree.map(lambda x: x.reshape(num_parts, -1, *x.shape[1:]), rows)
    rows_a_part = jax.tree.leaves(parts)[0].shape[1]
    first_rows = first_row + rows_a_part * jnp.arange(num_parts)

    def add(total: Any, part: tuple) -> tuple[Any, Any]:
        rows, first_row = part
        means, new_rows = of_part(*rows, first_row)
        return jax.tree.map(jnp.add, total, means), new_rows

    one = jax.tree.map(lambda x: x[0], parts)
    means, _ = jax.eval_shape(of_part, *one, first_row)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), means)
    total, new_rows = jax.lax.scan(add, zeros, (parts, first_rows))
    joined = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), new_rows)
    return jax.tree.map(lambda x: x / num_parts, total), joined


@partial(jax.jit, static_argnames=("model", "training", "mesh"), donate_argnames="state")
def train_steps(
    model: ModelConfig,
    training: TrainingConfig,
    state: TrainState,
    tokens: Int[Array, "N"],
    num_steps: Int[Array, ""],
    mesh: Mesh | None = None,
) -> tuple[TrainState, Float[Array, "MAX_CHUNK"], Int[Array, ""]]:
    """Up to MAX_CHUNK steps without leaving the device; stops after a loss that is not finite.

    `num_steps` is an argument and not a shape, so one compiled program serves every chunk length:
    where a run is cut into chunks, or interrupted, cannot change its numbers.

    Returns the state, the losses (the first so many count), and how many steps were done.
    """

    def unfinished(loop: tuple) -> Array:
        _, losses, i = loop
        return (i < num_steps) & ((i == 0) | jnp.isfinite(losses[i - 1]))

    def body(loop: tuple) -> tuple:
        state, losses, i = loop
        state, loss = train_step(model, training, state, tokens, mesh)
        return state, losses.at[i].set(loss), i + 1

    losses = jnp.zeros(MAX_CHUNK, jax.tree.leaves(state.params)[0].dtype)
    return jax.lax.while_loop(unfinished, body, (state, losses, jnp.zeros((), jnp.int32)))


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
