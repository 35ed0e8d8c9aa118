"""What no step reads: the carry of a row that takes no step, or none before its first reset.

Such a carry may hold anything, also NaN. 0 · NaN is NaN, so a step must not even compute with it
and drop the result: a weight's gradient is a sum over all rows. A start takes its place, and the
row still gets its own carry back. `unroll` sets the input of padded steps to zero in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxgru.cells.carry import Tree
from jaxgru.cells.contract import CellParams
from jaxgru.cells.layout import IN_ROWS
from jaxgru.cells.marks import Marks
from jaxgru.cells.promotion import in_dtypes_of
from jaxgru.layers.validate import Carries


def without_unread(stack: Sequence[CellParams], marks: Marks, carry: Carries) -> Carries:
    """Return the carry with a start of the layers in the rows that do not read it.

    Args:
      marks: padding and resets of all layers, in the order in which the steps are read.
    """
    if marks.real is None:
        return carry
    B = marks.real.shape[1]
    start = tuple(layer.zero_carry(B) for layer in stack)
    is_read = first_step(marks.real) < len(marks.real)
    if marks.reset is not None:
        is_read &= first_step(marks.real) < first_step(marks.reset)
    return IN_ROWS.choose(is_read, carry, in_dtypes_of(carry, start))


def with_unread(marks: Marks, given: Carries, last: Carries, each: Tree) -> tuple[Carries, Tree]:
    """Return the last carries, and those of each step, with `given` before a row's first event.

    Args:
      marks: as for `without_unread`.
      given: the carry before the first step.
      each: the carries after each step (T, …), or None.
    """
    if marks.real is None:
        return last, each
    T = len(marks.real)
    begins = marks.real if marks.reset is None else marks.real | marks.reset
    first = first_step(begins)
    last = IN_ROWS.choose(first < T, last, given)
    if each is not None:
        given_each = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (T, *leaf.shape)), given)
        has_begun = jnp.arange(T)[:, None] >= first[None]
        each = IN_ROWS.choose(has_begun, each, given_each)
    return last, each


def first_step(flags: Bool[Array, "T B"]) -> Int[Array, "B"]:
    """Return the first step at which a row's flag is set; T, if there is none."""
    return jnp.where(flags.any(0), jnp.argmax(flags, axis=0), len(flags))
