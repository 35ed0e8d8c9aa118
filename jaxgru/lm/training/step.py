"""A train state, one step, and many steps on the device: pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxgru.arrays import Tree, at_least_float32, choose_rows, in_dtypes_of, rounded_inside
from jaxgru.errors import needs
from jaxgru.layers import (
    Dropout,
    Dropouts,
    Implementation,
    drop_weights,
    dropout_at_step,
    in_segments,
    seed_dropout,
)
from jaxgru.lm.config import ModelConfig, TrainingConfig
from jaxgru.lm.data.batching import document_starts, random_crops, stream_windows
from jaxgru.lm.model import ModelCarry, Params, apply, init, initial_carry, round_model, token_nll
from jaxgru.lm.training.optimizer import optimizer
from jaxgru.parallel import ROWS, gather, scatter_mean, shardings, specs
from jaxgru.pytrees import struct

with needs("train"):
    import optax

MAX_CHUNK = 64  # the most steps between two readings of the clock
NO_STEP = 2**32 - 1  # a number that no step has: the key folded with it is none of a step's


@struct
class TrainState:
    """The state of training. A step updates all fields but `key`: it derives its own keys from it.

    Attributes:
      carry: the recurrent state from one step to the next, if training reads contiguous streams;
        None if each step reads random crops from zero state.
      ema: the moving average of the parameters; None if there is none. Step t = 0, 1, … sets it to
        d · ema + (1 − d) · params with d = min(ema_decay, (1 + t)/(10 + t)), like TensorFlow's
        `ExponentialMovingAverage`.
    """

    params: Params
    opt_state: Any
    key: PRNGKeyArray
    step: Int[Array, ""]
    carry: ModelCarry | None = None
    ema: Params | None = None

    @property
    def evaluated(self) -> Params:
        """The parameters that are evaluated and saved as the model: the average, if any."""
        return self.params if self.ema is None else self.ema


def init_state(model: ModelConfig, training: TrainingConfig, batches: str = "crops") -> TrainState:
    """Return the initial state; the seed decides the weights and the key of batches and dropout.

    Args:
      batches: "crops" or "streams", as in `DataConfig`.
    """
    init_key, key = jax.random.split(jax.random.key(training.seed))
    params = init(init_key, model)
    carry = None
    if batches == "streams":
        carry = initial_carry(params, training.rows_per_step)
    opt_state = optimizer(training).init(params)  # pyright: ignore[reportArgumentType]
    step = jnp.zeros((), jnp.int32)
    fresh = TrainState(params, opt_state, key, step, carry)
    return starting_from(params, fresh, training)


def starting_from(params: Params, fresh: TrainState, training: TrainingConfig) -> TrainState:
    """Return a fresh state with these parameters; their moving average starts from them, too.

    Training donates the state, so each of its arrays needs a buffer of its own.
    """
    params, carry = jax.tree.map(jnp.copy, (params, fresh.carry))
    ema = None
    if training.ema_decay:
        ema = jax.tree.map(jnp.copy, params)
    return dataclasses.replace(fresh, params=params, carry=carry, ema=ema)


def state_shardings(state: TrainState, mesh: Mesh, training: TrainingConfig) -> TrainState:
    """Return the state's `shardings` on a mesh; of the carry, each device has its own rows."""
    without_carry = dataclasses.replace(state, carry=None)
    of_state = shardings(without_carry, mesh, training.shard_parameters)
    of_carry = jax.tree.map(lambda _: NamedSharding(mesh, P(ROWS)), state.carry)
    return dataclasses.replace(of_state, carry=of_carry)


def loss_fn(
    params: Params,
    inputs: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    dropout: Dropouts = None,
    remat: bool = False,
    carry: ModelCarry | None = None,
    implementation: Implementation = "auto",
    separator_token: int | None = None,
) -> tuple[Float[Array, ""], ModelCarry]:
    """Compute the mean cross-entropy of a batch, nats per token, and the state after it.

    Args:
      remat: keep for the gradient only the state at the start of each of about √T segments of the
        sequence, and recompute a segment's activations when its turn comes: see `in_segments`.
    """
    if remat:
        batch = _Batch(carry, inputs, targets)
        return _loss_in_segments(params, batch, dropout, implementation, separator_token)
    reset = document_starts(inputs, separator_token)
    logits, carry = apply(params, inputs, carry, dropout, implementation, reset=reset)
    return token_nll(logits, targets).mean(), carry


class _Batch(NamedTuple):
    """The rows of a batch, and the state before each; None: `initial_carry`."""

    carry: ModelCarry | None
    inputs: Int[Array, "B T"]
    targets: Int[Array, "B T"]


class _Segment(NamedTuple):
    """Consecutive steps of all rows of a batch, time-major."""

    numbers: Int[Array, "T"]
    inputs: Int[Array, "T B"]
    targets: Int[Array, "T B"]


def _loss_in_segments(
    params: Params,
    batch: _Batch,
    dropout: Dropouts,
    implementation: Implementation,
    separator_token: int | None,
) -> tuple[Float[Array, ""], ModelCarry]:
    """Compute `loss_fn` `in_segments`, each of which also draws its dropout anew."""
    seeds = seed_dropout(dropout, params.layers)
    weights = rounded_inside(params)

    def run(carry: ModelCarry, segment: _Segment) -> tuple[ModelCarry, Array]:
        inputs = segment.inputs.T
        masks = dropout_at_step(seeds, segment.numbers[0])
        reset = document_starts(inputs, separator_token)
        logits, carry = apply(weights(), inputs, carry, masks, implementation, reset=reset)
        return carry, token_nll(logits, segment.targets.T).T

    B, T = batch.inputs.shape
    carry = batch.carry
    if carry is None:
        carry = initial_carry(params, B)
    sequence = _Segment(jnp.arange(T), batch.inputs.T, batch.targets.T)
    carry, nll = in_segments(run, carry, sequence)
    return nll.mean(), carry


def train_step(
    training: TrainingConfig,
    state: TrainState,
    tokens: Int[Array, "N"],
    mesh: Mesh | None = None,
    separator_token: int | None = None,
) -> tuple[TrainState, Float[Array, ""]]:
    """Compute one optimizer step on one batch; return the new state, and the loss before the step.

    The batch is random crops. If the state has a carry, it is the next windows of the streams
    (`stream_windows`), which start from the state after the previous windows; the gradient stops at
    a window's start. This is truncated backpropagation through time (Williams & Peng 1990, Neural
    Computation 2(4)). With `reset_probability`, some rows start from `initial_carry` instead. With
    a separator token, the state is also set to that before each of these tokens.

    With a mesh (`data_mesh`), each device takes its share of the batch's rows, and the gradients
    equal those of the whole batch up to the rounding of one sum. The tokens are then on all
    devices, and the state is sharded by `state_shardings`. If the parameters are cut (ZeRO stage 3,
    Rajbhandari et al. 2020, arXiv 1910.02054), each device gathers them for the step and keeps its
    piece of the mean gradient.
    """
    # A key for each purpose, used or not: no option changes what another one draws
    step_key = jax.random.fold_in(state.key, state.step)
    crop_key, dropout_key = jax.random.split(step_key)
    other_keys = jax.random.split(jax.random.fold_in(step_key, 2), 5)
    reset_key, weight_key, input_key, between_key, output_key = other_keys
    keys = _DropoutKeys(dropout_key, input_key, between_key, output_key, weight_key)

    batch = _next_batch(training, state, tokens, crop_key, reset_key)
    if mesh is None or mesh.size == 1:
        result = _batch_gradient(training, separator_token, state.params, batch, keys)
        return _update(training, state, result), result.loss

    result = _gradient_on_mesh(training, separator_token, mesh, state.params, batch, keys)
    state = _update(training, state, result)
    # The carry of a while_loop must keep its sharding
    placement = state_shardings(state, mesh, training)
    return jax.lax.with_sharding_constraint(state, placement), result.loss


def _next_batch(
    training: TrainingConfig,
    state: TrainState,
    tokens: Int[Array, "N"],
    crop_key: PRNGKeyArray,
    reset_key: PRNGKeyArray,
) -> _Batch:
    """Return random crops or, if the state has a carry, the next windows of the streams."""
    B = training.rows_per_step
    T = training.sequence_length
    if state.carry is None:
        inputs, targets = random_crops(crop_key, tokens, B, T)
        return _Batch(None, inputs, targets)

    pass_key = None
    if training.random_offset:
        pass_key = jax.random.fold_in(state.key, NO_STEP)
    inputs, targets, starts = stream_windows(tokens, state.step, B, T, pass_key)
    if training.reset_probability:
        starts |= jax.random.bernoulli(reset_key, training.reset_probability, (B,))
    start = initial_carry(state.params, B)
    carry = choose_rows(~jnp.atleast_1d(starts), state.carry, start)
    return _Batch(carry, inputs, targets)


class _DropoutKeys(NamedTuple):
    """The keys that a step draws dropout with: one for each site, and one for dropped weights."""

    state: PRNGKeyArray
    input: PRNGKeyArray
    between: PRNGKeyArray
    output: PRNGKeyArray
    weights: PRNGKeyArray


class _BatchResult(NamedTuple):
    """The mean loss of a batch, its gradient, and the state after each row; None: not kept."""

    loss: Float[Array, ""]
    grads: Params
    carry: ModelCarry | None


def _gradient_on_mesh(
    training: TrainingConfig,
    separator_token: int | None,
    mesh: Mesh,
    params: Params,
    batch: _Batch,
    keys: _DropoutKeys,
) -> _BatchResult:
    """Compute `_batch_gradient`, an equal share of the rows on each device."""
    cuts = specs(params, mesh, training.shard_parameters)

    def run(params: Params, batch: _Batch, keys: _DropoutKeys) -> _BatchResult:
        first_row = jax.lax.axis_index(ROWS) * len(batch.inputs)
        whole = gather(params, cuts)
        loss, grads, carry = _batch_gradient(
            training, separator_token, whole, batch, keys, first_row
        )
        return _BatchResult(jax.lax.pmean(loss, ROWS), scatter_mean(grads, cuts), carry)

    run_on_devices = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(cuts, P(ROWS), P()),
        out_specs=_BatchResult(P(), cuts, P(ROWS)),  # pyright: ignore[reportArgumentType]
        check_vma=False,
    )
    return run_on_devices(params, batch, keys)


def _batch_gradient(
    training: TrainingConfig,
    separator_token: int | None,
    params: Params,
    batch: _Batch,
    keys: _DropoutKeys,
    first_row: int | Int[Array, ""] = 0,
) -> _BatchResult:
    """Return the loss and the gradient of a batch whose rows are numbered from `first_row`.

    All keys are used here, outside of the loop over micro-batches: a key is used once.
    """
    drop = partial(_drop_weights, training, keys.weights)
    layers, gradient_before_drop = jax.vjp(drop, params.layers)
    params = dataclasses.replace(params, layers=layers)
    dropouts = seed_dropout(_dropouts(training, keys), params.layers)

    of_rows = partial(_micro_batch_gradient, training, separator_token, params, dropouts)
    number = training.gradient_accumulation
    (loss, grads), carry = mean_of_micro_batches(of_rows, number, batch, first_row)
    (of_layers,) = gradient_before_drop(grads.layers)
    return _BatchResult(loss, dataclasses.replace(grads, layers=of_layers), carry)


def _drop_weights(training: TrainingConfig, key: PRNGKeyArray, layers: Tree) -> Tree:
    """Return the layers, with some of their recurrent weights dropped if the config says so."""
    if not training.weight_drop:
        return layers
    return drop_weights(key, layers, training.weight_drop)


def _dropouts(training: TrainingConfig, keys: _DropoutKeys) -> list[Dropout]:
    """Return the dropout of each site. A single one has the key of "state", as in the study."""
    rates = training.dropouts
    if len(rates) == 1:
        return [Dropout(keys.state, rate, site) for site, rate in rates.items()]
    return [Dropout(getattr(keys, site), rate, site) for site, rate in rates.items()]


def _micro_batch_gradient(
    training: TrainingConfig,
    separator_token: int | None,
    params: Params,
    dropouts: list[Dropout],
    batch: _Batch,
    first_row: int | Int[Array, ""],
) -> tuple[tuple[Float[Array, ""], Params], ModelCarry | None]:
    """Return what `mean_of_micro_batches` takes: (loss, gradient), and the state of each row."""
    dropout = [each.replace(first_row=first_row) for each in dropouts]

    def loss(params: Params) -> tuple[Float[Array, ""], ModelCarry]:
        if training.compute_dtype != "float32":
            params = round_model(params, training.compute_dtype)
        return loss_fn(
            params,
            batch.inputs,
            batch.targets,
            dropout,
            training.remat,
            batch.carry,
            training.implementation,
            separator_token,
        )

    (value, carry), grads = jax.value_and_grad(loss, has_aux=True)(params)
    if batch.carry is None:
        carry = None
    return (value, grads), carry


def _update(training: TrainingConfig, state: TrainState, result: _BatchResult) -> TrainState:
    """Return the state after an optimizer step with this gradient."""
    params: Any = state.params
    grads: Any = result.grads
    ema: Any = state.ema
    with jax.numpy_dtype_promotion("standard"):  # Optax fails with "strict"
        updates, opt_state = optimizer(training).update(grads, state.opt_state, params)
        params = optax.apply_updates(params, updates)
        if ema is not None:
            t = state.step.astype(jnp.float32)
            decay = jnp.minimum(training.ema_decay, (1 + t) / (10 + t))
            ema = optax.incremental_update(params, ema, 1 - decay)
    return TrainState(params, opt_state, state.key, state.step + 1, result.carry, ema)


def mean_of_micro_batches(
    of_rows: Callable[[Tree, Any], tuple[Tree, Tree]],
    number: int,
    rows: Tree,
    first_row: int | Int[Array, ""],
) -> tuple[Tree, Tree]:
    """Return the means and the arrays of `of_rows(rows, first_row)`, which it computes in parts.

    There are `number` parts of equal size, so the mean of their means is the mean of the batch;
    they are computed in turn, in the memory of one. The first axis of each array in `rows` is the
    rows of the batch, which are numbered from `first_row`.
    """
    if number == 1:
        return of_rows(rows, first_row)
    micro_batches = jax.tree.map(lambda x: x.reshape(number, -1, *x.shape[1:]), rows)
    rows_each = jax.tree.leaves(micro_batches)[0].shape[1]
    first_rows = first_row + rows_each * jnp.arange(number)

    def add(total: Tree, micro_batch: tuple[Tree, Array]) -> tuple[Tree, Tree]:
        rows, first_row = micro_batch
        means, new_rows = of_rows(rows, first_row)
        return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, means), new_rows

    first_batch = jax.tree.map(lambda x: x[0], micro_batches)
    shapes, _ = jax.eval_shape(of_rows, first_batch, first_row)
    zeros = at_least_float32(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
    total, parts = jax.lax.scan(add, zeros, (micro_batches, first_rows))
    new_rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), parts)
    means = jax.tree.map(lambda t: t / number, total)
    return in_dtypes_of(shapes, means), new_rows


class _Loop(NamedTuple):
    """The state of `train_steps`: after how many steps, and the loss of each."""

    state: TrainState
    losses: Float[Array, "MAX_CHUNK"]
    num_done: Int[Array, ""]


@partial(jax.jit, static_argnames=("training", "mesh", "separator_token"), donate_argnames="state")
def train_steps(
    training: TrainingConfig,
    state: TrainState,
    tokens: Int[Array, "N"],
    num_steps: Int[Array, ""],
    mesh: Mesh | None = None,
    separator_token: int | None = None,
) -> tuple[TrainState, Float[Array, "MAX_CHUNK"], Int[Array, ""]]:
    """Compute up to MAX_CHUNK steps on the device; stop after a loss that is not finite.

    `num_steps` is an argument and not a shape, so that one compiled program computes chunks of any
    length. Neither the cuts into chunks nor an interruption can then change the numbers of a run.
    The losses end with zeros, after as many as the number that is returned.
    """

    def is_unfinished(loop: _Loop) -> Array:
        done = loop.num_done
        return (done < num_steps) & ((done == 0) | jnp.isfinite(loop.losses[done - 1]))

    def run_step(loop: _Loop) -> _Loop:
        state, loss = train_step(training, loop.state, tokens, mesh, separator_token)
        losses = loop.losses.at[loop.num_done].set(loss)
        return _Loop(state, losses, loop.num_done + 1)

    losses = jnp.zeros(MAX_CHUNK, jax.tree.leaves(state.params)[0].dtype)
    start = _Loop(state, losses, num_done=jnp.zeros((), jnp.int32))
    last = jax.lax.while_loop(is_unfinished, run_step, start)
    return last.state, last.losses, last.num_done
