"""A cell over time: `lax.scan`, the input product hoisted out of it, a hand-written backward pass.

The contract, which `unroll_plain` fulfils in the fewest lines and `unroll` fulfils fast:

    unroll(params, x (T, B, E), carry, mask) -> (h' of every step (T, B, H), carry)

Everything here is time-major. A mask is dropout inside the recurrence: h' is multiplied by
keep · scale, and the masked h' is both the output and the next step's state.

Why it is fast. x·W for all steps is ONE product before the scan. The backward scan carries only the
state's gradient and writes down the gradients `da` of the gates' pre-activations, so that each
weight's gradient is ONE product after it; autodiff would instead add a (H, H) product to an
accumulator at each step. See Appleyard et al. 2016 (arXiv 1604.01946), sections 3.2 and 3.4.

Weights may be bfloat16 beside biases and states of float32: see `dot`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import sigmoid
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxgru.cells import (
    Carry,
    CellParams,
    GRUParams,
    LSTMParams,
    MLPParams,
    RNNParams,
    cell,
    hidden,
    plus,
)


class Mask(NamedTuple):
    """Which units survive dropout, and the factor 1/(1 − p) that makes up for the others."""

    keep: Bool[Array, "T B H"]
    scale: Float[Array, ""]


class Lookup(NamedTuple):
    """A layer's input that is rows of a table, not looked up yet; outside the table it is NaN.

    With fewer rows than there are steps, (table·W)[index] is a smaller product than table[index]·W,
    and so are its gradients.
    """

    table: Float[Array, "V E"]
    index: Int[Array, "T B"]

    def rows(self) -> Float[Array, "T B E"]:
        """The input itself."""
        return jnp.take(self.table, self.index, axis=0)


@jax.custom_vjp
def dot(x: Float[Array, "... E"], W: Float[Array, "E H"]) -> Float[Array, "... H"]:
    """x·W, and x's dtype. Where W is narrower, x is rounded to it; sums are in x's precision.

    So are the gradients: each is one product of operands rounded to W's dtype. That is what
    matrix units compute (bfloat16 in, float32 out), and what `x @ W` would not ask them for.
    """
    return _dot_forward(x, W)[0]


def _dot_forward(x, W):
    return jnp.matmul(x.astype(W.dtype), W, preferred_element_type=x.dtype), (x, W)


def _dot_backward(residuals, dy):
    x, W = residuals
    return dot(dy, W.T), _outer(x, dy, W.dtype)


dot.defvjp(_dot_forward, _dot_backward)


def apply_mask(h: Array, mask: Mask | None) -> Array:
    """h with the dropped units zero and the others scaled; h itself where there is no mask."""
    return h if mask is None else jnp.where(mask.keep, h * mask.scale, 0)


def unroll_plain(
    params: CellParams,
    x: Float[Array, "T B E"] | Lookup,
    carry: Carry,
    mask: Mask | None = None,
) -> tuple[Float[Array, "T B H"], Carry]:
    """The definition of an unroll: the cell, step by step, differentiated by JAX. Slow."""

    def step(carry: Carry, x_keep: tuple) -> tuple[Carry, Array]:
        x, keep = x_keep
        carry = cell(params, carry, x)
        h = apply_mask(hidden(carry), _at_step(mask, keep))
        return ((h, carry[1]) if isinstance(carry, tuple) else h), h

    carry, h = jax.lax.scan(step, carry, (_looked_up(x), mask and mask.keep))
    return h, carry


def unroll(
    params: CellParams,
    x: Float[Array, "T B E"] | Lookup,
    carry: Carry,
    mask: Mask | None = None,
) -> tuple[Float[Array, "T B H"], Carry]:
    """The same as `unroll_plain`, to rounding; the gradient is hand-written.

    Args:
      params: one layer's.
      x: the layer's input, time-major, or the table and the rows that it consists of.
      carry: the state before the first step.
      mask: dropout inside the recurrence, or None. It is not differentiated.

    Returns:
      The (masked) h' of every step, and the carry after the last one.
    """
    p = params
    if isinstance(p, MLPParams):  # no recurrence: every step at once
        x = _looked_up(x)
        T = len(x)
        x = jnp.concatenate([carry[1].swapaxes(0, 1), x])
        a = sum(_product(x[j : j + T], W) for j, W in enumerate(p.W)) + p.b
        h = apply_mask(jnp.tanh(a), mask)
        return h, (h[-1], x[T:].swapaxes(0, 1))
    W, b, U = _gates(p)
    a = _product(x, W) + b
    match p:
        case GRUParams(reset="before"):
            h = _gru(*U, carry, a, mask)
        case GRUParams():
            h = _gru_after(*U, carry, a, mask)
        case RNNParams():
            h = _rnn(*U, carry, a, mask)
        case LSTMParams():
            h, c = _lstm(*U, *carry, a, mask)
            return h, (h[-1], c)
    return h, h[-1]


def layer_stepper(
    params: CellParams, table: Float[Array, "V E"] | None = None
) -> Callable[[Carry, Array], Carry]:
    """`cells.cell` of one layer for many steps in turn, to rounding: what can be done once is.

    Args:
      params: one layer's.
      table: where the input is rows of a table, the table; the steps then take the rows' numbers.

    Returns:
      A function from the carry and the input, (B, E) or (B,), to the next carry.
    """
    p = params
    if isinstance(p, MLPParams):
        return lambda carry, x: cell(p, carry, x if table is None else jnp.take(table, x, axis=0))
    W, b, U = _gates(p)
    step = {GRUParams: _gru_step, LSTMParams: _lstm_step, RNNParams: _rnn_step}[type(p)]
    if isinstance(p, GRUParams) and p.reset == "after":
        step = _gru_after_step
    if table is None:
        return lambda carry, x: step(U, carry, dot(x, W) + b)[0]
    rows = dot(table, W) + b
    return lambda carry, index: step(U, carry, jnp.take(rows, index, axis=0))[0]


def _gates(p: CellParams) -> tuple[Array, Array, tuple[Array, ...]]:
    """A layer's W side by side, its biases added up, and what acts on the state, as below."""
    match p:
        case GRUParams(reset="before"):
            W = jnp.concatenate([p.Wz, p.Wr, p.Wn], axis=1)
            b = jnp.concatenate([plus(p.bz, p.cz), plus(p.br, p.cr), p.bn])
            return W, b, (jnp.concatenate([p.Uz, p.Ur], axis=1), p.Un)
        case GRUParams():
            W = jnp.concatenate([p.Wz, p.Wr, p.Wn], axis=1)
            b = jnp.concatenate([plus(p.bz, p.cz), plus(p.br, p.cr), p.bn])
            cn = jnp.zeros_like(p.bn) if p.cn is None else p.cn
            return W, b, (jnp.concatenate([p.Uz, p.Ur, p.Un], axis=1), cn)
        case LSTMParams():
            W = jnp.concatenate([p.Wf, p.Wi, p.Wo, p.Wg], axis=1)
            b = jnp.concatenate([p.bf, p.bi, p.bo, p.bg])
            return W, b, (jnp.concatenate([p.Uf, p.Ui, p.Uo, p.Ug], axis=1),)
        case RNNParams():
            return p.W, p.b, (p.U,)
    raise TypeError(f"no unroll for parameters of type {type(p).__name__}")


def _looked_up(x: Array | Lookup) -> Array:
    return x.rows() if isinstance(x, Lookup) else x


def _product(x: Array | Lookup, W: Array) -> Array:
    """x·W over all steps as one matrix product; its gradients are one product each, too."""
    if isinstance(x, Lookup):
        return jnp.take(dot(x.table, W), x.index, axis=0)
    T, B, E = x.shape
    return dot(x.reshape(T * B, E), W).reshape(T, B, -1)


def _outer(x: Array, da: Array, dtype: DTypeLike) -> Array:
    """Σ over steps and batch of xᵀ·da: the gradient of a weight of this dtype that x meets."""
    flat_x, flat_da = (y.reshape(-1, y.shape[-1]).astype(dtype) for y in (x, da))
    return jnp.matmul(flat_x.T, flat_da, preferred_element_type=da.dtype).astype(dtype)


def _at_step(mask: Mask | None, keep: Array | None) -> Mask | None:
    return mask and Mask(keep, mask.scale)


def _before(h0: Array, h: Array) -> Array:
    """The state before each step, from the first state and the state after each step."""
    return jnp.concatenate([h0[None], h[:-1]])


# --- GRU. a (T, B, 3H): x·W + b of z, r, n. Uzr (H, 2H), Un (H, H).


@jax.custom_vjp
def _gru(Uzr: Array, Un: Array, h0: Array, a: Array, mask: Mask | None) -> Array:
    return _gru_forward(Uzr, Un, h0, a, mask)[0]


def _gru_step(U, h, a):
    (Uzr, Un), H = U, h.shape[-1]
    zr = sigmoid(a[:, : 2 * H] + dot(h, Uzr))
    z, r = zr[:, :H], zr[:, H:]
    n = jnp.tanh(a[:, 2 * H :] + dot(r * h, Un))
    return (1 - z) * h + z * n, (zr, n)


def _gru_forward(Uzr, Un, h0, a, mask):
    def step(h, a_keep):
        a, keep = a_keep
        h, saved = _gru_step((Uzr, Un), h, a)
        h = apply_mask(h, _at_step(mask, keep))
        return h, (h, *saved)

    _, (h, zr, n) = jax.lax.scan(step, h0, (a, mask and mask.keep))
    return h, (Uzr, Un, h0, h, zr, n, mask)


def _gru_backward(residuals, dh_out):
    Uzr, Un, h0, h, zr, n, mask = residuals
    H = h0.shape[-1]
    h_before, UzrT, UnT = _before(h0, h), Uzr.T, Un.T  # transposed once, not at each step

    def step(dh, inputs):
        dh_out, h, zr, n, keep = inputs
        z, r = zr[:, :H], zr[:, H:]
        dh = apply_mask(dh + dh_out, _at_step(mask, keep))
        da_n = dh * z * (1 - n * n)
        d_rh = dot(da_n, UnT)
        da_zr = jnp.concatenate([dh * (n - h), d_rh * h], axis=-1) * zr * (1 - zr)
        dh = dh * (1 - z) + d_rh * r + dot(da_zr, UzrT)
        return dh, jnp.concatenate([da_zr, da_n], axis=-1)

    keep = mask and mask.keep
    dh0, da = jax.lax.scan(step, jnp.zeros_like(h0), (dh_out, h_before, zr, n, keep), reverse=True)
    dUzr = _outer(h_before, da[..., : 2 * H], Uzr.dtype)
    dUn = _outer(zr[..., H:] * h_before, da[..., 2 * H :], Un.dtype)
    return dUzr, dUn, dh0, da, None


_gru.defvjp(_gru_forward, _gru_backward)


# --- GRU, reset after. a (T, B, 3H): x·W + b of z, r, n. U (H, 3H). m = h·Un + cn.


@jax.custom_vjp
def _gru_after(U: Array, cn: Array, h0: Array, a: Array, mask: Mask | None) -> Array:
    return _gru_after_forward(U, cn, h0, a, mask)[0]


def _gru_after_step(U, h, a):
    (U, cn), H = U, h.shape[-1]
    hU = dot(h, U)
    zr = sigmoid(a[:, : 2 * H] + hU[:, : 2 * H])
    z, r = zr[:, :H], zr[:, H:]
    m = hU[:, 2 * H :] + cn
    n = jnp.tanh(a[:, 2 * H :] + r * m)
    return (1 - z) * h + z * n, (zr, m, n)


def _gru_after_forward(U, cn, h0, a, mask):
    def step(h, a_keep):
        a, keep = a_keep
        h, saved = _gru_after_step((U, cn), h, a)
        h = apply_mask(h, _at_step(mask, keep))
        return h, (h, *saved)

    _, (h, zr, m, n) = jax.lax.scan(step, h0, (a, mask and mask.keep))
    return h, (U, h0, h, zr, m, n, mask)


def _gru_after_backward(residuals, dh_out):
    U, h0, h, zr, m, n, mask = residuals
    H = h0.shape[-1]
    h_before, UT = _before(h0, h), U.T

    def step(dh, inputs):
        dh_out, h, zr, m, n, keep = inputs
        z, r = zr[:, :H], zr[:, H:]
        dh = apply_mask(dh + dh_out, _at_step(mask, keep))
        da_n = dh * z * (1 - n * n)
        da_zr = jnp.concatenate([dh * (n - h), da_n * m], axis=-1) * zr * (1 - zr)
        dh = dh * (1 - z) + dot(jnp.concatenate([da_zr, da_n * r], axis=-1), UT)
        return dh, jnp.concatenate([da_zr, da_n], axis=-1)

    keep = mask and mask.keep
    dh0, da = jax.lax.scan(
        step, jnp.zeros_like(h0), (dh_out, h_before, zr, m, n, keep), reverse=True
    )
    dm = da[..., 2 * H :] * zr[..., H:]
    dU = _outer(h_before, jnp.concatenate([da[..., : 2 * H], dm], axis=-1), U.dtype)
    return dU, dm.sum((0, 1)), dh0, da, None


_gru_after.defvjp(_gru_after_forward, _gru_after_backward)


# --- LSTM. a (T, B, 4H): x·W + b of f, i, o, g. U (H, 4H).


@jax.custom_vjp
def _lstm(U: Array, h0: Array, c0: Array, a: Array, mask: Mask | None) -> tuple[Array, Array]:
    return _lstm_forward(U, h0, c0, a, mask)[0]


def _lstm_step(U, carry, a):
    (U,), (h, c), H = U, carry, carry[0].shape[-1]
    a = a + dot(h, U)
    fio, g = sigmoid(a[:, : 3 * H]), jnp.tanh(a[:, 3 * H :])
    f, i, o = jnp.split(fio, 3, axis=-1)
    c = f * c + i * g
    return (o * jnp.tanh(c), c), (fio, g)


def _lstm_forward(U, h0, c0, a, mask):
    def step(carry, a_keep):
        a, keep = a_keep
        (h, c), saved = _lstm_step((U,), carry, a)
        h = apply_mask(h, _at_step(mask, keep))
        return (h, c), (h, c, *saved)

    (_, c_last), (h, c, fio, g) = jax.lax.scan(step, (h0, c0), (a, mask and mask.keep))
    return (h, c_last), (U, h0, c0, h, c, fio, g, mask)


def _lstm_backward(residuals, cotangents):
    U, h0, c0, h, c, fio, g, mask = residuals
    dh_out, dc_last = cotangents
    UT = U.T

    def step(carry, inputs):
        (dh, dc), (dh_out, c_before, c, fio, g, keep) = carry, inputs
        f, i, o = jnp.split(fio, 3, axis=-1)
        tanh_c = jnp.tanh(c)
        dh = apply_mask(dh + dh_out, _at_step(mask, keep))
        dc = dc + dh * o * (1 - tanh_c * tanh_c)
        da_fio = jnp.concatenate([dc * c_before, dc * g, dh * tanh_c], axis=-1) * fio * (1 - fio)
        da = jnp.concatenate([da_fio, dc * i * (1 - g * g)], axis=-1)
        return (dot(da, UT), dc * f), da

    keep = mask and mask.keep
    (dh0, dc0), da = jax.lax.scan(
        step,
        (jnp.zeros_like(h0), dc_last),
        (dh_out, _before(c0, c), c, fio, g, keep),
        reverse=True,
    )
    return _outer(_before(h0, h), da, U.dtype), dh0, dc0, da, None


_lstm.defvjp(_lstm_forward, _lstm_backward)


# --- RNN. a (T, B, H): x·W + b. U (H, H).


@jax.custom_vjp
def _rnn(U: Array, h0: Array, a: Array, mask: Mask | None) -> Array:
    return _rnn_forward(U, h0, a, mask)[0]


def _rnn_step(U, h, a):
    n = jnp.tanh(a + dot(h, U[0]))
    return n, (n,)


def _rnn_forward(U, h0, a, mask):
    def step(h, a_keep):
        a, keep = a_keep
        h, saved = _rnn_step((U,), h, a)
        h = apply_mask(h, _at_step(mask, keep))
        return h, (h, *saved)

    _, (h, n) = jax.lax.scan(step, h0, (a, mask and mask.keep))
    return h, (U, h0, h, n, mask)


def _rnn_backward(residuals, dh_out):
    U, h0, h, n, mask = residuals
    UT = U.T

    def step(dh, inputs):
        dh_out, n, keep = inputs
        da = apply_mask(dh + dh_out, _at_step(mask, keep)) * (1 - n * n)
        return dot(da, UT), da

    dh0, da = jax.lax.scan(step, jnp.zeros_like(h0), (dh_out, n, mask and mask.keep), reverse=True)
    return _outer(_before(h0, h), da, U.dtype), dh0, da, None


_rnn.defvjp(_rnn_forward, _rnn_backward)
