"""Keras: the weights of its GRU, LSTM, SimpleRNN and Bidirectional as layers, and back.

Keras stores gates side by side, (in, out): a GRU's in the order z, r, n (its h), with z weighting
the old state, an LSTM's in the order i, f, g (its c), o. With `reset_after` a GRU's bias has two
rows, of which the second is added to h·U. See https://keras.io/api/layers/recurrent_layers/.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgru.cells import CellParams, GRUParams, LSTMParams, ResetBeforeGRUParams, RNNParams, sizes
from jaxgru.cells.gru import AnyGRU
from jaxgru.errors import a_type
from jaxgru.layers.arguments import as_array
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

TANH = (keras.activations.tanh, jnp.tanh)  # Keras's own rounds float64 to float32
SIGMOID = (keras.activations.sigmoid, jax.nn.sigmoid)
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
        tanh and sigmoid; a Bidirectional merges other than by "concat" or reads backwards first;
        some layers of a Sequential have one direction and some two, or one goes backwards; or the
        weights have other shapes than the layer's, or are neither float32 nor, if JAX has 64 bits
        enabled, float64.
    """
    if type(layer) is keras.Sequential:
        return _from_sequential(layer, weights)
    if type(layer) is keras.layers.Bidirectional:
        first, second = layer.forward_layer, layer.backward_layer
        if layer.merge_mode != "concat" or first.go_backwards:
            raise InteropError(
                f"merge_mode is {layer.merge_mode!r} and the forward layer's go_backwards is "
                f"{first.go_backwards}; jaxgru.bidirectional concatenates, forward outputs first "
                "(convert forward_layer and backward_layer one by one to merge otherwise)."
            )
        weights = list(layer.get_weights() if weights is None else weights)
        ahead = len(first.weights)
        return (from_keras(first, weights[:ahead]),), (from_keras(second, weights[ahead:]),)
    if type(layer) not in KINDS:
        raise InteropError(
            f"{a_type(layer)} cannot be converted; a keras GRU, LSTM, SimpleRNN, Bidirectional or "
            "Sequential of these can."
        )
    if not layer.built:
        raise InteropError(f"the {type(layer).__name__} has no weights yet; build it first.")
    gates = getattr(layer, "recurrent_activation", SIGMOID[0])
    if layer.activation not in TANH or gates not in SIGMOID:
        raise InteropError(
            f"the activations of this {type(layer).__name__} are not tanh and sigmoid, the only "
            "ones that jaxgru has."
        )
    given: list[Any] = layer.get_weights() if weights is None else list(weights)
    if len(given) != (count := 3 if layer.use_bias else 2):
        raise InteropError(
            f"the number of weights is {len(given)}; this {type(layer).__name__} has {count}."
        )
    arrays = {w.name: as_array("a weight", g) for w, g in zip(layer.weights, given, strict=True)}
    for array in arrays.values():
        common.check_dtype("the weights", str(array.dtype))
    check_shapes(
        f"the weights of this {type(layer).__name__}",
        {name: array.shape for name, array in arrays.items()},
        {weight.name: tuple(weight.shape) for weight in layer.weights},
    )
    W, U, b = [*arrays.values(), None][:3]
    if isinstance(layer, keras.layers.LSTM):
        return common.layer_of(LSTMParams, "ifgo", W, U, b)
    if isinstance(layer, keras.layers.SimpleRNN):
        return common.layer_of(RNNParams, "h", W, U, b)
    cls = GRUParams if layer.reset_after else ResetBeforeGRUParams
    b, c = b if layer.reset_after and b is not None else (b, None)
    return common.layer_of_both_biases(cls, "zrn", W, U, b, c)


def _from_sequential(model: Any, weights: Sequence[Any] | None) -> Any:
    layers = model.layers
    two = {type(layer) is keras.layers.Bidirectional for layer in layers}
    if len(two) != 1 or any(getattr(layer, "go_backwards", False) for layer in layers):
        raise InteropError(
            f"the {len(layers)} layers of this Sequential must all be forward or all "
            "Bidirectional; convert them one by one."
        )
    given = iter(model.get_weights() if weights is None else weights)
    stack = tuple(from_keras(layer, [*islice(given, len(layer.weights))]) for layer in layers)
    if two == {False}:
        return stack
    return tuple(tuple(layer for (layer,) in one) for one in zip(*stack, strict=True))


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
      InteropError: there is no layer; the two directions differ in kind, size or number of layers;
        a layer takes another size than the one below it gives, or Keras has none of its kind; the
        weights are neither float32 nor float64, or are not known, as under `jit`; or the layers
        determine an option.
    """
    common.check_known((layers, backward), "a Keras layer")
    ahead, back = common.in_directions(layers, backward)
    depth = len(ahead)
    determined = DETERMINED | ({"go_backwards"} if back or depth > 1 else set())
    if taken := sorted(options.keys() & determined):
        raise InteropError(
            f"to_keras does not take {', '.join(taken)}, which the layers determine."
        )
    first = features = sizes(_as_in_keras(ahead[0]))[0]
    made = []
    for i, p in enumerate(ahead):
        q = back[i] if back else None
        (E, _), last = sizes(_as_in_keras(p)), i == depth - 1
        if features != E:
            raise InteropError(f"layer {i} takes {E} features, but receives {features}.")
        inner = options if last else options | {"return_sequences": True}
        made.append(_bidirectional(p, q, inner) if q else _made(p, inner))
        features = sizes(p)[1] * (2 if q else 1)
    if depth == 1:
        return made[0]
    model = keras.Sequential(made)
    model.build((None, None, first))
    return model


def _bidirectional(p: CellParams, q: CellParams, options: dict[str, Any]) -> keras.layers.Layer:
    shapes = [jax.tree.map(jnp.shape, _as_in_keras(layer)) for layer in (p, q)]
    if shapes[0] != shapes[1]:
        raise InteropError("the two layers of a Bidirectional must be of one kind and size.")
    first, second = _made(p, options), _made(q, options)
    both = keras.layers.Bidirectional(first, dtype=str(common.dtype_of_biases(p)))
    both.build((None, None, sizes(p)[0]))
    both.set_weights(first.get_weights() + second.get_weights())
    return both


def _made(layer: CellParams, options: dict[str, Any]) -> keras.layers.Layer:
    p = _as_in_keras(layer)
    (E, H), dtype = sizes(p), common.dtype_of_biases(p)
    common.check_dtype("the layer's weights", str(dtype))
    match p:
        case GRUParams() | ResetBeforeGRUParams():
            after = isinstance(p, GRUParams)
            make, order = partial(keras.layers.GRU, reset_after=after), "zrn"
        case LSTMParams():
            make, order = keras.layers.LSTM, "ifgo"
        case _:
            make, order = keras.layers.SimpleRNN, "h"
    W, U, b = (common.joined(p, side, order) for side in "WUb")
    if isinstance(p, GRUParams):
        c = jnp.zeros_like(p.b[: -len(p.cn)]) if p.c is None else p.c
        b = jnp.stack([b, jnp.concatenate([c, p.cn])])
    made = make(H, dtype=str(dtype), **options)
    made.build((None, None, E))
    made.set_weights([np.asarray(w) for w in (W, U, b)])
    return made


DETERMINED = {"activation", "dtype", "recurrent_activation", "reset_after", "units", "use_bias"}
"""Options of Keras's layers that say what they compute."""


def _as_in_keras(layer: CellParams) -> CellParams:
    """Return the layer with Keras's z, and with exactly the biases that Keras has."""
    if not isinstance(layer, (AnyGRU, LSTMParams, RNNParams)):
        raise common.refusal(layer, "Keras has a GRU, an LSTM and a SimpleRNN")
    if not isinstance(layer, AnyGRU):
        return layer
    p = common.complement_z(layer)
    return p if isinstance(p, GRUParams) else common.single_bias(p)
