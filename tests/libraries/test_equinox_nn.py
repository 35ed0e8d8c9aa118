"""What is Equinox's own: lengths and states of every step, cells without biases, refusals."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import equinox_cell, normal, refused, resets
from random_models import same_bits

eqx = pytest.importorskip("equinox")

from jaxgru.libraries.equinox_nn import from_equinox, unroll  # noqa: E402

CELLS = pytest.mark.parametrize("kind", ["GRUCell", "LSTMCell"])


@CELLS
def test_without_biases_and_from_zeros(kind):
    cell = equinox_cell(kind, use_bias=False)
    xs = normal(5, 4, dtype=np.float32)
    state = (jnp.zeros(6), jnp.zeros(6)) if kind == "LSTMCell" else jnp.zeros(6)
    last, ys = unroll(cell, xs)
    for t, x in enumerate(xs):
        state = cell(x, state)
        chex.assert_trees_all_close(ys[t], jax.tree.leaves(state)[0], rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(last, state, rtol=1e-5, atol=1e-5)
    gradient = eqx.filter_grad(lambda cell: jnp.sum(unroll(cell, xs)[1]))(cell)
    assert jax.tree.structure(gradient) == jax.tree.structure(cell)


@CELLS
def test_lengths_and_the_state_of_every_step(kind):
    """Each row alone, as its own scan; of an LSTM also c."""
    cell = equinox_cell(kind)
    xs = normal(2, 3, 5, 4, dtype=np.float32)
    lengths = np.array([[5, 0, 2], [1, 4, 3]])
    zeros = (jnp.zeros(6), jnp.zeros(6)) if kind == "LSTMCell" else jnp.zeros(6)
    state, ys, states = unroll(cell, xs, lengths=lengths, return_states=True)
    for row in np.ndindex(2, 3):
        after = zeros
        each = []
        for x in xs[row][: lengths[row]]:
            after = cell(x, after)
            each.append(after)

        def of_row(tree, row=row):
            return jax.tree.map(lambda leaf: leaf[row], tree)

        chex.assert_trees_all_close(of_row(state), after, rtol=1e-5, atol=1e-5)
        assert not ys[row][len(each) :].any()
        for t, one in enumerate(each):
            now = jax.tree.map(lambda leaf, t=t: leaf[t], of_row(states))
            chex.assert_trees_all_close(now, one, rtol=1e-5, atol=1e-5)
            assert same_bits(ys[row][t], jax.tree.leaves(now)[0])


def with_fields(kind="GRUCell", **fields):
    """A cell, some of whose fields are replaced."""
    cell = equinox_cell(kind)
    for name, value in fields.items():
        object.__setattr__(cell, name, value)
    return cell


X = np.ones((3, 5, 4), np.float32)
cell = equinox_cell("GRUCell")


test_refusals = refused(
    (lambda: from_equinox(with_fields(use_bias=False)), "the tensor bias does not belong there"),
    (lambda: from_equinox(with_fields(bias_hh=jnp.ones(6))), "the tensor bias_hh does not belong"),
    (lambda: unroll(eqx.partition(cell, eqx.is_array)[1], X), "the tensor bias is missing"),
    (lambda: unroll(cell, X, reset=resets(5, 3)), r"reset is bool \(5, 3\); it must be"),
    (lambda: unroll(cell, X, jnp.zeros(6)), r"the state has shape \(6,\); it must"),
    (lambda: unroll(equinox_cell("LSTMCell"), X, jnp.zeros((3, 6))), "state must be a pair of"),
    (lambda: unroll(cell, X[0].astype(int)), "x is int64 .*; it must be floating-point"),
    (lambda: unroll(cell, X[0, 0]), r"xs has shape \(4,\); it must have steps"),
)
