"""The LSTM with a forget gate (Hochreiter & Schmidhuber 1997; Gers et al. 2000).

f, i, o = σ(x·W + h·U + b) each
g  = tanh(x·Wg + h·Ug + bg)
c' = f ⊙ c + i ⊙ g
h' = o ⊙ tanh(c')
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jax.nn import sigmoid
from jax.nn.initializers import Initializer, zeros
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.cells.base import (
    Cell,
    Hidden,
    Recurrence,
    RecurrentLayer,
    Size,
    aligned,
    initializers,
    sizes_of_gates,
    struct,
)
from jaxgru.cells.products import gradients_of_one_matrix


@struct
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


class LSTMState(NamedTuple):
    """The carry: the output h and the cell state c, (B, H) each. A pair (h, c) can stand for it."""

    h: Array
    c: Array


export.register_namedtuple_serialization(LSTMState, serialized_name="jaxgru.LSTMState")


def init_lstm(
    key: PRNGKeyArray,
    in_features: int,
    hidden_dim: int,
    *,
    dtype: DTypeLike = jnp.float32,
    kernel_init: Initializer | None = None,
    recurrent_kernel_init: Initializer | None = None,
    bias_init: Initializer | None = None,
) -> LSTMParams:
    """Draw initial parameters.

    W: uniform ±1/√E; U: uniform ±1/√H; b: zeros, but ones in the forget gate (Gers et al. 2000).

    Args:
      in_features: E, the size of the input at a step.
      hidden_dim: H, the size of h and of c.
      kernel_init: draws each gate's W (E, H) instead, as `(key, shape, dtype)`: one of
        `jax.nn.initializers`.
      recurrent_kernel_init: draws each gate's U (H, H) instead, such as `orthogonal()`.
      bias_init: draws each gate's b (H,) instead, the forget gate's, too.

    Raises:
      ValueError: a size is not positive; or an initializer is no function or returns something
        else than such numbers.
    """
    opened = bias_init is None
    b_init = zeros if opened else bias_init
    W, U, b = initializers(
        in_features, hidden_dim, dtype, kernel_init, recurrent_kernel_init, b_init
    )
    k = jax.random.split(key, 8)
    k_bias = jax.random.split(jax.random.fold_in(key, 8), 4)
    return LSTMParams(
        Wf=W(k[0]), Uf=U(k[1]), bf=jnp.ones(hidden_dim, dtype) if opened else b(k_bias[0]),
        Wi=W(k[2]), Ui=U(k[3]), bi=b(k_bias[1]),
        Wo=W(k[4]), Uo=U(k[5]), bo=b(k_bias[2]),
        Wg=W(k[6]), Ug=U(k[7]), bg=b(k_bias[3]),
    )  # fmt: skip


def lstm_cell(p: LSTMParams, carry: tuple[Hidden, Hidden], x: Float[Array, "B E"]) -> LSTMState:
    """Compute one step: (h, c) → (h', c')."""
    p, (h, c), x = aligned(p, carry, x)
    f = sigmoid(x @ p.Wf + h @ p.Uf + p.bf)
    i = sigmoid(x @ p.Wi + h @ p.Ui + p.bi)
    o = sigmoid(x @ p.Wo + h @ p.Uo + p.bo)
    g = jnp.tanh(x @ p.Wg + h @ p.Ug + p.bg)
    c = f * c + i * g
    return LSTMState(o * jnp.tanh(c), c)


def sizes(p: LSTMParams) -> tuple[int, int] | None:
    """Return (E, H), or None if the shapes contradict each other."""
    return sizes_of_gates(
        [p.Wf, p.Wi, p.Wo, p.Wg], [p.Uf, p.Ui, p.Uo, p.Ug], [p.bf, p.bi, p.bo, p.bg]
    )


def zero_carry(p: LSTMParams, batch_size: Size) -> LSTMState:
    """Return the state before the first step: zeros for h and c, (B, H), in the biases' dtype."""
    part = lambda: jnp.zeros((batch_size, *p.bf.shape), p.bf.dtype)
    return LSTMState(part(), part())  # two buffers: each can be donated


# --- Many steps. a (T, B, 4H) is x·W + b of f, i, o, g. U (H, 4H).


def prepare(p: LSTMParams) -> RecurrentLayer:
    """Prepare a layer for many steps."""
    W = jnp.concatenate([p.Wf, p.Wi, p.Wo, p.Wg], axis=1)
    b = jnp.concatenate([p.bf, p.bi, p.bo, p.bg])
    U = jnp.concatenate([p.Uf, p.Ui, p.Uo, p.Ug], axis=1)
    return RecurrentLayer(W, b, (U,), RECURRENCE)


def _step(layout, U, carry, a):
    (U,), (h, c) = U, carry
    Uh = layout.gates(layout.times(U, h), h.shape[layout.axis])
    a_f, a_i, a_o, a_g = map(jnp.add, a, Uh)
    f, i, o, g = sigmoid(a_f), sigmoid(a_i), sigmoid(a_o), jnp.tanh(a_g)
    c = f * c + i * g
    return LSTMState(o * jnp.tanh(c), c), (layout.join(f, i, o), g)


def _factors(layout, before, after, saved):
    """Return the factors of dc + dh·(…), da = (dc, dc, dh, dc)·(…) and dc·(…)."""
    fio, g = saved
    f, i, o = layout.gates(fio, g.shape[layout.axis])
    tanh_c = jnp.tanh(after.c)
    of_fio = layout.join(before.c, g, tanh_c) * fio * (1 - fio)
    return o * (1 - tanh_c * tanh_c), layout.join(of_fio, i * (1 - g * g)), f


def _step_gradient(layout, U, d_carry, factors):
    (U,), (dh, dc), (of_h, of_a, f) = U, d_carry, factors
    dc = dc + dh * of_h
    da = layout.join(dc, dc, dh, dc) * of_a
    return LSTMState(layout.times(U, da), dc * f), (da,)


RECURRENCE = Recurrence(_step, _factors, _step_gradient, gradients_of_one_matrix)


LSTM = Cell(
    name="lstm",
    params=LSTMParams,
    init=lambda key, E, H, options, dtype: init_lstm(key, E, H, dtype=dtype),
    sizes=sizes,
    step=lstm_cell,
    zero_carry=zero_carry,
    prepare=prepare,
)
