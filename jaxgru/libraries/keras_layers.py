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

from jaxgru.arguments import check_shapes
from jaxgru.arrays import AnyArray
from jaxgru.cells import GRUCell, LSTMCell, ResetBeforeGRUCell, RNNCell, sizes
from jaxgru.errors import LibraryError
from jaxgru.layers.validate import check_stack
from jaxgru.libraries import common

try:
    import keras
except ModuleNotFoundError as error:
    if error.name == "keras":
        raise LibraryError("Keras is needed but not installed; run pip install keras.") from error
    raise LibraryError(
        f"Keras computes with {error.name}, which is not installed: set KERAS_BACKEND=jax in the "
        "environment before anything imports Keras."
    ) from error

# Keras's own tanh rounds float64 to float32.
TANH = (keras.activations.tanh, *common.TANH)
RELU = (keras.activations.relu, *common.RELU)
SIGMOID = (keras.activations.sigmoid, *common.SIGMOID)
GRU = keras.layers.GRU
LSTM = keras.layers.LSTM
SimpleRNN = keras.layers.SimpleRNN
Bidirectional = keras.layers.Bidirectional
LAYERS: dict[type, tuple[Any, str]] = {
    GRUCell: (GRU, "zrn"),
    ResetBeforeGRUCell: (partial(GRU, reset_after=False), "zrn"),
    LSTMCell: (LSTM, "ifgo"),
    RNNCell: (SimpleRNN, "h"),
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
        return _from_bidirectional(layer, weights)
    what = f"this {type(layer).__name__}"
    if not layer.built:
        raise LibraryError(f"the {type(layer).__name__} has no weights yet; build it first.")
    common.check_options(what, layer, activation=TANH + RELU, recurrent_activation=SIGMOID)
    if weights is None:
        weights = layer.get_weights()
    W, U, *biases = _arrays(what, layer, weights)
    cls = _layer_class(layer)
    b = None
    c = None
    if biases:
        (b,) = biases
        if cls is GRUCell:
            b, c = b  # (2, 3·H)
    activation = common.activation(layer.activation, RELU)
    return common.layer_from_weights(cls, LAYERS[cls][1], W, U, b, c, activation=activation)


def _arrays(what: str, layer: Any, values: Any) -> list[AnyArray]:
    """Return the weights of a layer; raise LibraryError if they are not those that it has."""
    shapes = {weight.name: tuple(weight.shape) for weight in layer.weights}
    # Those after the layer's own have numbers as names, and are refused.
    names = [*shapes, *map(str, range(len(shapes), len(values)))]
    named_values = dict(zip(names, values, strict=False))
    arrays = common.as_weights(f"the weights of {what}", named_values)
    check_shapes(what, {name: array.shape for name, array in arrays.items()}, shapes)
    for array in arrays.values():
        common.check_dtype("the weights", str(array.dtype))
    return list(arrays.values())


def _layer_class(layer: Any) -> Any:
    """Return the class of our layer that computes what a layer of Keras's does."""
    if type(layer) is LSTM:
        return LSTMCell
    if type(layer) is SimpleRNN:
        return RNNCell
    return GRUCell if layer.reset_after else ResetBeforeGRUCell


def _from_bidirectional(layer: Any, weights: Sequence[Any] | None) -> Any:
    forward = layer.forward_layer
    common.check_options("this Bidirectional", layer, merge_mode=["concat"])
    common.check_options("its forward layer", forward, go_backwards=[False])
    directions = _from_parts(layer, [forward, layer.backward_layer], weights)
    return tuple((p,) for p in directions)


def _from_sequential(model: Any, weights: Sequence[Any] | None) -> Any:
    layers = model.layers
    are_bidirectional = [type(layer) is Bidirectional for layer in layers]
    is_mixed = any(are_bidirectional) != all(are_bidirectional)
    if not layers or is_mixed or any(getattr(layer, "go_backwards", False) for layer in layers):
        raise LibraryError(
            f"the {len(layers)} layers of this Sequential must all be forward or all "
            "Bidirectional; convert them one by one."
        )
    stack = _from_parts(model, layers, weights)
    if not any(are_bidirectional):
        return stack
    directions = zip(*stack, strict=True)
    return tuple(tuple(layer for (layer,) in direction) for direction in directions)


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
    stacks = common.directions(layers)
    is_stack = len(stacks[0]) > 1
    _check_options(options, is_stack, len(stacks))
    levels = [*zip(*stacks, strict=True)]
    inner_options = options | {"return_sequences": True}
    parts = [_keras_layer(level, inner_options) for level in levels[:-1]]
    parts.append(_keras_layer(levels[-1], options))
    in_features, _ = sizes(stacks[0][0])
    check_stack(levels, in_features)
    if not is_stack:
        return parts[0]
    model = keras.Sequential(parts)
    model.build((None, None, in_features))
    return model


def _check_options(options: dict[str, Any], is_stack: bool, directions: int) -> None:
    """Raise LibraryError if an option says what a layer computes."""
    determined = {"activation", "dtype", "recurrent_activation", "reset_after", "units", "use_bias"}
    if is_stack or directions == 2:
        determined.add("go_backwards")
    refused = sorted(options.keys() & determined)
    if refused:
        raise LibraryError(
            f"to_keras does not take {', '.join(refused)}, which the layers determine."
        )


def _keras_layer(level: tuple[Any, ...], options: dict[str, Any]) -> keras.layers.Layer:
    """Return a built layer or, for one layer in each direction, a Bidirectional."""
    forward = _one_direction(level[0], options)
    if len(level) == 1:
        return forward
    # Without one, Keras makes a copy of the forward layer, with its activation
    backward = _one_direction(level[1], options | {"go_backwards": True})
    both = Bidirectional(forward, backward_layer=backward, dtype=forward.dtype)
    in_features, _ = sizes(level[0])
    both.build((None, None, in_features))
    both.set_weights(forward.get_weights() + backward.get_weights())
    return both


def _one_direction(p: Any, options: dict[str, Any]) -> keras.layers.Layer:
    has = "Keras has a GRU, an LSTM and a SimpleRNN"
    make, order = common.counterpart(p, LAYERS, has, "activation")
    E, H = sizes(p)
    dtype = str(p.b.dtype)
    common.check_dtype("the layer's weights", dtype)
    if isinstance(p, GRUCell):
        W, U, b, c = common.weights_in_order(p, order)
        biases = np.stack([b, c])
    else:
        W, U, biases, _ = common.weights_in_order(common.without_c(p), order)
    layer = make(H, dtype=dtype, activation=p.activation, **options)
    layer.build((None, None, E))
    layer.set_weights([np.asarray(W), np.asarray(U), biases])
    return layer
