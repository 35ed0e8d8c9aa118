"""Cells of one's own: with the weights' gradients out of the loop, the gradients are JAX's."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import normal, randomized, value_and_gradients
from jax.experimental import checkify
from jax.nn import sigmoid
from jaxtyping import Array

import jaxgru
from jaxgru.cells import Cell, struct

E = 3
H = 20


@struct
class Plain(Cell):
    W: Array
    U: Array
    V: Array
    b: Array
    sizes = lambda self: (self.W.shape[0], self.b.shape[0])
    inputs = lambda self, x: jnp.log(x) @ self.W + self.b

    def step(self, layout, h, a):
        return jnp.tanh(a + layout.times(self.U, h))


class OfACarry(Plain):
    """With a second part, which has no units."""

    def zero_carry(self, batch_size):
        return super().zero_carry(batch_size), jnp.ones(batch_size, self.b.dtype)


def of_step(step, base=Plain, **fields):
    return struct(type("Of", (base,), {"step": step, **fields}))


def plus(part):
    """A cell whose step adds a part to its input, in a tanh."""
    return of_step(lambda p, layout, h, a: jnp.tanh(a + part(p, layout, h)))


def of_two_ranks(p, layout, h):
    return layout.matmul(p.U, jnp.stack([h, h**2], 1)).sum(1) + layout.matmul(p.V, p.b)


def scalar(p, layout, carry, a):
    h, n = carry
    return jnp.tanh(a + layout.times(p.U, h) / n[:, None]), n + 1 + 0.1 * h.mean(-1)


def twice(p, layout, h):
    """U directly, too; V of what U returned."""
    y = layout.times(p.U, h) + h @ p.U
    return y * jnp.diag(p.V) + layout.matmul(p.V, jnp.sin(y))


def effect(p, layout, h):
    jax.debug.callback(lambda h: None, h)
    return layout.times(p.U, h)


norm = jnp.linalg.norm
stop = jax.lax.stop_gradient
CELLS = {  # a cell, and whether some of its products are tapped
    "one product": (of_step(Plain.step), True),
    "none": (of_step(lambda p, _, h, a: sigmoid(a) * h + jnp.tanh(a)), False),
    "a normed weight, twice": (
        plus(lambda p, l, h: l.times(p.U / norm(p.U), h) + l.times(p.U, h * p.b)), True
    ),
    "factors of another rank": (plus(of_two_ranks), True),
    "a small matrix without times": (
        plus(lambda p, l, h: l.times(p.U, h) * (1 + p.W.sum(0))), True
    ),
    "stopped": (plus(lambda p, l, h: stop(l.times(p.U, h)) + l.times(p.V, stop(h))), True),
    "a carry of one number": (of_step(scalar, OfACarry), True),
    "a matrix with times and without": (plus(twice), True),
    "a weight of the state": (plus(lambda p, l, h: l.times(p.U * h.mean(), h)), False),
    "a weight of a product": (
        plus(lambda p, l, h: l.times(p.V * sigmoid(l.times(p.U, h)).mean(), h)), True
    ),
    "vmap": (
        plus(lambda p, l, h: jax.vmap(lambda U: l.times(U, h))(jnp.stack([p.U, p.V])).sum(0)), False
    ),
    "vmap, and a product before": (
        plus(lambda p, l, h: jax.vmap(lambda U: l.times(U, l.times(p.U, h)))(p.V[None])[0]), False
    ),
    "a product after vmap": (
        plus(lambda p, l, h: l.times(p.U, jax.vmap(lambda U: l.times(U, h))(p.V[None])[0])), True
    ),
    "cond": (
        plus(lambda p, l, h: jax.lax.cond(h.sum() > 0, lambda h: l.times(p.U, h), stop, h)), False
    ),
    "an effect": (plus(effect), False),
}  # fmt: skip


@pytest.mark.parametrize("name", CELLS)
def test_gradients_are_jaxs(name, monkeypatch, float64):
    """Of all parameters, the input and the carry, with resets, in blocks and with a rest."""
    monkeypatch.setattr(jaxgru.layers.blocks, "ROWS_AT_ONCE", 4)
    monkeypatch.setattr(jaxgru.layers.blocks, "FEWEST_BLOCKS", 1)
    cls, is_derived = CELLS[name]
    shapes = (E, H), (H, H), (H, H), H
    p = randomized(cls(*map(np.zeros, shapes)))
    x = jnp.exp(normal(2, 5, E))
    reset = np.random.default_rng(0).random((2, 5)) < 0.3
    seen = jaxgru.which_gradient(p)
    assert seen == "derived from the step" if is_derived else seen.startswith("JAX's, because ")
    both = (
        value_and_gradients(partial(jaxgru.unroll, reset=reset, implementation=name), p, x)
        for name in ("scan", "autodiff")
    )
    chex.assert_trees_all_close(*both, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "rows, features, is_tapped",
    [(8, E, True), (9, E, False), (9, 72 - H, False), (9, 73 - H, True)],
)
def test_auto_takes_jaxs_gradient_where_it_is_faster(rows, features, is_tapped):
    """With more than 8 rows, and an eighth of the features and units."""
    cell = plus(lambda p, l, h: l.times(p.U, h))
    p = cell(*map(jnp.zeros, ((features, H), (H, H), (H, H), H)))
    x = jnp.zeros((rows, 3, features))

    def program(name):
        return str(jax.make_jaxpr(partial(jaxgru.unroll, implementation=name))(p, x))

    assert ("custom_vjp" in program("auto")) == is_tapped
    assert "custom_vjp" in program("scan")


@pytest.mark.parametrize("narrow", ["W", "V"])
def test_sums_of_half_precision_are_wide(narrow):
    """Whichever of the weights is narrow: blocks would add up its gradient in its dtype."""

    def step(p, layout, h, a):
        return jnp.tanh(a + layout.times(p.U, h) + layout.times(p.V, h))

    cls = of_step(step, inputs=lambda self, x: x @ self.W + self.b)
    shapes = (E, H), (H, H), (H, H), H
    p = randomized(cls(*(np.zeros(shape, np.float32) for shape in shapes)))
    p = p.replace(U=p.U / 9, V=p.V / 9)
    p = p.replace(**{narrow: getattr(p, narrow).astype(jnp.bfloat16)})
    x = jnp.abs(normal(64, 512, E, dtype=np.float32))

    def loss(p, implementation):
        return jaxgru.unroll(p, x, implementation=implementation)[0].sum()

    seen, expected = (
        np.asarray(getattr(jax.grad(loss)(p, name), narrow), np.float64)
        for name in ("scan", "autodiff")
    )
    assert np.linalg.norm(seen - expected) < 0.02 * np.linalg.norm(expected)


def small(step, base=Plain):
    """A cell of two units, with a scalar weight, in place of V."""

    def normal(i, *shape):
        return jax.random.normal(jax.random.key(i), shape)

    return of_step(step, base)(normal(0, E, 2), normal(1, 2, 2), jnp.ones(()), normal(2, 2))


X = jnp.ones((2, 5, E)) + jnp.arange(5)[:, None]


def test_a_step_that_closes_over_a_traced_value():
    def loss(scale, implementation):

        def step(p, layout, h, a):
            return jnp.tanh(a + scale * p.V * layout.times(p.U, h))

        return jaxgru.unroll(small(step), X, implementation=implementation)[0].sum()

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    np.testing.assert_allclose(gradient(0.5, "auto"), gradient(0.5, "autodiff"), rtol=1e-5)


def test_no_step_runs_with_other_weights():
    """Zeros in place of U would be divided by their norm, zeros in place of x have no logarithm."""

    def step(p, layout, h, a):
        weights = p.U / jnp.linalg.norm(p.U, axis=0)
        return jnp.tanh(a + layout.times(weights, h) + layout.times(p.U / p.V, jnp.log(2 + h)))

    run = lambda p: jaxgru.unroll(p, X)[0].sum()
    checked = checkify.checkify(jax.jit(jax.grad(run)), errors=checkify.float_checks)
    error, _ = checked(small(step))
    assert error.get() is None
    with jax.debug_nans(True), jax.disable_jit():
        run(small(step))


def test_a_hessian_passes_a_product_of_more_axes():
    def step(p, layout, h, a):
        return jnp.tanh(a + layout.matmul(p.U, h.reshape(-1, 1, 2)).reshape(h.shape))

    def loss(p, name):
        return jnp.square(jaxgru.unroll(p, X, implementation=name)[0]).sum()

    seen, expected = (jax.hessian(loss)(small(step), name).U.U for name in ("scan", "autodiff"))
    np.testing.assert_allclose(seen, expected, rtol=1e-4, atol=1e-4)


def test_a_carry_of_weak_type_and_whole_numbers():
    """It goes in where it came out, also of `step`; zoneout's mean leaves a count alone."""

    class Start(Plain):
        def zero_carry(self, batch_size):
            return jnp.full((batch_size, 2), 0.1), jnp.zeros((batch_size, 1), int)

    def step(p, layout, carry, a):
        h, count = carry
        return jnp.tanh(a + layout.times(p.U, h) * count), count + 1

    p = small(step, Start)
    T = X.shape[1]
    start = p.zero_carry(2)
    y, carry = jaxgru.unroll(p, X, jaxgru.unroll(p, X, start)[1])
    assert carry[1].tolist() == [[2 * T]] * 2 and not jaxgru.initial_carry(p, 2)[0].weak_type
    np.testing.assert_allclose(
        y[:, 0], jaxgru.step(p, X[:, 0], jaxgru.unroll(p, X)[1])[0], rtol=1e-6
    )
    mean = jaxgru.Dropout(None, 0.5, "state", "zoneout")
    initial = jax.tree.map(lambda leaf: leaf[0] + 1, start)
    reset = jnp.zeros((2, T), bool).at[0, 1].set(True)
    _, (_, count) = jaxgru.unroll(p, X, dropout=mean, reset=reset, reset_carry=initial)
    assert count.tolist() == [[T], [T + 1]]
    for argument, (h, count) in (("carry", start), ("reset_carry", initial)):
        with pytest.raises(ValueError, match="float32; .*int32"):
            jaxgru.unroll(p, X, **{argument: (h, jnp.zeros_like(count, float))})
