"""A recurrent layer over all steps, forward and backward: `over_time` runs a cell's `Recurrence`.

Letters as in `cells/contract.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxgru.cells.carry import C, Carry, Size, Tree, besides_hidden, hidden, with_hidden
from jaxgru.cells.contract import AnyRecurrence, Recurrence, Weights
from jaxgru.cells.layout import IN_COLUMNS, IN_ROWS, Layout
from jaxgru.cells.marks import NO_MARKS, Marks, before_each, mixed

S = TypeVar("S")
Residuals: TypeAlias = tuple[Weights, Carry, Array, Tree, Marks]


def training_layout(B: Size, H: int) -> Layout:
    """Return the layout of a forward pass whose gradient is taken, and of its backward pass."""
    if not isinstance(B, int) or B >= 64 or B * H <= 2**13:
        return IN_ROWS  # `jax.export` has symbolic sizes
    return IN_COLUMNS


def turned_marks(layout: Layout, marks: Marks) -> Marks:
    """Return the marks with the arrays that have units in a layout."""
    state = marks.state._replace(keep=layout.turned(marks.state.keep))
    update, initial = layout.turned((marks.update, marks.initial))
    return marks._replace(state=state, update=update, initial=initial)


def advance(
    layout: Layout, equations: Callable[[C], tuple[C, S]], carry: C, now: Marks
) -> tuple[C, C, S]:
    """Compute one step with its reset, dropout, zoneout and padding.

    Args:
      equations: carry → the next carry, and what to save.
      now: the marks of the step.

    Returns:
      The next carry; what it is without zoneout and padding; and what the equations save.
    """
    start = carry if now.reset is None else layout.choose(~now.reset, carry, now.initial)
    new, saved = equations(start)
    new = with_hidden(new, now.state(hidden(new)))
    after = new if now.update is None else jax.tree.map(mixed, now.update, new, start)
    return after if now.real is None else layout.choose(now.real, after, start), new, saved


def over_time(
    recurrence: Recurrence[C],
    U: Weights,
    carry: C,
    a: Array,
    marks: Marks = NO_MARKS,
    return_carries: bool = False,
) -> tuple[Tree, C]:
    """Run a recurrence over all steps, with its own gradient.

    The backward scan carries only the gradient of the state and stores what the gradients of the
    weights need, so each of these is ONE product after the scan.

    Args:
      carry: the state before the first step.
      a: (T, B, …), what each step reads of its input.
      marks: of these, only `initial` is differentiated.
      return_carries: return the whole carry of every step, not only h.

    Returns:
      h (T, B, H) of every step, or the carry of every step; and the carry after the last one.
    """
    # The carry can be wider than the layer, and `_backward` computes all gradients in its dtype.
    # What is converted here gets a gradient of its own dtype.
    as_carry = lambda leaf: leaf.astype(hidden(carry).dtype)
    U = tuple(leaf if leaf.ndim > 1 else as_carry(leaf) for leaf in U)
    marks = marks._replace(initial=jax.tree.map(as_carry, marks.initial))
    return _over_time(recurrence, return_carries, U, carry, as_carry(a), marks)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _over_time(
    recurrence: AnyRecurrence,
    return_carries: bool,
    U: Weights,
    carry: Carry,
    a: Array,
    marks: Marks,
) -> tuple[Tree, Carry]:
    # XLA vectorizes the gates only if each is an array of its own: with the reset gate after the
    # product, H = 128 and B = 16, a step then takes 21 µs instead of 50
    gates = IN_ROWS.split(a, recurrence.num_gates)
    return _scan(IN_ROWS, recurrence, return_carries, U, carry, gates, marks)[:2]


def _forward(
    recurrence: AnyRecurrence,
    return_carries: bool,
    U: Weights,
    carry: Carry,
    a: Array,
    marks: Marks,
) -> tuple[tuple[Tree, Carry], Residuals]:
    layout = training_layout(*hidden(carry).shape)
    outputs, last, saved = _scan(
        layout, recurrence, return_carries, U, carry, [a], marks, save=True
    )
    return (outputs, last), (U, carry, hidden(outputs), saved, marks)


def _scan(
    layout: Layout,
    recurrence: AnyRecurrence,
    return_carries: bool,
    U: Weights,
    carry: Carry,
    parts: list[Array],
    marks: Marks,
    save: bool = False,
) -> tuple[Tree, Carry, Tree]:
    """Return the output of every step and the last carry, in rows; and what the gradient needs.

    The latter is in the layout: the carry after every step, without h, and before zoneout if there
    is any; and what the steps save.
    """
    turned, dropping = layout.turned, layout.dropping(marks.product)
    gates_per_part = recurrence.num_gates // len(parts)
    U, carry, marks = layout.weights(U), turned(carry), turned_marks(layout, marks)

    def step(carry: Carry, now: tuple[list[Array], Marks]) -> tuple[Carry, Tree]:
        parts, marks_now = now
        gates = [gate for part in parts for gate in layout.split(layout.turn(part), gates_per_part)]
        equations = lambda carry: recurrence.step(dropping, U, carry, gates)
        carry, new, saved = advance(layout, equations, carry, marks.at(marks_now))
        outputs = turned(carry if return_carries else hidden(carry))
        others = besides_hidden(carry), None if marks.update is None else besides_hidden(new)
        return carry, (outputs, (*others, saved) if save else None)

    last, (outputs, saved) = jax.lax.scan(step, carry, (parts, marks.each_step()))
    return outputs, turned(last), saved


def _backward(
    recurrence: AnyRecurrence,
    return_carries: bool,
    residuals: Residuals,
    cotangents: tuple[Tree, Carry],
) -> tuple[Weights, Carry, Array, Marks]:
    U, first, h, (others, new_others, saved), marks = residuals
    layout = training_layout(*h.shape[1:])
    turned, dropping = layout.turned, layout.dropping(marks.product)
    d_outputs, d_last = turned(cotangents)
    transposed_U = layout.weights(tuple(leaf.mT if leaf.ndim > 1 else leaf for leaf in U))
    first, in_layout = turned(first), turned_marks(layout, marks)

    after = with_hidden(first, layout.turn(h), others)
    before = jax.tree.map(before_each, first, after)
    if marks.reset is not None:
        before = layout.choose(~marks.reset, before, in_layout.initial)
    if new_others is not None:
        after = with_hidden(after, hidden(after), new_others)

    def step(gradients: Tree, inputs: Tree) -> tuple[Tree, Weights]:
        (d_carry, d_initial), (d_output, sources, now) = gradients, inputs
        now = in_layout.at(now)
        if return_carries:
            d_carry = jax.tree.map(jnp.add, d_carry, d_output)
        else:
            d_carry = with_hidden(d_carry, hidden(d_carry) + d_output)
        d_after = d_carry if now.real is None else layout.choose(now.real, d_carry)
        d_old = None
        if now.update is not None:
            d_old = jax.tree.map(lambda u, d: mixed(u, jnp.zeros_like(d), d), now.update, d_after)
            d_after = jax.tree.map(lambda u, d: mixed(u, d, 0), now.update, d_after)
        d_after = with_hidden(d_after, now.state(hidden(d_after)))
        d_before, kept = recurrence.step_gradient(dropping, transposed_U, d_after, *sources)
        if d_old is not None:
            d_before = jax.tree.map(jnp.add, d_before, d_old)
        if now.real is not None:
            d_before = jax.tree.map(jnp.add, d_before, layout.choose(~now.real, d_carry))
        if now.reset is not None:
            if d_initial is not None:
                d_initial = jax.tree.map(jnp.add, d_initial, layout.choose(now.reset, d_before))
            d_before = layout.choose(~now.reset, d_before)
        return (d_before, d_initial), kept

    start = d_last, jax.tree.map(jnp.zeros_like, in_layout.initial)
    sources = before, after, saved
    inputs = d_outputs, sources, in_layout.each_step()
    gradients, kept = jax.lax.scan(step, start, inputs, reverse=True)
    d_carry, d_initial = turned(gradients)
    in_rows = IN_ROWS.dropping(marks.product)
    dU, da = recurrence.gradients(in_rows, U, *turned((*sources, kept)))
    return dU, d_carry, da, Marks(initial=d_initial)


_over_time.defvjp(_forward, _backward)
