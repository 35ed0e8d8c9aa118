"""The fast unroll against its definition: the cell, step by step, differentiated by JAX."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import INIT, by_gate, in_blocks

import jaxgru
from jaxgru import cells
from jaxgru.cells import mlp
from jaxgru.cells.marks import NO_MASK, Marks, Mask
from jaxgru.cells.products import Lookup, dot
from jaxgru.layers import implementations
from jaxgru.layers.implementations import unroll_autodiff, unroll_layer
from jaxgru.layers.over_time import over_time

INIT = INIT | {
    "gru, relu": partial(jaxgru.init_gru, activation="relu", reset_gate="before"),
    "lstm, relu": in_blocks(jaxgru.init_lstm, activation="relu"),
}
QUICK = ["gru", "gru, reset after", "gru, norm", "lstm"]
KINDS = [
    "gru",
    "gru, norm",
    "lstm",
    *slow("gru, blocks", "gru, mogrifier", "lstm, norm", "lstm, projected", "lstm, relu"),
    "min_gru",
    "rnn",
    "gru, relu",
    "mlp",
]
# T, B, E, H, and whether there is a mask. Each pair costs a compilation, the values cost none
PROBLEMS = st.sampled_from([(1, 1, 1, 1, False), (5, 2, 3, 4, True)])


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Of 2 steps for 2 rows. Other tests' sequences are shorter than a block."""
    monkeypatch.setattr(implementations, "ROWS_AT_ONCE", 4)
    monkeypatch.setattr(implementations, "FEWEST_BLOCKS", 1)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def run(function, p, x, carry, mask=NO_MASK, **options):
    """`unroll_layer` or `unroll_autodiff`."""
    return function(p, carry, x, Marks(state=mask), **options)


jit_unroll, jit_cell = jax.jit(partial(run, unroll_layer)), jax.jit(cells.cell)


def problem(kind, T, B, E, H, masked, seed=0):
    """Random parameters (biases too), inputs, carry and mask. From NumPy: nothing is compiled."""
    rng = np.random.default_rng(seed)
    normal = lambda like: jax.device_put(rng.normal(size=like.shape))
    p = jax.tree.map(
        normal, jax.eval_shape(lambda: INIT[kind](jax.random.key(0), E, H, dtype=float))
    )
    carry = jax.tree.map(normal, jax.eval_shape(lambda: p.zero_carry(B)))
    x, mask = jax.device_put(rng.normal(size=(T, B, E))), NO_MASK
    if masked:
        mask = Mask(jax.device_put(rng.random((T, B, H)) < 0.7), jnp.float64(1 / 0.7))
    return p, x, carry, mask


@partial(jax.jit, static_argnums=0)
def value_and_gradients(function, p, x, carry, mask):
    """A scalar in which every output takes part with its own weight, and all its gradients."""

    def scalar(p, x, carry):
        outputs = run(function, p, x, carry, mask)
        weighted = lambda y: jnp.sum(y * np.cos(np.arange(y.size)).reshape(y.shape))
        return sum(map(weighted, jax.tree.leaves(outputs))), outputs

    gradients, outputs = jax.grad(scalar, (0, 1, 2), has_aux=True)(p, x, carry)
    return outputs, gradients


@pytest.mark.parametrize("kind", [*QUICK, *slow(*(kind for kind in INIT if kind not in QUICK))])
@settings(max_examples=7)
@given(sizes=PROBLEMS, seed=st.integers(0, 100))
def test_equals_the_plain_scan(kind, sizes, seed):
    """Outputs, carry and every gradient in float64; sums of ≤ 49 terms differ by rounding only."""
    with jax.enable_x64(True):
        args = problem(kind, *sizes, seed)
        ours = value_and_gradients(unroll_layer, *args)
        plain = value_and_gradients(unroll_autodiff, *args)
        chex.assert_trees_all_close(ours, plain, rtol=1e-10, atol=1e-11)


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
    p, x, carry, _ = problem(kind, T, 2, 3, 4, masked=False)

    def scalar(unroll, x):
        h, last = run(unroll, p, x, carry)
        weighted = lambda y: jnp.sum(y * np.cos(np.arange(y.size)).reshape(y.shape))
        return sum(map(weighted, jax.tree.leaves((h, last)))), (h, last)

    ours, plain = (
        jax.jit(jax.grad(partial(scalar, function), has_aux=True))(x)
        for function in (unroll_layer, unroll_autodiff)
    )
    assert set(lengths) == {length}
    chex.assert_trees_all_close(ours, plain, rtol=1e-11, atol=1e-12)


def test_lengths_of_blocks(monkeypatch):
    """As many steps as have about 512 rows, 1,024 of many units; a divisor if possible, or all.

    Or 32 rows: of few units, or where a gradient is derived and they are 16 at least.
    """
    monkeypatch.undo()
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    length_of = implementations.block_length
    sizes = [(64, 128), (24, 128), (1024, 128), (0, 128), (64, 512), (32, 1024)]
    assert [length_of(10_000, *size) for size in sizes] == [8, 20, 1, 500, 16, 25]
    assert [length_of(T, 64, 128) for T in (1, 12, 13, 17, 100, 101, 128)] == [
        *(1, 12, 13, 17, 10, 8, 8)
    ]
    assert [length_of(128, B, 64) for B in (16, 31, 32, 64)] == [32, 16, 1, 1]
    assert [length_of(128, B, 256, True) for B in (15, 16, 32)] == [128, 2, 1]
    B, T = jax.export.symbolic_shape("B, T")
    assert length_of(T, 4, 8) is T and length_of(7, B, 8) == 7
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert length_of(10_000, 64, 128) == 10_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_lookup_is_its_rows(kind):
    """Outputs, carry and all gradients, the table's too, where tokens repeat and one is missing."""
    p, _, carry, mask = problem(kind, 5, 2, 3, 4, masked=True)
    table = jax.device_put(np.random.default_rng(7).normal(size=(4, 3)))
    index = jnp.array([[0, 3], [3, 3], [1, 0], [0, 0], [1, 3]])

    def lookup(p, carry, table, marks):
        return unroll_layer(p, carry, Lookup(table, index), marks)

    def plain(p, carry, table, marks):
        return unroll_autodiff(p, carry, table[index], marks)

    both = (value_and_gradients(f, p, table, carry, mask) for f in (lookup, plain))
    chex.assert_trees_all_close(*both, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stepper_is_the_cell_step_by_step(kind):
    p, x, carry, _ = problem(kind, 3, 2, 3, 4, masked=False)
    index = np.array([1, 0])
    for table, inputs in ((None, x), (x[:, 0], [index, index, 1 - index])):
        step, expected, seen = jax.jit(cells.stepper(p, table)), carry, carry
        for x_or_index in inputs:
            seen = step(seen, x_or_index)
            expected = jit_cell(p, expected, x_or_index if table is None else table[x_or_index])
            # Some sums of terms of about 1 nearly cancel: a rounding is then relatively large
            chex.assert_trees_all_close(seen, expected, rtol=1e-12, atol=1e-15)


def test_an_mlp_of_many_positions(monkeypatch):
    """Which has one product in a loop: outputs, carry and all gradients are the definition's."""
    args = problem("mlp", 5, 2, 3, 4, masked=True)
    expected = value_and_gradients(unroll_autodiff, *args)
    monkeypatch.setattr(mlp, "UNROLLED", 1)
    seen = value_and_gradients(lambda *a: unroll_layer(*a), *args)
    chex.assert_trees_all_close(seen, expected, rtol=1e-10, atol=1e-11)


def test_the_program_of_an_mlp_does_not_grow_with_its_positions():
    size = lambda K: str(
        jax.make_jaxpr(lambda p, x: run(unroll_layer, p, x, p.zero_carry(2)))(
            cells.init_mlp(jax.random.key(0), 3, 4, K), jnp.ones((5, 2, 3), jnp.float32)
        )
    ).count("dot_general")
    assert size(1023) <= size(16)


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (5, 2, 3)])
def test_a_product_with_narrower_weights(shape):
    """Operands rounded to bfloat16, exact products, float32 sums: by NumPy, in float64."""
    x, dy = (jax.random.normal(jax.random.key(i), (*shape[:-1], n), jnp.float32)
             for i, n in ((0, shape[-1]), (1, 4)))  # fmt: skip
    W = jax.random.normal(jax.random.key(2), (shape[-1], 4), jnp.bfloat16)
    y, pullback = jax.vjp(dot, x, W)
    dx, dW = pullback(dy)
    assert (y.dtype, dx.dtype, dW.dtype) == (jnp.float32, jnp.float32, jnp.bfloat16)
    x64, dy64, W64 = (np.asarray(a.astype(jnp.bfloat16), np.float64) for a in (x, dy, W))
    np.testing.assert_allclose(y, x64 @ W64, 1e-6, 1e-6)
    np.testing.assert_allclose(dx, dy64 @ W64.T, 1e-6, 1e-6)
    expected = x64.reshape(-1, shape[-1]).T @ dy64.reshape(-1, 4)
    np.testing.assert_allclose(np.asarray(dW, np.float64), expected, 2**-8, 1e-6)  # rounded, too


def test_a_gru_with_narrower_weights_rounds_nothing_but_operands():
    """A step written out in NumPy: h and r ⊙ h rounded on their way into a product, and only there.

    And the gradients: near those of the plain scan, which rounds the weights alone.
    """
    p, x, h, mask = problem("gru", 3, 2, 3, 4, masked=True)
    p, x, h = (jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree) for tree in (p, x, h))
    mask = Mask(mask.keep, mask.scale.astype(jnp.float32))
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.ndim > 1 else leaf, p)
    sigma = lambda a: 1 / (1 + np.exp(-a))
    rounded = lambda a: np.asarray(jnp.asarray(a, jnp.float32).astype(jnp.bfloat16), np.float64)
    q, state = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), narrow), np.asarray(h)
    q = by_gate(q)
    for t in range(3):
        u, s = rounded(x[t]), rounded(state)
        z = sigma(u @ q.Wz + s @ q.Uz + q.bz + q.cz)
        r = sigma(u @ q.Wr + s @ q.Ur + q.br + q.cr)
        n = np.tanh(u @ q.Wn + rounded(r * state) @ q.Un + q.bn)
        state = ((1 - z) * state + z * n) * mask.keep[t] * float(mask.scale)
    ours, gradients = value_and_gradients(unroll_layer, narrow, x, h, mask)
    np.testing.assert_allclose(ours[1], state, 3e-6, 3e-6)
    _, plain = value_and_gradients(unroll_autodiff, narrow, x, h, mask)
    for a, b in zip(*map(jax.tree.leaves, (gradients, plain)), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
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
    dropout = jaxgru.Dropout(
        jax.random.key(2), 0.3 * (name == "a dropped h"), "state", "variational"
    )
    narrow = lambda leaf: leaf.astype(jnp.bfloat16 if leaf.ndim > 1 else jnp.float32)
    layers = [
        jax.tree.map(narrow, INIT["gru"](jax.random.key(i), 4, 4, dtype=float)) for i in range(L)
    ]
    x = jax.random.uniform(jax.random.key(1), (1, 4096, 4), jnp.float32)

    def loss(layers, x, **options):
        return jaxgru.unroll(layers, x, dropout=dropout, **options)[0].sum()

    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (layers, x))
    seen, expected = jax.grad(loss)(layers, x, **options), jax.grad(loss)(*wide)
    for a, b in zip(jax.tree.leaves(seen), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(np.asarray(a, float) - b) <= 0.01 * np.linalg.norm(b)
