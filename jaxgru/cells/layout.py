"""How a batch of states is stored as a matrix while a layer runs over time.

Letters as in `contract.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxgru.arrays import choose_rows, promoted_matmul
from jaxgru.cells.products import blocked_matmul, check_blocks, contract_axes, rounded_matmul
from jaxgru.cells.step_masks import Mask

T = TypeVar("T")


class Layout(NamedTuple):
    """How a batch of states is stored as a matrix, and the products with weights.

    XLA's CPU matmul repacks its right operand at each step. In columns, h (H, B), the state is that
    operand, so the weights are not repacked: faster for large weights and few rows (H = 1,024, one
    core, JAX 0.12: an LSTM with 32 rows 1.18×, a GRU with 16 rows 1.22×). In rows, h (B, H),
    nothing is transposed, and one product uses all cores: faster for many rows (H = 128, B = 1,024:
    1.24×), for small ones (H = 128, B = 16: 1.2×) and without a gradient.

    Attributes:
      axis: that of the units.
      matmul: (weights, factor) → their product.
      drop: dropout of h where it enters the products, in this layout.
    """

    axis: int
    matmul: Callable[[Array, Array], Array]
    drop: Callable[[Array], Array] = Mask()

    def times(self, U: Array, h: Array) -> Array:
        """Return the product of U and h, whose units dropout may drop."""
        if U.ndim == 3:
            check_blocks(self.transpose(U))
        return self.matmul(U, self.drop(h))

    def times_transposed(self, U: Array, d: Array) -> Array:
        """Return the gradient of h, given that of `times` and the transposed U."""
        return self.drop(self.matmul(U, d))

    def transpose(self, tree: T) -> T:
        """Transpose an array, or each array of a tree, between (..., B, H) and this layout."""
        if self.axis == -1:
            return tree
        return jax.tree.map(lambda x: jnp.swapaxes(x, -1, -2), tree)

    def weights(self, U: T) -> T:
        """Return weights in this layout; a vector (H) becomes a row or a column."""
        return self.transpose(jax.tree.map(lambda leaf: leaf[None] if leaf.ndim == 1 else leaf, U))

    def with_dropout(self, mask: Mask) -> Layout:
        """Return this layout with a dropout in its products; its mask is (B, H), in rows."""
        if mask.keep is None:
            return self
        keep = self.transpose(mask.keep)

        def drop(h: Array) -> Array:
            return Mask(jax.lax.broadcast_to_rank(keep, h.ndim), mask.scale)(h)

        return self._replace(drop=drop)

    def split(self, x: Array, G: int) -> list[Array]:
        """Split x into G gates."""
        return jnp.split(x, G, self.axis)

    def join(self, *parts: Array) -> Array:
        """Concatenate along the axis of the units."""
        return jnp.concatenate(parts, self.axis)

    def choose(self, flag: Bool[Array, "*T B"], x: T, y: T | None = None) -> T:
        """Return a carry: x in the rows of the batch where the flag is set, else y or zeros."""
        if self.axis == -1:
            return choose_rows(flag, x, y)
        if y is None:
            y = jax.tree.map(jnp.zeros_like, x)
        in_columns = flag[..., None, :]
        return jax.tree.map(lambda x, y: jnp.where(in_columns, x, y), x, y)


def _matmul_in_columns(
    U: Float[Array, "GH H"] | Float[Array, "blocks gk k"], h: Float[Array, "H B"]
) -> Float[Array, "GH B"]:
    if U.ndim == 3:
        return _blocked_matmul_in_columns(U, h)
    return contract_axes(U, h.astype(U.dtype), ((1,), (0,)), h.dtype)


def _blocked_matmul_in_columns(
    U: Float[Array, "blocks gk k"], h: Float[Array, "H B"]
) -> Float[Array, "GH B"]:
    """Return `blocked_matmul` in columns."""
    n, rows, _ = U.shape
    k = min(U.shape[1:])
    B = h.shape[1]
    gates = h.shape[0] // (n * k)
    by_block = h.astype(U.dtype).reshape(gates, n, k, B).swapaxes(0, 1).reshape(n, gates * k, B)
    y = contract_axes(U, by_block, ((2,), (1,)), h.dtype, ((0,), (0,)))
    return y.reshape(n, rows // k, k, B).swapaxes(0, 1).reshape(n * rows, B)


def plain_matmul(U: Array, h: Array) -> Array:
    """Return h·U, differentiated by JAX."""
    return promoted_matmul(h, U) if U.ndim < 3 else blocked_matmul(h, U)


IN_ROWS = Layout(-1, lambda U, h: rounded_matmul(h, U))  # h (B, H), U (H, GH)
IN_COLUMNS = Layout(-2, _matmul_in_columns)  # h (H, B), U (GH, H)
PLAIN = Layout(-1, plain_matmul)  # in rows, differentiated by JAX: for forward mode
