"""What the conversions share: gates in another order, z of the other sign, biases that are added.

Other libraries store the gates of a layer side by side, each in an order of its own, written here
as a string: "rzn" is r, then z, then n. All functions work under `jit` and `grad`, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxgru.cells import CellParams, GRUParams
from jaxgru.cells.carry import AnyArray
from jaxgru.cells.gru import AnyGRU
from jaxgru.cells.products import dense, round_weights
from jaxgru.cells.pytrees import options_of
from jaxgru.errors import shown, type_name
from jaxgru.layers.api import bidirectional, unroll
from jaxgru.layers.api import initial_carry as carry_of_layers
from jaxgru.layers.validate import as_array, is_pair
from jaxgru.libraries import InteropError

T = TypeVar("T")

SIGMOID = (jax.nn.sigmoid, jax.lax.logistic)
TANH = (jnp.tanh, jax.lax.tanh)
RELU = (jax.nn.relu,)
PHI = TANH + RELU
"""What a layer's `activation` can be, as functions of JAX."""

# --- Weights


def layer_from_weights(
    cls: type,
    order: str,
    W: AnyArray,
    U: AnyArray,
    b: AnyArray | None = None,
    c: AnyArray | None = None,
    old_z: bool = True,
    **others: Any,
) -> CellParams:
    """Return a layer, given W (E, G·H), U (H, G·H) and b (G·H) with gates in another order.

    Args:
      b: None: zeros.
      c: second biases (G·H). Those that act only as a sum with b are added to it: all of an LSTM's
        and an RNN's, and n's of a GRU whose reset gate acts before the product.
      old_z: z weights the old state of a GRU, as everywhere but in jaxgru and Haiku.
      others: other fields of the layer.
    """
    ordered = lambda side: reordered(side, order, cls.gates)
    b = np.zeros(W.shape[-1], W.dtype) if b is None else b
    if not issubclass(cls, AnyGRU):
        b = b if c is None else np.asarray(added(b, c))
        return cls(W=ordered(W), U=ordered(U), b=ordered(b), **others)
    b, zr = ordered(b), 2 * len(U)
    cn = jnp.array(np.zeros(len(U), U.dtype))
    if c is not None:
        c, cn = jnp.split(ordered(c), [zr])
    if cls is GRUParams:
        others.setdefault("cn", cn)
    elif c is not None:
        b = jnp.concatenate([b[:zr], added(b[zr:], cn)])
    p = cls(W=ordered(W), U=ordered(U), b=b, c=c, **others)
    return complement_z(p) if old_z else p


def reordered(weights: AnyArray, order: str, wanted: str) -> Array:
    """Return a copy of weights (..., G·H) with their gates in another order; zeros, of others.

    For a NumPy array, this compiles nothing.
    """
    numpy = np if isinstance(weights, np.ndarray) else jnp
    parts = dict(zip(order, numpy.split(weights, len(order), axis=-1), strict=True))
    zeros = numpy.zeros_like(parts[order[0]])
    return jnp.array(numpy.concatenate([parts.get(gate, zeros) for gate in wanted], axis=-1))


def sides(layer: CellParams, order: str, old_z: bool = True) -> tuple[Array, Array, Array]:
    """Return W, U and b with the gates in another order; a GRU's c is added to b.

    Blocks of U become a block-diagonal matrix, because no other library has them.

    Args:
      old_z: as for `layer_from_weights`.
    """
    p: Any = dense(complement_z(layer) if old_z else layer)
    b = p.b
    if getattr(p, "c", None) is not None:
        zr = len(p.c)
        b = jnp.concatenate([added(b[:zr], p.c), b[zr:]])
    W, U, b = (reordered(side, p.gates, order) for side in (p.W, p.U, b))
    return W, U, b


def stacked(layer: CellParams, order: str) -> tuple[np.ndarray, ...]:
    """Return W (G·H, E), U (G·H, H), b and c (G·H), as in PyTorch; a missing c is zeros.

    Blocks of U become a block-diagonal matrix; a GRU's z weights the old state.
    """
    p: Any = dense(complement_z(layer))
    c = np.zeros_like(p.b)
    if isinstance(p, AnyGRU):
        H = len(c) // 3
        c[: 2 * H] = 0 if p.c is None else p.c
        c[2 * H :] = getattr(p, "cn", 0)
    arrays = (reordered(side, p.gates, order) for side in (p.W, p.U, p.b, c))
    return tuple(np.array(np.asarray(array).T, order="C") for array in arrays)


def complement_z(p: Any) -> Any:
    """Return the GRU whose z is 1 minus this one's, or another layer: z's weights change sign.

    In PyTorch, Flax, Equinox, Keras and ONNX, z weights the old state; here, the new value.
    """
    if not isinstance(p, AnyGRU):
        return p

    def changed(weights: AnyArray, gates: int = 3) -> Array:
        z = np.arange(weights.shape[-1]) < weights.shape[-1] // gates
        return jnp.where(np.broadcast_to(z, weights.shape), -weights, weights)

    c = None if p.c is None else changed(p.c, 2)
    return dataclasses.replace(p, W=changed(p.W), U=changed(p.U), b=changed(p.b), c=c)


def added(b: AnyArray, c: AnyArray) -> Array:
    """Return b + c, and b bit for bit where c is zero (−0 + 0 would be 0)."""
    return jnp.where(c == 0, b, b + c)


def cast(layer: CellParams, weights: DTypeLike, biases: DTypeLike) -> CellParams:
    """Return the layer with W and U in one dtype and the biases, so also the state, in another."""
    return jax.tree.map(lambda w: w.astype(weights if w.ndim == 2 else biases), layer)


# --- Layers


def in_directions(
    layers: Any, backward: Any = None
) -> tuple[tuple[Any, ...], tuple[Any, ...] | None]:
    """Return the layers that read forward, and those that read backward or None.

    They are given as one layer, a list or a pair of lists; or `backward` is given apart.
    """
    if backward is None and is_pair(layers):
        layers, backward = layers
    several = lambda part: tuple(part) if isinstance(part, Sequence) else (part,)
    ahead, back = several(layers), None if backward is None else several(backward)
    if not ahead:
        raise InteropError("there is no layer to convert.")
    if back is not None and len(ahead) != len(back):
        raise InteropError(
            f"there are {len(ahead)} forward and {len(back)} backward layers; the numbers must be "
            "equal."
        )
    return ahead, back


def run_layers(layers: Any, x: Any, carry: Any = None, **options: Any) -> Any:
    """Run what a module `Layer` holds: `bidirectional` for a pair of lists, else `unroll`."""
    if is_pair(layers):
        return bidirectional(layers[0], layers[1], x, carry, **options)
    return unroll(layers, x, carry, **options)


def rounded(layers: Any, dtype: DTypeLike | None) -> Any:
    """Return what a `Layer` computes with, given its `dtype`."""
    return layers if dtype is None else round_weights(layers, dtype)


def initial_carry(layers: Any, batch_size: Any) -> Any:
    """Return the carry of what a `Layer` holds; for a pair of lists, a pair."""
    if is_pair(layers):
        return tuple(carry_of_layers(part, batch_size) for part in layers)
    return carry_of_layers(layers, batch_size)


# --- Checks


def counterpart(layer: Any, counterparts: Mapping[type, T], theirs: str, *options: str) -> T:
    """Return what a library has for the class of a layer.

    Args:
      theirs: says what the library has.
      options: those of a layer's options that the library has, too.

    Raises:
      InteropError: it has none, or not with the options of this layer.
    """
    if type(layer) not in counterparts:
        raise InteropError(f"{type_name(layer)} cannot be converted: {theirs}.")
    for name, value in options_of(layer).items():
        if name not in options:
            raise InteropError(
                f"{type_name(layer)} with {name}={value!r} cannot be converted: {theirs}, and none "
                "of them has this option."
            )
    return counterparts[type(layer)]


def check_options(what: str, module: Any, **supported: Sequence[Any]) -> None:
    """Raise InteropError if a module has such an attribute, with none of the supported values."""
    word = lambda value: getattr(value, "__name__", shown(value))
    for name, values in supported.items():
        if not is_one_of(value := getattr(module, name, values[0]), values):
            wanted = " or ".join(dict.fromkeys(map(word, values)))
            raise InteropError(f"{what} has {name}={word(value)}; it must be {wanted}.")


def is_one_of(value: Any, candidates: Sequence[Any]) -> bool:
    """Return whether a value is among the candidates, or a copy of a function of JAX's that is.

    `copy.deepcopy` makes new objects of `jax.nn.sigmoid` and `jax.nn.relu`, without a name; they
    trace to the same program.
    """
    program = lambda function: str(jax.make_jaxpr(function)(0.0))
    kinds = type(jax.nn.sigmoid), type(jax.nn.relu)
    copied = lambda like: type(value) is type(like) in kinds and program(value) == program(like)
    return value in candidates or any(map(copied, candidates))


def check_dtype(name: str, dtype: str, or_else: str = "") -> None:
    """Raise InteropError if weights are neither float32 nor, if JAX has 64 bits, float64."""
    if dtype not in ("float32", "float64"):
        raise InteropError(f"{name} are {dtype}; they must be float32 or float64.")
    x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]  set at run time
    if dtype == "float64" and not x64:
        raise InteropError(
            f"{name} are float64, which JAX rounds to float32 unless 64 bits are enabled; "
            f"{or_else}set JAX_ENABLE_X64=1."
        )


def check_known(weights: Any, theirs: str) -> None:
    """Raise InteropError for traced weights: `theirs`, which begins the message, needs values."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(weights)):
        raise InteropError(
            f"{theirs} needs the values of the weights, which are not known under a "
            "transformation; convert outside."
        )


def as_weights(where: str, weights: Mapping[str, Any]) -> dict[str, AnyArray]:
    """Return weights by name as arrays; raise InteropError if one is not of floating point."""
    arrays = {}
    for name, weight in weights.items():
        arrays[name] = as_array(f"{where}: the tensor {name}", weight)
        if not jnp.issubdtype(dtype := arrays[name].dtype, jnp.floating):
            raise InteropError(f"{where}: the tensor {name} is {dtype}; it must be floating-point.")
    return arrays


def with_steps(name: str, x: Any) -> AnyArray:
    """Return x, with the axes of steps and features, and of batches, as an array."""
    x = as_array(name, x)
    if x.ndim < 2:
        raise InteropError(f"{name} has shape {x.shape}; it must have steps and features.")
    return x


def of_shape(name: str, x: Any, shape: tuple[int, ...]) -> Array:
    """Return x, which must have this shape, as an array of JAX's."""
    x = as_array(name, x)
    if x.shape != shape:
        raise InteropError(f"{name} has shape {x.shape}; it must be {shape}.")
    return jnp.asarray(x)


def as_state(name: str, state: Any, pair: bool, shape: tuple[int, ...]) -> Any:
    """Return a state as an array or, for a pair, a tuple of two, each as `of_shape` returns it."""
    if pair and (not isinstance(state, tuple | list) or len(state) != 2):
        raise InteropError(f"{name} must be a pair of arrays {shape}, as an LSTM has.")
    if not pair:
        return of_shape(name, state, shape)
    return tuple(of_shape(name, part, shape) for part in state)
