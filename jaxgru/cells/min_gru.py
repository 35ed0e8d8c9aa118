"""The minGRU, whose gates do not read h: its steps can run in parallel (`linear_recurrence.py`)."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from jax.nn import sigmoid
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.cells.contract import register
from jaxgru.cells.initial_weights import linear_weights
from jaxgru.cells.linear_recurrence import LinearCell
from jaxgru.pytrees import struct


@struct
class MinGRUCell(LinearCell):
    """A minGRU layer: W for the input, b the biases, of z and n side by side.

        z  = σ(x·Wz + bz)                update gate
        n  = x·Wn + bn                   candidate
        h' = (1 − z) ⊙ h + z ⊙ n

    See Feng et al. 2024 (arXiv 2410.01201, section 3.1). The paper's version in log space, with
    h > 0, is another cell.
    """

    W: Float[Array, "E GH"]
    b: Float[Array, "GH"]
    gates: ClassVar[str] = "zn"

    def coefficients(
        self, inputs: Float[Array, "*n GH"]
    ) -> tuple[Float[Array, "*n H"], Float[Array, "*n H"]]:
        z, n = jnp.split(inputs, 2, axis=-1)
        z = sigmoid(z)
        return 1 - z, z * n


@register
def init_min_gru(
    key: PRNGKeyArray,
    in_features: int,
    hidden_dim: int,
    *,
    dtype: DTypeLike = jnp.float32,
    kernel_init: Initializer | None = None,
    bias_init: Initializer | None = None,
) -> MinGRUCell:
    """Draw the initial parameters of a minGRU layer.

    W and b are uniform in ±1/√E, as in PyTorch's `nn.Linear`, which the paper uses.

    Args:
      in_features: E, the size of the input at a step.
      hidden_dim: H, the size of the state.
      dtype: of the parameters, floating-point.
      kernel_init: as for `init_gru`.
      bias_init: as for `init_gru`.

    Raises:
      ValueError: an argument is not as described above, or two do not go together; the message says
        which and what would be right.

    Example:
      ```python
      layer = jaxgru.init_min_gru(jax.random.key(0), in_features=3, hidden_dim=4)
      y, h = jaxgru.unroll(layer, jnp.ones((2, 5, 3)))
      ```
    """
    weights = linear_weights(key, in_features, hidden_dim, dtype, 2, kernel_init, bias_init)
    return MinGRUCell(**weights)
