"""A stack of layers in one direction: reversal, padding, remat and several batch axes around it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, UInt32

from jaxgru.arrays import Size, Tree, choose_rows, in_dtypes_of, sharded_by_xla
from jaxgru.cells.carry import Carry
from jaxgru.cells.contract import AnyCell, starts_at_zero
from jaxgru.cells.products import Lookup, map_steps
from jaxgru.cells.step_masks import StepMasks
from jaxgru.layers import validate
from jaxgru.layers.dropout import Dropouts, in_rows, seed_dropout
from jaxgru.layers.implementations import StackOptions, run_stack
from jaxgru.layers.masks import dropout_masks
from jaxgru.layers.remat import run_in_segments
from jaxgru.layers.sequences import Options, Sequences
from jaxgru.layers.sharding import over_batch_axes, steps_of
from jaxgru.layers.unread import with_unread, without_unread
from jaxgru.layers.validate import Carries
from jaxgru.steps import in_reading_order

Resets: TypeAlias = tuple[Carry | None, ...]
"""What a reset sets, with an entry per layer; None: zeros."""


class Start(NamedTuple):
    """The carry before the first step, and what a reset sets, with an entry per layer."""

    carry: Carries
    of_reset: Resets


def start_of(
    stack: Sequence[AnyCell],
    is_single: bool,
    sequences: Sequences,
    carry: Tree,
    reset_carry: Tree,
) -> Start:
    """Return where layers start, given what a user passes for the carry and `reset_carry`."""
    batch = sequences.batch
    inner_batch = sequences.inner_batch
    other = sequences.other_order()
    like = validate.carry_like(stack, math.prod(batch))
    start = None
    if carry is not None:
        start = validate.as_carry(carry, like, is_single, batch, inner_batch, other)
    if reset_carry is not None:
        of_reset = validate.as_reset_carry(
            reset_carry, like, is_single, start, batch, inner_batch, other
        )
        return Start(start or of_reset, of_reset)
    of_cells = zero_carries(stack, inner_batch)
    start = start or of_cells
    if sequences.reset is None:
        return Start(start, (None,) * len(stack))
    of_reset = [
        None if starts_at_zero(layer) else in_dtypes_of(part, of_cell)
        for layer, part, of_cell in zip(stack, start, of_cells, strict=True)
    ]
    return Start(start, tuple(of_reset))


def zero_carries(stack: Sequence[AnyCell], batch: tuple[Size, ...]) -> tuple[Tree, ...]:
    """Return the carry before the first step of each layer, with these batch axes."""
    carries = tuple(layer.zero_carry(math.prod(batch)) for layer in stack)
    carries = jax.tree.map(validate.strongly_typed, carries)
    if len(batch) == 1:
        return carries
    return jax.tree.map(lambda leaf: leaf.reshape(*batch, *leaf.shape[1:]), carries)


def run_direction(
    options: Options,
    is_residual: bool,
    stack: Sequence[AnyCell],
    sequences: Sequences,
    start: Start,
    dropout: Dropouts,
) -> tuple[Array, Carries, Tree]:
    """Compute layers in one direction.

    Returns:
      y; the last carries; and, with `return_carries`, those of every step.
    """
    inner_batch = sequences.inner_batch
    x = _in_dtype_of(stack, sequences.x)
    if options.remat and is_symbolic_dim(x.shape[0]):
        raise ValueError(f"the number of steps is {x.shape[0]}; remat needs it to be known.")

    def run(
        inputs: tuple[Array | Lookup, Array | None, Array | None, Array | None],
        carry: Carries,
        of_reset: Resets,
        row: UInt32[Array, "B"] | None,
        stack: Sequence[AnyCell],
        dropout: Dropouts,
    ) -> tuple[Array, Carries, Tree]:
        start = Start(carry, of_reset)
        return _run_rows(options, is_residual, stack, *inputs, start, in_rows(dropout, row))

    row = None
    if len(inner_batch) > 1:
        row = jnp.arange(math.prod(inner_batch), dtype=jnp.uint32).reshape(inner_batch)
    axes = tuple(range(1, 1 + len(inner_batch)))
    run_all = over_batch_axes(run, x, inner_batch)
    run_all = sharded_by_xla(run_all, steps_of(x), (0, *axes, None), axes, (0, *axes))
    inputs = x, sequences.reset, sequences.valid, sequences.mask
    return run_all(inputs, start.carry, start.of_reset, row, stack, dropout)


def _in_dtype_of(stack: Sequence[AnyCell], x: Array | Lookup) -> Array | Lookup:
    """Return the input in the dtype of the first layer."""
    dtype = jax.tree.leaves(validate.carry_like(stack, 1))[0].dtype
    if isinstance(x, Lookup):
        return Lookup(jnp.asarray(x.table, dtype), x.ids)
    return jnp.asarray(x, dtype)


def _run_rows(
    options: Options,
    is_residual: bool,
    stack: Sequence[AnyCell],
    x: Array | Lookup,
    reset: Array | None,
    valid: Array | None,
    mask: Array | None,
    start: Start,
    dropout: Dropouts,
) -> tuple[Array, Carries, Tree]:
    """Compute rows of one batch axis; the arguments are as in `Sequences`."""
    T, B = x.shape[:2]
    reverse = options.reverse
    if reverse:
        x = map_steps(lambda a: a[::-1], x)
        reset = None if reset is None else in_reading_order(reset, mask)
    no_resets: Resets = (None,) * len(stack)
    of_reset = no_resets if reset is None else start.of_reset
    flags = [StepMasks(reset, of_layer, valid) for of_layer in of_reset]
    if reverse:
        flags = [of_layer.reversed() for of_layer in flags]

    of_stack = StackOptions(options.implementation, options.return_carries, is_residual)
    carry = without_unread(stack, flags[0], start.carry)
    if options.remat:
        seeds = seed_dropout(dropout, stack)
        y, last, each = run_in_segments(of_stack, reverse, stack, x, carry, flags, seeds)
    else:
        of_dropout = dropout_masks(stack, dropout, B, T, reverse)
        masks = [
            of_layer.with_flags_of(flags_of_layer)
            for of_layer, flags_of_layer in zip(of_dropout, flags, strict=True)
        ]
        y, last, each = run_stack(of_stack, stack, x, carry, masks)
    last, each = with_unread(flags[0], start.carry, last, each)

    if reverse:
        y, each = jax.tree.map(lambda h: h[::-1], (y, each))
    if valid is not None:
        y = choose_rows(valid, y)
    return y, last, each
