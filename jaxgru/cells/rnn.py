"""The vanilla RNN."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.cells.carry import Hidden
from jaxgru.cells.contract import register
from jaxgru.cells.gated import Activated, Equations, sizes_of_gates
from jaxgru.cells.initial_weights import initializers
from jaxgru.cells.layout import Layout
from jaxgru.pytrees import struct


@struct
class RNNCell(Activated[Hidden]):
    """A vanilla RNN layer: W for the input, U for the state, b the bias.

        h' = tanh(x·W + h·U + b)

    See Elman 1990 (Cognitive Science 14(2)). With the `activation` "relu", ReLU takes the place of
    tanh, as in `torch.nn.RNN(nonlinearity="relu")`; see Le et al. 2015 (arXiv 1504.00941). With
    `clip`, its argument is clipped to ±clip first, as in ONNX.
    """

    W: Float[Array, "E H"]
    U: Float[Array, "H H"]
    b: Float[Array, "H"]
    activation: str = field(default="tanh", kw_only=True, metadata={"static": True})
    clip: float | None = field(default=None, kw_only=True, metadata={"static": True})
    gates: ClassVar[str] = "h"

    def sizes(self) -> tuple[int, int] | None:
        return sizes_of_gates(1, self.W, self.U, [(1, self.b)])

    def step(self, layout: Layout, h: Hidden, a: Float[Array, "B H"]) -> Hidden:
        functions: Equations[Hidden] = Equations(*self.functions())
        return functions.phi(functions.clipped(a + layout.times(self.U, h)))


@register
def init_rnn(
    key: PRNGKeyArray,
    in_features: int,
    hidden_dim: int,
    *,
    dtype: DTypeLike = jnp.float32,
    activation: str = "tanh",
    clip: float | None = None,
    init_scheme: str = "orthogonal",
    kernel_init: Initializer | None = None,
    recurrent_kernel_init: Initializer | None = None,
    bias_init: Initializer | None = None,
) -> RNNCell:
    """Draw the initial parameters of a vanilla RNN layer.

    As in Flax, U is orthogonal, W normal with the variance 1/E (truncated), and b zeros. With
    `init_scheme` "pytorch", W and b are uniform in ±1/√E, and U in ±1/√H, as in PyTorch's
    `nn.Linear`.

    Args:
      in_features: E, the size of the input at a step.
      hidden_dim: H, the size of the state.
      dtype: of the parameters, floating-point.
      activation: "tanh" or "relu".
      clip: the argument of the activation is clipped to ±clip, as in ONNX; None: it is not.
      init_scheme: "orthogonal" or "pytorch"; see above.
      kernel_init: as for `init_gru`.
      recurrent_kernel_init: as for `init_gru`.
      bias_init: as for `init_gru`.

    Raises:
      ValueError: an argument is not as described above, or two do not go together; the message says
        which and what would be right.

    Example:
      ```python
      layer = jaxgru.init_rnn(jax.random.key(0), in_features=3, hidden_dim=4, activation="relu")
      y, h = jaxgru.unroll(layer, jnp.ones((2, 5, 3)))
      ```
    """
    W, U, b = initializers(
        in_features, hidden_dim, dtype, init_scheme, kernel_init, recurrent_kernel_init, bias_init
    )
    k = jax.random.split(key, 3)
    return RNNCell(W=W(k[0]), U=U(k[1]), b=b(k[2]), activation=activation, clip=clip)
