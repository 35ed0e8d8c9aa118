"""Keras: the weights of its GRU, LSTM, SimpleRNN and Bidirectional as layers, and back.

Keras stores gates side by side, (in, out): a GRU's in the order z, r, n (its h), with z weighting
the old state, an LSTM's in the order i, f, g (its c), o. With `reset_after` a GRU's bias has two
rows, of which the second is added to h·U. See https://keras.io/api/layers/recurrent_layers/.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from jaxgru.cells import GRUParams, LSTMParams, ResetBeforeGRUParams, RNNParams, sizes
from jaxgru.errors import type_name
from jaxgru.layers.validate import check_stack
from jaxgru.libraries import InteropError, check_shapes, common

try:
    import keras
except ModuleNotFoundError as error:
    if error.name == "keras":
        raise InteropError("Keras is needed but not installed; run pip install keras.") from error
    raise InteropError(
        f"Keras computes with {error.name}, which is not installed: set KERAS_BACKEND=jax in the "
        "environment before anything imports Keras."
    ) from error

TANH = (keras.activations.tanh, *common.TANH)  # Keras's own rounds float64 to float32
RELU = (keras.activations.relu, *common.RELU)
SIGMOID = (keras.activations.sigmoid, *common.SIGMOID)
KINDS = (keras.layers.GRU, keras.layers.LSTM, keras.layers.SimpleRNN)


def from_keras(layer: Any, weights: Sequence[Any] | None = None) -> Any:
    """Return the layer with the weights of a GRU, LSTM or SimpleRNN.

    Values are copied; those of z change sign. Missing biases become zeros. The carry is h, or
    (h, c). How a layer is run (`return_sequences`, `go_backwards`, `stateful`, …) is ignored, and
    so is dropout, which acts in training only.

    Args:
      layer: one that has been built, so has weights; a Bidirectional; or a Sequential of these.
      weights: in place of `layer.get_weights()`, for `jit` and `grad`.

    Returns:
      The layer's parameters; for a Sequential, a tuple of these. For a Bidirectional, or a
      Sequential of them, two tuples, forward and backward, for `jaxgru.bidirectional`.

    Raises:
      InteropError: the layer is of another class, has no weights yet, or has other activations than
        tanh or ReLU and, for the gates, sigmoid; a Bidirectional merges other than by "concat"
        or reads backwards first; some layers of a Sequential have one direction and some two, or
        one goes backwards; or the weights are neither float32 nor, if JAX has 64 bits enabled,
        float64.
    """
    if type(layer) is keras.Sequential:
        return _from_sequential(layer, weights)
    if type(layer) is keras.layers.Bidirectional:
        first, second = layer.forward_layer, layer.backward_layer
        common.check_options("this Bidirectional", layer, merge_mode=["concat"])
        common.check_options("its forward layer", first, go_backwards=[False])
        weights = list(layer.get_weights() if weights is None else weights)
        ahead = len(first.weights)
        return (from_keras(first, weights[:ahead]),), (from_keras(second, weights[ahead:]),)
    if type(layer) not in KINDS:
        raise InteropError(
            f"{type_name(layer)} cannot be converted; a keras GRU, LSTM, SimpleRNN, Bidirectional "
            "or Sequential of these can."
        )
    name = type(layer).__name__
    if not layer.built:
        raise InteropError(f"the {name} has no weights yet; build it first.")
    functions = dict(activation=TANH + RELU, recurrent_activation=SIGMOID)
    common.check_options(f"this {name}", layer, **functions)
    activation = "relu" if common.is_one_of(layer.activation, RELU) else "tanh"
    values: Any = layer.get_weights() if weights is None else weights
    shapes = {weight.name: tuple(weight.shape) for weight in layer.weights}
    names = [*shapes, *map(str, range(len(shapes), len(values)))]
    named = dict(zip(names, values, strict=False))
    arrays = common.as_weights(f"the weights of this {name}", named)
    check_shapes(f"this {name}", {n: array.shape for n, array in arrays.items()}, shapes)
    for array in arrays.values():
        common.check_dtype("the weights", str(array.dtype))
    W, U, *biases = arrays.values()
    b = biases[0] if biases else None
    if isinstance(layer, keras.layers.LSTM):
        return common.layer_from_weights(LSTMParams, "ifgo", W, U, b, activation=activation)
    if isinstance(layer, keras.layers.SimpleRNN):
        return common.layer_from_weights(RNNParams, "h", W, U, b, activation=activation)
    cls = GRUParams if layer.reset_after else ResetBeforeGRUParams
    b, c = b if layer.reset_after and b is not None else (b, None)
    return common.layer_from_weights(cls, "zrn", W, U, b, c, activation=activation)


def _from_sequential(model: Any, weights: Sequence[Any] | None) -> Any:
    layers = model.layers
    two = {type(layer) is keras.layers.Bidirectional for layer in layers}
    if len(two) != 1 or any(getattr(layer, "go_backwards", False) for layer in layers):
        raise InteropError(
            f"the {len(layers)} layers of this Sequential must all be forward or all "
            "Bidirectional; convert them one by one."
        )
    weights = list(model.get_weights() if weights is None else weights)
    ends = [*accumulate(len(layer.weights) for layer in layers[:-1]), None]
    parts = [weights[start:end] for start, end in pairwise([0, *ends])]
    stack = tuple(map(from_keras, layers, parts))
    if two == {False}:
        return stack
    return tuple(tuple(layer for (layer,) in side) for side in zip(*stack, strict=True))


def to_keras(layers: Any, backward: Any = None, **options: Any) -> keras.layers.Layer:
    """Return a built GRU, LSTM or SimpleRNN; for two directions, a Bidirectional of these.

    Several layers become a Sequential, in which all but the last return sequences.

    It has biases. If a GRU's `reset_gate` is "before", c is added to b; if it is
    "after", missing second biases become zeros. `from_keras` returns the other values bit for bit.

    Args:
      layers: one layer, or the layers of a stack, or of its forward direction; or, as from
        `from_torch` and `from_keras`, the pair of both directions.
      backward: the layer, or the layers, of the backward direction; None: there is one direction.
      options: for each Keras layer, such as `return_sequences=True`, but none that says what it
        computes.

    Raises:
      InteropError: Keras has no layer of this kind, or none with these options; the directions
        differ in number; the weights are not known, as under `jit`; or the layers determine one of
        the `options`.
      ValueError: the layers do not fit together.
    """
    common.check_known((layers, backward), "a Keras layer")
    ahead, back = common.in_directions(layers, backward)
    determined = {"activation", "dtype", "recurrent_activation", "reset_after", "units", "use_bias"}
    determined |= {"go_backwards"} if back or len(ahead) > 1 else set()
    if taken := sorted(options.keys() & determined):
        raise InteropError(
            f"to_keras does not take {', '.join(taken)}, which the layers determine."
        )
    made = []
    for i, p in enumerate(ahead):
        inner = options if i == len(ahead) - 1 else options | {"return_sequences": True}
        layer = _made(p, inner)
        if back:
            both = keras.layers.Bidirectional(layer, dtype=layer.dtype)
            both.build((None, None, sizes(p)[0]))
            both.set_weights(layer.get_weights() + _made(back[i], inner).get_weights())
            layer = both
        made.append(layer)
    features = sizes(list(ahead)[0])[0]
    check_stack([*zip(ahead, back, strict=True)] if back else ahead, features)
    if len(made) == 1:
        return made[0]
    model = keras.Sequential(made)
    model.build((None, None, features))
    return model


def _made(p: Any, options: dict[str, Any]) -> keras.layers.Layer:
    kinds = {
        GRUParams: (keras.layers.GRU, "zrn"),
        ResetBeforeGRUParams: (partial(keras.layers.GRU, reset_after=False), "zrn"),
        LSTMParams: (keras.layers.LSTM, "ifgo"),
        RNNParams: (keras.layers.SimpleRNN, "h"),
    }
    has = "Keras has a GRU, an LSTM and a SimpleRNN"
    make, order = common.counterpart(p, kinds, has, "activation")
    (E, H), dtype = sizes(p), str(p.b.dtype)
    common.check_dtype("the layer's weights", dtype)
    if isinstance(p, GRUParams):
        W, U, *biases = common.stacked(p, order)
        W, U, b = W.T, U.T, np.stack(biases)
    else:
        W, U, b = common.sides(p, order)
    made = make(H, dtype=dtype, activation=p.activation, **options)
    made.build((None, None, E))
    made.set_weights([np.asarray(w) for w in (W, U, b)])
    return made
