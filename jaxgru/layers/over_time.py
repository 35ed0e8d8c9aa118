"""A recurrent layer over all steps, forward and backward: `over_time` runs a cell's `Recurrence`.

Letters as in `cells/base.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxgru.cells.base import (
    NO_CONSTANTS,
    Carry,
    Constants,
    Recurrence,
    Steps,
    apply_mask,
    before_each,
    besides_hidden,
    hidden,
    mixed,
    with_hidden,
)
from jaxgru.layers.layout import IN_ROWS, Layout, is_small, training_layout


def advance(
    layout: Layout,
    equations: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    now: Steps,
    constants: Constants,
) -> tuple[Any, Any, Any]:
    """Compute one step with its reset, dropout, zoneout and padding.

    Args:
      equations: (carry, x) → the next carry, and what to save.
      now: the step, without the axis T.

    Returns:
      The next carry; what it is without zoneout and padding; and what the equations save.
    """
    start = carry if now.reset is None else layout.choose(~now.reset, carry, constants.initial)
    new, saved = equations(start, now.x)
    new = with_hidden(new, apply_mask(hidden(new), now.keep, constants.scale))
    after = new if now.update is None else jax.tree.map(mixed, now.update, new, start)
    return after if now.real is None else layout.choose(now.real, after, start), new, saved


def over_time(
    recurrence: Recurrence,
    U: tuple[Array, ...],
    carry: Carry,
    steps: Steps,
    constants: Constants = NO_CONSTANTS,
    return_carries: bool = False,
) -> tuple[Any, Carry]:
    """Run a recurrence over all steps, with a hand-written gradient.

    The backward scan carries only the gradient of the state and stores what the gradients of the
    weights need, so each of these is ONE product after the scan.

    Args:
      carry: the state before the first step.
      steps: their x is a = x·W + b. Of the rest, only `constants.initial` is differentiated.
      return_carries: return the whole carry of every step, not only h.

    Returns:
      h (T, B, H) of every step, or the carry of every step; and the carry after the last one.
    """
    # The carry can be wider than the layer, and `_backward` computes all gradients in its dtype.
    # What is converted here gets a gradient of its own dtype.
    as_carry = lambda leaf: leaf.astype(hidden(carry).dtype)
    U = tuple(leaf if leaf.ndim > 1 else as_carry(leaf) for leaf in U)
    steps = steps._replace(x=as_carry(steps.x))
    constants = constants._replace(initial=jax.tree.map(as_carry, constants.initial))
    return _over_time(recurrence, return_carries, U, carry, steps, constants)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _over_time(recurrence, return_carries, U, carry, steps, constants):
    # XLA vectorizes the gates only if each is an array of its own: with the reset gate after the
    # product, H = 128 and B = 16, a step then takes 21 µs instead of 50
    steps = steps._replace(x=IN_ROWS.gates(steps.x, recurrence.gates))
    scan = _scan(IN_ROWS, recurrence, return_carries, U, carry, steps, constants)
    return scan[:2]


def _forward(recurrence, return_carries, U, carry, steps, constants):
    layout = training_layout(*hidden(carry).shape)
    whole = steps._replace(x=[steps.x])
    outputs, last, saved = _scan(
        layout, recurrence, return_carries, U, carry, whole, constants, save=True
    )
    marks = steps._replace(x=None)
    return (outputs, last), (U, carry, hidden(outputs), saved, marks, constants)


def _scan(layout, recurrence, return_carries, U, carry, steps, constants, save=False):
    """Return the output of every step and the last carry, in rows; and what the gradient needs.

    The latter is in the layout: the carry after every step, without h, and before zoneout if there
    is any; and what the steps save.
    """
    turned = partial(jax.tree.map, layout.turn)
    U, carry = turned((U, carry))
    steps = steps._replace(keep=turned(steps.keep), update=turned(steps.update))
    constants = Constants(turned(constants.initial), constants.scale, turned(constants.keep))
    masked = layout.masked(constants.keep, constants.scale)

    def equations(carry, parts):
        of_part = recurrence.gates // len(parts)
        gates = [gate for part in parts for gate in layout.gates(layout.turn(part), of_part)]
        return recurrence.step(masked, U, carry, gates)

    def step(carry, now):
        carry, new, saved = advance(layout, equations, carry, now, constants)
        outputs = turned(carry if return_carries else hidden(carry))
        others = besides_hidden(carry), None if now.update is None else besides_hidden(new)
        return carry, (outputs, (*others, saved) if save else None)

    last, (outputs, saved) = jax.lax.scan(step, carry, steps)
    return outputs, turned(last), saved


def _backward(recurrence, return_carries, residuals, cotangents):
    U, first, h, (others, new_others, saved), steps, constants = residuals
    layout = training_layout(*h.shape[1:])
    turned = partial(jax.tree.map, layout.turn)
    d_outputs, d_last = turned(cotangents)
    transposed_U = turned(tuple(leaf.mT if leaf.ndim > 1 else leaf for leaf in U))
    first, initial, keep, update = turned((first, constants.initial, steps.keep, steps.update))
    steps = steps._replace(keep=keep, update=update)
    kept_units = turned(constants.keep), constants.scale
    masked, masked_gradient = layout.masked(*kept_units), layout.masked(*kept_units, gradient=True)

    after = with_hidden(first, layout.turn(h), others)
    before = jax.tree.map(before_each, first, after)
    if steps.reset is not None:
        before = layout.choose(~steps.reset, before, initial)
    if new_others is not None:
        after = with_hidden(after, hidden(after), new_others)
    factors_of, sources = partial(recurrence.factors, masked), (before, after, saved)
    if is_small(*h.shape[1:]):
        factors_of, sources = lambda *factors: factors, factors_of(*sources)

    def step(gradients, inputs):
        (d_carry, d_initial), (d_output, sources, now) = gradients, inputs
        if return_carries:
            d_carry = jax.tree.map(jnp.add, d_carry, d_output)
        else:
            d_carry = with_hidden(d_carry, hidden(d_carry) + d_output)
        d_after = d_carry if now.real is None else layout.choose(now.real, d_carry)
        d_old = None
        if now.update is not None:
            d_old = jax.tree.map(lambda u, d: mixed(u, jnp.zeros_like(d), d), now.update, d_after)
            d_after = jax.tree.map(lambda u, d: mixed(u, d, 0), now.update, d_after)
        d_after = with_hidden(d_after, apply_mask(hidden(d_after), now.keep, constants.scale))
        factors = factors_of(*sources)
        d_before, kept = recurrence.step_gradient(masked_gradient, transposed_U, d_after, factors)
        if d_old is not None:
            d_before = jax.tree.map(jnp.add, d_before, d_old)
        if now.real is not None:
            d_before = jax.tree.map(jnp.add, d_before, layout.choose(~now.real, d_carry))
        if now.reset is not None:
            if d_initial is not None:
                d_initial = jax.tree.map(jnp.add, d_initial, layout.choose(now.reset, d_before))
            d_before = layout.choose(~now.reset, d_before)
        return (d_before, d_initial), kept

    start = d_last, jax.tree.map(jnp.zeros_like, initial)
    gradients, kept = jax.lax.scan(step, start, (d_outputs, sources, steps), reverse=True)
    d_carry, d_initial = turned(gradients)
    if constants.keep is not None:  # what has entered the products
        h_masked = apply_mask(hidden(before), kept_units[0][None], constants.scale)
        before = with_hidden(before, h_masked)
    dU, da = recurrence.gradients(IN_ROWS, U, *turned((before, after, saved, kept)))
    return dU, d_carry, Steps(da), Constants(d_initial)


_over_time.defvjp(_forward, _backward)
