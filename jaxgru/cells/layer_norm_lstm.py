"""The LSTM with layer normalisation.

LN(x·W) does not depend on h, so it is computed for all steps at once, before the first.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax.nn import sigmoid
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.cells.base import (
    Cell,
    LSTMState,
    Recurrence,
    RecurrentLayer,
    Size,
    StateWeights,
    aligned,
    check_named,
    sizes_of_gates,
    struct,
)
from jaxgru.cells.initial_weights import lstm_weights
from jaxgru.cells.layer_norm import layer_norm, standardized, standardized_gradient
from jaxgru.cells.products import dense, gradient_of


@struct
class LayerNormLSTMParams:
    """Parameters of an LSTM layer with layer normalisation.

    W, U and b are as in `LSTMParams`; w, u and wc are gains, and bc is the bias of LN(c').

        a_f, a_i, a_o, a_g = LN(x·W) ⊙ w + LN(h·U) ⊙ u + b
        f, i, o, g = σ(a_f), σ(a_i), σ(a_o), tanh(a_g)
        c' = f ⊙ c + i ⊙ g
        h' = o ⊙ tanh(LN(c') ⊙ wc + bc)

    This is the LSTM of Ba et al. 2016 (arXiv 1607.06450, supplementary material), whose three
    biases of the gates are one here: only their sum b acts. LN subtracts the mean of a row and
    divides by √(variance + 10⁻⁵). All gates are normalised together, over 4·H units.
    """

    W: Float[Array, "E GH"]
    U: StateWeights
    b: Float[Array, "GH"]
    w: Float[Array, "GH"]
    u: Float[Array, "GH"]
    wc: Float[Array, "H"]
    bc: Float[Array, "H"]
    gates: ClassVar[str] = "fiog"


def init_layer_norm_lstm(
    key: PRNGKeyArray, E: int, H: int, dtype: DTypeLike = jnp.float32, **options: Any
) -> LayerNormLSTMParams:
    """Draw initial parameters, with ones as gains. See `init_lstm`."""
    weights = lstm_weights(key, E, H, dtype, **options)
    gain = lambda: jnp.ones(4 * H, dtype)  # two buffers: each can be donated
    of_c = dict(wc=jnp.ones(H, dtype), bc=jnp.zeros(H, dtype))
    return LayerNormLSTMParams(**weights, w=gain(), u=gain(), **of_c)


def layer_norm_lstm_cell(
    p: LayerNormLSTMParams, carry: LSTMState, x: Float[Array, "B E"]
) -> LSTMState:
    """Compute one step: (h, c) → (h', c')."""
    check_named("the carry", carry, LSTMState)
    p, (h, c), x = aligned(dense(p), carry, x)
    a = layer_norm(x @ p.W, p.w) + layer_norm(h @ p.U, p.u) + p.b
    f, i, o, g = jnp.split(a, 4, axis=-1)
    c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
    return LSTMState(sigmoid(o) * jnp.tanh(layer_norm(c, p.wc) + p.bc), c)


def sizes(p: LayerNormLSTMParams) -> tuple[int, int] | None:
    """Return (E, H), or None if the shapes contradict each other."""
    return sizes_of_gates(4, p.W, p.U, [(4, p.b), (4, p.w), (4, p.u), (1, p.wc), (1, p.bc)])


def zero_carry(p: LayerNormLSTMParams, batch_size: Size) -> LSTMState:
    """Return the state before the first step: zeros for h and c, (B, H), in the biases' dtype."""
    part = lambda: jnp.zeros((batch_size, *p.bc.shape), p.bc.dtype)
    return LSTMState(part(), part())


# --- Many steps. a (T, B, 4H) is the input's part and b of f, i, o, g. U (H, 4H), u (4H), wc, bc.


def prepare(p: LayerNormLSTMParams) -> RecurrentLayer:
    """Prepare a layer for many steps."""
    norm = lambda xW: layer_norm(xW, p.w)
    return RecurrentLayer(p.W, p.b, (p.U, p.u, p.wc, p.bc), RECURRENCE, norm)


def _step(layout, U, carry, a):
    (U, u, wc, bc), (h, c) = U, carry
    Uh, Uh_scale = standardized(layout.times(U, h), layout.axis)
    a_f, a_i, a_o, a_g = map(jnp.add, a, layout.gates(Uh * u, 4))
    f, i, o, g = sigmoid(a_f), sigmoid(a_i), sigmoid(a_o), jnp.tanh(a_g)
    c = f * c + i * g
    c_hat, c_scale = standardized(c, layout.axis)
    m = jnp.tanh(c_hat * wc + bc)
    return LSTMState(o * m, c), (layout.join(f, i, o), g, m, Uh, Uh_scale, c_hat, c_scale)


def _factors(layout, before, after, saved):
    """Return the factors of dy = dh·(…), where m = tanh(y), of da and of dc; what LN returned."""
    fio, g, m, *normalised = saved
    f, i, o = layout.gates(fio, 3)
    of_fio = layout.join(before.c, g, m) * fio * (1 - fio)
    return o * (1 - m * m), layout.join(of_fio, i * (1 - g * g)), f, *normalised


def _step_gradient(layout, U, d_carry, factors):
    (U, u, wc, _), (dh, dc) = U, d_carry
    of_y, of_a, f, Uh, Uh_scale, c, c_scale = factors
    dy = dh * of_y
    dc = dc + standardized_gradient(dy * wc, c, c_scale, layout.axis)
    da = layout.join(dc, dc, dh, dc) * of_a
    d_Uh = standardized_gradient(da * u, Uh, Uh_scale, layout.axis)
    return LSTMState(layout.times(U, d_Uh), dc * f), (da, d_Uh, dy)


def _gradients(layout, U, before, after, saved, kept):
    U, (_, _, _, Uh, _, c, _), (da, d_Uh, dy) = U[0], saved, kept
    total = lambda d: d.sum((0, 1))
    return (gradient_of(U, before.h, d_Uh), total(da * Uh), total(dy * c), total(dy)), da


RECURRENCE = Recurrence(4, _step, _factors, _step_gradient, _gradients)


LAYER_NORM_LSTM = Cell(
    name="layer_norm_lstm",
    params=LayerNormLSTMParams,
    init=lambda key, E, H, options, dtype: init_layer_norm_lstm(
        key, E, H, dtype, num_blocks=options.num_blocks
    ),
    sizes=sizes,
    step=layer_norm_lstm_cell,
    zero_carry=zero_carry,
    options=frozenset({"num_blocks"}),
    prepare=prepare,
)
