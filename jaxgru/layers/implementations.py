"""Who computes a stack of layers over time. Inside, arrays are time-major, and one layer is

    unroll_layer(params, carry, x, masks) -> (h' of every step (T, B, H), carry)

`unroll_autodiff` is the reference. `unroll_layer` computes the same values faster, in two ways. x·W
of many steps is ONE product before the scan. The backward scan carries only the gradient of the
state and stores `da`, the gradients of the gates' pre-activations, so the gradient of each weight
is ONE product after the scan. Autodiff would instead add an (H, H) product to an accumulator at
each step. See Appleyard et al. 2016 (arXiv 1604.01946), sections 3.2 and 3.4. On a CPU, this is
done block by block of the steps, so that the arrays stay in the cache.

Weights may be bfloat16 beside biases and states of float32: see `cells.products.matmul`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxgru.arrays import Tree, rounded_inside, vary_alike
from jaxgru.cells.carry import Carry, hidden
from jaxgru.cells.contract import AnyCell, AnyRecurrence, Cell, Weights, one_step, sizes
from jaxgru.cells.layout import IN_ROWS, PLAIN
from jaxgru.cells.products import Lookup, before_lookup, look_up
from jaxgru.cells.step_masks import NO_MASKS, StepMasks
from jaxgru.layers import wavefront
from jaxgru.layers.blocks import block_length, in_blocks
from jaxgru.layers.derived import over_time_by_jax, tapped_products, taps_are_faster
from jaxgru.layers.over_time import advance, over_time
from jaxgru.layers.validate import check_features, check_layers, check_stack
from jaxgru.printing import type_name

Implementation: TypeAlias = Literal["auto", "scan", "autodiff", "wavefront"]
"""How layers can be computed. "scan" has a gradient of jaxgru's own, by hand or derived. "autodiff"
has JAX's, which forward mode needs. "wavefront" (`wavefront.py`) computes the layers of a stack at
the same time, for GPUs. It falls back to "scan" if it does not support the layers, and for resets,
padding, `return_carries`, a `ResidualStack`, zoneout and variational dropout at the state. "auto"
is "scan", but a step without a gradient by hand is differentiated by JAX where that is faster: see
`taps_are_faster` in `jaxgru.layers.derived`. It is not "wavefront": on the one GPU tried, that made
GRUs faster, an LSTM slower."""

IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)


class StackOptions(NamedTuple):
    """How a stack is computed: by which `Implementation`, and what it returns.

    return_carries: also the carry of every step. is_residual: each layer above the first adds its
    input to its output.
    """

    implementation: Implementation = "auto"
    return_carries: bool = False
    is_residual: bool = False


def unroll_autodiff(
    params: AnyCell,
    carry: Carry,
    x: Array | Lookup,
    masks: StepMasks = NO_MASKS,
    return_carries: bool = False,
) -> tuple[Tree, Carry]:
    """Compute a layer by its definition: the cell at each step, differentiated by JAX. Slow."""
    weights = rounded_inside(params)
    layout = PLAIN.with_dropout(masks.recurrent)

    def step(carry: Carry, inputs: tuple[Array, StepMasks]) -> tuple[Carry, Tree]:
        x, now = inputs

        def equations(carry: Carry) -> tuple[Carry, None]:
            return one_step(weights(), carry, x, layout), None

        after, _, _ = advance(IN_ROWS, equations, carry, masks.at(now))
        return after, after if return_carries else hidden(after)

    carry, outputs = jax.lax.scan(step, carry, (look_up(x), masks.each_step()))
    return outputs, carry


def check_products(params: AnyCell, carry: Carry, a: jax.ShapeDtypeStruct) -> None:
    """Raise ValueError if a cell has no products of h with weights, which dropout could mask."""
    factors: list[Array] = []

    def drop(h: Array) -> Array:
        factors.append(h)
        return h

    layout = PLAIN._replace(drop=drop)
    jax.eval_shape(lambda params, carry, a: params.step(layout, carry, a), params, carry, a)
    if not factors:
        raise ValueError(
            "variational dropout at the state masks h in its products with weights, but jaxgru "
            f"knows of none in {type(params).__name__}; choose another site or kind."
        )


def step_input(params: AnyCell, carry: Tree) -> jax.ShapeDtypeStruct:
    """Return the shape and the dtype of what a step reads of its input."""
    h = jax.tree.leaves(carry)[0]
    x = jax.ShapeDtypeStruct((h.shape[0], sizes(params)[0]), h.dtype)
    return jax.eval_shape(lambda params, x: params.inputs(x).astype(x.dtype), params, x)


def which_gradient(layer: AnyCell) -> str:
    """Say how `unroll` computes the gradient of a layer, for somebody who writes a cell.

    Returns:
      "written by hand", "of all steps at once" or "derived from the step", which are jaxgru's own;
      or "JAX's, because …", which says what in the step stands in the way. With many rows on
      a CPU, JAX's own is faster than a derived one, so "auto" takes it: see `taps_are_faster`.

    Raises:
      ValueError: `unroll` does not take the layer either, or there are several.
    """
    check_layers("the layer", layer)
    if not isinstance(cast(object, layer), Cell):
        raise ValueError(f"the layer is {type_name(layer)}; it must be a single layer.")
    check_stack([layer], sizes(layer)[0])
    if type(layer).parallel is not Cell.parallel:
        return "of all steps at once"
    if layer.custom_gradient():
        return "written by hand"
    carry = jax.eval_shape(lambda layer: layer.zero_carry(1), layer)
    products = tapped_products(layer, carry, step_input(layer, carry))
    return f"JAX's, because {products}" if isinstance(products, str) else "derived from the step"


def unroll_layer(
    params: AnyCell,
    carry: Carry,
    x: Array | Lookup,
    masks: StepMasks = NO_MASKS,
    implementation: Implementation = "auto",
    return_carries: bool = False,
) -> tuple[Tree, Carry]:
    """Compute one layer over time; it equals `unroll_autodiff` up to rounding.

    Args:
      params: one layer's parameters.
      carry: the state before the first step.
      x: the layer's input (T, B, E).
      masks: dropout, zoneout, resets and padding.
      implementation: for a single layer, "wavefront" is "scan".
      return_carries: return the whole carry of every step, not only h.

    Returns:
      The (masked) h' of every step, or the carry of every step; and the carry after the last one.
    """
    check_features(x.shape[-1], sizes(params)[0])
    if masks.recurrent.keep is not None:
        check_products(params, carry, step_input(params, carry))
    if implementation == "autodiff":
        return unroll_autodiff(params, carry, x, masks, return_carries)
    if can_run_at_once(params, masks, return_carries):
        results = params.parallel(carry, x, masks)
        if results is not None:
            return results
    custom_gradient = params.custom_gradient()
    if custom_gradient is not None:
        return unroll_by_hand(custom_gradient, params, carry, x, masks, return_carries)
    if implementation == "auto" and not taps_are_faster(x.shape[1], *sizes(params)):
        return unroll_autodiff(params, carry, x, masks, return_carries)
    inputs, steps = before_lookup(params.inputs, x)
    return over_time_by_jax(params, carry, inputs(steps), masks, return_carries)


def can_run_at_once(params: AnyCell, masks: StepMasks, return_carries: bool) -> bool:
    """Return whether a cell's `parallel`, if it has one, can apply these masks."""
    if masks.recurrent.keep is not None:
        return False
    is_marked = any(mark is not None for mark in (masks.reset, masks.valid, masks.zoneout))
    return params.parallel_masks or not (is_marked or return_carries)


def unroll_by_hand(
    custom_gradient: tuple[AnyRecurrence, Weights],
    params: AnyCell,
    carry: Carry,
    x: Array | Lookup,
    masks: StepMasks,
    return_carries: bool,
) -> tuple[Tree, Carry]:
    """Compute `unroll_layer` with a gradient that is written by hand, in blocks of the steps."""
    recurrence, U = custom_gradient
    T, B = x.shape[:2]
    _, H = sizes(params)
    inputs, steps = before_lookup(params.inputs, x)
    # Narrow weights: one block, for the gradients of blocks would be added up in their dtype
    is_wide = all(jnp.finfo(leaf.dtype).bits >= 32 for leaf in jax.tree.leaves(params))
    length = block_length(T, B, H) if is_wide else T
    # To compute a shorter last block would be a second program, and take twice the time to compile.
    # So it reads the last step again and again, and the last carry is one of all carries.
    beyond = 0 if length == T else -T % length
    every_carry = return_carries or beyond > 0

    def run(carry: Carry, block: tuple[Array, StepMasks]) -> tuple[Carry, Tree]:
        """Compute some of the steps."""
        steps, now = block
        a = inputs(steps)
        outputs, carry = over_time(recurrence, U, carry, a, masks.at(now), every_carry)
        return carry, outputs

    blocks = jax.tree.map(partial(repeat_last, beyond), (steps, masks.each_step()))
    carry, outputs = in_blocks(run, carry, blocks, length)
    if beyond:
        outputs = jax.tree.map(lambda h: h[:T], outputs)
        carry = jax.tree.map(lambda h: h[-1], outputs)
    return outputs if return_carries else hidden(outputs), carry


def repeat_last(number: int, steps: Array) -> Array:
    """Return steps (T, …) with the last one so many times more."""
    if number == 0:
        return steps
    return jnp.pad(steps, [(0, number)] + [(0, 0)] * (steps.ndim - 1), mode="edge")


def run_stack(
    options: StackOptions,
    layers: Sequence[AnyCell],
    x: Float[Array, "T B E"] | Lookup,
    carry: Sequence[Carry],
    masks: Sequence[StepMasks],
) -> tuple[Array, tuple[Carry, ...], tuple[Tree, ...] | None]:
    """Compute a stack of layers: the output, the last carries, and the carries of every step."""
    implementation, return_carries, is_residual = options
    layers, x, carry, masks = vary_alike((layers, x, carry, masks))
    inputs = masks[0].input(look_up(x)) if masks[0].input.keep is not None else x
    if implementation == "wavefront" and not (return_carries or is_residual):
        custom_gradient = [layer.custom_gradient() for layer in layers]
        if wavefront.supports(layers, custom_gradient, inputs, carry, masks):
            return *wavefront.unroll_stack(layers, custom_gradient, inputs, carry, masks), None
    ends: list[Carry] = []
    each: list[Tree] = []
    for i, (layer, c, of_layer) in enumerate(zip(layers, carry, masks, strict=True)):
        if i and not isinstance(inputs, Lookup):
            inputs = inputs.astype(hidden(c).dtype)  # layers can have different dtypes
        outputs, c = unroll_layer(layer, c, inputs, of_layer, implementation, return_carries)
        h = of_layer.output(hidden(outputs))
        inputs = plus_input(h, look_up(inputs)) if is_residual and i else h
        ends.append(c)
        each.append(outputs)
    return look_up(inputs), tuple(ends), tuple(each) if return_carries else None


def plus_input(h: Float[Array, "*n H"], x: Float[Array, "*n H"]) -> Float[Array, "*n H"]:
    """Return a layer's output in a residual stack, in its own dtype."""
    return h + x.astype(h.dtype)
