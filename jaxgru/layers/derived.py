"""A cell's `Recurrence` from its step alone: the gradient is derived, not written by hand.

The forward scan saves the products with weights. In a step of the backward scan, they are given, so
JAX differentiates only what stands between them, and each weight's gradient is ONE product after
the scan, as for the recurrences that are written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state, jaxpr_as_fun
from jaxtyping import Array

from jaxgru.cells.carry import Carry, Size, Tree
from jaxgru.cells.contract import AnyRecurrence, CellParams, Weights
from jaxgru.cells.layout import IN_ROWS, Layout
from jaxgru.cells.products import gradient_of


class _NotDerived(Exception):
    """Why no gradient can be derived."""


class _Program:
    """A function, traced abstractly: a call computes only what its result depends on.

    Attributes:
      read: the numbers of the arguments' leaves that the result depends on.
      closed: the traced function, with what it closes over.
    """

    def __init__(self, function: Callable[..., Tree], *args: Tree):
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

    def __call__(self, *args: Tree) -> Tree:
        """Return the function's result; what is not read may be shapes and dtypes alone."""
        return jax.tree.unflatten(self.structure, self.run(*jax.tree.leaves(args)))


class _Derived(AnyRecurrence):
    """The recurrence of a cell's step.

    Its weights are the n of its products and the `inner` leaves of the cell, which it uses in other
    ways; `like` and `structure` are the cell's.
    """

    in_rows = True

    def __init__(
        self,
        like: Sequence[jax.ShapeDtypeStruct],
        structure: Tree,
        inner: Sequence[int],
        n: int,
    ):
        self.like, self.structure, self.inner, self.n = like, structure, inner, n

    def with_products(
        self,
        layout: Layout,
        times: Callable[[int, Array], Array],
        others: Sequence[Array],
        carry: Carry,
        a: Array,
    ) -> tuple[Carry, list[Array], list[Array]]:
        """Return the next carry, all factors of h or the like, and all products `times(i, h)`."""
        filled: list[Tree] = [*self.like]
        for i, leaf in zip(self.inner, others, strict=True):
            filled[i] = leaf.reshape(self.like[i].shape)

        def function(leaves: list[Array], carry: Carry, a: Array) -> Tree:
            factors: list[Array] = []
            products: list[Array] = []

            def product(_: Array, h: Array) -> Array:
                factors.append(h)
                products.append(times(len(products), h))
                return products[-1]

            cell = jax.tree.unflatten(self.structure, leaves)
            return cell.step(layout._replace(product=product), carry, a), factors, products

        return _Program(function, filled, carry, a)(filled, carry, a)

    def step(self, layout, U, carry, a):
        times = lambda i, h: layout.product(U[i], h)
        carry, _, y = self.with_products(layout, times, U[self.n :], carry, *a)
        return carry, (*a, *y)

    def step_gradient(self, layout, U, d_carry, carry, after, saved):
        n, (a, *y) = self.n, saved
        of_rank = lambda i, u: u.mT if self.like[i].ndim > 1 else u
        others = list(map(of_rank, self.inner, U[n:]))

        def pull_back(of: Callable[[Tree], Tree]) -> Callable[[Tree], Tree]:
            """Return the pull-back of the next carry, or of what enters a product."""
            results = lambda *args: self.with_products(layout, lambda i, h: args[3][i], *args[:3])
            return jax.vjp(lambda *args: of(results(*args)), others, carry, a, y)[1]

        d = pull_back(lambda results: results[0])(d_carry)  # of others, the carry, a, the products
        for i in reversed(range(n)):
            enters = pull_back(lambda results, i=i: results[1][i])
            d = jax.tree.map(jnp.add, d, enters(layout.product(U[i], d[3][i])))
        d_others, d_carry, da, dy = d
        return d_carry, (da, *dy, *d_others)

    def gradients(self, layout, U, carry, after, saved, kept):
        n, (a, *y), (da, *rest) = self.n, saved, kept
        entered = lambda c, a, y: self.with_products(layout, lambda i, h: y[i], U[n:], c, a)[1]
        of_products = map(gradient_of, U[:n], jax.vmap(entered)(carry, a, y), rest[:n])
        total: Callable[[Array, Array], Array] = lambda u, d: d.sum(0).reshape(u.shape)
        return (*of_products, *map(total, U[n:], rest[n:])), da


def derived(
    params: CellParams, carry: Tree, a: jax.ShapeDtypeStruct
) -> tuple[AnyRecurrence, Weights] | str:
    """Return the recurrence of a cell's step, and its weights: those of its products, then others.

    No step is computed here, or in the gradient, with other values than the layer's.

    Args:
      carry: the state before a step; only its shapes and dtypes matter.
      a: a step of what the cell's `inputs` returns.

    Returns:
      A reason, such as "the step has effects", if JAX's gradient has to be used instead.
    """
    leaves, structure = jax.tree.flatten(params)
    like = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

    def recorded(leaves: list[Array], carry: Carry, a: Array, cut: bool) -> tuple[Tree, Tree]:
        """Return the weights of all products; with `cut`, the next carry and the factors.

        Then, what depends on weights through products alone does not depend on them.
        """
        weights: list[Array] = []
        factors: list[Array] = []
        here = get_opaque_trace_state()

        def product(U: Array, h: Array) -> Array:
            if U.ndim < 2:
                raise _NotDerived("a factor of layout.times is no matrix")
            if get_opaque_trace_state() != here:
                raise _NotDerived("layout.times is called within a transformation, as jax.vmap")
            weights.append(U)
            factors.append(h)
            y = IN_ROWS.product(U, h)
            return jnp.zeros(y.shape, y.dtype) if cut else y

        cell = jax.tree.unflatten(structure, leaves)
        after = cell.step(IN_ROWS._replace(product=product), carry, a)
        return (after, factors) if cut else (None, weights)

    args = like, carry, a
    try:
        alone = _Program(partial(recorded, cut=True), *args)
        weights = _Program(partial(recorded, cut=False), *args)
    except _NotDerived as reason:
        return str(reason)
    inner = [i for i in alone.read if i < len(leaves)]
    if any(isinstance(value, Tracer) for value in weights.closed.consts):
        return "the step closes over traced values"
    if weights.closed.effects:
        return "the step has effects, such as jax.debug.print or a check of checkify"
    if any(leaf >= len(leaves) for leaf in weights.read):
        return "the step computes weights from its state or its input"
    if any(leaves[i].size > 16 * jax.tree.leaves(carry)[0].shape[-1] for i in inner):
        return "the step uses large weights without layout.times"
    if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(carry)):
        return "the carry contains whole numbers, such as a count"
    U: list[Array] = weights(leaves, carry, a)[1]
    return _Derived(like, structure, inner, len(U)), (*U, *(leaves[i] for i in inner))


def jax_is_faster(recurrence: AnyRecurrence, B: Size, H: int) -> bool:
    """Return whether JAX's gradient of a cell is faster than the derived one.

    On a CPU, with two or more products in a step, many rows and few units: on one core of an AMD
    EPYC with JAX 0.12, the derived gradient of LEM (Rusch et al. 2022) takes 1.04 to 1.33 times as
    long over 16 or 64 rows, and no longer above 128 units or with 4 rows.
    """
    several = isinstance(recurrence, _Derived) and recurrence.n > 1
    few_units = isinstance(B, int) and B >= 16 and H <= 128
    return several and few_units and jax.default_backend() == "cpu"
