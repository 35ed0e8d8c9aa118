"""A recurrent layer over all steps, forward and backward: `over_time` runs a cell's `Recurrence`.

Letters as in `cells/base.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxgru.cells.base import (
    PLAIN_STEPS,
    Carry,
    Recurrence,
    Steps,
    apply_mask,
    hidden,
    with_hidden,
)
from jaxgru.layers.layout import IN_ROWS, is_small, training_layout


def before(first: Array, after: Array, reverse: bool = False) -> Array:
    """Return the state before each step, given the first state and the state after each step."""
    first = first[None]
    return jnp.concatenate([after[1:], first] if reverse else [first, after[:-1]])


def over_time(
    recurrence: Recurrence,
    U: tuple[Array, ...],
    carry: Carry,
    a: Float[Array, "T B GH"],
    steps: Steps = PLAIN_STEPS,
    reverse: bool = False,
    return_carries: bool = False,
) -> tuple[Any, Carry]:
    """Run a recurrence over all steps, with a hand-written gradient.

    The backward scan carries only the gradient of the state and stores what the gradients of the
    weights need, so each of these is ONE product after the scan.

    Args:
      carry: the state before the first step.
      a: x·W + b of every step.
      steps: dropout, resets and padding. Of these, only `initial` is differentiated.
      reverse: run from the last step to the first.
      return_carries: return the whole carry of every step, not only h.

    Returns:
      h (T, B, H) of every step, or the carry of every step; and the carry after the last one.
    """
    # The carry can be wider than the layer, and `_backward` computes all gradients in its dtype.
    # What is converted here gets a gradient of its own dtype.
    as_carry = lambda leaf: leaf.astype(hidden(carry).dtype)
    U = tuple(leaf if leaf.ndim > 1 else as_carry(leaf) for leaf in U)
    a, initial = jax.tree.map(as_carry, (a, steps.initial))
    flags = steps.mask, steps.reset, steps.real
    outputs: Any = _over_time(recurrence, reverse, return_carries, U, carry, a, initial, flags)
    h, c = outputs
    end = 0 if reverse else -1
    if not isinstance(carry, tuple):
        return h, h[end]
    return ((h, c) if return_carries else h), (h[end], c[end] if return_carries else c)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _over_time(recurrence, reverse, return_carries, U, carry, a, initial, flags):
    return _scan(IN_ROWS, recurrence, reverse, return_carries, U, carry, a, initial, flags)[0]


def _scan(layout, recurrence, reverse, return_carries, U, carry, a, initial, flags, save=False):
    """Return h of every step, with c of every step or the last; and what the gradient needs.

    h and c are (T, B, H). What the gradient needs is in the layout.
    """
    (mask, reset, real), pair = flags, isinstance(carry, tuple)
    H = hidden(carry).shape[-1]
    # Without a gradient, XLA vectorizes the gates only if each is an array of its own: with the
    # reset after the product, H = 128 and B = 16, a step then takes 21 µs instead of 50
    apart = [a] if save else IN_ROWS.gates(a, H)
    U, carry, initial = jax.tree.map(layout.turn, (U, carry, initial))

    def step(carry, inputs):
        apart, keep, reset, real = inputs
        gates = [gate for part in apart for gate in layout.gates(layout.turn(part), H)]
        current = carry if reset is None else layout.choose(~reset, carry, initial)
        after, saved = recurrence.step(layout, U, current, gates)
        after = with_hidden(after, apply_mask(hidden(after), mask and mask._replace(keep=keep)))
        if real is not None:
            after = layout.choose(real, after, carry)
        c = after[1:] if pair else ()
        each_c = jax.tree.map(layout.turn, c) if return_carries else None
        outputs = layout.turn(hidden(after)), each_c
        return after, (outputs, (*c, *saved) if save else None)

    inputs = apart, mask and layout.turn(mask.keep), reset, real
    carry, ((h, c), saved) = jax.lax.scan(step, carry, inputs, reverse=reverse)
    last_c = layout.turn(carry[1]) if pair else None
    return (h, c[0] if c else last_c), saved


def _forward(recurrence, reverse, return_carries, U, carry, a, initial, flags):
    layout = training_layout(*hidden(carry).shape)
    (h, c), saved = _scan(
        layout, recurrence, reverse, return_carries, U, carry, a, initial, flags, save=True
    )
    return (h, c), (U, carry, h, saved, initial, flags)


def _backward(recurrence, reverse, return_carries, residuals, cotangents):
    U, carry, h, saved, initial, (mask, reset, real) = residuals
    pair, layout = isinstance(carry, tuple), training_layout(*h.shape[1:])
    dh_out, dc_out = jax.tree.map(layout.turn, cotangents)
    transposed_U = jax.tree.map(jnp.transpose, U)
    turned_U, first, initial = jax.tree.map(layout.turn, (transposed_U, carry, initial))
    previous = before(hidden(first), layout.turn(h), reverse)
    if pair:
        previous = previous, before(first[1], saved[0], reverse)
    if reset is not None:
        previous = layout.choose(~reset, previous, initial)
    factors_of, sources = partial(recurrence.factors, layout), (previous, saved)
    if is_small(*h.shape[1:]):
        factors_of, sources = lambda *factors: factors, factors_of(*sources)

    def step(gradients, inputs):
        (dh, *dc), d_initial = gradients
        dh_out, dc_out, sources, keep, reset, real = inputs
        dh = dh + dh_out
        if dc_out is not None:
            dc = [dc[0] + dc_out]
        d_after = (dh, *dc) if real is None else layout.choose(real, (dh, *dc))
        dh_step = apply_mask(d_after[0], mask and mask._replace(keep=keep))
        d_step = (dh_step, *d_after[1:]) if pair else dh_step
        d_before, kept = recurrence.step_gradient(layout, turned_U, d_step, factors_of(*sources))
        if reset is not None:
            if d_initial is not None:
                d_initial = jax.tree.map(jnp.add, d_initial, layout.choose(reset, d_before))
            d_before = layout.choose(~reset, d_before)
        d_before = d_before if pair else (d_before,)
        if real is not None:
            d_before = jax.tree.map(jnp.add, d_before, layout.choose(~real, (dh, *dc)))
        return (d_before, d_initial), kept

    dh = jnp.zeros_like(hidden(first))
    dc = () if not pair else (jnp.zeros_like(dh),) if return_carries else (dc_out,)
    dc_outs = dc_out if return_carries else None
    (d_carry, d_initial), kept = jax.lax.scan(
        step,
        ((dh, *dc), jax.tree.map(jnp.zeros_like, initial)),
        (dh_out, dc_outs, sources, mask and layout.turn(mask.keep), reset, real),
        reverse=not reverse,
    )
    d_carry, d_initial = jax.tree.map(layout.turn, (d_carry, d_initial))
    in_rows = jax.tree.map(layout.turn, (previous, saved, kept))
    dU, da = recurrence.gradients(IN_ROWS, U, *in_rows)
    return dU, d_carry if pair else d_carry[0], da, d_initial, None


_over_time.defvjp(_forward, _backward)
