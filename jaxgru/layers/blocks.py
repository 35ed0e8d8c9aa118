"""The steps of a layer in blocks, so that the arrays of each stay in a CPU's cache."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax

from jaxgru.arrays import Size, Tree

ROWS_AT_ONCE = 512  # steps times rows of the batch
FEWEST_BLOCKS = 4


def block_length(T: Size, B: Size, H: int) -> Size:
    """Return how many steps of a layer are computed at once: x·W, the recurrence, the gradients.

    All of them on a GPU, or if they are few. On a CPU, as many as fit in the cache, but enough to
    amortize the sum of the weights' gradients over the blocks. With many rows and few units, one
    step is enough: over 64 rows × 128 steps, on one core of an AMD EPYC with JAX 0.12, the gradient
    of a GRU or an LSTM of 32 or 64 units is 1.06 to 1.15× as fast as with 8 steps at once.
    """
    if jax.default_backend() != "cpu" or not isinstance(T, int) or not isinstance(B, int):
        return T  # `jax.export` has symbolic sizes
    length = max(_rows_at_once(B, H) // max(B, 1), 1)
    if T < FEWEST_BLOCKS * length:  # about as fast, and compiled in three quarters of the time
        return T
    num_blocks = math.ceil(T / length)
    return nearest_divisor(T, length) or math.ceil(T / num_blocks)


def _rows_at_once(B: int, H: int) -> int:
    """Return how many rows, of all steps of a block together, are computed at once."""
    if B >= 32 and H <= 64:
        return 32
    return ROWS_AT_ONCE if H < 512 else 2 * ROWS_AT_ONCE


def nearest_divisor(T: int, wanted: int) -> int | None:
    """Return the divisor of T nearest to a number; None if none is within half of it."""
    near = range(wanted // 2 + 1, wanted + wanted // 2 + 1)
    divisors = [length for length in near if T % length == 0]
    return min(divisors, key=lambda length: abs(length - wanted), default=None)


def in_blocks(
    run: Callable[[Tree, Tree], tuple[Tree, Tree]],
    carry: Tree,
    inputs: Tree,
    length: Size,
) -> tuple[Tree, Tree]:
    """Apply `run`, (carry, inputs (T, ...)) → (carry, outputs (T, ...)), block by block.

    A block has `length` steps, which divides T.
    """
    T = jax.tree.leaves(inputs)[0].shape[0]
    if length == T:
        return run(carry, inputs)
    blocks = jax.tree.map(lambda a: a.reshape(T // length, length, *a.shape[1:]), inputs)
    carry, outputs = jax.lax.scan(run, carry, blocks)
    return carry, jax.tree.map(lambda h: h.reshape(T, *h.shape[2:]), outputs)
