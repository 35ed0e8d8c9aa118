"""A cell over time: `lax.scan`, the input product hoisted out of it, a hand-written backward pass.

The contract, which `unroll_plain` fulfils in the fewest lines and `unroll` fulfils fast:

    unroll(params, x (T, B, E), carry, mask) -> (h' of every step (T, B, H), carry)

Everything here is time-major. A mask is dropout inside the recurrence: h' is multiplied by
keep · scale, and the masked h' is both the output and the next step's state.

Why it is fast. x·W for all steps is ONE product before the scan. The backward scan carries only the
state's gradient and writes down the gradients `da` of the gates' pre-activations, so that each
weight's gradient is ONE product after it; autodiff would instead add a (H, H) product to an
accumulator at each step. See Appleyard et al. 2016 (arXiv 1604.01946), sections 3.2 and 3.4.

While training, the state lies in columns, h (H, B), as in U·h. For the left factor of a product is
used as it stands, while XLA's CPU back end packs the right one anew at each step: that should be
the state and not the weights (H = 512, B = 32: 161 GFLOP/s a core against 107). That is training,
where each core has its own rows (`hardware.share_cpu`). Without a gradient the state lies in rows:
there a product is on all cores, and h·U is faster.

Weights may be bfloat16 beside biases and states of float32: see `dot`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
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
from jaxgru.errors import UserError

CHOICE = "JAXGRU_UNROLL"  # an environment variable, read while a program is traced
CHOICES = ("scan", "plain", "wavefront", "hopper")  # the first is taken where it is not set


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
        return rows(self.table, self.index)


def rows(table: Float[Array, "V E"], index: Int[Array, "..."]) -> Float[Array, "... E"]:
    """The rows with these numbers; NaN where there is no such row, so for negative numbers."""
    if index.dtype == bool:
        index = index.astype(jnp.int32)  # booleans would be a mask
    at = jnp.asarray(table).at[index]
    return at.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def dot(x: Float[Array, "... E"], W: Float[Array, "E H"]) -> Float[Array, "... H"]:
    """x·W, and x's dtype. Where W is narrower, x is rounded to it; sums are in x's precision.

    So are the gradients: each is one product of operands rounded to W's dtype. That is what
    matrix units compute (bfloat16 in, float32 out), and what `x @ W` would not ask them for.
    """
    if W.dtype != x.dtype:
        return _narrow_dot(x, W)
    rows = x.reshape(-1, x.shape[-1])  # so that the gradients are products of two matrices, too
    return (rows @ W).reshape(*x.shape[:-1], W.shape[1])


@jax.custom_vjp
def _narrow_dot(x: Float[Array, "... E"], W: Float[Array, "E H"]) -> Float[Array, "... H"]:
    return _dot_forward(x, W)[0]


def _matmul(x: Array, y: Array, dtype: DTypeLike) -> Array:
    """x·y of factors of one dtype, summed in another, which is the result's.

    XLA's CPU back end settles how to multiply in bfloat16, and only then takes transpositions into
    the product; one with a transposed left factor it cannot execute ("UNIMPLEMENTED ... DotThunk").
    On a CPU, barriers therefore keep transpositions out of the product.
    """
    multiply = partial(jnp.matmul, preferred_element_type=dtype)
    if x.dtype == dtype:
        return multiply(x, y)
    apart = jax.lax.optimization_barrier
    return jax.lax.platform_dependent(
        x, y, cpu=lambda x, y: apart(multiply(*apart((x, y)))), default=multiply
    )


def _dot_forward(x, W):
    return _matmul(x.astype(W.dtype), W, x.dtype), (x, W)


def _dot_backward(residuals, dy):
    x, W = residuals
    return dot(dy, W.T), outer(x, dy, W.dtype)


_narrow_dot.defvjp(_dot_forward, _dot_backward)


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
        h = ROWS.masked(hidden(carry), mask, keep)
        return _with_hidden(carry, h), h

    carry, h = jax.lax.scan(step, carry, (_looked_up(x), mask and mask.keep))
    return h, carry


def unroll(
    params: CellParams,
    x: Float[Array, "T B E"] | Lookup,
    carry: Carry,
    mask: Mask | None = None,
) -> tuple[Float[Array, "T B H"], Carry]:
    """The same as `unroll_plain`, to rounding; the gradient is hand-written.

    It is for reverse mode: `grad`, and `grad` of that. Forward mode (`jvp`, `jacfwd`, `hessian`)
    needs `unroll_plain`.

    Args:
      params: one layer's.
      x: the layer's input, time-major, or the table and the rows that it consists of.
      carry: the state before the first step.
      mask: dropout inside the recurrence, or None. It is not differentiated.

    Returns:
      The (masked) h' of every step, and the carry after the last one.
    """
    if isinstance(params, MLPParams):
        return _mlp(params, _looked_up(x), carry, mask)
    W, b, U = gates(params)
    return recurrence(params)(U, carry, product(x, W) + b, mask)


def unroll_layers(
    layers: Sequence[CellParams],
    x: Float[Array, "T B E"] | Lookup,
    carry: Sequence[Carry],
    masks: Sequence[tuple[Mask | None, Mask | None]],
) -> tuple[Float[Array, "T B H"], tuple[Carry, ...]]:
    """Layers one on top of another: each one's input is the output of the one below.

    What goes over time is chosen by the environment variable JAXGRU_UNROLL: "scan" is `unroll`;
    "plain" is `unroll_plain`, which forward mode needs; "wavefront" and "hopper" are for GPUs, in
    `kernels/`, and where they do not support the layers or the device, `unroll` does it. Neither
    has been timed on a GPU; until they are, they must be asked for.

    Args:
      masks: a layer's pair: dropout inside its recurrence, and on its output.

    Returns:
      The last layer's output, masked, and every layer's carry.

    Raises:
      UserError: JAXGRU_UNROLL is none of these.
    """
    choice = _choice()
    if choice == "wavefront":
        from jaxgru.kernels import wavefront  # which imports this file

        if wavefront.supports(layers, len(x.index if isinstance(x, Lookup) else x)):
            return wavefront.unroll_layers(layers, x, carry, masks)
    one_layer = unroll_plain if choice == "plain" else unroll
    new_carry = []
    for layer, c, (state_mask, output_mask) in zip(layers, carry, masks, strict=True):
        h, c = one_layer(layer, x, c, state_mask)
        x = apply_mask(h, output_mask)
        new_carry.append(c)
    return x, tuple(new_carry)


def _choice() -> str:
    name = os.environ.get(CHOICE) or CHOICES[0]
    if name not in CHOICES:
        raise UserError(f"{CHOICE} is {name!r}; it must be one of {', '.join(CHOICES)}.")
    return name


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
        return lambda carry, x: cell(p, carry, x if table is None else rows(table, x))
    W, b, U = gates(p)
    step = {GRUParams: _gru_step, LSTMParams: _lstm_step, RNNParams: _rnn_step}[type(p)]
    if isinstance(p, GRUParams) and p.reset == "after":
        step = _gru_after_step
    if table is None:
        return lambda carry, x: step(ROWS, U, carry, dot(x, W) + b)[0]
    a = dot(table, W) + b
    return lambda carry, index: step(ROWS, U, carry, rows(a, index))[0]


def recurrence(params: CellParams) -> Callable[..., tuple[Float[Array, "T B H"], Carry]]:
    """A cell over time, once the input's part is computed: (U, carry, a, mask) → (h, carry).

    U is what `gates` gives; a (T, B, G·H) is x·W + b. Of the parameters the type alone matters.
    """

    def with_last(h: Array) -> tuple[Array, Array]:
        return h, h[-1]

    match params:
        case GRUParams(reset="before"):
            return lambda U, h, a, mask: with_last(_gru_of(U[0], h)(*U, h, a, mask))
        case GRUParams():
            return lambda U, h, a, mask: with_last(_gru_after(*U, h, a, mask))
        case RNNParams():
            return lambda U, h, a, mask: with_last(_rnn(*U, h, a, mask))
        case LSTMParams():
            return _lstm_with_carry
    raise TypeError(f"no unroll for parameters of type {type(params).__name__}")


def _gru_of(Uzr: Array, h0: Array) -> Callable[..., Array]:
    """`_gru`, or the kernel for Hopper, which multiplies in bfloat16: for such weights alone."""
    if Uzr.dtype == jnp.bfloat16 and _choice() == "hopper":
        from jaxgru.kernels import gru_hopper  # which imports this file

        if gru_hopper.supports(*h0.shape, h0.dtype):
            return gru_hopper.gru
    return _gru


def gates(p: CellParams) -> tuple[Array, Array, tuple[Array, ...]]:
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
    raise TypeError(f"no gates in parameters of type {type(p).__name__}")


def _looked_up(x: Array | Lookup) -> Array:
    return x.rows() if isinstance(x, Lookup) else x


def product(x: Array | Lookup, W: Array) -> Array:
    """x·W over all steps as one matrix product; its gradients are one product each, too."""
    if isinstance(x, Lookup):
        return rows(dot(x.table, W), x.index)
    T, B, E = x.shape
    return dot(x.reshape(T * B, E), W).reshape(T, B, W.shape[1])


def outer(x: Array, da: Array, dtype: DTypeLike) -> Array:
    """Σ over steps and batch of xᵀ·da: the gradient of a weight of this dtype that x meets."""
    flat_da = da.reshape(-1, da.shape[-1]).astype(dtype)
    if dtype == da.dtype:
        xT = x.reshape(-1, x.shape[-1]).T  # XLA multiplies it as it lies …
    else:
        xT = jnp.moveaxis(x.astype(dtype), -1, 0).reshape(x.shape[-1], -1)  # … but not bfloat16
    return _matmul(xT, flat_da, da.dtype).astype(dtype)


def before(h0: Array, h: Array) -> Array:
    """The state before each step, from the first state and the state after each step."""
    return jnp.concatenate([h0[None], h[:-1]])


def _times(U: Float[Array, "G H"], h: Float[Array, "H B"]) -> Float[Array, "G B"]:
    """U·h for a state in columns, rounded as in `dot`."""
    return _matmul(U, h.astype(U.dtype), h.dtype)


class Layout(NamedTuple):
    """How the states of a batch lie in a matrix: along which axis the units, and what U·h is."""

    axis: int
    times: Callable[[Array, Array], Array]

    def split(self, x: Array, *units: int) -> list[Array]:
        """x cut before these units."""
        return jnp.split(x, units, self.axis)

    def turn(self, x: Array) -> Array:
        """What lies in rows as it lies here, and the other way round."""
        return x if self.axis else x.T

    def masked(self, h: Array, mask: Mask | None, keep: Bool[Array, "B H"] | None) -> Array:
        """h after dropout by one step of the mask, which is `keep`."""
        return h if mask is None else apply_mask(h, Mask(self.turn(keep), mask.scale))


ROWS = Layout(1, lambda U, h: dot(h, U))  # h (B, H), U (H, G)
COLUMNS = Layout(0, _times)  # h (H, B), U (G, H)


def _with_hidden(carry: Carry, h: Array) -> Carry:
    return (h, carry[1]) if isinstance(carry, tuple) else h


def _forward(
    layout: Layout, step: Callable, U: tuple, carry: Carry, a: Array, mask: Mask | None
) -> tuple[Array, Carry, tuple[Array, ...]]:
    """All steps: h of each, the last carry, and in columns what the backward pass needs of each."""

    def one(carry: Carry, a_keep: tuple) -> tuple[Carry, tuple]:
        a, keep = a_keep
        carry, saved = step(layout, U, carry, layout.turn(a))
        h = layout.masked(hidden(carry), mask, keep)
        return _with_hidden(carry, h), (layout.turn(h), saved if layout is COLUMNS else ())

    carry = jax.tree.map(layout.turn, carry)
    carry, (h, saved) = jax.lax.scan(one, carry, (a, mask and mask.keep))
    return h, jax.tree.map(layout.turn, carry), saved


def _mlp(
    p: MLPParams, x: Float[Array, "T B E"], carry: Carry, mask: Mask | None
) -> tuple[Float[Array, "T B H"], Carry]:
    """No recurrence: every step at once."""
    T = len(x)
    x = jnp.concatenate([carry[1].swapaxes(0, 1), x])
    a = sum(product(x[j : j + T], W) for j, W in enumerate(p.W)) + p.b
    h = apply_mask(jnp.tanh(a), mask)
    return h, (h[-1], x[T:].swapaxes(0, 1))


# --- GRU. a (T, B, 3H): x·W + b of z, r, n. Uzr (H, 2H), Un (H, H).


@jax.custom_vjp
def _gru(Uzr: Array, Un: Array, h0: Array, a: Array, mask: Mask | None) -> Array:
    return _forward(ROWS, _gru_step, (Uzr, Un), h0, a, mask)[0]


def _gru_step(layout, U, h, a):
    (Uzr, Un), H = U, h.shape[layout.axis]
    a_zr, a_n = layout.split(a, 2 * H)
    zr = sigmoid(a_zr + layout.times(Uzr, h))
    z, r = layout.split(zr, H)
    n = jnp.tanh(a_n + layout.times(Un, r * h))
    return (1 - z) * h + z * n, (zr, n)


def _gru_forward(Uzr, Un, h0, a, mask):
    h, _, saved = _forward(COLUMNS, _gru_step, (Uzr.T, Un.T), h0, a, mask)
    return h, (Uzr, Un, h0, h, *saved, mask)


def _gru_backward(residuals, dh_out):
    Uzr, Un, h0, h, zr, n, mask = residuals
    H = h0.shape[-1]
    h_before = before(h0, h)

    def step(dh, inputs):
        dh_out, h, zr, n, keep = inputs
        h, z, r = h.T, zr[:H], zr[H:]
        dh = COLUMNS.masked(dh + dh_out.T, mask, keep)
        da_n = dh * z * (1 - n * n)
        d_rh = _times(Un, da_n)
        da_zr = jnp.concatenate([dh * (n - h), d_rh * h]) * zr * (1 - zr)
        dh = dh * (1 - z) + d_rh * r + _times(Uzr, da_zr)
        return dh, (jnp.concatenate([da_zr, da_n]).T, (r * h).T)

    dh0, (da, rh) = jax.lax.scan(
        step,
        jnp.zeros_like(h0.T),
        (dh_out, h_before, zr, n, mask and mask.keep),
        reverse=True,
    )
    dUzr = outer(h_before, da[..., : 2 * H], Uzr.dtype)
    dUn = outer(rh, da[..., 2 * H :], Un.dtype)
    return dUzr, dUn, dh0.T, da, None


_gru.defvjp(_gru_forward, _gru_backward)


# --- GRU, reset after. a (T, B, 3H): x·W + b of z, r, n. U (H, 3H). m = h·Un + cn.


@jax.custom_vjp
def _gru_after(U: Array, cn: Array, h0: Array, a: Array, mask: Mask | None) -> Array:
    return _forward(ROWS, _gru_after_step, (U, cn), h0, a, mask)[0]


def _gru_after_step(layout, U, h, a):
    (U, cn), H = U, h.shape[layout.axis]
    a_zr, a_n = layout.split(a, 2 * H)
    Uh_zr, Uh_n = layout.split(layout.times(U, h), 2 * H)
    zr = sigmoid(a_zr + Uh_zr)
    z, r = layout.split(zr, H)
    m = Uh_n + cn
    n = jnp.tanh(a_n + r * m)
    return (1 - z) * h + z * n, (zr, m, n)


def _gru_after_forward(U, cn, h0, a, mask):
    h, _, saved = _forward(COLUMNS, _gru_after_step, (U.T, cn[:, None]), h0, a, mask)
    return h, (U, h0, h, *saved, mask)


def _gru_after_backward(residuals, dh_out):
    U, h0, h, zr, m, n, mask = residuals
    H = h0.shape[-1]
    h_before = before(h0, h)

    def step(dh, inputs):
        dh_out, h, zr, m, n, keep = inputs
        z, r = zr[:H], zr[H:]
        dh = COLUMNS.masked(dh + dh_out.T, mask, keep)
        da_n = dh * z * (1 - n * n)
        da_zr = jnp.concatenate([dh * (n - h.T), da_n * m]) * zr * (1 - zr)
        d_Uh = jnp.concatenate([da_zr, da_n * r])
        dh = dh * (1 - z) + _times(U, d_Uh)
        return dh, (jnp.concatenate([da_zr, da_n]).T, d_Uh.T)

    dh0, (da, d_Uh) = jax.lax.scan(
        step,
        jnp.zeros_like(h0.T),
        (dh_out, h_before, zr, m, n, mask and mask.keep),
        reverse=True,
    )
    dcn = d_Uh[..., 2 * H :].sum((0, 1))
    return outer(h_before, d_Uh, U.dtype), dcn, dh0.T, da, None


_gru_after.defvjp(_gru_after_forward, _gru_after_backward)


# --- LSTM. a (T, B, 4H): x·W + b of f, i, o, g. U (H, 4H).


@jax.custom_vjp
def _lstm(U: Array, h0: Array, c0: Array, a: Array, mask: Mask | None) -> tuple[Array, Array]:
    h, (_, c), _ = _forward(ROWS, _lstm_step, (U,), (h0, c0), a, mask)
    return h, c


def _lstm_with_carry(U, carry, a, mask):
    h, c = _lstm(*U, *carry, a, mask)
    return h, (h[-1], c)


def _lstm_step(layout, U, carry, a):
    (U,), (h, c) = U, carry
    H = h.shape[layout.axis]
    a_fio, a_g = layout.split(a + layout.times(U, h), 3 * H)
    fio, g = sigmoid(a_fio), jnp.tanh(a_g)
    f, i, o = layout.split(fio, H, 2 * H)
    c = f * c + i * g
    return (o * jnp.tanh(c), c), (c, fio, g)


def _lstm_forward(U, h0, c0, a, mask):
    h, (_, c_last), saved = _forward(COLUMNS, _lstm_step, (U.T,), (h0, c0), a, mask)
    return (h, c_last), (U, h0, c0, h, *saved, mask)


def _lstm_backward(residuals, cotangents):
    U, h0, c0, h, c, fio, g, mask = residuals
    dh_out, dc_last = cotangents

    def step(carry, inputs):
        (dh, dc), (dh_out, c_before, c, fio, g, keep) = carry, inputs
        f, i, o = jnp.split(fio, 3)
        tanh_c = jnp.tanh(c)
        dh = COLUMNS.masked(dh + dh_out.T, mask, keep)
        dc = dc + dh * o * (1 - tanh_c * tanh_c)
        da_fio = jnp.concatenate([dc * c_before, dc * g, dh * tanh_c]) * fio * (1 - fio)
        da = jnp.concatenate([da_fio, dc * i * (1 - g * g)])
        return (_times(U, da), dc * f), da.T

    (dh0, dc0), da = jax.lax.scan(
        step,
        (jnp.zeros_like(h0.T), dc_last.T),
        (dh_out, before(c0.T, c), c, fio, g, mask and mask.keep),
        reverse=True,
    )
    return outer(before(h0, h), da, U.dtype), dh0.T, dc0.T, da, None


_lstm.defvjp(_lstm_forward, _lstm_backward)


# --- RNN. a (T, B, H): x·W + b. U (H, H).


@jax.custom_vjp
def _rnn(U: Array, h0: Array, a: Array, mask: Mask | None) -> Array:
    return _forward(ROWS, _rnn_step, (U,), h0, a, mask)[0]


def _rnn_step(layout, U, h, a):
    n = jnp.tanh(a + layout.times(U[0], h))
    return n, (n,)


def _rnn_forward(U, h0, a, mask):
    h, _, saved = _forward(COLUMNS, _rnn_step, (U.T,), h0, a, mask)
    return h, (U, h0, h, *saved, mask)


def _rnn_backward(residuals, dh_out):
    U, h0, h, n, mask = residuals

    def step(dh, inputs):
        dh_out, n, keep = inputs
        da = COLUMNS.masked(dh + dh_out.T, mask, keep) * (1 - n * n)
        return _times(U, da), da.T

    dh0, da = jax.lax.scan(
        step, jnp.zeros_like(h0.T), (dh_out, n, mask and mask.keep), reverse=True
    )
    return outer(before(h0, h), da, U.dtype), dh0.T, da, None


_rnn.defvjp(_rnn_forward, _rnn_backward)
