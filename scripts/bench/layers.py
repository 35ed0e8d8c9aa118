"""A recurrent layer, forward and backward, or one step of it: jaxgru's, and each library's own.

Every contestant of a task computes the same equations, and the gradients of ⟨y, y⟩ with respect to
the weights and to x. Inputs are time-major, which every library accepts. With resets, the state is
set to zero before about one step in 16; a library without resets computes them by the idiom that
its users know: a cell under a scan, and `where`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxgru
from bench.cells import CELLS
from bench.timing import Contestant, LayerTask, calling, compiled

Step = Callable[[Any, Any, jax.Array], tuple[Any, jax.Array]]
"""(params, carry, x (B, H)) → (carry, y)."""


class Layer(NamedTuple):
    """A library's layer, as pure functions."""

    params: Any
    apply: Callable[[Any, jax.Array, jax.Array | None], jax.Array]  # (params, x, reset) → y
    step: Step | None = None
    carry: Any = None  # before the first step


def contestant(task: LayerTask, layer: Layer) -> Contestant:
    """Compile the layer's gradients; or return one step, under `jit`."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(task.num_tokens, task.batch_size, task.hidden_dim)), "f4")
    if task.what == "step":
        return _one_step(layer, x)
    reset = None
    if task.what == "resets":
        reset = jnp.asarray(rng.random(x.shape[:2]) < 1 / 16)

    def loss(params: Any, x: jax.Array, reset: jax.Array | None) -> jax.Array:
        return jnp.square(layer.apply(params, x, reset)).sum()

    arguments = layer.params, x, reset
    gradients, seconds = compiled(jax.grad(loss, (0, 1)), *arguments)
    return Contestant(calling(lambda: gradients(*arguments)), seconds)


def _one_step(layer: Layer, x: jax.Array) -> Contestant:
    step = jax.jit(layer.step)

    def call() -> tuple[Any, jax.Array]:
        return jax.block_until_ready(step(layer.params, layer.carry, x[0]))

    return Contestant(calling(call))


def jaxgru_layer(task: LayerTask, implementation: str = "auto") -> Layer:
    """Return `jaxgru.unroll` and `jaxgru.step`."""
    params = CELLS[task.cell](jax.random.key(0), task.hidden_dim, task.hidden_dim)

    def apply(params: Any, x: jax.Array, reset: jax.Array | None) -> jax.Array:
        y, _ = jaxgru.unroll(params, x, reset=reset, time_major=True, implementation=implementation)
        return y

    def step(params: Any, carry: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        y, carry = jaxgru.step(params, x, carry)
        return carry, y

    return Layer(params, apply, step, jaxgru.initial_carry(params, task.batch_size))


def haiku_layer(task: LayerTask) -> Layer:
    """Return `hk.dynamic_unroll` of an `hk.ResetCore`."""
    import haiku as hk

    def network(x: jax.Array, reset: jax.Array) -> jax.Array:
        core = hk.LSTM(task.hidden_dim) if task.cell == "LSTM" else hk.GRU(task.hidden_dim)
        zeros = core.initial_state(x.shape[1])
        y, _ = hk.dynamic_unroll(hk.ResetCore(core), (x, reset), zeros)
        return y

    init, apply = hk.without_apply_rng(hk.transform(network))
    x = jnp.zeros((1, 1, task.hidden_dim))
    reset = jnp.zeros((1, 1), bool)
    params = jax.jit(init)(jax.random.key(0), x, reset)
    return Layer(params, apply)


def _zeros(task: LayerTask) -> Any:
    """Return the zero state of a GRU, or both of an LSTM."""
    h = jnp.zeros((task.batch_size, task.hidden_dim))
    return (h, h) if task.cell == "LSTM" else h


def _scanned(task: LayerTask, params: Any, step: Step) -> Layer:
    """Return a cell's layer by the `ScannedRNN` idiom: it is zero in the rows that are reset."""

    def apply(params: Any, x: jax.Array, reset: jax.Array) -> jax.Array:
        def step_or_reset(carry: Any, inputs: tuple) -> tuple[Any, jax.Array]:
            x, reset = inputs
            carry = jax.tree.map(lambda c: jnp.where(reset[:, None], 0, c), carry)
            return step(params, carry, x)

        _, y = jax.lax.scan(step_or_reset, _zeros(task), (x, reset))
        return y

    return Layer(params, apply, step, _zeros(task))


def linen_layer(task: LayerTask) -> Layer:
    """Return `linen.GRUCell` or `OptimizedLSTMCell`; `nn.scan` compiles to the same program."""
    from flax import linen as nn

    cell = nn.OptimizedLSTMCell if task.cell == "LSTM" else nn.GRUCell
    core = cell(task.hidden_dim)
    x = jnp.zeros((task.batch_size, task.hidden_dim))
    params = jax.jit(core.init)(jax.random.key(0), _zeros(task), x)
    return _scanned(task, params, core.apply)


def nnx_layer(task: LayerTask) -> Layer:
    """Return `nnx.GRUCell` or `OptimizedLSTMCell`."""
    from flax import nnx

    cell = nnx.OptimizedLSTMCell if task.cell == "LSTM" else nnx.GRUCell
    core = cell(task.hidden_dim, task.hidden_dim, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(core, nnx.Param, ...)

    def step(params: Any, carry: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        state = jax.tree.map(lambda leaf: leaf, (params, rest))  # nnx requires one of this trace
        return nnx.merge(graph, *state)(carry, x)

    return _scanned(task, params, step)


def equinox_layer(task: LayerTask) -> Layer:
    """Return `eqx.nn.GRUCell` or `LSTMCell` over the batch by `vmap`."""
    import equinox as eqx

    is_lstm = task.cell == "LSTM"
    cell = eqx.nn.LSTMCell if is_lstm else eqx.nn.GRUCell
    core = cell(task.hidden_dim, task.hidden_dim, key=jax.random.key(0))
    params, static = eqx.partition(core, eqx.is_array)

    def step(params: Any, carry: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        carry = jax.vmap(eqx.combine(params, static))(x, carry)
        h = carry[0] if is_lstm else carry
        return carry, h

    return _scanned(task, params, step)
