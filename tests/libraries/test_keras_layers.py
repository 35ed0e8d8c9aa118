"""Keras's recurrent layers and ours: the same numbers; weights both ways."""

from __future__ import annotations

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import CASES, alike_under_strict_promotion, layer, normal, precision, same_numbers
from conftest import slow
from random_models import same_bits

import jaxgru
from jaxgru.libraries import InteropError

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras")
if keras.backend.backend() != "jax":
    pytest.skip("Keras runs on another backend than JAX.", allow_module_level=True)

from jaxgru.libraries.keras_layers import from_keras, to_keras  # noqa: E402

KINDS = {
    "GRU, reset after": lambda H, **options: keras.layers.GRU(H, **options),
    "GRU, reset before": lambda H, **options: keras.layers.GRU(H, reset_after=False, **options),
    # With JAX 0.11 on a GPU, the gradient of cuDNN's LSTM fails in float64, so Keras's own loop
    "LSTM": lambda H, **options: keras.layers.LSTM(H, use_cudnn=False, **options),
    "SimpleRNN": lambda H, **options: keras.layers.SimpleRNN(H, **options),
}
EVERY = pytest.mark.parametrize("kind", KINDS)
ALL = dict(return_sequences=True, return_state=True)
UNDRAWN = dict(kernel_initializer="zeros", recurrent_initializer="zeros")  # `made` draws weights


def made(kind, E=4, H=6, dtype=np.float32, two=False, **options):
    """A layer whose every weight and bias is random."""
    name = np.dtype(dtype).name
    built = KINDS[kind](H, dtype=name, **ALL, **UNDRAWN, **options)
    built = keras.layers.Bidirectional(built, dtype=name) if two else built
    built.build((None, None, E))
    if dtype == np.float64:
        for one in (built.forward_layer, built.backward_layer) if two else (built,):
            one.cell.activation = jnp.tanh  # Keras's own rounds float64 to float32
    built.set_weights(
        [normal(*w.shape, dtype=dtype, seed=i) for i, w in enumerate(built.get_weights())]
    )
    return built


def keras_call(built, weights, x, carry):
    """What the layer returns, with these weights and this carry."""
    seeds = [variable.value for variable in built.non_trainable_variables]  # of unused dropout
    return list(built.stateless_call(weights, seeds, x, initial_state=carry)[0])


def problem(built, T, B, E, H, dtype, states):
    x = normal(B, T, E, dtype=dtype, seed=20)
    carry = [normal(B, H, dtype=dtype, seed=30 + i) for i in range(states)]
    return [variable.value for variable in built.trainable_variables], x, carry


@EVERY
@pytest.mark.parametrize("dtype, sizes", CASES)
def test_the_same_numbers(kind, dtype, sizes):
    """Outputs, carry, and the gradients of Keras's weights, of the input and of the carry."""
    with precision(dtype):
        T, B, E, H = sizes
        built = made(kind, E, H, dtype)

        def ours(weights, x, carry):
            carry = jaxgru.LSTMState(*carry) if kind == "LSTM" else carry[0]
            y, last = jaxgru.unroll(from_keras(built, weights), x, carry)
            return [y, *jax.tree.leaves(last)]

        theirs = partial(keras_call, built)
        same_numbers(ours, theirs, *problem(built, *sizes, dtype, 1 + (kind == "LSTM")))


@EVERY
def test_two_directions(kind):
    with precision(np.float64):
        sizes = 5, 3, 4, 6
        built = made(kind, dtype=np.float64, two=True)
        pair = 2 if kind == "LSTM" else 1

        def ours(weights, x, carry):
            states = (
                carry if pair == 1 else (jaxgru.LSTMState(*carry[:2]), jaxgru.LSTMState(*carry[2:]))
            )
            carry = tuple((state,) for state in states)
            y, ends = jaxgru.bidirectional(*from_keras(built, weights), x, carry)
            return [y, *jax.tree.leaves(ends)]

        theirs = partial(keras_call, built)
        same_numbers(ours, theirs, *problem(built, *sizes, np.float64, 2 * pair))


@EVERY
@pytest.mark.parametrize("two", [True, *slow(False)])
def test_weights_there_and_back(kind, two):
    built = made(kind, two=two)
    weights = from_keras(built)
    again = to_keras(weights, return_sequences=True)
    assert type(again) is type(built)
    assert same_bits(again.get_weights(), built.get_weights())
    assert same_bits(from_keras(again), weights)
    assert again(normal(2, 5, 4, dtype=np.float32)).shape == (2, 5, 12 if two else 6)


@pytest.mark.parametrize(
    "kind, two",
    [("gru after, second bias", True), pytest.param("lstm", False, marks=pytest.mark.slow)],
)
def test_stacks(kind, two):
    """What `from_torch` of a module of several layers returns, in one direction or two."""
    sizes = [(4, 5), (10 if two else 5, 5), (10 if two else 5, 5)]
    ahead, back = (
        tuple(layer(kind, E, H, seed=10 * i + j) for j, (E, H) in enumerate(sizes)) for i in (0, 1)
    )
    weights, x = (ahead, back) if two else ahead, normal(2, 5, 4, dtype=np.float32)
    model = to_keras(weights, return_sequences=True)
    y, _ = jaxgru.bidirectional(*weights, x) if two else jaxgru.unroll(weights, x)
    np.testing.assert_allclose(y, model(x), 1e-5, 1e-5)
    assert to_keras(weights)(x).shape == (2, y.shape[2])
    again = from_keras(model)
    assert jax.tree.structure(again) == jax.tree.structure(weights)
    assert same_bits(again, weights)
    if two:
        apart = to_keras(*weights, return_sequences=True)
        assert same_bits(apart.get_weights(), model.get_weights())


def test_without_biases_and_with_second_ones():
    for kind in KINDS:
        p = from_keras(made(kind, use_bias=False))
        y = to_keras(p, return_sequences=True)(x := normal(2, 5, 4, dtype=np.float32))
        np.testing.assert_allclose(jaxgru.unroll(p, x)[0], y, 1e-5, 1e-5)
    p = layer("gru, second bias")
    q = from_keras(to_keras(p))
    assert same_bits((q.b[:12], q.b[12:], q.c), (p.b[:12] + p.c, p.b[12:], None))
    p, zeros = layer("gru after"), jnp.zeros(6)  # −0: the sign of z changes
    assert same_bits(from_keras(to_keras(p)), p.replace(c=jnp.concatenate([-zeros, zeros])))


@pytest.mark.parametrize("kind", ["GRU, reset after", "LSTM"])
def test_strict_promotion(kind):
    built = made(kind, two=True)
    alike_under_strict_promotion(lambda: from_keras(built))  # Keras cannot build a layer so


@pytest.mark.parametrize("ahead", [False, True])
def test_biases_in_one_direction_only(ahead):
    """The first three weights, or the first two, are the forward layer's."""
    options = dict(return_sequences=True, **UNDRAWN)
    both = keras.layers.Bidirectional(
        keras.layers.GRU(6, use_bias=ahead, **options),
        backward_layer=keras.layers.GRU(6, use_bias=not ahead, go_backwards=True, **options),
    )
    both.build((None, None, 4))
    both.set_weights(
        [normal(*w.shape, dtype=np.float32, seed=i) for i, w in enumerate(both.get_weights())]
    )
    x = normal(2, 5, 4, dtype=np.float32)
    np.testing.assert_allclose(jaxgru.bidirectional(*from_keras(both), x)[0], both(x), 1e-5, 1e-5)


class TestRefusals:
    @pytest.mark.parametrize(
        "make, says",
        [
            (lambda: keras.layers.Dense(3), "a Dense cannot be converted; a keras GRU, LSTM"),
            (lambda: keras.layers.GRU(3), "the GRU has no weights yet; build it first"),
            (lambda: made("LSTM", activation="relu"), "activations of this LSTM are not tanh"),
            (lambda: made("LSTM", recurrent_activation="relu"), "activations of this LSTM are no"),
            (lambda: made("LSTM", dtype=jnp.bfloat16), "the weights are bfloat16; they must be"),
        ],
    )
    def test_keras_layers(self, make, says):
        with pytest.raises(InteropError, match=says):
            from_keras(make())

    def test_what_may_change_what_a_layer_computes(self):
        class Mine(keras.layers.GRU):
            pass

        def built(layer, **parts):
            for name, part in parts.items():
                setattr(layer, name, part)
            layer.build((None, None, 2))
            return layer

        with pytest.raises(InteropError, match="a Mine cannot be converted"):
            from_keras(built(Mine(3)))
        with pytest.raises(InteropError, match="something else: its cell is an LSTMCell"):
            from_keras(built(keras.layers.GRU(3), cell=keras.layers.LSTMCell(3)))
        with pytest.raises(InteropError, match="its cell is a GRUCell, or a call was replaced"):
            from_keras(built(keras.layers.GRU(3), call=lambda x: x))
        more = keras.layers.GRU(3)
        more.add_weight(shape=(2,))
        for weights in (None, made("GRU, reset after", 2, 3).get_weights()):
            with pytest.raises(InteropError, match="the number of weights is 4; this GRU has 3"):
                from_keras(built(more) if weights is None else more, weights)

    def test_directions(self):
        summed = keras.layers.Bidirectional(keras.layers.GRU(3), merge_mode="sum")
        with pytest.raises(InteropError, match="the number of weights is 1; this GRU has 3"):
            from_keras(made("GRU, reset after"), [np.zeros((4, 18), np.float32)])
        with pytest.raises(InteropError, match="merge_mode is 'sum' .* one by one"):
            from_keras(summed)
        with pytest.raises(InteropError, match="must be of one kind and size"):
            to_keras(layer("gru"), layer("gru after"))
        with pytest.raises(InteropError, match="must be of one kind and size"):
            to_keras(layer("rnn"), layer("rnn", H=5))
        with pytest.raises(InteropError, match="layer 1 takes 6 features, but receives 12"):
            to_keras([layer("rnn"), layer("rnn", 6)], [layer("rnn"), layer("rnn", 6)])
        with pytest.raises(InteropError, match="there are 2 forward and 1 backward layers"):
            to_keras([layer("rnn"), layer("rnn")], layer("rnn"))
        with pytest.raises(InteropError, match="there is no layer to convert"):
            to_keras([])
        with pytest.raises(InteropError, match="a dict cannot be converted: Keras has"):
            to_keras({})

    def test_sequentials(self):
        several = lambda *layers: from_keras(keras.Sequential([keras.Input((5, 4)), *layers]))
        run = dict(return_sequences=True, **UNDRAWN)
        gru, back = keras.layers.GRU(6, **run), keras.layers.GRU(6, go_backwards=True, **run)
        for layers in ([], [back], [gru, keras.layers.Bidirectional(keras.layers.GRU(6, **run))]):
            says = f"the {len(layers)} layers of this Sequential must all be forward or"
            with pytest.raises(InteropError, match=says):
                several(*layers)
        with pytest.raises(InteropError, match="a Dense cannot be converted"):
            several(gru, keras.layers.Dense(3))
        model = to_keras([layer("rnn"), layer("rnn", 6)])
        with pytest.raises(InteropError, match="the number of weights is 1; this Sequential has 6"):
            from_keras(model, model.get_weights()[:1])
        for option in ("name", "return_state"):
            with pytest.raises(InteropError, match=f"{option}, which the stack determines"):
                to_keras([layer("rnn"), layer("rnn", 6)], **{option: True})

    def test_weights_of_other_shapes(self):
        built = made("GRU, reset after")
        W, U, b = built.get_weights()
        with pytest.raises(
            InteropError, match=r"tensor bias has shape \(18,\); it must be \(2, 18\)"
        ):
            from_keras(built, [W, U, b[0]])
        with pytest.raises(InteropError, match=r"kernel has shape \(6, 18\); it must be \(4, 18\)"):
            from_keras(built, [U, W, b])
        with pytest.raises(ValueError, match="a weight is a NoneType; it must be an array"):
            from_keras(built, [W, U, None])

    @pytest.mark.parametrize(
        "option", [{"activation": "relu"}, {"use_bias": False}, {"units": 3}, {"dtype": "float64"}]
    )
    def test_options_that_contradict_the_layer(self, option):
        (name,) = option
        p, q = layer("gru"), layer("gru", 6)
        for layers, which in ((p, "layer"), (((p,), (p,)), "pair"), ([p, q], "stack")):
            says = f"to_keras does not take {name}, which the {which} determines"
            with pytest.raises(InteropError, match=says):
                to_keras(layers, **option)

    @pytest.mark.parametrize("option", [{"merge_mode": "sum"}, {"go_backwards": True}])
    def test_options_that_contradict_a_pair(self, option):
        (name,) = option
        with pytest.raises(InteropError, match=f"does not take {name}, which the pair determines"):
            to_keras(layer("lstm"), layer("lstm"), **option)

    def test_weights_in_bfloat16(self):
        """Keras cannot draw them."""
        narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), layer("lstm"))
        with pytest.raises(InteropError, match="the layer's weights are bfloat16; they must be fl"):
            to_keras(narrow)

    def test_weights_that_are_not_known(self):
        with pytest.raises(InteropError, match="a Keras layer needs the values of the weights"):
            jax.jit(to_keras)(layer("lstm"))

    def test_float64_where_jax_would_round_it(self):
        with precision(np.float64):
            built = made("GRU, reset after", dtype=np.float64)
        with pytest.raises(InteropError, match="JAX_ENABLE_X64"):
            from_keras(built)


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
    with pytest.raises(InteropError, match="with tensorflow, which is not .* KERAS_BACKEND=jax"):
        importlib.import_module("jaxgru.libraries.keras_layers")
