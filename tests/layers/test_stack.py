"""A stack drawn in one call, and what is printed of layers."""

import jax
import jax.numpy as jnp
import pytest
from annotations import unchecked

import jaxgru
from jaxgru.errors import shown

KEY = jax.random.key(0)


@pytest.mark.parametrize("cell", ["gru", "lstm", "rnn", jaxgru.init_gru])
def test_a_stack_fits_together(cell):
    """No two layers are alike; the options reach each."""
    layers = jaxgru.init_stack(cell, KEY, 3, 4, 2, dtype="float16")
    ahead, back = jaxgru.init_stack(cell, KEY, 3, 4, num_layers=2, bidirectional=True)
    x = jax.ShapeDtypeStruct((2, 5, 3), "float32")
    y, _ = jax.eval_shape(jaxgru.unroll, layers, x)
    assert y.shape == (2, 5, 4) and y.dtype == "float16"
    y, _ = jax.eval_shape(jaxgru.bidirectional, ahead, back, x)
    assert y.shape == (2, 5, 8)
    drawn = [leaf for leaf in jax.tree.leaves((ahead, back)) if leaf.ndim == 2]
    assert len({leaf.tobytes() for leaf in map(jax.device_get, drawn)}) == len(drawn)


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("gruu", KEY, 3, 4), "the cell is 'gruu'; it must be one of gru, lstm, rnn, or a funct"),
        (("gru", KEY, 3, 4, 0), "num_layers is 0; it must be a whole number, 1 or more"),
        (("gru", KEY, 3, 0), "hidden_dim is 0; it must be a whole number"),
    ],
)
def test_what_is_refused(arguments, says):
    with unchecked(), pytest.raises(ValueError, match=says):
        jaxgru.init_stack(*arguments)


def test_printed_layers_show_sizes():
    layer = jaxgru.init_gru(KEY, 64, 128)
    assert repr(layer) == "GRUParams(in 64, hidden 128, float32, reset_gate='after')"
    narrow = jax.tree.map(lambda w: w.astype("bfloat16") if w.ndim > 1 else w, layer)
    assert repr(narrow) == "GRUParams(in 64, hidden 128, bfloat16, float32, reset_gate='after')"
    several = jax.tree.map(lambda w: jnp.stack([w, w]), jaxgru.init_rnn(KEY, 3, 4))
    expected = "RNNParams(W float32 (2, 3, 4), U float32 (2, 4, 4), b float32 (2, 4))"
    assert repr(several) == expected
    placeholders = jax.tree.map(lambda w: 0, several)
    assert repr(placeholders) == "RNNParams(W 0, U 0, b 0)"


def test_messages_print_no_arrays():
    pair = jaxgru.initial_carry(jaxgru.init_lstm(KEY, 3, 4), 2)
    part = "an array, float32 (2, 4)"
    assert shown(pair) == f"({part}, {part})" and shown([pair.h]) == f"[{part}]"
