"""A train state, one step, and many steps on the device: pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxgru.config import ModelConfig, TrainingConfig
from jaxgru.data.batching import random_crops, stream_windows
from jaxgru.evaluation import token_nll
from jaxgru.model import (
    Dropout,
    ModelCarry,
    Params,
    apply,
    init,
    initial_carry,
    round_weights,
)
from jaxgru.parallel.sharding import (
    ROWS,
    gather,
    row_shardings,
    scatter_mean,
    shardings,
    specs,
)

MAX_CHUNK = 64  # steps between two looks at the clock, at most


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
