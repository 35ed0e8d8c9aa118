"""The GRU with layer normalisation.

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
    Hidden,
    Recurrence,
    RecurrentLayer,
    Size,
    StateWeights,
    aligned,
    sizes_of_gates,
    struct,
)
from jaxgru.cells.initial_weights import gru_weights
from jaxgru.cells.layer_norm import layer_norm, standardized, standardized_gradient
from jaxgru.cells.products import dense, gradient_of


@struct
class LayerNormGRUParams:
    """Parameters of a GRU layer with layer normalisation.

    W, U, b and cn are as in `GRUParams`; w and u are gains, of the gates z, r and n side by side.

        z, r = σ(LN(x·[Wz Wr]) ⊙ [wz wr] + LN(h·[Uz Ur]) ⊙ [uz ur] + [bz br])
        n    = tanh(LN(x·Wn) ⊙ wn + r ⊙ (LN(h·Un) ⊙ un + cn) + bn)
        h'   = (1 − z) ⊙ h + z ⊙ n

    This is the GRU of Ba et al. 2016 (arXiv 1607.06450, supplementary material), whose two biases
    of z and r are one here: only their sum acts. LN subtracts the mean of a row and divides by
    √(variance + 10⁻⁵). z and r are normalised together, over 2·H units, and n by itself.
    """

    W: Float[Array, "E GH"]
    U: StateWeights
    b: Float[Array, "GH"]
    cn: Float[Array, "H"]
    w: Float[Array, "GH"]
    u: Float[Array, "GH"]
    gates: ClassVar[str] = "zrn"


def init_layer_norm_gru(
    key: PRNGKeyArray, E: int, H: int, dtype: DTypeLike = jnp.float32, **options: Any
) -> LayerNormGRUParams:
    """Draw initial parameters, with ones as gains. See `init_gru`."""
    weights = gru_weights(key, E, H, dtype, **options)
    gain = lambda: jnp.ones(3 * H, dtype)  # two buffers: each can be donated
    return LayerNormGRUParams(**weights, cn=jnp.zeros(H, dtype), w=gain(), u=gain())


def layer_norm_gru_cell(p: LayerNormGRUParams, h: Hidden, x: Float[Array, "B E"]) -> Hidden:
    """Compute one step: h → h'."""
    p, h, x = aligned(dense(p), h, x)
    x_z, x_r, x_n = jnp.split(_normalised(x @ p.W, p.w) + p.b, 3, axis=-1)
    h_z, h_r, h_n = jnp.split(_normalised(h @ p.U, p.u), 3, axis=-1)
    z, r = sigmoid(x_z + h_z), sigmoid(x_r + h_r)
    n = jnp.tanh(x_n + r * (h_n + p.cn))
    return (1 - z) * h + z * n


def _normalised(y: Float[Array, "*n GH"], gain: Float[Array, "... GH"]) -> Float[Array, "*n GH"]:
    """Return LN of z and r together, and of n, times the gain."""
    H = y.shape[-1] // 3
    zr = layer_norm(y[..., : 2 * H], gain[..., : 2 * H])
    return jnp.concatenate([zr, layer_norm(y[..., 2 * H :], gain[..., 2 * H :])], axis=-1)


def sizes(p: LayerNormGRUParams) -> tuple[int, int] | None:
    """Return (E, H), or None if the shapes contradict each other."""
    return sizes_of_gates(3, p.W, p.U, [(3, p.b), (1, p.cn), (3, p.w), (3, p.u)])


def zero_carry(p: LayerNormGRUParams, batch_size: Size) -> Hidden:
    """Return the state before the first step: zeros (B, H) in the biases' dtype."""
    return jnp.zeros((batch_size, *p.cn.shape), p.cn.dtype)


# --- Many steps. a (T, B, 3H) is the input's part and b of z, r, n. U (H, 3H), u (2H), un, cn (H).


def prepare(p: LayerNormGRUParams) -> RecurrentLayer:
    """Prepare a layer for many steps."""
    H = len(p.cn)
    U = p.U, p.u[: 2 * H], p.u[2 * H :], p.cn
    return RecurrentLayer(p.W, p.b, U, RECURRENCE, lambda xW: _normalised(xW, p.w))


def _step(layout, U, h, a):
    (U, u, un, cn), (a_z, a_r, a_n) = U, a
    *zr, n = layout.gates(layout.times(U, h), 3)
    zr, zr_scale = standardized(layout.join(*zr), layout.axis)
    n_hat, n_scale = standardized(n, layout.axis)
    y_z, y_r = layout.gates(zr * u, 2)
    z, r = sigmoid(a_z + y_z), sigmoid(a_r + y_r)
    m = n_hat * un + cn
    n = jnp.tanh(a_n + r * m)
    return (1 - z) * h + z * n, (layout.join(z, r), m, n, zr, zr_scale, n_hat, n_scale)


def _factors(layout, h, after, saved):
    """Return the factors of da_n, da_zr, dm and dh, each of them dh·(…), and what LN returned."""
    zr, m, n, *normalised = saved
    z, r = layout.gates(zr, 2)
    of_n = z * (1 - n * n)
    return of_n, layout.join(n - h, of_n * m) * zr * (1 - zr), of_n * r, 1 - z, *normalised


def _step_gradient(layout, U, dh, factors):
    U, u, un, _ = U
    of_n, of_zr, of_m, of_h, zr, zr_scale, n, n_scale = factors
    da_zr, dm = layout.join(dh, dh) * of_zr, dh * of_m
    d_Uh = layout.join(
        standardized_gradient(da_zr * u, zr, zr_scale, layout.axis),
        standardized_gradient(dm * un, n, n_scale, layout.axis),
    )
    return dh * of_h + layout.times(U, d_Uh), (da_zr, dh * of_n, dm, d_Uh)


def _gradients(layout, U, h, after, saved, kept):
    U, (_, _, _, zr, _, n, _), (da_zr, da_n, dm, d_Uh) = U[0], saved, kept
    total = lambda d: d.sum((0, 1))
    gradients = gradient_of(U, h, d_Uh), total(da_zr * zr), total(dm * n), total(dm)
    return gradients, layout.join(da_zr, da_n)


RECURRENCE = Recurrence(3, _step, _factors, _step_gradient, _gradients)


LAYER_NORM_GRU = Cell(
    name="layer_norm_gru",
    params=LayerNormGRUParams,
    init=lambda key, E, H, options, dtype: init_layer_norm_gru(
        key, E, H, dtype, num_blocks=options.num_blocks
    ),
    sizes=sizes,
    step=layer_norm_gru_cell,
    zero_carry=zero_carry,
    options=frozenset({"num_blocks"}),
    prepare=prepare,
)
