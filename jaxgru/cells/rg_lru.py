"""The RG-LRU of Griffin, whose decay depends on the input: its steps can run in parallel."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.nn import sigmoid, softplus
from jax.nn.initializers import lecun_normal
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.arrays import plus, widest
from jaxgru.cells.contract import register
from jaxgru.cells.gated import StateWeights, num_blocks_of
from jaxgru.cells.initial_weights import gates, initializers
from jaxgru.cells.linear_recurrence import LinearCell
from jaxgru.cells.products import matmul
from jaxgru.pytrees import struct


@struct
class RGLRUCell(LinearCell):
    """An RG-LRU layer: P and bp for the input; W and b hold the gates r and i side by side.

        u  = x·P + bp                    the input, of H units
        r  = σ(u·Wr + br)                recurrence gate
        i  = σ(u·Wi + bi)                input gate
        a  = exp(−8 · softplus(Λ) ⊙ r)
        h' = a ⊙ h + √(1 − a²) ⊙ (i ⊙ u)

    See De et al. 2024 (arXiv 2402.19427, section 2.4 and appendix A). There, u is the input: P is
    the linear layer before the RG-LRU in Griffin's recurrent block (section 2.3), whose convolution
    and second branch are not part of this layer. W can be block-diagonal, as in the paper. Where a
    sequence begins, the authors' code leaves out √(1 − a²); the paper and this layer do not.
    """

    P: Float[Array, "E H"]
    bp: Float[Array, "H"]
    W: StateWeights
    b: Float[Array, "GH"]
    Lambda: Float[Array, "H"]
    gates: ClassVar[str] = "ri"

    def sizes(self) -> tuple[int, int] | None:
        if self.P.ndim != 2:
            return None
        E, H = self.P.shape
        n = len(self.W)
        k = H // n
        of_gates = (n, k, 2 * k) if self.W.ndim == 3 else (H, 2 * H)
        shapes = [(E, H), (H,), of_gates, (2 * H,), (H,)]
        fits = [leaf.shape for leaf in vars(self).values()] == shapes
        return (E, H) if fits else None

    def hidden_sizes(self) -> str:
        return super().hidden_sizes() + num_blocks_of(self.W)

    def inputs(self, x: Float[Array, "*n E"]) -> Float[Array, "*n _"]:
        """Return u, and the arguments of the gates r and i, side by side."""
        u = plus(matmul(x, self.P), self.bp)
        return jnp.concatenate([u, plus(matmul(u, self.W), self.b)], axis=-1)

    def coefficients(
        self, inputs: Float[Array, "*n _"]
    ) -> tuple[Float[Array, "*n H"], Float[Array, "*n H"]]:
        u, r, i = jnp.split(inputs, 3, axis=-1)
        rate = 8 * softplus(self.Lambda.astype(u.dtype))
        log_a = -jax.lax.broadcast_to_rank(rate, u.ndim) * sigmoid(r)
        return jnp.exp(log_a), input_scale(log_a) * sigmoid(i) * u


def input_scale(log_a: Float[Array, "*n H"]) -> Float[Array, "*n H"]:
    """Return √(1 − a²), without the digits that 1 − a² loses where a is nearly 1.

    Where a rounds to 1, the root's gradient would be ∞, and its product with that of r NaN. It is 0
    here, which the product tends to as r closes.
    """
    square = -jnp.expm1(2 * log_a)
    is_open = square != 0
    return jnp.where(is_open, jnp.sqrt(jnp.where(is_open, square, 1)), 0)


@register
def init_rg_lru(
    key: PRNGKeyArray,
    in_features: int,
    hidden_dim: int,
    *,
    num_blocks: int = 1,
    dtype: DTypeLike = jnp.float32,
) -> RGLRUCell:
    """Draw the initial parameters of an RG-LRU layer.

    As in the paper, Λ is drawn so that exp(−8 · softplus(Λ)), which a unit keeps of its state where
    r = 1, is uniform in 0.9 … 0.999. P and W are normal with the variance 1/(their rows),
    truncated, and the biases are zeros.

    Args:
      in_features: E, the size of the input at a step.
      hidden_dim: H, the size of the state.
      num_blocks: n, of diagonal blocks of W, each for H/n units; a divisor of `hidden_dim`.
      dtype: of the parameters, floating-point.

    Raises:
      ValueError: an argument is not as described above, or two do not go together; the message says
        which and what would be right.

    Example:
      ```python
      layer = jaxgru.init_rg_lru(jax.random.key(0), in_features=3, hidden_dim=4, num_blocks=2)
      y, h = jaxgru.unroll(layer, jnp.ones((2, 5, 3)))
      ```
    """
    P, W, _ = initializers(
        in_features,
        hidden_dim,
        dtype,
        recurrent_kernel_init=lecun_normal(),
        num_blocks=num_blocks,
    )
    keys = jax.random.split(key, 4)
    H = hidden_dim
    kept = jax.random.uniform(keys[3], (H,), widest(dtype, jnp.float32), 0.9, 0.999)
    Lambda = jnp.log(jnp.expm1(-jnp.log(kept) / 8))  # the inverse of softplus
    return RGLRUCell(
        P=P(keys[0]),
        bp=jnp.zeros(H, dtype),
        W=gates(map(W, keys[1:3])),
        b=jnp.zeros(2 * H, dtype),
        Lambda=Lambda.astype(dtype),
    )
