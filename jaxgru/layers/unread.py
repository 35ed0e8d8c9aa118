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

from jaxgru.arrays import Tree, choose_rows, in_dtypes_of
from jaxgru.cells.contract import AnyCell
from jaxgru.cells.step_masks import StepMasks
from jaxgru.layers.validate import Carries


def without_unread(stack: Sequence[AnyCell], masks: StepMasks, carry: Carries) -> Carries:
    """Return the carry with a start of the layers in the rows that do not read it.

    Args:
      masks: padding and resets of all layers, in the order in which the steps are read.
    """
    if masks.valid is None:
        return carry
    B = masks.valid.shape[1]
    start = tuple(layer.zero_carry(B) for layer in stack)
    is_read = first_step(masks.valid) < masks.valid.shape[0]
    if masks.reset is not None:
        is_read &= first_step(masks.valid) < first_step(masks.reset)
    return choose_rows(is_read, carry, in_dtypes_of(carry, start))


def with_unread(
    masks: StepMasks, given: Carries, last: Carries, each: Tree
) -> tuple[Carries, Tree]:
    """Return the last carries, and those of each step, with `given` before a row's first event.

    Args:
      masks: as for `without_unread`.
      given: the carry before the first step.
      each: the carries after each step (T, …), or None.
    """
    if masks.valid is None:
        return last, each
    T = masks.valid.shape[0]
    begins = masks.valid if masks.reset is None else masks.valid | masks.reset
    first = first_step(begins)
    last = choose_rows(first < T, last, given)
    if each is not None:
        given_each = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (T, *leaf.shape)), given)
        has_begun = jnp.arange(T)[:, None] >= first[None]
        each = choose_rows(has_begun, each, given_each)
    return last, each


def first_step(flags: Bool[Array, "T B"]) -> Int[Array, "B"]:
    """Return the first step at which a row's flag is set; T, if there is none."""
    return jnp.where(flags.any(0), jnp.argmax(flags, axis=0), flags.shape[0])
