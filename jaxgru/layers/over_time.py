"""A recurrent layer over all steps, forward and backward: `over_time` runs a cell's `Recurrence`.

Letters as in `cells/contract.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxgru.arrays import Size, Tree
from jaxgru.cells.carry import C, Carry, besides_hidden, hidden, with_hidden
from jaxgru.cells.contract import AnyRecurrence, Recurrence, Weights
from jaxgru.cells.layout import IN_COLUMNS, IN_ROWS, Layout
from jaxgru.cells.step_masks import NO_MASKS, StepMasks, before_each, mixed

S = TypeVar("S")
T = TypeVar("T")
Stored: TypeAlias = tuple[Weights, Carry, Array, Tree, StepMasks]


def training_layout(B: Size, H: int) -> Layout:
    """Return the layout of a forward pass whose gradient is taken, and of its backward pass.

    Columns are faster for large weights and few rows. On one core of an AMD EPYC (Zen 3) with JAX
    0.12, over 32 steps of a GRU (E = H), the time in rows is so many times that in columns:

        B      H = 512     H = 768     H = 1,024
        4                  3.0         2.5
        8      1.3         2.3         2.7
        16     1.2         1.9         2.1
        32     1.3         1.5         1.5
        48                             1.2

    An LSTM's times are alike. Up to 512 units, processors disagree: on a Zen 4, rows are up to 1.5
    times as fast.
    """
    is_known = isinstance(B, int)  # `jax.export` has symbolic sizes
    return IN_COLUMNS if is_known and H >= 768 and 4 <= B <= 32 else IN_ROWS


def transpose_masks(layout: Layout, masks: StepMasks) -> StepMasks:
    """Return the masks with the arrays that have units in a layout."""
    hidden = masks.hidden._replace(keep=layout.transpose(masks.hidden.keep))
    zoneout, reset_carry = layout.transpose((masks.zoneout, masks.reset_carry))
    return masks._replace(hidden=hidden, zoneout=zoneout, reset_carry=reset_carry)


def advance(
    layout: Layout, equations: Callable[[C], tuple[C, S]], carry: C, now: StepMasks
) -> tuple[C, C, S]:
    """Compute one step with its reset, dropout, zoneout and padding.

    Args:
      equations: carry → the next carry, and the residuals of the step.
      now: the masks of the step.

    Returns:
      The next carry; what it is without zoneout and padding; and the equations' residuals.
    """
    before = carry
    if now.reset is not None:
        before = layout.choose(~now.reset, carry, now.reset_carry)
    new, residuals = equations(before)
    new = with_hidden(new, now.hidden(hidden(new)))
    after = new
    if now.zoneout is not None:
        after = jax.tree.map(mixed, now.zoneout, new, before)
    if now.valid is not None:
        after = layout.choose(now.valid, after, before)
    return after, new, residuals


def over_time(
    recurrence: Recurrence[C],
    U: Weights,
    carry: C,
    a: Array,
    masks: StepMasks = NO_MASKS,
    return_carries: bool = False,
) -> tuple[Tree, C]:
    """Run a recurrence over all steps, with its own gradient.

    The backward scan carries only the gradient of the state and stores what the gradients of the
    weights need, so each of these is ONE product after the scan.

    Args:
      carry: the state before the first step.
      a: (T, B, …), what each step reads of its input.
      masks: of these, only `reset_carry` is differentiated.
      return_carries: return the whole carry of every step, not only h.

    Returns:
      h (T, B, H) of every step, or the carry of every step; and the carry after the last one.
    """
    # The carry can be wider than the layer, and `_backward` computes all gradients in its dtype.
    # What is converted here gets a gradient of its own dtype.
    dtype = hidden(carry).dtype
    U = vectors_in(dtype, U)
    a = a.astype(dtype)
    reset_carry = jax.tree.map(lambda leaf: leaf.astype(dtype), masks.reset_carry)
    return _over_time(
        recurrence, return_carries, U, carry, a, masks._replace(reset_carry=reset_carry)
    )


def vectors_in(dtype: DTypeLike, weights: T) -> T:
    """Return weights with the vectors, such as biases, in a dtype, and the matrices as they are."""
    return jax.tree.map(lambda leaf: leaf if leaf.ndim > 1 else leaf.astype(dtype), weights)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _over_time(
    recurrence: AnyRecurrence,
    return_carries: bool,
    U: Weights,
    carry: Carry,
    a: Array,
    masks: StepMasks,
) -> tuple[Tree, Carry]:
    # XLA vectorizes the gates only if each is an array of its own: with the reset gate after the
    # product, H = 128 and B = 16, a step then takes 21 µs instead of 50
    gates = IN_ROWS.split(a, recurrence.num_gates)
    return _scan(IN_ROWS, recurrence, return_carries, U, carry, gates, masks)[:2]


def _forward(
    recurrence: AnyRecurrence,
    return_carries: bool,
    U: Weights,
    carry: Carry,
    a: Array,
    masks: StepMasks,
) -> tuple[tuple[Tree, Carry], Stored]:
    layout = training_layout(*hidden(carry).shape)
    outputs, last, residuals = _scan(
        layout, recurrence, return_carries, U, carry, [a], masks, save=True
    )
    return (outputs, last), (U, carry, hidden(outputs), residuals, masks)


def _scan(
    layout: Layout,
    recurrence: AnyRecurrence,
    return_carries: bool,
    U: Weights,
    carry: Carry,
    parts: list[Array],
    masks: StepMasks,
    save: bool = False,
) -> tuple[Tree, Carry, Tree]:
    """Return the output of every step and the last carry, in rows; and what the gradient needs.

    The latter is in the layout: the carry after every step, without h, and before zoneout if there
    is any; and what the steps save.
    """
    masked_layout = layout.with_dropout(masks.recurrent)
    U = layout.weights(U)
    masks = transpose_masks(layout, masks)
    gates_per_part = recurrence.num_gates // len(parts)

    def step(carry: Carry, inputs: tuple[list[Array], StepMasks]) -> tuple[Carry, Tree]:
        parts, now = inputs
        gates: list[Array] = []
        for part in parts:
            gates += layout.split(layout.transpose(part), gates_per_part)

        def equations(carry: Carry) -> tuple[Carry, Weights]:
            return recurrence.step(masked_layout, U, carry, gates)

        after, new, residuals = advance(layout, equations, carry, masks.at(now))
        outputs = layout.transpose(after if return_carries else hidden(after))
        if not save:
            return after, (outputs, None)
        others_before_zoneout = None if masks.zoneout is None else besides_hidden(new)
        return after, (outputs, (besides_hidden(after), others_before_zoneout, residuals))

    inputs = parts, masks.each_step()
    last, (outputs, residuals) = jax.lax.scan(step, layout.transpose(carry), inputs)
    return outputs, layout.transpose(last), residuals


def _backward(
    recurrence: AnyRecurrence,
    return_carries: bool,
    stored: Stored,
    cotangents: tuple[Tree, Carry],
) -> tuple[Weights, Carry, Array, StepMasks]:
    U, first, h, residuals, masks = stored
    layout = training_layout(*h.shape[1:])
    masked_layout = layout.with_dropout(masks.recurrent)
    in_layout = transpose_masks(layout, masks)
    transposed_U = layout.weights(transpose_matrices(U))
    before, after, step_residuals = _states(layout, in_layout, first, h, residuals)

    def step(gradients: Tree, inputs: Tree) -> tuple[Tree, Weights]:
        d_carry, d_reset_carry = gradients
        d_output, states, now = inputs
        now = in_layout.at(now)
        d_carry = plus_output(d_carry, d_output, return_carries)
        d_after, d_kept = undo_padding(layout, now, d_carry)
        d_new, d_old = undo_zoneout(now, d_after)
        d_new = with_hidden(d_new, now.hidden(hidden(d_new)))
        d_before, backward_residuals = recurrence.step_gradient(
            masked_layout, transposed_U, d_new, *states
        )
        d_before = added(d_before, d_old, d_kept)
        return undo_reset(layout, now, d_before, d_reset_carry), backward_residuals

    d_outputs, d_last = layout.transpose(cotangents)
    start = d_last, jax.tree.map(jnp.zeros_like, in_layout.reset_carry)
    states = before, after, step_residuals
    inputs = d_outputs, states, in_layout.each_step()
    gradients, backward_residuals = jax.lax.scan(step, start, inputs, reverse=True)

    d_carry, d_reset_carry = layout.transpose(gradients)
    in_rows = IN_ROWS.with_dropout(masks.recurrent)
    dU, da = recurrence.gradients(in_rows, U, *layout.transpose((*states, backward_residuals)))
    return dU, d_carry, da, StepMasks(reset_carry=d_reset_carry)


def _states(
    layout: Layout, masks: StepMasks, first: Carry, h: Array, residuals: Tree
) -> tuple[Tree, Tree, Weights]:
    """Return the carry before and after each step, as the equations saw them, and their residuals.

    Args:
      masks: in the layout; the other arguments are as `_forward` stored them.
    """
    others, others_before_zoneout, step_residuals = residuals
    first = layout.transpose(first)
    after = with_hidden(first, layout.transpose(h), others)
    before = jax.tree.map(before_each, first, after)
    if masks.reset is not None:
        before = layout.choose(~masks.reset, before, masks.reset_carry)
    if others_before_zoneout is not None:
        after = with_hidden(after, hidden(after), others_before_zoneout)
    return before, after, step_residuals


# `advance` applies a reset, the equations, zoneout and padding, in this order. These undo them.


def plus_output(d_carry: Carry, d_output: Tree, whole_carry: bool) -> Carry:
    """Return the gradient of the carry after a step, which is also the step's output."""
    if whole_carry:
        return jax.tree.map(jnp.add, d_carry, d_output)
    return with_hidden(d_carry, hidden(d_carry) + d_output)


def undo_padding(layout: Layout, now: StepMasks, d_carry: Carry) -> tuple[Carry, Carry | None]:
    """Return the gradients of the carry after a step that was taken, and of one that was kept."""
    if now.valid is None:
        return d_carry, None
    return layout.choose(now.valid, d_carry), layout.choose(~now.valid, d_carry)


def undo_zoneout(now: StepMasks, d_after: Carry) -> tuple[Carry, Carry | None]:
    """Return the gradients of the new values, and of the old values that zoneout kept."""
    if now.zoneout is None:
        return d_after, None
    d_new = jax.tree.map(lambda zoneout, d: mixed(zoneout, d, 0), now.zoneout, d_after)
    d_old = jax.tree.map(
        lambda zoneout, d: mixed(zoneout, jnp.zeros_like(d), d), now.zoneout, d_after
    )
    return d_new, d_old


def undo_reset(
    layout: Layout, now: StepMasks, d_before: Carry, d_reset_carry: Tree
) -> tuple[Carry, Tree]:
    """Return the gradients of the carry that a reset replaced, and of what it was set to."""
    if now.reset is None:
        return d_before, d_reset_carry
    if d_reset_carry is not None:
        d_reset_carry = added(d_reset_carry, layout.choose(now.reset, d_before))
    return layout.choose(~now.reset, d_before), d_reset_carry


def added(carry: Carry, *others: Carry | None) -> Carry:
    """Return the sum of carries; None counts as zeros."""
    for other in others:
        if other is not None:
            carry = jax.tree.map(jnp.add, carry, other)
    return carry


def transpose_matrices(U: Weights) -> Weights:
    """Return the matrices transposed, and the vectors as they are."""
    return tuple(leaf.mT if leaf.ndim > 1 else leaf for leaf in U)


_over_time.defvjp(_forward, _backward)
