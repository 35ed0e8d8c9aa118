"""Less memory for a gradient: keep the carries between segments, compute the rest again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxgru.arrays import Tree, rounded_inside, vary_alike
from jaxgru.cells.carry import Carry
from jaxgru.cells.contract import AnyCell
from jaxgru.cells.products import Lookup
from jaxgru.cells.step_masks import StepMasks
from jaxgru.layers.blocks import in_blocks, nearest_divisor
from jaxgru.layers.dropout import Dropouts, dropout_at_step
from jaxgru.layers.implementations import StackOptions, run_stack
from jaxgru.layers.masks import dropout_masks


def run_in_segments(
    options: StackOptions,
    reverse: bool,
    layers: Sequence[AnyCell],
    x: Float[Array, "T B E"] | Lookup,
    carry: Sequence[Carry],
    flags: Sequence[StepMasks],
    dropout: Dropouts,
) -> tuple[Array, tuple[Carry, ...], tuple[Tree, ...] | None]:
    """Compute `run_stack` `in_segments`, each of which also draws its masks anew.

    With `reverse`, the steps come from the last to the first, and so do the masks.
    """
    layers, x, carry, flags = vary_alike((layers, x, carry, flags))
    T, B = x.shape[:2]
    table = None
    steps = x
    if isinstance(x, Lookup):
        table = x.table
        steps = x.ids
    weights = rounded_inside((layers, table))

    def segment(
        carry: tuple[Carry, ...], of_segment: tuple[Array, Array, list[StepMasks]]
    ) -> tuple[tuple[Carry, ...], Tree]:
        layers, table = weights()
        numbers, steps, sliced = of_segment
        first_step = numbers[-1 if reverse else 0]
        dropout_here = dropout_at_step(dropout, first_step)
        masks = dropout_masks(layers, dropout_here, B, len(numbers), reverse)
        now = [
            masks_of_layer.with_flags_of(flags_of_layer.at(of_steps))
            for masks_of_layer, flags_of_layer, of_steps in zip(masks, flags, sliced, strict=True)
        ]
        inputs = steps if table is None else Lookup(table, steps)
        y, carry, carries = run_stack(options, layers, inputs, carry, now)
        return carry, (y, carries)

    numbers = jnp.arange(T)[::-1] if reverse else jnp.arange(T)
    inputs = numbers, steps, [of_layer.each_step() for of_layer in flags]
    ends, (y, carries) = in_segments(segment, tuple(carry), inputs)
    return y, ends, carries


def in_segments(
    run: Callable[[Tree, Tree], tuple[Tree, Tree]], carry: Tree, inputs: Tree
) -> tuple[Tree, Tree]:
    """Apply `run` to segments of about √T steps in turn, and keep no more than their carries.

    What the gradient needs of a segment is computed anew when its turn comes (Chen et al. 2016,
    arXiv 1604.06174): the memory of 2√T steps instead of T, and one more forward pass.

    Args:
      run: (carry, steps) → (carry, outputs), for any number of steps.
      carry: the state before the first step, any pytree.
      inputs: a pytree of arrays (T, …).

    Returns:
      The last carry, and the outputs of all steps.
    """
    T = jax.tree.leaves(inputs)[0].shape[0]
    again = jax.checkpoint(run, prevent_cse=False)  # within a scan, nothing is merged
    length = nearest_divisor(T, math.isqrt(T)) or math.isqrt(T)
    whole = T - T % length
    most = jax.tree.map(lambda a: a[:whole], inputs)
    carry, first = in_blocks(again, carry, most, length)
    if whole == T:
        return carry, first
    carry, last = again(carry, jax.tree.map(lambda a: a[whole:], inputs))
    return carry, jax.tree.map(lambda *h: jnp.concatenate(h), first, last)
