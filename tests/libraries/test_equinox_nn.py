"""Equinox's cells under a scan and ours: the same numbers; weights both ways."""

from __future__ import annotations

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import (
    CASES,
    alike_under_strict_promotion,
    layer,
    normal,
    precision,
    randomized,
    resets,
    same_cost,
    same_numbers,
)
from annotations import unchecked
from random_models import same_bits

import jaxgru
from jaxgru.libraries import InteropError

eqx = pytest.importorskip("equinox")

from jaxgru.libraries.equinox_nn import Layer, from_equinox, to_equinox, unroll  # noqa: E402

CELLS = pytest.mark.parametrize("kind", ["GRUCell", "LSTMCell"])


def made(kind, E=4, H=6, dtype=np.float32, **options):
    make = getattr(eqx.nn, kind)
    options |= dict(dtype=dtype, key=jax.random.key(0))
    return randomized(eqx.filter_eval_shape(make, E, H, **options))


def scanned(cell, xs, state, reset=None, reverse=False):
    """A user's scan of the cell, where an episode begins from zeros."""
    reset = jnp.zeros(len(xs), bool) if reset is None else reset

    def step(state, inputs):
        x, reset = inputs
        state = cell(x, jax.tree.map(lambda s: jnp.where(reset, 0, s), state))
        return state, jax.tree.leaves(state)[0]

    return jax.lax.scan(step, state, (xs, reset), reverse=reverse)


@CELLS
@pytest.mark.parametrize("dtype, sizes", CASES)
def test_the_same_numbers(kind, dtype, sizes):
    """One sequence; a batch with resets, whole and by `vmap`; backwards."""
    with precision(dtype):
        T, B, E, H = sizes
        cell, xs = made(kind, E, H, dtype), normal(B, T, E, dtype=dtype)
        h = normal(B, H, dtype=dtype, seed=3)
        states = (h, normal(B, H, dtype=dtype, seed=4)) if kind == "LSTMCell" else h
        reset = resets(B, T)

        def theirs(cell, xs, states):
            each = jax.vmap(lambda x, s, r: scanned(cell, x, s, r))(xs, states, reset)
            first = jax.tree.map(lambda s: s[0], states)
            ends = np.append(reset[0, 1:], False)  # of episodes
            return each, each, scanned(cell, xs[0], first, ends, reverse=True)

        def ours(cell, xs, states):
            whole = unroll(cell, xs, states, reset=reset)
            each = jax.vmap(lambda x, s, r: unroll(cell, x, s, reset=r))(xs, states, reset)
            first = jax.tree.map(lambda s: s[0], states)
            return whole, each, unroll(cell, xs[0], first, reset=reset[0], reverse=True)

        same_numbers(ours, theirs, cell, xs, states)


def test_the_cost_is_that_of_unroll():
    cell, xs = made("GRUCell"), normal(3, 5, 4, dtype=np.float32)
    same_cost(lambda cell, xs: unroll(cell, xs)[1], cell, from_equinox(cell), xs)


@CELLS
def test_without_biases_and_from_zeros(kind):
    cell, xs = made(kind, use_bias=False), normal(5, 4, dtype=np.float32)
    zeros = (jnp.zeros(6), jnp.zeros(6)) if kind == "LSTMCell" else jnp.zeros(6)
    ours, theirs = unroll(cell, xs), scanned(cell, xs, zeros)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-5)
    gradient = eqx.filter_grad(lambda cell: jnp.sum(unroll(cell, xs)[1]))(cell)
    assert jax.tree.structure(gradient) == jax.tree.structure(cell)


@CELLS
def test_lengths_and_the_state_of_every_step(kind):
    """Each row alone, as its own scan; of an LSTM also c."""
    cell, xs, lengths = (
        made(kind),
        normal(2, 3, 5, 4, dtype=np.float32),
        np.array([[5, 0, 2], [1, 4, 3]]),
    )
    zeros = (jnp.zeros(6), jnp.zeros(6)) if kind == "LSTMCell" else jnp.zeros(6)
    state, ys, states = unroll(cell, xs, lengths=lengths, return_states=True)
    for row in np.ndindex(2, 3):
        after, each = zeros, []
        for x in xs[row][: lengths[row]]:
            after = cell(x, after)
            each.append(after)
        of_row = lambda tree, row=row: jax.tree.map(lambda leaf: leaf[row], tree)
        chex.assert_trees_all_close(of_row(state), after, rtol=1e-5, atol=1e-5)
        assert not ys[row][len(each) :].any()
        for t, one in enumerate(each):
            now = jax.tree.map(lambda leaf, t=t: leaf[t], of_row(states))
            chex.assert_trees_all_close(now, one, rtol=1e-5, atol=1e-5)
            assert same_bits(ys[row][t], jax.tree.leaves(now)[0])


def test_jaxgru_layers_are_modules():
    stack, pair = [layer("gru after"), layer("rnn", 6)], ([layer("rnn")], [layer("lstm")])
    xs = normal(3, 5, 4, dtype=np.float32)
    assert same_bits(Layer(stack)(xs), jaxgru.unroll(stack, xs))
    assert same_bits(Layer(pair)(xs), jaxgru.bidirectional(*pair, xs))
    gradient = eqx.filter_grad(lambda module: jnp.sum(module(xs)[0]))(Layer(pair))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_lists_of_numbers():
    cell, xs = made("GRUCell"), normal(5, 4, dtype=np.float32)
    with unchecked():  # the annotations say arrays
        ours = unroll(cell, xs.tolist(), [1.0] * 6)
    assert same_bits(ours, unroll(cell, xs, jnp.ones(6)))


@CELLS
def test_weights_there_and_back(kind):
    cell = made(kind)
    again = to_equinox(from_equinox(cell))
    assert same_bits(again, cell)  # also the structure, which holds the sizes
    p = layer({"GRUCell": "gru after, second bias", "LSTMCell": "lstm"}[kind])
    q = from_equinox(to_equinox(p))
    if kind == "GRUCell":
        assert same_bits((q.b[:12], q.b[12:], q.cn), (p.b[:12] + p.c, p.b[12:], p.cn))
    else:
        assert same_bits(q, p)


def test_forward_mode_of_the_plain_implementation():
    cell, xs = made("GRUCell"), normal(5, 4, dtype=np.float32)
    ours = jax.jacfwd(lambda xs: unroll(cell, xs, implementation="autodiff")[1])(xs)
    theirs = jax.jacfwd(lambda xs: scanned(cell, xs, jnp.zeros(6))[1])(xs)
    np.testing.assert_allclose(ours, theirs, 1e-5, 1e-5)


def test_strict_promotion():
    cell, xs = made("GRUCell"), normal(3, 5, 4, dtype=np.float32)
    flags = resets(3, 5).astype(np.float32)
    run = lambda: unroll(cell, xs, jnp.ones((3, 6)), reset=flags, reverse=True)
    alike_under_strict_promotion(run)


def test_cells_with_other_fields(monkeypatch):
    """A bias that the cell does not use, one that it lacks, and one that Equinox may add."""
    cell, xs = made("GRUCell"), normal(5, 4, dtype=np.float32)
    unbiased = made("GRUCell")
    object.__setattr__(unbiased, "use_bias", False)
    with pytest.raises(InteropError, match="the tensor bias does not belong there"):
        unroll(unbiased, xs)
    with pytest.raises(InteropError, match="the tensor bias_n is missing"):
        unroll(eqx.tree_at(lambda c: c.bias_n, cell, None), xs)
    with pytest.raises(ValueError, match="weight_ih is a str; it must be an array"):
        unroll(eqx.tree_at(lambda c: c.weight_ih, cell, "W"), xs)

    class GRUCell(eqx.nn.GRUCell):
        bias_hh: jax.Array

        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.bias_hh = jnp.ones(6)

    with unchecked(), pytest.raises(InteropError, match="the cell is a GRUCell; it must be an equ"):
        unroll(GRUCell(4, 6, key=jax.random.key(0)), xs)
    monkeypatch.setattr(eqx.nn, "GRUCell", GRUCell)
    with unchecked(), pytest.raises(InteropError, match="the tensor bias_hh does not belong"):
        unroll(GRUCell(4, 6, key=jax.random.key(0)), xs)


def test_refusals():
    with pytest.raises(
        InteropError,
        match="equinox.nn.GRUCell applies the reset gate after the product, this GRU befor",
    ):
        to_equinox(layer("gru"))
    with pytest.raises(InteropError, match="an RNNParams cannot be converted: Equinox has a G"):
        to_equinox(layer("rnn"))
    with unchecked(), pytest.raises(InteropError, match="the cell is a Linear; it must be an eq"):
        unroll(eqx.nn.Linear(2, 3, key=jax.random.key(0)), jnp.zeros((5, 2)))
    cell, xs = made("GRUCell"), normal(3, 5, 4, dtype=np.float32)
    with unchecked(), pytest.raises(ValueError, match=r"reset has shape \(5, 3\); it must be"):
        unroll(cell, xs, reset=resets(5, 3))
    with unchecked(), pytest.raises(ValueError, match=r"the state has shape \(6,\); it must"):
        unroll(cell, xs, jnp.zeros(6))
    with unchecked(), pytest.raises(InteropError, match=r"the state has shape \(\); it must be"):
        unroll(cell, xs, 0.0)
    with unchecked(), pytest.raises(ValueError, match="the state is a str; it must be an array"):
        unroll(cell, xs, "zeros")
    with pytest.raises(InteropError, match=r"the state must be a pair of arrays \(3, 6\), as an L"):
        unroll(made("LSTMCell"), xs, jnp.zeros((3, 6)))
    with pytest.raises(InteropError, match="the cell's weights are None; eqx.combine it with its"):
        unroll(eqx.partition(cell, eqx.is_array)[1], xs)
    for name, shape, wanted in (("weight_ih", (4, 18), (18, 4)), ("bias", (16,), (18,))):
        wrong = eqx.tree_at(lambda c, name=name: getattr(c, name), cell, jnp.ones(shape))
        says = re.escape(f"a GRUCell: the tensor {name} has shape {shape}; it must be {wanted}")
        with pytest.raises(InteropError, match=says):
            unroll(wrong, xs)
    with unchecked(), pytest.raises(InteropError, match=r"xs is int32 \(6, 4\); it must be float"):
        unroll(cell, jnp.ones((6, 4), jnp.int32))
    with unchecked(), pytest.raises(InteropError, match=r"xs has shape \(4,\); it must have steps"):
        unroll(cell, [1.0, 2.0, 3.0, 4.0])
    with pytest.raises(
        InteropError, match=r"xs has shape \(0, 4\); it must have at least one step"
    ):
        unroll(cell, jnp.ones((0, 4)))
    with pytest.raises(InteropError, match="the state is complex64; it must be floating-point"):
        unroll(cell, jnp.ones((6, 4)), jnp.ones(6, complex))
