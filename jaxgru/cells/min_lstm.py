"""The minLSTM, whose gates do not read h, so that its steps can run in parallel."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from jax.nn import log_sigmoid, sigmoid
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.cells.contract import register
from jaxgru.cells.initial_weights import linear_weights
from jaxgru.cells.linear_recurrence import LinearCell
from jaxgru.pytrees import struct


@struct
class MinLSTMCell(LinearCell):
    """A minLSTM layer: W for the input, b the biases, of f, i and n side by side.

        f  = σ(x·Wf + bf)                forget gate
        i  = σ(x·Wi + bi)                input gate
        n  = x·Wn + bn                   candidate
        h' = f/(f + i) ⊙ h + i/(f + i) ⊙ n

    See Feng et al. 2024 (arXiv 2410.01201, section 3.2). The paper's version in log space, with
    h > 0, is another cell.
    """

    W: Float[Array, "E GH"]
    b: Float[Array, "GH"]
    gates: ClassVar[str] = "fin"

    def coefficients(
        self, inputs: Float[Array, "*n GH"]
    ) -> tuple[Float[Array, "*n H"], Float[Array, "*n H"]]:
        f, i, n = jnp.split(inputs, 3, axis=-1)
        # f/(f + i) = σ(log f − log i), which is not 0/0 where both gates are closed
        log_ratio = log_sigmoid(f) - log_sigmoid(i)
        return sigmoid(log_ratio), sigmoid(-log_ratio) * n


@register
def init_min_lstm(
    key: PRNGKeyArray,
    in_features: int,
    hidden_dim: int,
    *,
    dtype: DTypeLike = jnp.float32,
    kernel_init: Initializer | None = None,
    bias_init: Initializer | None = None,
) -> MinLSTMCell:
    """Draw the initial parameters of a minLSTM layer.

    W and b are uniform in ±1/√E, as in PyTorch's `nn.Linear`, which the paper uses.

    Arguments and errors are those of `init_min_gru`.

    Example:
      ```python
      layer = jaxgru.init_min_lstm(jax.random.key(0), in_features=3, hidden_dim=4)
      y, h = jaxgru.unroll(layer, jnp.ones((2, 5, 3)))
      ```
    """
    weights = linear_weights(key, in_features, hidden_dim, dtype, 3, kernel_init, bias_init)
    return MinLSTMCell(**weights)
