"""A cell's `Recurrence` from its step alone: the gradient is derived, not written by hand.

The forward scan saves the products with weights. In a step of the backward scan, they are given, so
JAX differentiates only what stands between them, and each weight's gradient is ONE product after
the scan, as for the recurrences that are written by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array

from jaxgru.cells.base import CellParams, Recurrence
from jaxgru.cells.layout import IN_ROWS, Layout
from jaxgru.cells.marks import hidden
from jaxgru.cells.products import gradient_of


class _Unknown(Exception):
    """A product is none of a step and a matrix."""


def derived(
    params: CellParams, carry: Any, a: Array
) -> tuple[Recurrence, tuple[Array, ...]] | None:
    """Return the recurrence of a cell's step, and its weights: those of its products, then others.

    Args:
      carry: the state before a step.
      a: a step of what the cell's `inputs` returns.

    Returns:
      None, so that JAX's gradient is used, if the step computes weights from its state or input;
      uses large ones without `layout.times`; multiplies within a transformation, as `jax.vmap`; or
      counts in a carry of whole numbers.
    """
    leaves, structure = jax.tree.flatten(params)
    shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]

    def run(layout: Layout, product: Callable, leaves: list, carry: Any, a: Array) -> Any:
        of_cell = jax.tree.unflatten(structure, leaves)
        return of_cell.step(layout._replace(product=product), carry, a)

    def recorded(leaves: list, carry: Any, a: Array, cut: bool) -> tuple[Any, list, list]:
        """Return the next carry, the weights of all products and their factors.

        With `cut`, what depends on weights through products alone does not depend on them here.
        """
        weights, factors, here = [], [], get_opaque_trace_state()

        def product(U: Array, h: Array) -> Array:
            if U.ndim < 2 or get_opaque_trace_state() != here:
                raise _Unknown
            weights.append(U)
            factors.append(h)
            y = IN_ROWS.product(U, h)
            return jnp.zeros(y.shape, y.dtype) if cut else y

        return run(IN_ROWS, product, leaves, carry, a), weights, factors

    args = leaves, carry, a
    try:
        read_alone = _read(lambda *args: recorded(*args, cut=True)[::2], *args)
        read_by_weights = _read(lambda *args: recorded(*args, cut=False)[1], *args)
    except _Unknown:
        return None
    inner = [i for i in read_alone if i < len(leaves)]
    is_floating = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)
    large = any(leaves[i].size > 16 * hidden(carry).shape[-1] for i in inner)
    of_state = max(read_by_weights, default=0) >= len(leaves)
    if large or of_state or not all(map(is_floating, jax.tree.leaves(carry))):
        return None
    U = recorded(*args, cut=False)[1]
    n = len(U)

    def given(layout: Layout, times: Callable, others: Any, carry: Any, a: Array) -> Any:
        """Compute a step whose i-th product is `times(i, h)`, and what entered the products."""
        filled, factors = [jnp.zeros(*shape) for shape in shapes], []
        for i, leaf in zip(inner, others, strict=True):
            filled[i] = leaf.reshape(shapes[i][0])

        def product(_: Array, h: Array) -> Array:
            factors.append(h)
            return times(len(factors) - 1, h)

        return run(layout, product, filled, carry, a), factors

    def step(layout, U, carry, gates):
        y = []

        def times(i: int, h: Array) -> Array:
            y.append(layout.product(U[i], h))
            return y[i]

        return given(layout, times, U[n:], carry, *gates)[0], (*gates, y)

    def step_gradient(layout, U, d_carry, carry, after, saved):
        others = [u.mT if len(shapes[i][0]) > 1 else u for i, u in zip(inner, U[n:], strict=True)]

        def pull_back(of: Callable) -> Callable:
            """Return the pull-back of the next carry, or of what enters a product."""
            results = lambda *args: given(layout, lambda i, h: args[3][i], *args[:3])
            return jax.vjp(lambda *args: of(results(*args)), others, carry, *saved)[1]

        d = pull_back(lambda results: results[0])(d_carry)  # of others, the carry, a, the products
        for i in reversed(range(n)):
            enters = pull_back(lambda results, i=i: results[1][i])
            d = jax.tree.map(jnp.add, d, enters(layout.product(U[i], d[3][i])))
        d_others, d_carry, *kept = d
        return d_carry, (d_others, *kept)

    def gradients(layout, U, carry, after, saved, kept):
        d_others, da, dy = kept
        factors = jax.vmap(lambda c, a, y: given(layout, lambda i, h: y[i], U[n:], c, a)[1])
        of_products = map(gradient_of, U[:n], factors(carry, *saved), dy)
        total = lambda u, d: d.sum(0).reshape(u.shape)
        return (*of_products, *map(total, U[n:], d_others)), da

    recurrence = Recurrence(1, step, step_gradient, gradients, in_rows=True)
    return recurrence, (*U, *(leaves[i] for i in inner))


def _read(function: Callable, *args: Any) -> list[int]:
    """Return the numbers of the arguments' leaves that a function's result depends on."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    read = set(map(id, jaxpr.outvars))
    for equation in reversed(jaxpr.eqns):
        if read.intersection(map(id, equation.outvars)):
            read.update(map(id, equation.invars))
    return [i for i, variable in enumerate(jaxpr.invars) if id(variable) in read]
