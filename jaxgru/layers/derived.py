"""JAX's gradient of a cell's step, with the gradients of its weights taken out of the loop.

Each product y = h·U of a step is tapped: `tap(y, zeros)` is y, and the gradient of the zeros is
that of y. The scan takes zeros (T, B, G) as an input and returns the factors h of all steps, so JAX
stacks the gradients dy, and U's gradient is ONE product after the scan, as for the recurrences that
are written by hand. XLA never reads the zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, get_opaque_trace_state, jaxpr_as_fun
from jaxtyping import Array

from jaxgru.arrays import Size, Tree, rounded_inside, vary_alike
from jaxgru.cells.carry import Carry, hidden
from jaxgru.cells.contract import AnyCell, Weights
from jaxgru.cells.layout import IN_ROWS
from jaxgru.cells.products import as_factors, weight_gradient
from jaxgru.cells.step_masks import NO_MASKS, StepMasks
from jaxgru.layers.over_time import advance, vectors_in

Taps: TypeAlias = tuple[jax.ShapeDtypeStruct | None, ...]
"""For each product of a step, in the order of its calls: its shape, or None if it is not tapped."""


def taps_are_faster(B: Size, E: int, H: int) -> bool:
    """Return whether taps are faster than JAX's own gradient, `unroll_autodiff`, for any cell.

    JAX adds a product of the weights' size to their gradient at each step; taps store what B rows
    need for one product at the end. On one core of an AMD EPYC (Zen 3) with JAX 0.10.2, over 64
    steps of cells of one's own (sLSTM, LEM, LTC, CfC, LN-LSTM, E = H), JAX's time is so many times
    that of taps:

        B      H = 64          H = 128         H = 256
        8      1.0 to 1.4      1.2             1.3 to 2.1
        16     0.8 to 1.0      1.0 to 1.1      1.1 to 1.7
        64     0.4 to 0.8      0.5 to 0.8      0.9 to 1.1
    """
    if jax.default_backend() != "cpu":
        return True
    return isinstance(B, int) and (B <= 8 or 8 * B < E + H)


def over_time_by_jax(
    params: AnyCell,
    carry: Carry,
    a: Array,
    masks: StepMasks = NO_MASKS,
    return_carries: bool = False,
) -> tuple[Tree, Carry]:
    """Run a cell's step over time; arguments and results as of `over_time`."""
    dtype = hidden(carry).dtype
    a = a.astype(dtype)
    params = vectors_in(dtype, params)
    products = tapped_products(params, carry, a[0])
    if isinstance(products, str):
        return _scan((), return_carries, params, (), carry, a, masks)[0]
    taps, U = products
    return _tapped(taps, return_carries, params, U, carry, a, masks)


def tapped_products(
    params: AnyCell, carry: Tree, a: jax.ShapeDtypeStruct | Array
) -> tuple[Taps, Weights] | str:
    """Return which products of a step are tapped, and their weights.

    Those are tapped whose weights depend on the parameters alone.

    Args:
      carry: the state before a step; only its shapes and dtypes matter, and those of a.
      a: a step of what the cell's `inputs` returns.

    Returns:
      A reason, such as "the step has effects", if there are none to tap.
    """
    program, products = _traced_products(params, carry, a)
    if program.effects:
        return "the step has effects, such as jax.debug.print or a check of checkify"
    if any(isinstance(value, Tracer) for value in program.consts):
        return "the step closes over traced values"
    jaxpr = program.jaxpr
    num_leaves = len(jax.tree.leaves(params))
    of_state = set(map(id, jaxpr.invars[num_leaves:]))
    is_of_params = [of_state.isdisjoint(_needed_for([U], jaxpr)[0]) for U in jaxpr.outvars]
    if not any(is_of_params):
        return "the step uses layout.times for no weights that depend on the parameters alone"
    outputs = [U for U, tapped in zip(jaxpr.outvars, is_of_params, strict=True) if tapped]
    _, equations = _needed_for(outputs, jaxpr)
    part = jaxpr.replace(outvars=outputs, eqns=equations)
    weights = jaxpr_as_fun(program.replace(jaxpr=part))(*jax.tree.leaves((params, carry, a)))
    is_tapped = iter(is_of_params)
    taps = tuple(y if y is not None and next(is_tapped) else None for y in products)
    return taps, tuple(weights)


def _traced_products(
    params: AnyCell, carry: Tree, a: jax.ShapeDtypeStruct | Array
) -> tuple[ClosedJaxpr, Taps]:
    """Trace a step.

    Returns:
      The program that computes the weights of the step's products, from (params, carry, a); and
      each product's shape, or None if its weights are not among them.
    """
    products: list[jax.ShapeDtypeStruct | None] = []

    def weights_of_products(params: AnyCell, carry: Tree, a: Array) -> list[Array]:
        weights: list[Array] = []
        outside = get_opaque_trace_state()

        def recorded_matmul(U: Array, h: Array) -> Array:
            h, U = as_factors(h, U)
            y = IN_ROWS.matmul(U, h)
            # Within a transformation of the step, such as `jax.vmap`, they would leak
            is_outside = get_opaque_trace_state() == outside
            if U.ndim > 1 and is_outside:
                weights.append(U)
                products.append(jax.ShapeDtypeStruct(y.shape, y.dtype))
            else:
                products.append(None)
            return y

        params.step(IN_ROWS._replace(matmul=recorded_matmul), carry, a)
        return weights

    program = jax.make_jaxpr(weights_of_products)(params, carry, a)
    return program, tuple(products)


def _needed_for(outputs: Sequence[Any], jaxpr: Any) -> tuple[set[int], list[Any]]:
    """Return the ids of the variables that some of a program depend on, and their equations."""
    needed = set(map(id, outputs))
    equations: list[Any] = []
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(map(id, equation.outvars)):
            needed.update(map(id, equation.invars))
            equations.insert(0, equation)
    return needed, equations


@jax.custom_vjp
def tap(y: Array, zeros: Array) -> Array:
    """Return y, whose gradient is also that of the zeros."""
    return y


tap.defvjp(lambda y, zeros: (y, None), lambda _, dy: (dy, dy))


def _scan(
    taps: Taps,
    return_carries: bool,
    params: AnyCell,
    U: Weights,
    carry: Carry,
    a: Array,
    masks: StepMasks,
    zeros: Sequence[Array] | None = None,
) -> tuple[tuple[Tree, Carry], list[Array] | None]:
    """Return the outputs of every step and the last carry; and the factors of tapped products."""
    weights = rounded_inside(params)
    masked_layout = IN_ROWS.with_dropout(masks.recurrent)

    def step(carry: Carry, inputs: Tree) -> tuple[Carry, Tree]:
        a, masks_now, zeros = inputs
        factors: list[Array] = []
        is_tapped = iter(taps)

        def tapped_matmul(weights: Array, h: Array) -> Array:
            if next(is_tapped, None) is None:
                return IN_ROWS.matmul(weights, h)
            i = len(factors)
            factors.append(h)
            y = IN_ROWS.matmul(U[i], h)
            return y if zeros is None else tap(y, zeros[i])

        def equations(carry: Carry) -> tuple[Carry, list[Array]]:
            return weights().step(masked_layout._replace(matmul=tapped_matmul), carry, a), factors

        carry, _, factors = advance(IN_ROWS, equations, carry, masks.at(masks_now))
        outputs = carry if return_carries else hidden(carry)
        return carry, (outputs, None if zeros is None else factors)

    carry, (outputs, factors) = jax.lax.scan(step, carry, (a, masks.each_step(), zeros))
    return (outputs, carry), factors


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tapped(
    taps: Taps,
    return_carries: bool,
    params: AnyCell,
    U: Weights,
    carry: Carry,
    a: Array,
    masks: StepMasks,
) -> tuple[Tree, Carry]:
    return _scan(taps, return_carries, params, U, carry, a, masks)[0]


def _forward(
    taps: Taps,
    return_carries: bool,
    params: AnyCell,
    U: Weights,
    carry: Carry,
    a: Array,
    masks: StepMasks,
) -> tuple[tuple[Tree, Carry], Tree]:
    T = a.shape[0]
    zeros = [jnp.zeros((T, *like.shape), like.dtype) for like in taps if like is not None]
    zeros, _ = vary_alike((zeros, a))

    def run(
        params: AnyCell, carry: Carry, a: Array, reset_carry: Tree, zeros: Sequence[Array]
    ) -> tuple[tuple[Tree, Carry], list[Array] | None]:
        starts = masks._replace(reset_carry=reset_carry)
        return _scan(taps, return_carries, params, U, carry, a, starts, zeros)

    results, pull_back, factors = jax.vjp(
        run, params, carry, a, masks.reset_carry, zeros, has_aux=True
    )
    return results, (U, pull_back, factors)


def _backward(
    taps: Taps, return_carries: bool, residuals: Tree, d_results: tuple[Tree, Carry]
) -> tuple[AnyCell, Weights, Carry, Array, StepMasks]:
    U, pull_back, factors = residuals
    d_params, d_carry, da, d_reset_carry, dy = pull_back(d_results)
    dU = tuple(map(weight_gradient, U, factors, dy))
    return d_params, dU, d_carry, da, StepMasks(reset_carry=d_reset_carry)


_tapped.defvjp(_forward, _backward)
