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
from jaxtyping import Array

from jaxgru.cells.base import CellParams, Recurrence
from jaxgru.cells.layout import IN_ROWS, Layout
from jaxgru.cells.marks import hidden
from jaxgru.cells.products import gradient_of


def derived(
    params: CellParams, carry: Any, a: Array
) -> tuple[Recurrence, tuple[Array, ...]] | None:
    """Return the recurrence of a cell's step, and its weights: those of its products, then others.

    Args:
      carry: the state before a step.
      a: a step of what the cell's `inputs` returns.

    Returns:
      None if the step computes weights from its state or input, or uses large ones without
      `layout.times`; JAX's gradient of all steps is then as good.
    """
    leaves, structure = jax.tree.flatten(params)
    shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]

    def run(layout: Layout, product: Callable, leaves: list, carry: Any, a: Array) -> Any:
        of_cell = jax.tree.unflatten(structure, leaves)
        return of_cell.step(layout._replace(product=product), carry, a)

    def recorded(leaves: list, carry: Any, a: Array) -> tuple[Any, list, list]:
        """Return the next carry if all products are zeros, their weights and their factors."""
        weights, factors = [], []

        def product(U: Array, h: Array) -> Array:
            weights.append(U)
            factors.append(h)
            return jnp.zeros_like(jax.eval_shape(IN_ROWS.product, U, h))

        return run(IN_ROWS, product, leaves, carry, a), weights, factors

    args = leaves, carry, a
    inner = [i for i in _read(lambda *args: recorded(*args)[::2], *args) if i < len(leaves)]
    of_state = max(_read(lambda *args: recorded(*args)[1], *args), default=0) >= len(leaves)
    if of_state or any(leaves[i].size > 4 * hidden(carry).size for i in inner):
        return None
    U = recorded(*args)[1]
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

    def factors(layout, U, carry, after, saved):
        """Return the pull-backs of the next carry and of what enters each product."""
        others = [u.mT if len(shapes[i][0]) > 1 else u for i, u in zip(inner, U[n:], strict=True)]

        def pull_back(of: Callable) -> Callable:
            results = lambda *args: given(layout, lambda i, h: args[3][i], *args[:3])
            return jax.vjp(lambda *args: of(results(*args)), others, carry, *saved)[1]

        products = [lambda results, i=i: results[1][i] for i in range(n)]
        return list(map(pull_back, (lambda results: results[0], *products)))

    def step_gradient(layout, U, d_carry, pull_backs):
        of_next, *of_products = pull_backs
        d = of_next(d_carry)  # of others, the carry, a and the products
        for i in reversed(range(n)):
            d = jax.tree.map(jnp.add, d, of_products[i](layout.product(U[i], d[3][i])))
        d_others, d_carry, *kept = d
        return d_carry, (d_others, *kept)

    def gradients(layout, U, carry, after, saved, kept):
        d_others, da, dy = kept
        factors = jax.vmap(lambda c, a, y: given(layout, lambda i, h: y[i], U[n:], c, a)[1])
        of_products = map(gradient_of, U[:n], factors(carry, *saved), dy)
        total = lambda u, d: d.sum(0).reshape(u.shape)
        return (*of_products, *map(total, U[n:], d_others)), da

    recurrence = Recurrence(1, step, factors, step_gradient, gradients, in_rows=True)
    return recurrence, (*U, *(leaves[i] for i in inner))


def _read(function: Callable, *args: Any) -> list[int]:
    """Return the numbers of the arguments' leaves that a function's result depends on."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    read = set(map(id, jaxpr.outvars))
    for equation in reversed(jaxpr.eqns):
        if read.intersection(map(id, equation.outvars)):
            read.update(map(id, equation.invars))
    return [i for i, variable in enumerate(jaxpr.invars) if id(variable) in read]
