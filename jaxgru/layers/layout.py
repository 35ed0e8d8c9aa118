"""How a batch of states is stored as a matrix while a layer runs over time.

Letters as in `cells/base.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxgru.cells.base import Size, apply_mask
from jaxgru.cells.products import contract, dot


class Layout(NamedTuple):
    """How a batch of states is stored as a matrix, and the products with weights.

    XLA's CPU matmul repacks its right operand at each step. In columns, h (H, B), the state is that
    operand, so the weights are not repacked: faster for large weights and few rows (LSTM of
    H = 1,024, B = 32 on one core: 1.11×). In rows, h (B, H), nothing is transposed, and one product
    uses all cores: faster for many rows (H = 128, B = 1,024: 1.24×), for small ones (H = 128,
    B = 16: 1.2×) and without a gradient.

    Attributes:
      axis: that of the units.
      product: (weights, factor) → their product.
      times: the same of U and h, where dropout may drop units of h.
    """

    axis: int
    product: Callable[[Array, Array], Array]
    times: Callable[[Array, Array], Array]

    def turn(self, x: Array) -> Array:
        """Transpose between (..., B, H) and this layout; a vector (H) becomes a row or a column."""
        x = x[None] if x.ndim == 1 else x
        return x if self.axis == -1 else jnp.swapaxes(x, -1, -2)

    def gates(self, x: Array, G: int) -> list[Array]:
        """Split x into G gates."""
        return jnp.split(x, G, self.axis)

    def join(self, *parts: Array) -> Array:
        """Concatenate along the axis of the units."""
        return jnp.concatenate(parts, self.axis)

    def choose(self, flag: Bool[Array, "*T B"], x: Any, y: Any = None) -> Any:
        """Return a carry: x in the rows of the batch where the flag is set, else y or zeros."""

        def where(x: Array, y: Array) -> Array:
            if self.axis == -2:
                return jnp.where(flag[..., None, :], x, y)
            return jnp.where(flag.reshape(*flag.shape, *[1] * (x.ndim - flag.ndim)), x, y)

        return jax.tree.map(where, x, jax.tree.map(jnp.zeros_like, x) if y is None else y)

    def masked(
        self, keep: Bool[Array, "..."] | None, scale: Array | None, gradient: bool = False
    ) -> Layout:
        """Return the layout whose products take h without the units that dropout drops.

        Args:
          keep: (B, H) in this layout; None: all.
          gradient: mask the results instead: the products are with U transposed.
        """
        if keep is None:
            return self

        def drop(h: Array) -> Array:
            return apply_mask(h, jax.lax.broadcast_to_rank(keep, h.ndim), scale)

        if gradient:
            return self._replace(times=lambda U, d: drop(self.product(U, d)))
        return self._replace(times=lambda U, h: self.product(U, drop(h)))


def _columns_dot(
    U: Float[Array, "GH H"] | Float[Array, "blocks gk k"], h: Float[Array, "H B"]
) -> Float[Array, "GH B"]:
    if U.ndim == 3:
        return _columns_of_blocks(U, h)
    return contract(U, h.astype(U.dtype), ((1,), (0,)), h.dtype)


def _columns_of_blocks(
    U: Float[Array, "blocks gk k"], h: Float[Array, "H B"]
) -> Float[Array, "GH B"]:
    """Return `blocks_dot` in columns."""
    (n, rows, _), k, B = U.shape, min(U.shape[1:]), h.shape[1]
    gates = h.shape[0] // (n * k)
    by_block = h.astype(U.dtype).reshape(gates, n, k, B).swapaxes(0, 1).reshape(n, gates * k, B)
    y = contract(U, by_block, ((2,), (1,)), h.dtype, ((0,), (0,)))
    return y.reshape(n, rows // k, k, B).swapaxes(0, 1).reshape(n * rows, B)


_rows_dot = lambda U, h: dot(h, U)
IN_ROWS = Layout(-1, _rows_dot, _rows_dot)  # h (B, H), U (H, GH)
IN_COLUMNS = Layout(-2, _columns_dot, _columns_dot)  # h (H, B), U (GH, H)


def is_small(B: Size, H: int) -> bool:
    """Return whether a step is so small that the overhead of each operation dominates its time.

    The factors of its gradient are then computed beforehand, for all steps at once: a training step
    of H = 128 and B = 16, 32, 64 is 1.2×, 1.1×, 1.04× as fast; one of H = 512 and B = 64 would take
    1.05 times as long.
    """
    return isinstance(B, int) and B * H <= 2**13  # `jax.export` has symbolic sizes


def training_layout(B: Size, H: int) -> Layout:
    """Return the layout of a forward pass whose gradient is taken, and of its backward pass."""
    if not isinstance(B, int) or B >= 64 or is_small(B, H):
        return IN_ROWS
    return IN_COLUMNS
