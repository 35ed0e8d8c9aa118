"""The LSTM with layer normalisation."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.nn import sigmoid
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.arrays import plus
from jaxgru.cells.carry import LSTMState
from jaxgru.cells.gated import AnyLSTM, StateWeights, sizes_of_gates
from jaxgru.cells.initial_weights import lstm_weights
from jaxgru.cells.layer_norm import layer_norm
from jaxgru.cells.layout import Layout
from jaxgru.cells.products import matmul
from jaxgru.pytrees import struct


@struct
class LayerNormLSTMCell(AnyLSTM):
    """An LSTM layer with layer normalisation.

    W, U and b are as in `LSTMCell`; w, u and wc are gains, and bc is the bias of LN(c').

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

    def sizes(self) -> tuple[int, int] | None:
        vectors = [(4, self.b), (4, self.w), (4, self.u), (1, self.wc), (1, self.bc)]
        return sizes_of_gates(4, self.W, self.U, vectors)

    def inputs(self, x: Float[Array, "*n E"]) -> Float[Array, "*n GH"]:
        """Return LN(x·W) ⊙ w + b."""
        return plus(layer_norm(matmul(x, self.W), self.w), self.b)

    def step(self, layout: Layout, carry: LSTMState, a: Float[Array, "B GH"]) -> LSTMState:
        h, c = carry
        a = a + layer_norm(layout.times(self.U, h), self.u)
        f, i, o, g = jnp.split(a, 4, axis=-1)
        c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
        return LSTMState(sigmoid(o) * jnp.tanh(plus(layer_norm(c, self.wc), self.bc)), c)


def init_layer_norm_lstm(
    key: PRNGKeyArray, E: int, H: int, dtype: DTypeLike = jnp.float32, **options: Any
) -> LayerNormLSTMCell:
    """Draw initial parameters, with ones as gains. See `init_lstm`."""
    weights = lstm_weights(key, E, H, dtype, **options)
    gain = lambda: jnp.ones(4 * H, dtype)  # two buffers: each can be donated
    of_c = dict(wc=jnp.ones(H, dtype), bc=jnp.zeros(H, dtype))
    return LayerNormLSTMCell(**weights, w=gain(), u=gain(), **of_c)
