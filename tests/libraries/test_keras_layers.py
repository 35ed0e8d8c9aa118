"""What is Keras's own: two directions, stacks, layers with or without biases, refusals."""

from __future__ import annotations

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import keras_drawn, layer, normal, precision, refused, same_numbers
from random_models import same_bits

import jaxgru
from jaxgru.libraries import LibraryError

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras")
if keras.backend.backend() != "jax":
    pytest.skip("Keras runs on another backend than JAX.", allow_module_level=True)

from jaxgru.libraries.keras_layers import from_keras, to_keras  # noqa: E402

KINDS = {
    "GRU, reset after": keras.layers.GRU,
    "GRU, reset before": partial(keras.layers.GRU, reset_after=False),
    # With JAX 0.11 on a GPU, the gradient of cuDNN's LSTM fails in float64, so Keras's own loop
    "LSTM": partial(keras.layers.LSTM, use_cudnn=False),
    "SimpleRNN": keras.layers.SimpleRNN,
    "GRU, ReLU": partial(keras.layers.GRU, activation="relu"),
    "LSTM, ReLU": partial(keras.layers.LSTM, activation="relu"),
}
EVERY = pytest.mark.parametrize("kind", KINDS)
UNDRAWN = dict(kernel_initializer="zeros", recurrent_initializer="zeros")  # `made` draws weights


def made(kind, dtype=np.float32, two=False, **options):
    """A layer whose every weight and bias is random."""
    name = np.dtype(dtype).name
    built = KINDS[kind](
        6, dtype=name, return_sequences=True, return_state=True, **UNDRAWN, **options
    )
    return keras_drawn(keras.layers.Bidirectional(built, dtype=name) if two else built)


@EVERY
def test_two_directions(kind):
    with precision(np.float64):
        built = made(kind, dtype=np.float64, two=True)
        if "ReLU" not in kind:
            for side in (built.forward_layer, built.backward_layer):
                side.cell.activation = jnp.tanh  # Keras's own rounds float64 to float32
        pair = "LSTM" in kind
        x = normal(3, 5, 4, seed=20)
        carry = [normal(3, 6, seed=30 + i) for i in range(2 + 2 * pair)]
        seeds = [variable.value for variable in built.non_trainable_variables]  # no dropout's

        def ours(weights, x, carry):
            states = zip(carry[::2], carry[1::2], strict=True) if pair else carry
            carry = tuple((jaxgru.LSTMState(*s) if pair else s,) for s in states)
            y, ends = jaxgru.bidirectional(*from_keras(built, weights), x, carry)
            return [y, *jax.tree.leaves(ends)]

        def theirs(weights, x, carry):
            return list(built.stateless_call(weights, seeds, x, initial_state=carry)[0])

        weights = [variable.value for variable in built.trainable_variables]
        same_numbers(ours, theirs, weights, x, carry)


@pytest.mark.parametrize(
    "kind, two",
    [("gru after, second bias", True), pytest.param("lstm", False, marks=pytest.mark.slow)],
)
def test_stacks(kind, two):
    """What `from_torch` of a module of several layers returns, in one direction or two."""
    sizes = [(4, 5), (10 if two else 5, 5)]
    ahead, back = (
        tuple(layer(kind, E, H, seed=10 * i + j) for j, (E, H) in enumerate(sizes)) for i in (0, 1)
    )
    weights = (ahead, back) if two else ahead
    x = normal(2, 5, 4, dtype=np.float32)
    model = to_keras(weights, return_sequences=True)
    y, _ = jaxgru.bidirectional(*weights, x) if two else jaxgru.unroll(weights, x)
    np.testing.assert_allclose(y, model(x), 1e-5, 1e-5)
    assert to_keras(weights)(x).shape == (2, y.shape[2])
    again = from_keras(model)
    assert jax.tree.structure(again) == jax.tree.structure(weights)
    assert same_bits(again, weights)


RELU = layer("rnn").replace(activation="relu")


@pytest.mark.parametrize(
    "pair", [(layer("rnn"), RELU), (RELU, layer("rnn")), (layer("gru"), layer("gru after"))]
)
def test_two_directions_of_different_kinds(pair):
    """The backward layer is no copy of the forward one."""
    ahead, back = pair
    x = normal(2, 5, 4, dtype=np.float32)
    built = to_keras(([ahead], [back]), return_sequences=True)
    expected, _ = jaxgru.bidirectional(ahead, back, x)
    np.testing.assert_allclose(built(x), expected, 1e-5, 1e-5)
    again, _ = jaxgru.bidirectional(*from_keras(built), x)
    np.testing.assert_allclose(again, expected, 1e-5, 1e-5)


@EVERY
def test_without_biases(kind):
    p = from_keras(made(kind, use_bias=False))
    x = normal(2, 5, 4, dtype=np.float32)
    y = to_keras(p, return_sequences=True)(x)
    np.testing.assert_allclose(jaxgru.unroll(p, x)[0], y, 1e-5, 1e-5)


class Mine(keras.layers.GRU):
    pass


run = dict(return_sequences=True, **UNDRAWN)


def several(*layers):
    return from_keras(keras.Sequential([keras.Input((5, 4)), *layers]))


def both(**options):
    return keras.layers.Bidirectional(keras.layers.GRU(6, **run), **options)


LSTM = layer("lstm")
RNN = layer("rnn")
W, U, B = (np.ones(shape, np.float32) for shape in ((4, 18), (6, 18), (2, 18)))
after = partial(made, "GRU, reset after")


test_refusals = refused(
    (lambda: from_keras(Mine(3)), "Mine; it must be one of Keras's GRU, LSTM, SimpleRNN, Bidir"),
    (lambda: from_keras(keras.layers.GRU(3)), "the GRU has no weights yet; build it first"),
    (lambda: from_keras(made("LSTM", activation="gelu")), "gelu; it must be tanh or relu"),
    (lambda: from_keras(made("LSTM", recurrent_activation="relu")), "_activation=relu; it"),
    (lambda: from_keras(made("LSTM", dtype=jnp.bfloat16)), "the weights are bfloat16; they mu"),
    (lambda: from_keras(after(), [W, U, B, B]), "this GRU: the tensor 3 does not belong there"),
    (lambda: from_keras(after(), [W, 0.5, B]), "the tensor recurrent_kernel has shape ..; it"),
    (lambda: from_keras(both(merge_mode="sum")), "merge_mode='sum'; it must be 'concat'"),
    (lambda: several(), "the 0 layers of this Sequential must all be forward or"),
    (lambda: several(keras.layers.GRU(6, go_backwards=True)), "the 1 layers of this Sequent"),
    (lambda: several(keras.layers.GRU(6, **run), both()), "the 2 layers of this Sequential"),
    (lambda: to_keras([RNN, RNN]), "layer below it has 6 features per step; layer 1 takes 4"),
    (lambda: to_keras(jax.tree.map(jnp.bfloat16, LSTM)), "the layer's weights are bfloat16"),
    (lambda: to_keras(LSTM, units=3, dtype="float32"), "take dtype, units, which the layers"),
    (lambda: to_keras(([LSTM], [LSTM]), go_backwards=True), "does not take go_backwards, which"),
)


def test_a_backend_that_is_not_installed(monkeypatch):
    """Whatever Keras would compute with; the first import of `keras` fails on it."""
    import builtins
    import importlib
    import sys

    def refuse(name, *args):
        if name == "keras":
            raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")
        return real(name, *args)

    real = builtins.__import__
    monkeypatch.delitem(sys.modules, "jaxgru.libraries.keras_layers")
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(LibraryError, match="with tensorflow, which is not .* KERAS_BACKEND=jax"):
        importlib.import_module("jaxgru.libraries.keras_layers")
