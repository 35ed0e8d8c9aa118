"""The LSTM with a forget gate (Hochreiter & Schmidhuber 1997; Gers et al. 2000).

f, i, o = σ(x·W + h·U + b) each
g  = tanh(x·Wg + h·Ug + bg)
c' = f ⊙ c + i ⊙ g
h' = o ⊙ tanh(c')
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.nn import sigmoid
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
)


@struct.dataclass
class LSTMParams:
    """Parameters of an LSTM layer: W for the input, U for the state, b the biases.

    Gates: f forget, i input, o output, g candidate.
    """

    Wf: Float[Array, "E H"]
    Uf: Float[Array, "H H"]
    bf: Float[Array, "H"]
    Wi: Float[Array, "E H"]
    Ui: Float[Array, "H H"]
    bi: Float[Array, "H"]
    Wo: Float[Array, "E H"]
    Uo: Float[Array, "H H"]
    bo: Float[Array, "H"]
    Wg: Float[Array, "E H"]
    Ug: Float[Array, "H H"]
    bg: Float[Array, "H"]


def init_lstm(key: PRNGKeyArray, E: int, H: int, dtype: DTypeLike = jnp.float32) -> LSTMParams:
    """Draw initial parameters.

    W: uniform ±1/√E; U: uniform ±1/√H; b: zeros, but ones in the forget gate (Gers et al. 2000).
    """
    W, U, _ = initializers(E, H, dtype)
    k = jax.random.split(key, 8)
    return LSTMParams(
        Wf=W(k[0]), Uf=U(k[1]), bf=jnp.ones(H, dtype),
        Wi=W(k[2]), Ui=U(k[3]), bi=jnp.zeros(H, dtype),
        Wo=W(k[4]), Uo=U(k[5]), bo=jnp.zeros(H, dtype),
        Wg=W(k[6]), Ug=U(k[7]), bg=jnp.zeros(H, dtype),
    )  # fmt: skip


def lstm_cell(
    p: LSTMParams, carry: tuple[Hidden, Hidden], x: Float[Array, "B E"]
) -> tuple[Hidden, Hidden]:
    """Compute one step: (h, c) → (h', c')."""
    h, c = carry
    f = sigmoid(x @ p.Wf + h @ p.Uf + p.bf)
    i = sigmoid(x @ p.Wi + h @ p.Ui + p.bi)
    o = sigmoid(x @ p.Wo + h @ p.Uo + p.bo)
    g = jnp.tanh(x @ p.Wg + h @ p.Ug + p.bg)
    c = f * c + i * g
    return o * jnp.tanh(c), c


def zero_carry(p: LSTMParams, batch_size: int) -> tuple[Hidden, Hidden]:
    """Return the state before the first step: zeros for h and c, (B, H), in the biases' dtype."""
    shape, dtype = (batch_size, *p.bf.shape), p.bf.dtype
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)  # two buffers: each can be donated


# --- Fast. a (T, B, 4H) is x·W + b of f, i, o, g. U (H, 4H).


def fast(p: LSTMParams) -> Gated:
    """Prepare a layer for many steps."""
    W = jnp.concatenate([p.Wf, p.Wi, p.Wo, p.Wg], axis=1)
    b = jnp.concatenate([p.bf, p.bi, p.bo, p.bg])
    U = jnp.concatenate([p.Uf, p.Ui, p.Uo, p.Ug], axis=1)
    return Gated(W, b, (U,), _step, _over_time)


def _over_time(U: tuple[Array], carry: Any, a: Array, mask: Mask | None) -> tuple[Array, Any]:
    h, c = _unroll(*U, *carry, a, mask)
    return h, (h[-1], c)


def _step(layout, U, carry, a):
    (U,), (h, c) = U, carry
    H = h.shape[layout.axis]
    a_fio, a_g = layout.split(a + layout.times(U, h), 3 * H)
    fio, g = sigmoid(a_fio), jnp.tanh(a_g)
    f, i, o = layout.split(fio, H, 2 * H)
    c = f * c + i * g
    return (o * jnp.tanh(c), c), (c, fio, g)


@jax.custom_vjp
def _unroll(U: Array, h0: Array, c0: Array, a: Array, mask: Mask | None) -> tuple[Array, Array]:
    h, (_, c), _ = forward_scan(IN_ROWS, _step, (U,), (h0, c0), a, mask)
    return h, c


def _forward(U, h0, c0, a, mask):
    h, (_, c_last), saved = forward_scan(IN_COLUMNS, _step, (U.T,), (h0, c0), a, mask)
    return (h, c_last), (U, h0, c0, h, *saved, mask)


def _backward(residuals, cotangents):
    U, h0, c0, h, c, fio, g, mask = residuals
    dh_out, dc_last = cotangents

    def step(carry, inputs):
        (dh, dc), (dh_out, c_before, c, fio, g, keep) = carry, inputs
        f, i, o = jnp.split(fio, 3)
        tanh_c = jnp.tanh(c)
        dh = IN_COLUMNS.masked(dh + dh_out.T, mask, keep)
        dc = dc + dh * o * (1 - tanh_c * tanh_c)
        da_fio = jnp.concatenate([dc * c_before, dc * g, dh * tanh_c]) * fio * (1 - fio)
        da = jnp.concatenate([da_fio, dc * i * (1 - g * g)])
        return (columns_dot(U, da), dc * f), da.T

    (dh0, dc0), da = jax.lax.scan(
        step,
        (jnp.zeros_like(h0.T), dc_last.T),
        (dh_out, before(c0.T, c), c, fio, g, mask and mask.keep),
        reverse=True,
    )
    return outer(before(h0, h), da, U.dtype), dh0.T, dc0.T, da, None


_unroll.defvjp(_forward, _backward)


LSTM = Cell(
    name="lstm",
    params=LSTMParams,
    init=lambda key, E, H, options, dtype: init_lstm(key, E, H, dtype),
    step=lstm_cell,
    zero_carry=zero_carry,
    fast=fast,
)
