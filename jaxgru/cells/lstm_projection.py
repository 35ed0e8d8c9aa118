"""The LSTM with a recurrent projection."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.nn import sigmoid
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.cells.base import (
    Cell,
    LSTMState,
    Recurrence,
    RecurrentLayer,
    Size,
    aligned,
    check_named,
    sizes_of_gates,
    struct,
)
from jaxgru.cells.initial_weights import initializers, lstm_weights
from jaxgru.cells.products import outer


@struct
class ProjectedLSTMParams:
    """Parameters of an LSTM layer with a projection: those of `LSTMParams`, and P.

    The equations are those of `LSTMParams`, but h' = (o ⊙ tanh(c'))·P, with p units, while c has H
    (Sak et al. 2014, arXiv 1402.1128). As in `torch.nn.LSTM`, the paper's second, non-recurrent
    projection is left out.
    """

    W: Float[Array, "E GH"]
    U: Float[Array, "p GH"]
    b: Float[Array, "GH"]
    P: Float[Array, "H p"]
    gates: ClassVar[str] = "fiog"


def init_projected_lstm(
    key: PRNGKeyArray,
    E: int,
    H: int,
    proj_size: int,
    dtype: DTypeLike = jnp.float32,
    recurrent_kernel_init: Initializer | None = None,
    **options: Any,
) -> ProjectedLSTMParams:
    """Draw initial parameters. See `init_lstm`."""
    weights = lstm_weights(
        key, E, H, dtype,
        recurrent_kernel_init=recurrent_kernel_init, state_size=proj_size, **options,
    )  # fmt: skip
    _, P, _ = initializers(
        E, proj_size, dtype, recurrent_kernel_init=recurrent_kernel_init, state_size=H
    )
    return ProjectedLSTMParams(**weights, P=P(jax.random.fold_in(key, 9)))


def projected_lstm_cell(
    p: ProjectedLSTMParams,
    carry: LSTMState,
    x: Float[Array, "B E"],
) -> LSTMState:
    """Compute one step: (h, c) → (h', c')."""
    check_named("the carry", carry, LSTMState)
    p, (h, c), x = aligned(p, carry, x)
    f, i, o, g = jnp.split(x @ p.W + h @ p.U + p.b, 4, axis=-1)
    c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
    return LSTMState((sigmoid(o) * jnp.tanh(c)) @ p.P, c)


def sizes(p: ProjectedLSTMParams) -> tuple[int, int] | None:
    """Return (E, p), or None if the shapes contradict each other."""
    proj_size = p.P.shape[-1]
    known = sizes_of_gates(4, p.W, p.U, [(4, p.b)], proj_size)
    return (known[0], proj_size) if known and p.P.shape == (known[1], proj_size) else None


def zero_carry(p: ProjectedLSTMParams, batch_size: Size) -> LSTMState:
    """Return the state before the first step: zeros, h (B, p) and c (B, H)."""
    H, proj_size = p.P.shape
    zeros = lambda size: jnp.zeros((batch_size, size), p.b.dtype)
    return LSTMState(zeros(proj_size), zeros(H))


# --- Many steps. a (T, B, 4H) is x·W + b of f, i, o, g. U (p, 4H), P (H, p).


def prepare(p: ProjectedLSTMParams) -> RecurrentLayer:
    """Prepare a layer for many steps."""
    return RecurrentLayer(p.W, p.b, (p.U, p.P), RECURRENCE)


def _step(layout, U, carry, a):
    (U, P), (h, c) = U, carry
    Uh = layout.gates(layout.times(U, h), 4)
    a_f, a_i, a_o, a_g = map(jnp.add, a, Uh)
    f, i, o, g = sigmoid(a_f), sigmoid(a_i), sigmoid(a_o), jnp.tanh(a_g)
    c = f * c + i * g
    m = o * jnp.tanh(c)
    return LSTMState(layout.product(P, m), c), (layout.join(f, i, o), g, m)


def _factors(layout, before, after, saved):
    """Return the factors of dc + dm·(…), da = (dc, dc, dm, dc)·(…) and dc·(…)."""
    fio, g, _ = saved
    f, i, o = layout.gates(fio, 3)
    tanh_c = jnp.tanh(after.c)
    of_fio = layout.join(before.c, g, tanh_c) * fio * (1 - fio)
    return o * (1 - tanh_c * tanh_c), layout.join(of_fio, i * (1 - g * g)), f


def _step_gradient(layout, U, d_carry, factors):
    (U, P), (dh, dc), (of_m, of_a, f) = U, d_carry, factors
    dm = layout.product(P, dh)
    dc = dc + dm * of_m
    da = layout.join(dc, dc, dm, dc) * of_a
    return LSTMState(layout.times(U, da), dc * f), (da, dh)


def _gradients(layout, U, before, after, saved, kept):
    (U, P), (_, _, m), (da, dh) = U, saved, kept
    return (outer(before.h, da, U.dtype), outer(m, dh, P.dtype)), da


RECURRENCE = Recurrence(4, _step, _factors, _step_gradient, _gradients)


PROJECTED_LSTM = Cell(
    name="projected_lstm",
    params=ProjectedLSTMParams,
    init=lambda key, E, H, options, dtype: init_projected_lstm(key, E, H, options.proj_size, dtype),
    sizes=sizes,
    step=projected_lstm_cell,
    zero_carry=zero_carry,
    options=frozenset({"proj_size"}),
    prepare=prepare,
)
