"""Steps that are linear in h; and what holds of these cells, and of xLSTM's, at their limits.

`test_structured.py` compares each with NumPy, and `tests/layers` all options with the definition.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import normal, randomized, value_and_gradients

import jaxgru
from jaxgru.cells import CELLS, LinearCell, linear_recurrence
from jaxgru.cells.linear_recurrence import LinearSteps


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("T", [1, 7])
@pytest.mark.parametrize("has_resets", [False, True])
def test_steps_in_parallel_are_steps_in_turn(T, has_resets, monkeypatch):
    """Also those that keep (a = 1) and those that begin an episode: values and gradients."""
    a, b, first = normal(T, 2, 3), normal(T, 2, 3, seed=2), normal(2, 3, seed=3)
    b[T // 2, 0], a[-1] = 0, 1
    begins = np.zeros((T, 2, 1), bool)
    begins[T // 2] = has_resets
    h, expected = first, np.zeros_like(a)
    for t in range(T):
        expected[t] = h = b[t] if begins[t].any() else a[t] * h + b[t]
    flags = jnp.asarray(begins) if has_resets else None
    steps = lambda a, b: LinearSteps(a, b, flags)
    arguments = tuple(map(jnp.asarray, (a, b, first)))
    by_jax = lambda a, b, first: linear_recurrence.in_turn(False, steps(a, b), first)
    plain = value_and_gradients(by_jax, *arguments)
    np.testing.assert_allclose(plain[0], expected, rtol=1e-12)
    ours = lambda a, b, first: linear_recurrence.linear_recurrence(steps(a, b), first)
    for way in (linear_recurrence.in_turn, linear_recurrence.in_parallel):
        monkeypatch.setattr(linear_recurrence, "in_turn", way)
        chex.assert_trees_all_close(
            value_and_gradients(ours, *arguments), plain, rtol=1e-12, atol=1e-13
        )


def drawn(name, E=3, H=4, dtype="float64"):
    """A layer of a cell that is registered, whose every weight is random."""
    options = {"context_length": 3} if name == "mlp" else {}
    make = lambda: CELLS[name](jax.random.key(0), E, H, dtype=dtype, **options)
    return randomized(jax.eval_shape(make))


LINEAR = [name for name in CELLS if isinstance(drawn(name, dtype="float32"), LinearCell)]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "name, way",
    [*((name, "in_turn") for name in CELLS), *((name, "in_parallel") for name in LINEAR)],
)
def test_nothing_crosses_a_reset(name, way, value, monkeypatch, forget_traces):
    """Neither forward, from an episode of NaN to the next, nor backward to the one before."""
    monkeypatch.setattr(linear_recurrence, "in_turn", getattr(linear_recurrence, way))
    forget_traces()
    layer, x = drawn(name), normal(2, 9, 3)
    reset = np.zeros((2, 9), bool)
    reset[:, [3, 6]] = True
    spoiled = x.copy()
    spoiled[0, 3:6] = value
    run = lambda x, carry: jaxgru.unroll(layer, x, carry, reset=reset)[0]
    carry = randomized(jaxgru.initial_carry(layer, 2), 2)
    y, (dx, d_carry) = value_and_gradients(run, jnp.asarray(x), carry)
    seen, (seen_dx, seen_d_carry) = value_and_gradients(run, jnp.asarray(spoiled), carry)
    assert not np.isfinite(seen[0, 3:6]).all()
    elsewhere = np.ones((2, 9), bool)
    elsewhere[0, 3:6] = False
    np.testing.assert_array_equal(seen[elsewhere], y[elsewhere])
    np.testing.assert_array_equal(seen_dx[elsewhere], dx[elsewhere])
    chex.assert_trees_all_equal(seen_d_carry, d_carry)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", CELLS)
def test_a_start_that_no_reset_reads(name, value):
    """Of a row without a reset: neither outputs nor gradients depend on it."""
    layer, x = drawn(name), normal(2, 5, 3)
    reset = np.zeros((2, 5), bool)
    reset[0, 2] = True
    start = randomized(jaxgru.initial_carry(layer, 2), 2)
    spoiled = jax.tree.map(lambda leaf: jnp.asarray(leaf).at[1].set(value), start)
    run = lambda layer, x, start: jaxgru.unroll(
        layer, x, jaxgru.initial_carry(layer, 2), reset=reset, reset_carry=start
    )
    expected = value_and_gradients(run, layer, x, start)
    chex.assert_trees_all_equal(value_and_gradients(run, layer, x, spoiled), expected)


@pytest.mark.parametrize("name", ["min_gru", "min_lstm", "rg_lru", "slstm"])
def test_gates_that_are_wide_open_or_closed(name):
    """In float32, what float64 has: no digit is lost, and no gradient is NaN."""
    values = np.array([-1e3, -100, -20, -1e-4, 0, 1e-4, 20, 100, 1e3])
    x = np.stack(np.meshgrid(values, values), -1).reshape(-1, 1, 2)
    layer = drawn(name, 2, 3, "float32")
    y = {}
    for dtype in ("float32", "float64"):
        with jax.enable_x64(dtype == "float64"):
            p, inputs = jax.tree.map(lambda leaf, d=dtype: jnp.asarray(leaf, d), (layer, x))
            inputs = jnp.repeat(inputs, 3, axis=1)
            y[dtype], gradients = value_and_gradients(
                lambda p, x: jaxgru.unroll(p, x)[0], p, inputs
            )
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    np.testing.assert_allclose(y["float32"], y["float64"], rtol=1e-3, atol=1e-12)


def test_how_the_decay_of_an_rg_lru_is_drawn():
    """Uniform in 0.9 … 0.999; the paper's section 2.4."""
    Lambda = jaxgru.init_rg_lru(jax.random.key(0), 1, 4096).Lambda
    kept = np.sort((1 + np.exp(np.asarray(Lambda, np.float64))) ** -8)
    np.testing.assert_allclose(kept, np.linspace(0.9, 0.999, 4096), atol=0.003)  # 1.9 σ at most
