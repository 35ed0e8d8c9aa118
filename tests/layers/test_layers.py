"""Parts of how layers are computed: blocks, one step, products, narrow weights."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import randomized, value_and_gradients
from annotations import unchecked
from conftest import slow
from equations import numbers, sigma
from jax.extend.core import Literal
from random_models import INIT

import jaxgru
from jaxgru import cells
from jaxgru.cells import mlp
from jaxgru.cells.products import matmul
from jaxgru.cells.step_masks import Mask, StepMasks
from jaxgru.layers import blocks, implementations
from jaxgru.layers.implementations import unroll_autodiff, unroll_layer
from jaxgru.layers.over_time import over_time
from jaxgru.pytrees import struct

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Of 2 steps for 2 rows. Other tests' sequences are shorter than a block."""
    monkeypatch.setattr(blocks, "ROWS_AT_ONCE", 4)
    monkeypatch.setattr(blocks, "FEWEST_BLOCKS", 1)


def problem(kind, T, seed=0):
    """A random layer, an input, a carry and a mask of h, time-major: 2 rows, 3 and 4 features."""
    like = jax.eval_shape(lambda: INIT[kind](jax.random.key(0), 3, 4, dtype=float))
    p, x = randomized((like, np.zeros((T, 2, 3))), seed)
    keep = jax.device_put(np.random.default_rng(seed).random((T, 2, 4)) < 0.7)
    return p, x, randomized(p.zero_carry(2), seed + 1), Mask(keep, jnp.float64(1 / 0.7))


@pytest.mark.parametrize(
    "T, length, kind",
    [
        (5, 2, "lstm"),
        (9, 3, "gru"),
        *slow((5, 2, "gru"), (6, 2, "lstm"), (3, 3, "gru"), (1, 1, "gru")),
    ],
)
def test_steps_are_computed_in_blocks(T, length, kind, monkeypatch):
    """Of one length, so as one program, also where the last block reads beyond the last step."""
    lengths = []

    def counted(recurrence, U, carry, a, *rest):
        lengths.append(len(a))
        return over_time(recurrence, U, carry, a, *rest)

    monkeypatch.setattr(implementations, "over_time", counted)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")  # on a GPU, all steps are one block
    p, x, carry, _ = problem(kind, T)
    jax.eval_shape(lambda p, carry, x: unroll_layer(p, carry, x, StepMasks()), p, carry, x)
    assert set(lengths) == {length}


def test_lengths_of_blocks(monkeypatch):
    """As many steps as have about 512 rows, 1,024 of many units; a divisor if possible, or all.

    Or 32 rows, of few units.
    """
    monkeypatch.undo()
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    length_of = blocks.block_length
    sizes = [(64, 128), (24, 128), (1024, 128), (0, 128), (64, 512), (32, 1024)]
    assert [length_of(10_000, *size) for size in sizes] == [8, 20, 1, 500, 16, 25]
    assert [length_of(T, 64, 128) for T in (1, 12, 13, 17, 100, 101, 128)] == [
        *(1, 12, 13, 17, 10, 8, 8)
    ]
    assert [length_of(128, B, 64) for B in (16, 31, 32, 64)] == [32, 16, 1, 1]
    B, T = jax.export.symbolic_shape("B, T")
    assert length_of(T, 4, 8) is T and length_of(7, B, 8) == 7
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert length_of(10_000, 64, 128) == 10_000


@pytest.mark.parametrize("kind", ["gru", "lstm", *slow(*INIT), "min_gru", "rnn", "mlp"])
def test_a_stepper_is_the_cell_step_by_step(kind):
    p, x, carry, _ = problem(kind, 3)
    one_step = jax.jit(cells.one_step)

    def compare(step, inputs, xs):
        seen = carry
        expected = carry
        for x_or_index, x_t in zip(inputs, xs, strict=True):
            seen = step(seen, x_or_index)
            expected = one_step(p, expected, x_t)
            # Some sums of terms of about 1 nearly cancel: a rounding is then relatively large
            chex.assert_trees_all_close(seen, expected, rtol=1e-12, atol=1e-15)

    compare(jax.jit(cells.stepper(p, None)), x, x)
    table = x[:, 0]
    indices = np.array([[1, 0], [1, 0], [0, 1]])
    compare(jax.jit(cells.stepper(p, table)), indices, table[indices])


@pytest.mark.parametrize("kind", INIT)
def test_a_stepper_computes_no_matrix_of_the_weights_at_each_step(kind):
    """Such as half of U. To copy it each time takes as long as to multiply with it."""
    p = INIT[kind](jax.random.key(0), 3, 16, dtype=float)
    jaxpr = jax.make_jaxpr(cells.stepper(p))(p.zero_carry(2), jnp.ones((2, 3))).jaxpr
    of_weights = set(jaxpr.constvars)
    for equation in jaxpr.eqns:
        if of_weights.issuperset(v for v in equation.invars if not isinstance(v, Literal)):
            of_weights.update(equation.outvars)
            assert all(max(v.aval.shape, default=1) == v.aval.size for v in equation.outvars)


@pytest.mark.parametrize("from_a_mixin", [False, True])
@pytest.mark.parametrize("kind", ["gru", "lstm", "gru, mogrifier", "min_gru"])
def test_a_subclass_with_another_step(kind, from_a_mixin):
    """Neither the gradient, the prepared step nor the parallel way of its base class is its own."""
    p, x, carry, _ = problem(kind, 3)

    def halved_step(self, layout, carry, a):
        return jax.tree.map(lambda part: part / 2, type(p).step(self, layout, carry, a))

    members = {"step": halved_step}
    if from_a_mixin:
        made = type("Halved", (type("Halving", (), members), type(p)), {})
    else:
        made = type("Halved", (type(p),), members)
    halved = struct(made)(**vars(p))
    step = cells.stepper(halved)
    expected = carry
    seen = carry
    for x_t in x:
        expected = jax.tree.map(lambda part: part / 2, cells.one_step(p, expected, x_t))
        seen = step(seen, x_t)
        chex.assert_trees_all_close(seen, expected, rtol=1e-12, atol=1e-15)
    for implementation in ("auto", "scan", "autodiff"):
        _, last = jaxgru.unroll(halved, x, carry, time_major=True, implementation=implementation)
        chex.assert_trees_all_close(last, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", ["gru", "lstm", "min_gru", "mlp", *slow(*INIT)])
def test_a_subclass_with_other_inputs(kind):
    """They are what every way to compute a layer reads."""
    p, x, carry, _ = problem(kind, 3)

    def doubled(self, x):
        return type(p).inputs(self, 2 * x)

    made = struct(type("Doubled", (type(p),), {"inputs": doubled}))(**vars(p))
    table = x[:, 0]
    ids = np.array([[1, 0], [1, 0], [0, 1]])
    for given, read in ((x, x), (cells.Lookup(table, ids), table[ids])):
        expected = jaxgru.unroll(p, 2 * read, carry, time_major=True, implementation="autodiff")
        for implementation in ("auto", "scan", "autodiff"):
            seen = jaxgru.unroll(made, given, carry, time_major=True, implementation=implementation)
            chex.assert_trees_all_close(seen, expected, rtol=1e-12, atol=1e-15)


def test_an_mlp_of_many_positions(monkeypatch):
    """Which has one product in a loop: outputs, carry and all gradients are the definition's."""
    monkeypatch.setattr(mlp, "UNROLLED", 1)
    p, x, carry, mask = problem("mlp", 5)
    both = (
        value_and_gradients(partial(run, masks=StepMasks(hidden=mask)), p, carry, x)
        for run in (unroll_layer, unroll_autodiff)
    )
    chex.assert_trees_all_close(*both, rtol=1e-10, atol=1e-11)


def test_the_program_of_an_mlp_does_not_grow_with_its_positions():
    x = jnp.ones((5, 2, 3), jnp.float32)

    def run(p):
        return unroll_layer(p, p.zero_carry(2), x, StepMasks())

    def program(context_length):
        p = cells.init_mlp(jax.random.key(0), 3, 4, context_length=context_length)
        return str(jax.make_jaxpr(run)(p))

    assert program(1023).count("dot_general") <= program(16).count("dot_general")


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (5, 2, 3)])
def test_a_product_with_narrower_weights(shape):
    """Operands rounded to bfloat16, exact products, float32 sums: by NumPy, in float64."""
    x = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    dy = jax.random.normal(jax.random.key(1), (*shape[:-1], 4), jnp.float32)
    W = jax.random.normal(jax.random.key(2), (shape[-1], 4), jnp.bfloat16)
    y, pullback = jax.vjp(matmul, x, W)
    dx, dW = pullback(dy)
    assert (y.dtype, dx.dtype, dW.dtype) == (jnp.float32, jnp.float32, jnp.bfloat16)
    x64, dy64, W64 = (np.asarray(a.astype(jnp.bfloat16), np.float64) for a in (x, dy, W))
    np.testing.assert_allclose(y, x64 @ W64, 1e-6, 1e-6)
    np.testing.assert_allclose(dx, dy64 @ W64.T, 1e-6, 1e-6)
    expected = x64.reshape(-1, shape[-1]).T @ dy64.reshape(-1, 4)
    np.testing.assert_allclose(np.asarray(dW, np.float64), expected, 2**-8, 1e-6)  # rounded, too


@pytest.mark.parametrize("dtype", [np.int32, bool])
@pytest.mark.parametrize("of_integers", ["x", "W"])
def test_a_product_with_integers_is_that_of_their_values(of_integers, dtype):
    """The other factor is not rounded to them."""
    factors = {
        "x": np.array([[0.7, 1.0, 0.2]]),
        "W": np.array([[0.3, 1.0], [1.0, 0.5], [1.0, 0.0]]),
    }
    factors[of_integers] = np.ceil(factors[of_integers])
    expected = factors["x"] @ factors["W"]
    factors[of_integers] = factors[of_integers].astype(dtype)
    with unchecked():
        seen = matmul(*map(jnp.asarray, factors.values()))
    np.testing.assert_allclose(seen, expected)


def test_a_gru_with_narrower_weights_rounds_nothing_but_operands():
    """A step written out in NumPy: h and r ⊙ h rounded on their way into a product, and only there.

    And the gradients: near those of the plain scan, which rounds the weights alone.
    """

    def rounded(a):
        return np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64)

    p, x, h, mask = problem("gru", 3)
    p, x, h, scale = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (p, x, h, mask.scale))
    mask = Mask(mask.keep, scale)
    narrow = jaxgru.round_weights(p, jnp.bfloat16)
    q = numbers(narrow)
    state = np.asarray(h, np.float64)
    for t in range(3):
        u = rounded(x[t])
        s = rounded(state)
        z = sigma(u @ q.Wz + s @ q.Uz + q.bz + q.cz)
        r = sigma(u @ q.Wr + s @ q.Ur + q.br + q.cr)
        n = np.tanh(u @ q.Wn + rounded(r * state) @ q.Un + q.bn)
        state = ((1 - z) * state + z * n) * mask.keep[t] * float(mask.scale)
    ((y, end), gradients), (_, plain) = (
        value_and_gradients(partial(run, masks=StepMasks(hidden=mask)), narrow, h, x)
        for run in (unroll_layer, unroll_autodiff)
    )
    assert y.dtype == end.dtype == np.float32
    np.testing.assert_allclose(end, state, 3e-6, 3e-6)

    def widen(tree):
        return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]

    for a, b in zip(widen(gradients), widen(plain), strict=True):
        assert a.shape == b.shape and np.abs(a - b).max() < 0.03 * np.abs(b).max()


LONG = {  # of one layer or two: how they are computed
    "autodiff": (1, {"implementation": "autodiff"}),
    "a dropped h": (1, {"implementation": "autodiff"}),
    "wavefront": (2, {"implementation": "wavefront"}),
    "remat": (2, {"remat": True}),
}


@pytest.mark.parametrize("name", ["autodiff", *slow("wavefront", "a dropped h", "remat")])
def test_a_long_sum_of_gradients_in_half_precision(name):
    """As in float64 with the same weights, to the roundings of bfloat16 (2⁻⁹) in a step.

    What sums the gradients of steps or parts in bfloat16 loses 5 to 70 % of them here.
    """
    L, options = LONG[name]
    rate = 0.3 if name == "a dropped h" else 0.0
    dropout = jaxgru.Dropout(jax.random.key(2), rate, "state", "variational")
    layers = [INIT["gru"](jax.random.key(i), 4, 4, dtype=float) for i in range(L)]

    def narrow(leaf):
        return leaf.astype(jnp.bfloat16 if leaf.ndim > 1 else jnp.float32)

    layers = jax.tree.map(narrow, layers)
    x = jax.random.uniform(jax.random.key(1), (1, 4096, 4), jnp.float32)

    def loss(layers, x, **options):
        y, _ = jaxgru.unroll(layers, x, dropout=dropout, **options)
        return y.sum()

    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (layers, x))
    seen = jax.grad(loss)(layers, x, **options)
    expected = jax.grad(loss)(*wide)
    for a, b in zip(jax.tree.leaves(seen), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(np.asarray(a, float) - b) <= 0.01 * np.linalg.norm(b)
