"""A stack drawn in one call, and what is printed of layers."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgru
from jaxgru.cells.contract import CELLS, CellName
from jaxgru.printing import shown

KEY = jax.random.key(0)


@pytest.mark.parametrize("cell", ["gru", "lstm", "rnn", jaxgru.init_gru])
def test_a_stack_fits_together(cell):
    """No two layers are alike; the options reach each."""
    layers = jaxgru.init_stack(cell, KEY, 3, 4, 2, dtype="float16")
    pair = jaxgru.init_stack(cell, KEY, 3, 4, num_layers=2, bidirectional=True)
    x = jax.ShapeDtypeStruct((2, 5, 3), "float32")
    y, _ = jax.eval_shape(jaxgru.unroll, layers, x)
    assert y.shape == (2, 5, 4) and y.dtype == "float16"
    y, _ = jax.eval_shape(jaxgru.bidirectional, *pair, x)
    assert y.shape == (2, 5, 8)
    matrices = [leaf for leaf in jax.tree.leaves(pair) if leaf.ndim == 2]
    assert len({leaf.tobytes() for leaf in map(jax.device_get, matrices)}) == len(matrices)


def test_type_checkers_know_the_names_of_all_cells():
    """A new cell's name is to be added to `CellName`."""
    ours = {name for name, init in CELLS.items() if init.__module__.startswith("jaxgru.")}
    assert ours == set(get_args(CellName))


def test_a_stack_of_projected_layers_fits_together():
    """Each layer reads the proj_size features of the one below, not hidden_dim."""
    pair = jaxgru.init_stack("lstm", KEY, 3, 4, 2, bidirectional=True, residual=True, proj_size=2)
    y, _ = jax.eval_shape(jaxgru.bidirectional, *pair, jax.ShapeDtypeStruct((2, 5, 3), "float32"))
    assert y.shape == (2, 5, 4)


@pytest.fixture(scope="module")
def residual():
    """Two directions of three layers."""
    with jax.enable_x64(True):
        options = dict(bidirectional=True, residual=True, dtype="float64")
        yield jaxgru.init_stack("rnn", KEY, 3, 4, 3, **options)


def test_a_step_adds_inputs_as_unroll_does():
    with jax.enable_x64(True):
        stack = jaxgru.init_stack("rnn", KEY, 3, 4, 3, residual=True, dtype="float64")
        x = jax.random.normal(KEY, (2, 3, 3), "float64")
        carry = jaxgru.initial_carry(stack, 2)
        y, _ = jaxgru.unroll(stack, x)
        for t in range(3):
            h, carry = jaxgru.step(stack, x[:, t], carry)
            np.testing.assert_allclose(h, y[:, t], atol=1e-12)


def test_two_directions_add_what_both_read(residual):
    with jax.enable_x64(True):
        x = jax.random.normal(KEY, (2, 5, 3), "float64")
        y, _ = jaxgru.bidirectional(*residual, x)
        forward, backward = residual
        expected = x
        for i, layers in enumerate(zip(forward.layers, backward.layers, strict=True)):
            h, _ = jaxgru.bidirectional(*layers, expected)
            expected = h + expected if i else h
        np.testing.assert_allclose(y, expected, atol=1e-12)


def test_printed_layers_show_sizes():
    def shapes(init, *sizes, **options):
        return jax.eval_shape(lambda: init(KEY, *sizes, **options))

    layer = shapes(jaxgru.init_gru, 64, 128)
    assert repr(layer) == "GRUCell(in 64, hidden 128, float32)"
    narrow = jax.tree.map(lambda w: w.update(dtype="bfloat16") if w.ndim > 1 else w, layer)
    assert repr(narrow) == "GRUCell(in 64, hidden 128, bfloat16, float32)"
    projected = shapes(jaxgru.init_lstm, 3, 8, proj_size=4)
    assert repr(projected) == "ProjectedLSTMCell(in 3, hidden 8, proj_size 4, float32)"
    grouped = shapes(jaxgru.init_gru, 3, 8, layer_norm=True, num_blocks=2)
    assert repr(grouped) == "LayerNormGRUCell(in 3, hidden 8, num_blocks 2, float32)"
    several = jax.tree.map(lambda w: jnp.stack([w, w]), jaxgru.init_rnn(KEY, 3, 4))
    arrays = "W float32 (2, 3, 4), U float32 (2, 4, 4), b float32 (2, 4)"
    assert repr(several) == f"RNNCell({arrays}, activation 'tanh', clip None)"
    zeros = jax.tree.map(lambda w: 0, several)
    assert repr(zeros) == "RNNCell(W 0, U 0, b 0, activation 'tanh', clip None)"


def test_messages_print_no_arrays():
    pair = jaxgru.initial_carry(jaxgru.init_lstm(KEY, 3, 4), 2)
    part = "an array, float32 (2, 4)"
    assert shown(pair) == f"({part}, {part})" and shown([pair.h]) == f"[{part}]"
