"""What the conversions share: the matrix of all gates split into gates, and joined again.

Other libraries store the gates of a layer side by side, each in an order of its own, written here
as a string: "rzn" is r, then z, then n. All functions work under `jit` and `grad`, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxgru.cells import CellParams, GRUParams, hidden, zero_carry
from jaxgru.cells.base import AnyArray
from jaxgru.cells.gru import AnyGRU
from jaxgru.cells.products import dense
from jaxgru.errors import a_type
from jaxgru.layers.arguments import as_array, is_pair
from jaxgru.layers.unroll import bidirectional, unroll
from jaxgru.libraries import InteropError

SIGMOID = (jax.nn.sigmoid, jax.lax.logistic)
TANH = (jnp.tanh, jax.lax.tanh)


SomeGRU = TypeVar("SomeGRU", bound=AnyGRU)


def computes(function: Any, known: Sequence[Callable[..., Any]]) -> bool:
    """Return whether a function is one of these, or a copy of one.

    `copy.deepcopy` makes a new object of what `jax.jit` returned, as `jax.nn.sigmoid` is; it has
    neither name nor code, but traces to the same program.
    """
    if function in known:
        return True
    return type(function) is type(known[0]) and _program(function) == _program(known[0])


@lru_cache(maxsize=64)
def _program(function: Callable[..., Any]) -> str:
    return str(jax.make_jaxpr(function)(jax.ShapeDtypeStruct((2, 3), np.float32)))


def layer_of(
    cls: type, order: str, W: AnyArray, U: AnyArray, b: AnyArray | None = None, **others: Any
) -> CellParams:
    """Return a layer, given W (E, G·H), U (H, G·H) and b (G·H) with gates in another order.

    If b is None, it is zeros.
    """
    b = np.zeros(W.shape[-1], W.dtype) if b is None else b
    sides = {name: reordered(side, order, cls.gates) for name, side in dict(W=W, U=U, b=b).items()}
    return cls(**sides, **others)


def reordered(weights: AnyArray, order: str, wanted: str) -> Array:
    """Return a copy of weights (..., G·H) with their gates in another order.

    For a NumPy array, this compiles nothing.
    """
    numpy = np if isinstance(weights, np.ndarray) else jnp
    parts = dict(zip(order, numpy.split(weights, len(order), axis=-1), strict=True))
    return jnp.array(numpy.concatenate([parts[gate] for gate in wanted], axis=-1))


def layer_of_both_biases(
    cls: type,
    order: str,
    W: AnyArray,
    U: AnyArray,
    b: AnyArray | None,
    c: AnyArray | None,
    **others: Any,
) -> CellParams:
    """Return a layer, given b and second biases c (G·H) of all gates, and a GRU's z of the others.

    Biases that act only as their sum are added: all of an LSTM's and an RNN's, and n's of a GRU
    whose reset gate acts before the product.
    """
    if not issubclass(cls, AnyGRU):
        b = b if b is None or c is None else np.asarray(added(b, c))
        return layer_of(cls, order, W, U, b, **others)
    H = U.shape[-1] // 3
    c = None if c is None else reordered(c, order, cls.gates)
    if cls is GRUParams:
        others["cn"] = jnp.array(np.zeros(H, U.dtype)) if c is None else c[2 * H :]
    p = layer_of(cls, order, W, U, b, **others, c=None if c is None else c[: 2 * H])
    if cls is not GRUParams and c is not None:
        b = jnp.concatenate([p.b[: 2 * H], added(p.b[2 * H :], c[2 * H :])])
        p = dataclasses.replace(p, b=b)
    return complement_z(p)


def joined(layer: CellParams, side: str, order: str) -> Array:
    """Return one side of a layer, W, U or b, with its gates, or some of them, in another order.

    Blocks of U become a block-diagonal matrix, because no other library has them.
    """
    weights = getattr(dense(layer), side)
    return weights if order == layer.gates else reordered(weights, layer.gates, order)


def stacked(layer: CellParams, order: str) -> tuple[np.ndarray, ...]:
    """Return W (G·H, E), U (G·H, H), b and c (G·H), as in PyTorch; a missing c is zeros.

    Blocks of U become a block-diagonal matrix; a GRU's z weights the old state.
    """
    layer = dense(complement_z(layer) if isinstance(layer, AnyGRU) else layer)
    c = np.zeros_like(layer.b)
    if isinstance(layer, AnyGRU):
        H = len(c) // 3
        c[: 2 * H] = 0 if layer.c is None else layer.c
        c[2 * H :] = getattr(layer, "cn", 0)
    sides = map(np.asarray, (layer.W, layer.U, layer.b, c))
    turned = (reordered(side, layer.gates, order).T for side in sides)
    return tuple(np.array(side, order="C") for side in turned)


def in_directions(
    layers: Any, backward: Any = None
) -> tuple[tuple[CellParams, ...], tuple[CellParams, ...] | None]:
    """Return the layers that read forward, and those that read backward or None.

    Args:
      layers: one layer; a list of them, that is, a stack; or a pair of lists, for `bidirectional`.
      backward: the layers of the backward direction, if they are given apart.

    Raises:
      InteropError: there is no layer, or the numbers differ.
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


def dtype_of_biases(layer: CellParams) -> jnp.dtype:
    """Return the dtype of a layer's biases, and so of its state."""
    return jax.eval_shape(lambda p: hidden(zero_carry(p, 1)), layer).dtype


@jax.jit
def complement_z(p: SomeGRU) -> SomeGRU:
    """Return the GRU whose z is 1 minus this one's: z's weights and biases change sign.

    In PyTorch, Flax, Equinox, Keras and ONNX, z weights the old state; here, the new value.
    """

    def changed(weights: AnyArray, gates: int) -> Array:
        z, *others = jnp.split(weights, gates, axis=-1)
        return jnp.concatenate([-z, *others], axis=-1)

    c = None if p.c is None else changed(p.c, 2)
    sides = {name: changed(getattr(p, name), 3) for name in "WUb"}
    return dataclasses.replace(p, c=c, **sides)


def added(b: AnyArray, c: AnyArray | None) -> Array:
    """Return b + c, and b bit for bit where c is zero (−0 + 0 would be 0)."""
    return jnp.asarray(b) if c is None else _added(b, c)


@jax.jit
def _added(b: AnyArray, c: AnyArray) -> Array:
    return jnp.where(c == 0, b, b + c)


def single_bias(p: SomeGRU) -> SomeGRU:
    """Return the GRU with c added to b: their sum is what a layer computes with."""
    if p.c is None:
        return p
    zr = len(p.c)
    b = jnp.concatenate([added(p.b[:zr], p.c), p.b[zr:]])
    return dataclasses.replace(p, b=b, c=None)


def check_inner_bias(p: CellParams, theirs: str, hint: str = "") -> None:
    """Raise InteropError if a GRU's cn is not zero, or not known because it is traced."""
    if isinstance(p.cn, Tracer):
        raise InteropError(
            f"{theirs} has no bias like cn, which must be zeros, but is not known under a "
            "transformation; convert outside."
        )
    if jnp.any(p.cn != 0):
        raise InteropError(
            f"{theirs} has no bias like cn, so a GRU whose cn is not zero cannot be "
            f"converted{hint}."
        )


def check_reset_gate(p: AnyGRU, reset_gate: str, theirs: str) -> None:
    """Raise InteropError if a GRU's reset gate is not where the other library has it."""
    if p.reset_gate != reset_gate:
        raise InteropError(
            f"{theirs} applies the reset gate {reset_gate} the product, this GRU {p.reset_gate} "
            "it, so it cannot be converted."
        )


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


def refusal(layer: Any, theirs: str) -> InteropError:
    """Return the error for a layer for which the other library has no cell."""
    if isinstance(layer, list | tuple):
        theirs = "convert its layers one by one"
    return InteropError(f"{a_type(layer)} cannot be converted: {theirs}.")


def cast(layer: CellParams, weights: DTypeLike, biases: DTypeLike) -> CellParams:
    """Return the layer with W and U in one dtype and the biases, so also the state, in another."""
    return jax.tree.map(lambda w: w.astype(weights if w.ndim == 2 else biases), layer)


def with_steps(name: str, x: Any, time_major: bool = False) -> AnyArray:
    """Return x as an array (..., T, F) or, if it is time-major, (T, ..., F).

    Raises:
      InteropError: it has fewer than two axes, or no step.
    """
    x = as_array(name, x)
    if x.ndim < 2:
        raise InteropError(f"{name} has shape {x.shape}; it must have steps and features.")
    if x.shape[0 if time_major else -2] == 0:
        raise InteropError(f"{name} has shape {x.shape}; it must have at least one step.")
    return x


def reshaped(
    name: str, x: Any, shape: tuple[int, ...], new: tuple[int, ...] | None = None
) -> Array:
    """Return x, which must have the first shape, in the new shape, if there is one.

    Raises:
      InteropError: x has another shape.
    """
    x = as_array(name, x)
    if x.shape != shape:
        raise InteropError(f"{name} has shape {x.shape}; it must be {shape}.")
    return jnp.asarray(x).reshape(shape if new is None else new)


def as_state(
    name: str, state: Any, pair: bool, shape: tuple[int, ...], new: tuple[int, ...] | None = None
) -> Array | tuple[Array, Array]:
    """Return a state as an array or, for a pair, a tuple of two, each as `reshaped` returns it.

    Raises:
      InteropError: it is something else or has another shape.
    """
    if pair and (not isinstance(state, tuple | list) or len(state) != 2):
        raise InteropError(f"{name} must be a pair of arrays {shape}, as an LSTM has.")
    parts = [reshaped(name, part, shape, new) for part in (state if pair else [state])]
    return (parts[0], parts[1]) if pair else parts[0]
