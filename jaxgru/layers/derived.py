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
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state, jaxpr_as_fun
from jaxtyping import Array

from jaxgru.cells.base import CellParams, Recurrence
from jaxgru.cells.layout import IN_ROWS, Layout
from jaxgru.cells.marks import hidden
from jaxgru.cells.products import gradient_of


class _Unknown(Exception):
    """A product is none of a step and a matrix, or a step does more than to compute."""


class _Program:
    """A function, traced abstractly: a call computes only what its result depends on.

    Attributes:
      read: the numbers of the arguments' leaves that the result depends on.
      closed: the traced function, with what it closes over.
    """

    def __init__(self, function: Callable, *args: Any):
        self.closed, like = jax.make_jaxpr(function, return_shape=True)(*args)
        self.structure = jax.tree.structure(like)
        jaxpr, needed = self.closed.jaxpr, []
        read = set(map(id, jaxpr.outvars))
        for equation in reversed(jaxpr.eqns):
            if read.intersection(map(id, equation.outvars)):
                read.update(map(id, equation.invars))
                needed.insert(0, equation)
        self.read = [i for i, variable in enumerate(jaxpr.invars) if id(variable) in read]
        self.run = jaxpr_as_fun(self.closed.replace(jaxpr=jaxpr.replace(eqns=needed)))

    def __call__(self, *args: Any) -> Any:
        """Return the function's result; what is not read may be shapes and dtypes alone."""
        return jax.tree.unflatten(self.structure, self.run(*jax.tree.leaves(args)))


def derived(
    params: CellParams, carry: Any, a: jax.ShapeDtypeStruct
) -> tuple[Recurrence, tuple[Array, ...]] | None:
    """Return the recurrence of a cell's step, and its weights: those of its products, then others.

    No step is computed here, or in the gradient, with other values than the layer's.

    Args:
      carry: the state before a step; only its shapes and dtypes matter.
      a: a step of what the cell's `inputs` returns.

    Returns:
      None, so that JAX's gradient is used, if the step computes weights from its state or input;
      uses large ones without `layout.times`; multiplies within a transformation, as `jax.vmap`;
      closes over traced values; has effects, such as `jax.debug.print` or a check of `checkify`; or
      counts in a carry of whole numbers.
    """
    leaves, structure = jax.tree.flatten(params)
    like = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

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

    args = like, carry, a
    try:
        alone = _Program(lambda *args: recorded(*args, cut=True)[::2], *args)
        weights = _Program(lambda *args: recorded(*args, cut=False)[1], *args)
    except _Unknown:
        return None
    inner = [i for i in alone.read if i < len(leaves)]
    is_floating = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)
    if (
        any(isinstance(value, Tracer) for value in weights.closed.consts)
        or weights.closed.effects
        or any(leaf >= len(leaves) for leaf in weights.read)
        or any(leaves[i].size > 16 * hidden(carry).shape[-1] for i in inner)
        or not all(map(is_floating, jax.tree.leaves(carry)))
    ):
        return None
    U = weights(leaves, carry, a)
    n = len(U)

    def given(layout: Layout, times: Callable, others: Any, carry: Any, a: Array) -> Any:
        """Return a step whose i-th product is `times(i, h)`, all factors and all products."""
        filled: list[Any] = [*like]
        for i, leaf in zip(inner, others, strict=True):
            filled[i] = leaf.reshape(like[i].shape)

        def function(leaves: list, carry: Any, a: Array) -> tuple[Any, list, list]:
            factors, products = [], []

            def product(_: Array, h: Array) -> Array:
                factors.append(h)
                products.append(times(len(products), h))
                return products[-1]

            return run(layout, product, leaves, carry, a), factors, products

        return _Program(function, filled, carry, a)(filled, carry, a)

    def step(layout, U, carry, gates):
        times = lambda i, h: layout.product(U[i], h)
        carry, _, y = given(layout, times, U[n:], carry, *gates)
        return carry, (*gates, y)

    def step_gradient(layout, U, d_carry, carry, after, saved):
        others = [u.mT if like[i].ndim > 1 else u for i, u in zip(inner, U[n:], strict=True)]

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
