"""The sLSTM of xLSTM: an LSTM with an exponential input gate, which can revise what it stores."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jax.nn import log_sigmoid, sigmoid
from jax.nn.initializers import Initializer, variance_scaling, zeros
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.arrays import Size
from jaxgru.cells.contract import register
from jaxgru.cells.gated import Gated, StateWeights, sizes_of_gates
from jaxgru.cells.initial_weights import gates, initializers
from jaxgru.cells.layout import Layout
from jaxgru.pytrees import struct


class SLSTMState(NamedTuple):
    """The carry of an sLSTM, (B, H) each: the output h, the cell state c, the normaliser n, and m.

    c and n are stored divided by exp(m), so that they stay in the range of floating-point numbers.
    """

    h: Array
    c: Array
    n: Array
    m: Array


export.register_namedtuple_serialization(SLSTMState, serialized_name="jaxgru.SLSTMState")


@struct
class SLSTMCell(Gated[SLSTMState]):
    """An sLSTM layer: W, U and b hold the gates i, f, z and o side by side.

        ĩ, f̃, z̃, õ = x·W + h·U + b
        l  = log σ(f̃) + m                      at the start, where n = 0: −∞
        m' = max(l, ĩ)                         stabiliser
        i  = exp(ĩ − m')                       input gate
        f  = exp(l − m')                       forget gate
        c' = f ⊙ c + i ⊙ tanh(z̃)               cell state
        n' = f ⊙ n + i                         normaliser
        h' = σ(õ) ⊙ c'/n'

    See Beck et al. 2024 (arXiv 2405.04517, section 2.2). Of the two forget gates that the paper
    names, σ and exp, this is σ, as in its code. The carry starts as zeros, as there. U can be
    block-diagonal: the paper's heads. The convolution, the group normalisation and the projections
    around the paper's layer are not part of this one.
    """

    W: Float[Array, "E GH"]
    U: StateWeights
    b: Float[Array, "GH"]
    gates: ClassVar[str] = "ifzo"

    def sizes(self) -> tuple[int, int] | None:
        return sizes_of_gates(4, self.W, self.U, [(4, self.b)])

    def zero_carry(self, batch_size: Size) -> SLSTMState:
        """Return the carry before the first step: zeros (B, H), in the biases' dtype."""
        shape = batch_size, len(self.b) // 4
        h, c, n, m = (jnp.zeros(shape, self.b.dtype) for _ in range(4))  # each can be donated
        return SLSTMState(h, c, n, m)

    def step(self, layout: Layout, carry: SLSTMState, a: Float[Array, "B GH"]) -> SLSTMState:
        h, c, n, m = carry
        log_i, f, z, o = jnp.split(a + layout.times(self.U, h), 4, axis=-1)
        log_f = jnp.where(n == 0, -jnp.inf, log_sigmoid(f) + m)
        m = jnp.maximum(log_f, log_i)
        i = jnp.exp(log_i - m)
        f = jnp.exp(log_f - m)
        c = f * c + i * jnp.tanh(z)
        n = f * n + i
        return SLSTMState(sigmoid(o) * c / n, c, n, m)


@register
def init_slstm(
    key: PRNGKeyArray,
    in_features: int,
    hidden_dim: int,
    *,
    num_blocks: int = 1,
    dtype: DTypeLike = jnp.float32,
    kernel_init: Initializer | None = None,
    recurrent_kernel_init: Initializer | None = None,
    bias_init: Initializer | None = None,
) -> SLSTMCell:
    """Draw the initial parameters of an sLSTM layer.

    As in the paper's code, W is normal with the variance 2/(5·E), U is zeros, and b is zeros but in
    the forget gate, where unit j of the k units in a block begins with 5 − 12·(j/(k − 1))^0.3: from
    units that forget little to those that forget most.

    Args:
      in_features: E, the size of the input at a step.
      hidden_dim: H, the size of each part of the state.
      num_blocks: n, of diagonal blocks of U, each for H/n units, a divisor of `hidden_dim`: the
        paper's heads.
      dtype: of the parameters, floating-point.
      kernel_init: as for `init_gru`.
      recurrent_kernel_init: as for `init_gru`.
      bias_init: as for `init_gru`.

    Raises:
      ValueError: an argument is not as described above, or two do not go together; the message says
        which and what would be right.

    Example:
      ```python
      layer = jaxgru.init_slstm(jax.random.key(0), in_features=3, hidden_dim=4, num_blocks=2)
      y, (h, c, n, m) = jaxgru.unroll(layer, jnp.ones((2, 5, 3)))
      ```
    """
    if kernel_init is None:
        kernel_init = variance_scaling(2 / 5, "fan_in", "normal")
    if recurrent_kernel_init is None:
        recurrent_kernel_init = zeros
    W, U, b = initializers(
        in_features,
        hidden_dim,
        dtype,
        "orthogonal",
        kernel_init,
        recurrent_kernel_init,
        bias_init,
        num_blocks=num_blocks,
    )
    keys = jax.random.split(key, 12)
    biases = [b(key) for key in keys[2::3]]
    if bias_init is None:
        k = hidden_dim // num_blocks
        place = jnp.arange(k) / max(k - 1, 1)
        biases[1] = jnp.tile(5 - 12 * place**0.3, num_blocks).astype(dtype)
    return SLSTMCell(
        W=gates(map(W, keys[::3])),
        U=gates(map(U, keys[1::3])),
        b=gates(biases),
    )
