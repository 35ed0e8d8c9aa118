"""The minGRU, whose gates do not read h: its steps can run in parallel (`linear_recurrence.py`)."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.nn import sigmoid
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.arrays import plus
from jaxgru.cells.carry import Hidden
from jaxgru.cells.contract import Cell, register
from jaxgru.cells.initial_weights import gates, initializers
from jaxgru.cells.layout import Layout
from jaxgru.cells.linear_recurrence import LinearSteps, linear_recurrence
from jaxgru.cells.products import Lookup, apply_to, matmul
from jaxgru.cells.step_masks import StepMasks
from jaxgru.pytrees import struct


@struct
class MinGRUCell(Cell[Hidden]):
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
    parallel_masks: ClassVar[bool] = True

    def sizes(self) -> tuple[int, int] | None:
        fits = self.W.ndim == 2 and not self.W.shape[1] % 2 and self.b.shape == self.W.shape[1:]
        return (len(self.W), len(self.b) // 2) if fits else None

    def inputs(self, x: Float[Array, "*n E"]) -> Float[Array, "*n GH"]:
        """Return x·W + b."""
        return plus(matmul(x, self.W), self.b)

    def step(self, layout: Layout, h: Hidden, a: Float[Array, "B GH"]) -> Hidden:
        z, n = jnp.split(a, 2, axis=-1)
        z = sigmoid(z)
        return (1 - z) * h + z * n

    def parallel(
        self, h: Hidden, x: Float[Array, "T B E"] | Lookup, masks: StepMasks
    ) -> tuple[Float[Array, "T B H"], Hidden]:
        """Compute all steps at once, with resets, padding and dropout."""
        z, n = jnp.split(apply_to(self.inputs, x).astype(h.dtype), 2, axis=-1)
        z = sigmoid(z)
        a = masks.hidden(1 - z)
        b = masks.hidden(z * n)
        if masks.valid is not None:  # padding: h' = 1 ⊙ h + 0
            valid = masks.valid[..., None]
            a = jnp.where(valid, a, 1)
            b = jnp.where(valid, b, 0)
        begins = None if masks.reset is None else masks.reset[..., None]
        if begins is not None and masks.reset_carry is not None:  # also at a step of padding
            b = jnp.where(begins, a * masks.reset_carry.astype(h.dtype)[None] + b, b)
        after = linear_recurrence(LinearSteps(a, b, begins), h)
        return after, after[-1]


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
    """
    W, _, b = initializers(
        in_features, hidden_dim, dtype, "pytorch", kernel_init, bias_init=bias_init
    )
    k = jax.random.split(key, 4)
    return MinGRUCell(W=gates(map(W, k[::2])), b=gates(map(b, k[1::2])))
