"""The hidden layer of Bengio et al. 2003 (JMLR 3, section 2), written as a cell.

    h' = tanh(x₋ₖ₊₁·W[0] + … + x₋₁·W[K−2] + x·W[K−1] + b)

The state is the K − 1 inputs before the current one, oldest first, padded with zeros at the start.
The carry also holds h, but only for the layer above to read: h' does not depend on it. The paper's
optional direct connections from the inputs to the logits are left out.
"""

from __future__ import annotations

from functools import partial
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.arrays import Size, plus, widest
from jaxgru.cells.carry import Hidden
from jaxgru.cells.contract import Cell, register
from jaxgru.cells.initial_weights import initializers
from jaxgru.cells.layout import Layout
from jaxgru.cells.products import Lookup, apply_to, matmul
from jaxgru.cells.step_masks import StepMasks
from jaxgru.pytrees import struct

Context: TypeAlias = Float[Array, "B _ _"]  # (B, K − 1, E); E differs from layer to layer

UNROLLED = 16  # up to so many positions, each has a product of its own; XLA takes minutes for 100


@struct
class MLPCell(Cell[tuple[Hidden, Context]]):
    """An MLP layer: W[j] for the input of K − 1 − j steps ago, b the bias."""

    W: Float[Array, "K E H"]
    b: Float[Array, "H"]

    def sizes(self) -> tuple[int, int] | None:
        fits = self.W.ndim == 3 and self.b.shape == self.W.shape[2:]
        return (self.W.shape[1], self.W.shape[2]) if fits else None

    def zero_carry(self, batch_size: Size) -> tuple[Hidden, Context]:
        """Return the carry before the first step: zeros, (B, H) and (B, K − 1, E)."""
        K, E, H = self.W.shape
        h = jnp.zeros((batch_size, H), self.b.dtype)
        context = jnp.zeros((batch_size, K - 1, E), self.b.dtype)
        return h, context

    def step(
        self, layout: Layout, carry: tuple[Hidden, Context], x: Float[Array, "B E"]
    ) -> tuple[Hidden, Context]:
        _, context = carry
        inputs = jnp.concatenate([context, x[:, None]], axis=1)
        a = plus(jnp.einsum("bke,keh->bh", inputs, self.W.astype(x.dtype)), self.b)
        return jnp.tanh(a), inputs[:, 1:]

    def parallel(
        self,
        carry: tuple[Hidden, Context],
        x: Float[Array, "T B E"] | Lookup,
        masks: StepMasks,
    ) -> tuple[Float[Array, "T B H"], tuple[Hidden, Context]]:
        """Compute all steps at once, with dropout: there is no recurrence."""
        _, context = carry
        new = apply_to(self.inputs, x)
        T = new.shape[0]
        K = len(self.W)
        dtype = widest(context, new)
        x = jnp.concatenate([context.swapaxes(0, 1).astype(dtype), new.astype(dtype)])

        @partial(jax.checkpoint, prevent_cse=False)  # keeps W, and not the inputs of each position
        def add(a: Array, position: tuple[Array, Array]) -> tuple[Array, None]:
            j, W = position
            return a + matmul(jax.lax.dynamic_slice_in_dim(x, j, T), W), None

        if K <= UNROLLED:
            a = cast(Array, sum(matmul(x[j : j + T], W) for j, W in enumerate(self.W)))
        else:
            a, _ = jax.lax.scan(add, matmul(x[:T], self.W[0]), (jnp.arange(1, K), self.W[1:]))
        h = masks.hidden(jnp.tanh(plus(a, self.b)))
        return h, (h[-1], x[T:].swapaxes(0, 1))


@register
def init_mlp(
    key: PRNGKeyArray,
    in_features: int,
    hidden_dim: int,
    *,
    context_length: int,
    dtype: DTypeLike = jnp.float32,
) -> MLPCell:
    """Draw the initial parameters of an MLP layer that sees K = `context_length` inputs.

    W and b are uniform in ±1/√(K·E), as of an `nn.Linear` of K concatenated inputs.

    Example:
      ```python
      layer = jaxgru.cells.init_mlp(jax.random.key(0), 3, 4, context_length=2)
      y, (h, last_inputs) = jaxgru.unroll(layer, jnp.ones((2, 5, 3)))
      ```
    """
    K = context_length
    W, _, b = initializers(K * in_features, hidden_dim, dtype, "pytorch")
    k_weight, k_bias = jax.random.split(key)
    return MLPCell(W=W(k_weight).reshape(K, in_features, hidden_dim), b=b(k_bias))
