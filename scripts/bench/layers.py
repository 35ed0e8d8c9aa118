"""A recurrent layer, forward and backward: jaxgru's, and each library's own.

Every contestant of a task computes the same equations, y (T, B, H) from x (T, B, F), and the
gradients of ⟨y, a constant⟩ with respect to the weights and to x. Inputs are time-major, which
every library accepts. With resets, the state is set to zero before about one step in 16; a library
without resets computes them by the idiom that its users know: a cell under a scan, and `where`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxgru
from bench.timing import Contestant, LayerTask, calling, compiled
from jaxgru.parallel.sharding import ROWS


class Layer(NamedTuple):
    """A library's layer, as a pure function (params, x, reset or None) → y."""

    params: Any
    apply: Callable[[Any, jax.Array, jax.Array | None], jax.Array]


def layer_contestant(
    task: LayerTask, mesh: jax.sharding.Mesh, make: Callable[[LayerTask], Layer]
) -> Contestant:
    """Compile the layer and its gradients, with the batch's rows split over the mesh."""
    layer = make(task)
    rng = np.random.default_rng(0)
    T, B, F, H = task.num_tokens, task.batch_size, task.features, task.hidden_dim
    x, weights = (jnp.asarray(rng.normal(size=(T, B, n)), jnp.float32) for n in (F, H))
    reset = jnp.asarray(rng.random((T, B)) < 1 / 16) if task.resets else None

    def value(params: Any, x: jax.Array, reset: jax.Array | None, weights: jax.Array) -> jax.Array:
        return jnp.vdot(layer.apply(params, x, reset), weights)

    def share(params: Any, *arguments: Any) -> tuple:
        loss, (of_params, of_x) = jax.value_and_grad(value, (0, 1))(params, *arguments)
        return *jax.lax.psum((loss, of_params), ROWS), of_x

    columns = P(None, ROWS)
    program = jax.shard_map(
        share, mesh=mesh, in_specs=(P(), columns, columns, columns),
        out_specs=(P(), P(), columns), check_vma=False,
    )  # fmt: skip
    params = jax.device_put(layer.params, NamedSharding(mesh, P()))
    arguments = params, *jax.device_put((x, reset, weights), NamedSharding(mesh, columns))
    done, seconds = compiled(program, *arguments)
    return Contestant(calling(lambda: done(*arguments)), seconds)


def jaxgru_layer(task: LayerTask, implementation: str = "auto") -> Layer:
    """Return `jaxgru.unroll`."""
    reset_gate = "after" if task.cell == "gru, reset after" else "before"
    gru = partial(jaxgru.init_gru, reset_gate=reset_gate)
    init = jaxgru.init_lstm if task.cell == "lstm" else gru
    params = init(jax.random.key(0), task.features, task.hidden_dim)

    def apply(params: Any, x: jax.Array, reset: jax.Array | None) -> jax.Array:
        options = {"time_major": True, "implementation": implementation}
        return jaxgru.unroll(params, x, reset=reset, **options)[0]

    return Layer(params, apply)


def haiku_layer(task: LayerTask) -> Layer:
    """Return `hk.dynamic_unroll`; with resets, of an `hk.ResetCore`."""
    import haiku as hk

    def network(x: jax.Array, reset: jax.Array | None) -> jax.Array:
        core = hk.LSTM(task.hidden_dim) if task.cell == "lstm" else hk.GRU(task.hidden_dim)
        zeros = core.initial_state(x.shape[1])
        if reset is None:
            return hk.dynamic_unroll(core, x, zeros)[0]
        return hk.dynamic_unroll(hk.ResetCore(core), (x, reset), zeros)[0]

    init, apply = hk.without_apply_rng(hk.transform(network))
    reset = jnp.zeros((1, 1), bool) if task.resets else None
    return Layer(jax.jit(init)(jax.random.key(0), jnp.zeros((1, 1, task.features)), reset), apply)


def _where(reset: jax.Array, carry: Any) -> Any:
    """Return the carry, zero in the rows that are reset: the `ScannedRNN` idiom."""
    return jax.tree.map(lambda c: jnp.where(reset[:, None], 0, c), carry)


def linen_layer(task: LayerTask) -> Layer:
    """Return `flax.linen.RNN`; with resets, the cell under `nn.scan`."""
    from flax import linen as nn

    cell = nn.OptimizedLSTMCell if task.cell == "lstm" else nn.GRUCell

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, reset: jax.Array | None) -> jax.Array:
            if reset is None:
                return nn.RNN(cell(task.hidden_dim), time_major=True)(x)

            def step(cell: Any, carry: Any, inputs: tuple) -> tuple:
                x, reset = inputs
                return cell(_where(reset, carry), x)

            core = cell(task.hidden_dim)
            zeros = core.initialize_carry(jax.random.key(0), x[0].shape)
            scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})
            return scan(core, zeros, (x, reset))[1]

    network = Network()
    reset = jnp.zeros((1, 1), bool) if task.resets else None
    params = jax.jit(network.init)(jax.random.key(0), jnp.zeros((1, 1, task.features)), reset)
    return Layer(params, network.apply)


def nnx_layer(task: LayerTask) -> Layer:
    """Return `nnx.RNN`; with resets, the cell under `lax.scan`."""
    from flax import nnx

    cell = nnx.OptimizedLSTMCell if task.cell == "lstm" else nnx.GRUCell
    core = cell(task.features, task.hidden_dim, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(core, nnx.Param, ...)

    def apply(params: Any, x: jax.Array, reset: jax.Array | None) -> jax.Array:
        core = nnx.merge(graph, *jax.tree.map(lambda leaf: leaf, (params, rest)))
        if reset is None:
            return nnx.RNN(core, time_major=True)(x)

        def step(carry: Any, inputs: tuple) -> tuple:
            x, reset = inputs
            core = nnx.merge(graph, params, rest)
            return core(_where(reset, carry), x)

        zeros = core.initialize_carry(x[0].shape, nnx.Rngs(0))
        return jax.lax.scan(step, zeros, (x, reset))[1]

    return Layer(params, apply)


def equinox_layer(task: LayerTask) -> Layer:
    """Return `eqx.nn.GRUCell` or `LSTMCell` over the batch by `vmap`, under `lax.scan`."""
    import equinox as eqx

    lstm = task.cell == "lstm"
    cell = eqx.nn.LSTMCell if lstm else eqx.nn.GRUCell
    core = cell(task.features, task.hidden_dim, key=jax.random.key(0))
    params, static = eqx.partition(core, eqx.is_array)

    def apply(params: Any, x: jax.Array, reset: jax.Array | None) -> jax.Array:
        core = eqx.combine(params, static)

        def step(carry: Any, inputs: tuple) -> tuple:
            x, reset = inputs
            carry = jax.vmap(core)(x, carry if reset is None else _where(reset, carry))
            return carry, carry[0] if lstm else carry

        h = jnp.zeros((x.shape[1], task.hidden_dim))
        return jax.lax.scan(step, (h, h) if lstm else h, (x, reset))[1]

    return Layer(params, apply)
