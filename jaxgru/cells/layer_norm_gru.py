"""The GRU with layer normalisation."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax.nn import sigmoid
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.arrays import plus
from jaxgru.cells.carry import Hidden
from jaxgru.cells.gated import Gated, StateWeights, sizes_of_gates
from jaxgru.cells.initial_weights import gru_weights
from jaxgru.cells.layer_norm import layer_norm
from jaxgru.cells.layout import Layout
from jaxgru.cells.products import matmul
from jaxgru.pytrees import struct


@struct
class LayerNormGRUCell(Gated[Hidden]):
    """A GRU layer with layer normalisation.

    W, U, b and cn are as in `GRUCell`; w and u are gains, of the gates z, r and n side by side.

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

    def sizes(self) -> tuple[int, int] | None:
        vectors = [(3, self.b), (1, self.cn), (3, self.w), (3, self.u)]
        return sizes_of_gates(3, self.W, self.U, vectors)

    def inputs(self, x: Float[Array, "*n E"]) -> Float[Array, "*n GH"]:
        """Return LN(x·W) ⊙ w + b."""
        return plus(_normalised(matmul(x, self.W), self.w), self.b)

    def step(self, layout: Layout, h: Hidden, a: Float[Array, "B GH"]) -> Hidden:
        x_z, x_r, x_n = jnp.split(a, 3, axis=-1)
        h_z, h_r, h_n = jnp.split(_normalised(layout.times(self.U, h), self.u), 3, axis=-1)
        z = sigmoid(x_z + h_z)
        r = sigmoid(x_r + h_r)
        n = jnp.tanh(x_n + r * plus(h_n, self.cn))
        return (1 - z) * h + z * n


def init_layer_norm_gru(
    key: PRNGKeyArray, E: int, H: int, dtype: DTypeLike = jnp.float32, **options: Any
) -> LayerNormGRUCell:
    """Draw initial parameters, with ones as gains. See `init_gru`."""
    weights = gru_weights(key, E, H, dtype, **options)
    gain = lambda: jnp.ones(3 * H, dtype)  # two buffers: each can be donated
    return LayerNormGRUCell(**weights, cn=jnp.zeros(H, dtype), w=gain(), u=gain())


def _normalised(y: Float[Array, "*n GH"], gain: Float[Array, "... GH"]) -> Float[Array, "*n GH"]:
    """Return LN of z and r together, and of n, times the gain."""
    H = y.shape[-1] // 3
    zr = layer_norm(y[..., : 2 * H], gain[..., : 2 * H])
    n = layer_norm(y[..., 2 * H :], gain[..., 2 * H :])
    return jnp.concatenate([zr, n], axis=-1)
