"""The vanilla RNN (Elman 1990, Cognitive Science 14(2)).

h' = tanh(x·W + h·U + b)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.cells.base import (
    IN_COLUMNS,
    IN_ROWS,
    Cell,
    Gated,
    Hidden,
    Mask,
    before,
    columns_dot,
    forward_scan,
    initializers,
    outer,
    with_last,
)


@struct.dataclass
class RNNParams:
    """Parameters of a vanilla RNN layer: W for the input, U for the state, b the bias."""

    W: Float[Array, "E H"]
    U: Float[Array, "H H"]
    b: Float[Array, "H"]


def init_rnn(key: PRNGKeyArray, E: int, H: int, dtype: DTypeLike = jnp.float32) -> RNNParams:
    """Draw initial parameters. W, b: uniform ±1/√E; U: uniform ±1/√H (PyTorch's `nn.Linear`)."""
    W, U, b = initializers(E, H, dtype)
    k = jax.random.split(key, 3)
    return RNNParams(W=W(k[0]), U=U(k[1]), b=b(k[2]))


def rnn_cell(p: RNNParams, h: Hidden, x: Float[Array, "B E"]) -> Hidden:
    """Compute one step: h' = tanh(x·W + h·U + b)."""
    return jnp.tanh(x @ p.W + h @ p.U + p.b)


def zero_carry(p: RNNParams, batch_size: int) -> Hidden:
    """Return the state before the first step: zeros (B, H) in the bias's dtype."""
    return jnp.zeros((batch_size, *p.b.shape), p.b.dtype)


# --- Fast. a (T, B, H) is x·W + b. U (H, H).


def fast(p: RNNParams) -> Gated:
    """Prepare a layer for many steps."""
    return Gated(p.W, p.b, (p.U,), _step, _over_time)


def _over_time(U: tuple[Array], h: Hidden, a: Array, mask: Mask | None) -> tuple[Array, Array]:
    return with_last(_unroll(*U, h, a, mask))


def _step(layout, U, h, a):
    n = jnp.tanh(a + layout.times(U[0], h))
    return n, (n,)


@jax.custom_vjp
def _unroll(U: Array, h0: Array, a: Array, mask: Mask | None) -> Array:
    return forward_scan(IN_ROWS, _step, (U,), h0, a, mask)[0]


def _forward(U, h0, a, mask):
    h, _, saved = forward_scan(IN_COLUMNS, _step, (U.T,), h0, a, mask)
    return h, (U, h0, h, *saved, mask)


def _backward(residuals: Any, dh_out: Array) -> tuple:
    U, h0, h, n, mask = residuals

    def step(dh, inputs):
        dh_out, n, keep = inputs
        da = IN_COLUMNS.masked(dh + dh_out.T, mask, keep) * (1 - n * n)
        return columns_dot(U, da), da.T

    dh0, da = jax.lax.scan(
        step, jnp.zeros_like(h0.T), (dh_out, n, mask and mask.keep), reverse=True
    )
    return outer(before(h0, h), da, U.dtype), dh0.T, da, None


_unroll.defvjp(_forward, _backward)


RNN = Cell(
    name="rnn",
    params=RNNParams,
    init=lambda key, E, H, options, dtype: init_rnn(key, E, H, dtype),
    step=rnn_cell,
    zero_carry=zero_carry,
    fast=fast,
)
