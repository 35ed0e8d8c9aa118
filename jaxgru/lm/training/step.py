"""A train state, one step, and many steps on the device: pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxgru.cells.carry import Tree
from jaxgru.cells.layout import IN_ROWS
from jaxgru.cells.promotion import at_least_float32, in_dtypes_of, rounded_inside
from jaxgru.cells.pytrees import struct
from jaxgru.errors import needs
from jaxgru.layers.dropout import Dropout, Dropouts, at_step, seeded
from jaxgru.layers.remat import in_segments
from jaxgru.layers.weight_drop import drop_weights
from jaxgru.lm.config import ModelConfig, TrainingConfig
from jaxgru.lm.data.batching import random_crops, stream_windows, unit_starts
from jaxgru.lm.model import ModelCarry, Params, apply, init, initial_carry, round_model, token_nll
from jaxgru.lm.training.optimizer import optimizer
from jaxgru.parallel.sharding import ROWS, gather, scatter_mean, shardings, specs

with needs("train"):
    import optax

MAX_CHUNK = 64  # the most steps between two readings of the clock
NO_STEP = 2**32 - 1  # a number that no step has: the key folded with it is none of a step's
# Of a step: the state before the batch, inputs and targets; the keys of dropout and of the weights
_Rows: TypeAlias = tuple[ModelCarry | None, Int[Array, "B T"], Int[Array, "B T"]]
_Keys: TypeAlias = tuple[PRNGKeyArray, list[PRNGKeyArray], PRNGKeyArray]


@struct
class TrainState:
    """The state of training. A step updates all fields but `key`: it derives its own keys from it.

    carry is the recurrent state from one step to the next, if training reads contiguous streams;
    None if each step reads random crops from zero state. ema is the moving average of the
    parameters, None if there is none. Step t = 0, 1, … sets it to d · ema + (1 − d) · params with
    d = min(ema_decay, (1 + t)/(10 + t)), like TensorFlow's `ExponentialMovingAverage`.
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

    batches: "crops" or "streams", as in `DataConfig`.
    """
    init_key, key = jax.random.split(jax.random.key(training.seed))
    params = init(init_key, model)
    carry = initial_carry(params, training.rows_per_step) if batches == "streams" else None
    opt_state = optimizer(training).init(params)  # pyright: ignore[reportArgumentType]
    fresh = TrainState(params, opt_state, key, jnp.zeros((), jnp.int32), carry)
    return starting_from(params, fresh, training)


def starting_from(params: Params, fresh: TrainState, training: TrainingConfig) -> TrainState:
    """Return a fresh state with these parameters; their moving average starts from them, too.

    Training donates the state, so each of its arrays needs a buffer of its own.
    """
    params, carry = jax.tree.map(jnp.copy, (params, fresh.carry))
    ema = jax.tree.map(jnp.copy, params) if training.ema_decay else None
    return dataclasses.replace(fresh, params=params, carry=carry, ema=ema)


def state_shardings(state: TrainState, mesh: Mesh, training: TrainingConfig) -> TrainState:
    """Return the state's `shardings` on a mesh; of the carry, each device has its own rows."""
    rest = dataclasses.replace(state, carry=None)
    rest = shardings(rest, mesh, training.shard_parameters)
    rows = jax.tree.map(lambda _: NamedSharding(mesh, P(ROWS)), state.carry)
    return dataclasses.replace(rest, carry=rows)


def loss_fn(
    params: Params, inputs: Int[Array, "B T"], targets: Int[Array, "B T"], dropout: Dropouts = None,
    remat: bool = False, carry: ModelCarry | None = None, implementation: str = "auto",
    end: int | None = None,
) -> tuple[Float[Array, ""], ModelCarry]:  # fmt: skip
    """Compute the mean cross-entropy of a batch, nats per token, and the state after it.

    remat: keep for the gradient only the state at the start of each of about √T segments of the
    sequence, and recompute a segment's activations when its turn comes: see `in_segments`.
    """
    if not remat:
        reset = unit_starts(inputs, end)
        logits, carry = apply(params, inputs, carry, dropout, implementation, reset=reset)
        return token_nll(logits, targets).mean(), carry
    dropout = seeded(dropout, params.layers)
    weights = rounded_inside(params)

    def segment(carry: ModelCarry, part: tuple[Array, Array, Array]) -> tuple[ModelCarry, Array]:
        steps, inputs, targets = part
        here, reset = at_step(dropout, steps[0]), unit_starts(inputs.T, end)
        logits, carry = apply(weights(), inputs.T, carry, here, implementation, reset=reset)
        return carry, token_nll(logits, targets.T).T

    B, T = inputs.shape
    start = initial_carry(params, B) if carry is None else carry
    last, nll = in_segments(segment, start, (jnp.arange(T), inputs.T, targets.T))
    return nll.mean(), last


def train_step(
    training: TrainingConfig, state: TrainState, tokens: Int[Array, "N"], mesh: Mesh | None = None,
    end: int | None = None,
) -> tuple[TrainState, Float[Array, ""]]:  # fmt: skip
    """Compute one optimizer step on one batch; return the new state, and the loss before the step.

    The batch is random crops. If the state has a carry, it is the next windows of the streams
    (`stream_windows`), which start from the state after the previous windows; the gradient stops at
    a window's start. This is truncated backpropagation through time (Williams & Peng 1990, Neural
    Computation 2(4)). With `reset_probability`, some rows start from zeros instead. With an
    end-of-unit token `end`, the state is also set to zero before each of these tokens.

    With a mesh (`data_mesh`), each device takes its share of the batch's rows, and the gradients
    equal those of the whole batch up to the rounding of one sum. The tokens are then on all
    devices, and the state is sharded by `state_shardings`. If the parameters are cut (ZeRO stage 3,
    Rajbhandari et al. 2020, arXiv 1910.02054), each device gathers them for the step and keeps its
    piece of the mean gradient.
    """
    step_key = jax.random.fold_in(state.key, state.step)
    crop_key, dropout_key = jax.random.split(step_key)  # a key each: no draw changes another
    reset_key, weight_key, *site_keys = jax.random.split(jax.random.fold_in(step_key, 2), 5)
    keys = dropout_key, site_keys, weight_key
    sizes = training.rows_per_step, training.sequence_length
    if state.carry is None:
        carry, (inputs, targets) = None, random_crops(crop_key, tokens, *sizes)
    else:
        pass_key = jax.random.fold_in(state.key, NO_STEP) if training.random_offset else None
        inputs, targets, from_zeros = stream_windows(tokens, state.step, *sizes, pass_key)
        if training.reset_probability:
            rows = training.rows_per_step
            from_zeros |= jax.random.bernoulli(reset_key, training.reset_probability, (rows,))
        start = initial_carry(state.params, training.rows_per_step)
        carry = IN_ROWS.choose(~jnp.atleast_1d(from_zeros), state.carry, start)

    def loss_and_grads(
        params: Params, rows: _Rows, keys: _Keys, first_row: int | Int[Array, ""] = 0
    ) -> tuple[tuple[Float[Array, ""], Params], ModelCarry | None]:
        # Each key is used once, outside of the loop over micro-batches
        dropout_key, site_keys, weight_key = keys
        rate = training.weight_drop
        drop = lambda layers: drop_weights(weight_key, layers, rate) if rate else layers
        layers, gradient_of = jax.vjp(drop, params.layers)
        params = dataclasses.replace(params, layers=layers)
        dropouts = seeded(_dropouts(training, dropout_key, site_keys), params.layers)

        def of_rows(
            rows: _Rows, first_row: int | Int[Array, ""]
        ) -> tuple[tuple[Float[Array, ""], Params], ModelCarry | None]:
            carry, inputs, targets = rows
            dropout = [each.replace(first_row=first_row) for each in dropouts]

            def loss(params: Params) -> tuple[Float[Array, ""], ModelCarry]:
                if training.compute_dtype != "float32":
                    params = round_model(params, training.compute_dtype)
                how = training.remat, carry, training.implementation
                return loss_fn(params, inputs, targets, dropout, *how, end)

            (value, new_carry), grads = jax.value_and_grad(loss, has_aux=True)(params)
            return (value, grads), None if carry is None else new_carry

        number = training.gradient_accumulation
        (loss, grads), carry = mean_of_micro_batches(of_rows, number, rows, first_row)
        grads = dataclasses.replace(grads, layers=gradient_of(grads.layers)[0])
        return (loss, grads), carry

    batch = carry, inputs, targets
    if mesh is None or mesh.size == 1:
        (loss, grads), carry = loss_and_grads(state.params, batch, keys)
        return _update(training, state, grads, carry), loss

    cuts = specs(state.params, mesh, training.shard_parameters)

    def share(params: Params, rows: _Rows, keys: _Keys) -> tuple[Array, Params, ModelCarry | None]:
        first_row = jax.lax.axis_index(ROWS) * len(rows[1])
        params = gather(params, cuts)
        (loss, grads), carry = loss_and_grads(params, rows, keys, first_row)
        return jax.lax.pmean(loss, ROWS), scatter_mean(grads, cuts), carry

    in_specs, out_specs = (cuts, P(ROWS), P()), (P(), cuts, P(ROWS))
    run = jax.shard_map(share, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    loss, grads, carry = run(state.params, batch, keys)
    state = _update(training, state, grads, carry)
    where = state_shardings(state, mesh, training)  # a while_loop carry must keep its sharding
    return jax.lax.with_sharding_constraint(state, where), loss


def _dropouts(
    training: TrainingConfig, key: PRNGKeyArray, site_keys: Sequence[PRNGKeyArray]
) -> list[Dropout]:
    """Return the dropout of each site; a single one draws from the step's key, as the study's."""
    rates = training.dropouts
    keys = dict(zip(("input", "between", "output"), site_keys, strict=True))
    key_of = lambda site: key if len(rates) == 1 else keys.get(site, key)
    return [Dropout(key_of(site), rate, site) for site, rate in rates.items()]


def _update(
    training: TrainingConfig, state: TrainState, grads: Any, carry: ModelCarry | None
) -> TrainState:
    params: Any = state.params
    ema: Any = state.ema
    with jax.numpy_dtype_promotion("standard"):  # Optax fails with "strict"
        updates, opt_state = optimizer(training).update(grads, state.opt_state, params)
        params = optax.apply_updates(params, updates)
        if ema is not None:
            t = state.step.astype(jnp.float32)
            decay = jnp.minimum(training.ema_decay, (1 + t) / (10 + t))
            ema = optax.incremental_update(params, ema, 1 - decay)
    return TrainState(params, opt_state, state.key, state.step + 1, carry, ema)


def mean_of_micro_batches(
    of_rows: Callable[[Tree, Any], tuple[Tree, Tree]], number: int, rows: Tree,
    first_row: int | Int[Array, ""],
) -> tuple[Tree, Tree]:  # fmt: skip
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
    means, _ = jax.eval_shape(of_rows, first_batch, first_row)
    zeros = at_least_float32(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), means))
    total, new_rows = jax.lax.scan(add, zeros, (micro_batches, first_rows))
    joined = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), new_rows)
    return in_dtypes_of(means, jax.tree.map(lambda t: t / number, total)), joined


@partial(jax.jit, static_argnames=("training", "mesh", "end"), donate_argnames="state")
def train_steps(
    training: TrainingConfig, state: TrainState, tokens: Int[Array, "N"],
    num_steps: Int[Array, ""], mesh: Mesh | None = None, end: int | None = None,
) -> tuple[TrainState, Float[Array, "MAX_CHUNK"], Int[Array, ""]]:  # fmt: skip
    """Compute up to MAX_CHUNK steps on the device; stop after a loss that is not finite.

    `num_steps` is an argument and not a shape, so that one compiled program computes chunks of any
    length. Neither the cuts into chunks nor an interruption can then change the numbers of a run.
    The losses end with zeros, after as many as the number that is returned.
    """

    def unfinished(loop: tuple[TrainState, Array, Array]) -> Array:
        _, losses, i = loop
        return (i < num_steps) & ((i == 0) | jnp.isfinite(losses[i - 1]))

    def body(loop: tuple[TrainState, Array, Array]) -> tuple[TrainState, Array, Array]:
        state, losses, i = loop
        state, loss = train_step(training, state, tokens, mesh, end)
        return state, losses.at[i].set(loss), i + 1

    losses = jnp.zeros(MAX_CHUNK, jax.tree.leaves(state.params)[0].dtype)
    return jax.lax.while_loop(unfinished, body, (state, losses, jnp.zeros((), jnp.int32)))
