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
GRU, LSTM, SimpleRNN = keras.layers.GRU, keras.layers.LSTM, keras.layers.SimpleRNN
Bidirectional = keras.layers.Bidirectional
LAYERS: dict[type, tuple[Any, str]] = {
    GRUParams: (GRU, "zrn"),
    ResetBeforeGRUParams: (partial(GRU, reset_after=False), "zrn"),
    LSTMParams: (LSTM, "ifgo"),
    RNNParams: (SimpleRNN, "h"),
}
"""For each class of layers, Keras's, and the order of its gates."""


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
    """
    classes = (GRU, LSTM, SimpleRNN, Bidirectional, keras.Sequential)
    common.check_class("the layer", layer, classes, "Keras")
    if type(layer) is keras.Sequential:
        return _from_sequential(layer, weights)
    if type(layer) is Bidirectional:
        both = layer.forward_layer, layer.backward_layer
        common.check_options("this Bidirectional", layer, merge_mode=["concat"])
        common.check_options("its forward layer", both[0], go_backwards=[False])
        return tuple((p,) for p in _from_parts(layer, both, weights))
    name = type(layer).__name__
    if not layer.built:
        raise InteropError(f"the {name} has no weights yet; build it first.")
    functions = dict(activation=TANH + RELU, recurrent_activation=SIGMOID)
    common.check_options(f"this {name}", layer, **functions)
    values: Any = layer.get_weights() if weights is None else weights
    shapes = {weight.name: tuple(weight.shape) for weight in layer.weights}
    names = [*shapes, *map(str, range(len(shapes), len(values)))]
    named = dict(zip(names, values, strict=False))
    arrays = common.as_weights(f"the weights of this {name}", named)
    check_shapes(f"this {name}", {n: array.shape for n, array in arrays.items()}, shapes)
    for array in arrays.values():
        common.check_dtype("the weights", str(array.dtype))
    made = {GRU: ResetBeforeGRUParams, LSTM: LSTMParams, SimpleRNN: RNNParams}
    after = getattr(layer, "reset_after", False)
    cls = GRUParams if after else made[type(layer)]
    W, U, *b = arrays.values()
    b, c = b[0] if b and after else (*b, None, None)[:2]  # of a GRU, (2, 3·H)
    activation = common.activation(layer.activation, RELU)
    return common.layer_from_weights(cls, LAYERS[cls][1], W, U, b, c, activation=activation)


def _from_sequential(model: Any, weights: Sequence[Any] | None) -> Any:
    layers = model.layers
    two = {type(layer) is Bidirectional for layer in layers}
    if len(two) != 1 or any(getattr(layer, "go_backwards", False) for layer in layers):
        raise InteropError(
            f"the {len(layers)} layers of this Sequential must all be forward or all "
            "Bidirectional; convert them one by one."
        )
    stack = _from_parts(model, layers, weights)
    if two == {False}:
        return stack
    return tuple(tuple(layer for (layer,) in side) for side in zip(*stack, strict=True))


def _from_parts(whole: Any, layers: Sequence[Any], weights: Sequence[Any] | None) -> Any:
    """Return `from_keras` of each layer of which one consists; the last takes the other weights."""
    weights = list(whole.get_weights() if weights is None else weights)
    ends = [*accumulate(len(layer.weights) for layer in layers[:-1]), None]
    parts = [weights[start:end] for start, end in pairwise([0, *ends])]
    return tuple(map(from_keras, layers, parts))


def to_keras(layers: Any, **options: Any) -> keras.layers.Layer:
    """Return a built GRU, LSTM or SimpleRNN; for two directions, a Bidirectional of these.

    Several layers become a Sequential, in which all but the last return sequences.

    It has biases. If a GRU's `reset_gate` is "before", c is added to b; if it is "after", missing
    second biases become zeros. `from_keras` returns the other values bit for bit.

    Args:
      layers: one layer, or the layers of a stack; or, as from `from_torch` and `from_keras`, the
        pair of lists of both directions.
      options: for each Keras layer, such as `return_sequences=True`, but none that says what it
        computes.
    """
    common.check_known(layers, "a Keras layer")
    sides = common.directions(layers)
    last, two = len(sides[0]) - 1, len(sides) == 2
    determined = {"activation", "dtype", "recurrent_activation", "reset_after", "units", "use_bias"}
    determined |= {"go_backwards"} if two or last else set()
    if taken := sorted(options.keys() & determined):
        raise InteropError(
            f"to_keras does not take {', '.join(taken)}, which the layers determine."
        )
    made = []
    for i, pair in enumerate(zip(*sides, strict=True)):
        inner = options if i == last else options | {"return_sequences": True}
        layer, *back = (_made(p, inner) for p in pair)
        if back:
            both = Bidirectional(layer, dtype=layer.dtype)
            both.build((None, None, sizes(pair[0])[0]))
            both.set_weights(layer.get_weights() + back[0].get_weights())
            layer = both
        made.append(layer)
    features = sizes(sides[0][0])[0]
    check_stack([*zip(*sides, strict=True)], features)
    if not last:
        return made[0]
    model = keras.Sequential(made)
    model.build((None, None, features))
    return model


def _made(p: Any, options: dict[str, Any]) -> keras.layers.Layer:
    has = "Keras has a GRU, an LSTM and a SimpleRNN"
    make, order = common.counterpart(p, LAYERS, has, "activation")
    (E, H), dtype = sizes(p), str(p.b.dtype)
    common.check_dtype("the layer's weights", dtype)
    is_after = isinstance(p, GRUParams)
    W, U, b, c = common.sides(p if is_after else common.without_c(p), order)
    made = make(H, dtype=dtype, activation=p.activation, **options)
    made.build((None, None, E))
    made.set_weights([np.asarray(W), np.asarray(U), np.stack([b, c]) if is_after else b])
    return made
