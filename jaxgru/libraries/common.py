"""What the conversions share: gates in another order, z of the other sign, biases that are added.

Other libraries store the gates of a layer side by side, each in an order of its own, written here
as a string: "rzn" is r, then z, then n. All functions work under `jit` and `grad`, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxgru.cells import CellParams, GRUParams, LSTMState
from jaxgru.cells.carry import AnyArray
from jaxgru.cells.gru import AnyGRU
from jaxgru.cells.products import dense, round_weights
from jaxgru.cells.pytrees import options_of
from jaxgru.layers import api
from jaxgru.layers.validate import as_array, is_pair, one_array
from jaxgru.libraries import InteropError, check_shapes
from jaxgru.printing import shown, type_name

T = TypeVar("T")


class UnknownCell(InteropError):
    """A cell that may compute something else than what jaxgru knows.

    What stands in for another library's class runs it by that library's own code.
    """


SIGMOID = (jax.nn.sigmoid, jax.lax.logistic)
TANH = (jnp.tanh, jax.lax.tanh)
RELU = (jax.nn.relu,)
PHI = TANH + RELU
"""What a layer's `activation` can be, as functions of JAX."""

# --- Weights


class Stored(NamedTuple):
    """How another library stores a layer: as arrays by name.

    cls: the layer's class. order: of the gates, which are side by side in an array, or have one
    each. W, U, b: the names of the arrays that are these, side by side. cn: that of a GRU's cn.
    out_in: W and U are (out, in). old_z: see `layer_from_weights`.
    """

    cls: type
    order: str
    W: Sequence[str]
    U: Sequence[str]
    b: Sequence[str]
    cn: str = ""
    out_in: bool = False
    old_z: bool = True


def from_arrays(where: str, stored: Stored, arrays: Mapping[str, Any], **others: Any) -> CellParams:
    """Return the layer with these arrays; `others` are other fields.

    Raises InteropError, whose message `where` begins, if they are not the arrays of such a layer.
    """
    arrays = as_weights(where, arrays)
    turned = lambda shape: shape[::-1] if stored.out_in else shape
    shapes = {name: array.shape for name, array in arrays.items()}
    E = max(turned(shapes.get(stored.W[0], ()))[:1], default=0)
    width = max(turned(shapes.get(stored.U[0], ()))[-1:], default=0)
    H = width * len(stored.U) // len(stored.order)
    want = {name: turned((E, width)) for name in stored.W}
    want |= {name: turned((H, width)) for name in stored.U}
    want |= {name: (width,) for name in stored.b} | ({stored.cn: (H,)} if stored.cn else {})
    others_too = sorted(shapes.keys() - want.keys())
    if others_too and shapes.keys() > want.keys():
        raise UnknownCell(f"{where}: the tensor {others_too[0]} does not belong there.")
    check_shapes(where, shapes, want)
    if stored.out_in:
        arrays = {name: array.T for name, array in arrays.items()}
    side = lambda names: jnp.concatenate([arrays[name] for name in names], axis=-1)
    b = side(stored.b) if stored.b else None
    others |= {"cn": jnp.asarray(arrays[stored.cn])} if stored.cn else {}
    W, U = side(stored.W), side(stored.U)
    return layer_from_weights(stored.cls, stored.order, W, U, b, old_z=stored.old_z, **others)


def to_arrays(layer: Any, stored: Stored) -> dict[str, Array]:
    """Return a layer's arrays by name; a GRU's c is added to b."""
    W, U, b, _ = sides(without_c(layer), stored.order, stored.old_z)
    arrays: dict[str, Array] = {}
    for names, side in ((stored.W, W), (stored.U, U), (stored.b, b)):
        parts = jnp.split(side, len(names), axis=-1)
        arrays |= zip(names, (part.T if stored.out_in else part for part in parts), strict=True)
    return arrays | ({stored.cn: layer.cn} if stored.cn else {})


def layer_from_weights(
    cls: type, order: str, W: AnyArray, U: AnyArray, b: AnyArray | None = None,
    c: AnyArray | None = None, old_z: bool = True, **others: Any,
) -> CellParams:  # fmt: skip
    """Return a layer, given W (E, G·H), U (H, G·H) and b (G·H) with gates in another order.

    Args:
      b: None: zeros.
      c: second biases (G·H). Those that act only as a sum with b are added to it: all of an LSTM's
        and an RNN's, and n's of a GRU whose reset gate acts before the product.
      old_z: z weights the old state of a GRU, as everywhere but in jaxgru and Haiku.
      others: other fields of the layer.
    """
    ordered = lambda side: reordered(side, order, cls.gates, old_z)
    b = ordered(np.zeros(W.shape[-1], W.dtype) if b is None else b)
    c = None if c is None else ordered(c)
    if issubclass(cls, AnyGRU):
        H = len(U)
        c, n = (None, jnp.zeros(H, U.dtype)) if c is None else jnp.split(c, [2 * H])
        if cls is GRUParams:
            others.setdefault("cn", n)
        else:
            b = jnp.concatenate([b[: 2 * H], added(b[2 * H :], n)])
        others["c"] = c
    elif c is not None:
        b = added(b, c)
    return cls(W=ordered(W), U=ordered(U), b=b, **others)


def reordered(weights: AnyArray, order: str, wanted: str, old_z: bool = False) -> Array:
    """Return a copy of weights (..., G·H) with their gates in another order; zeros, of others.

    For a NumPy array, this compiles nothing.

    Args:
      old_z: the weights of z change sign, so that z becomes 1 − z.
    """
    numpy = np if isinstance(weights, np.ndarray) else jnp
    parts = dict(zip(order, numpy.split(weights, len(order), axis=-1), strict=True))
    zeros = numpy.zeros_like(parts[order[0]])
    parts |= {"z": -parts["z"]} if old_z and "z" in parts else {}
    return jnp.array(numpy.concatenate([parts.get(gate, zeros) for gate in wanted], axis=-1))


def sides(layer: CellParams, order: str, old_z: bool = True) -> tuple[Array, ...]:
    """Return W (E, G·H), U (H, G·H), b and c (G·H) with the gates in another order.

    A missing c is zeros. Blocks of U become a block-diagonal matrix, because no other library has
    them. `old_z` is as for `layer_from_weights`.
    """
    p: Any = dense(layer)
    ordered = lambda side, old_z=old_z: reordered(side, p.gates, order, old_z)
    c, is_zeros = jnp.zeros_like(p.b), getattr(p, "c", None) is None
    if isinstance(p, AnyGRU):
        zr, n = jnp.split(c, [len(c) // 3 * 2])
        c = jnp.concatenate([zr if p.c is None else p.c, getattr(p, "cn", n)])
    return ordered(p.W), ordered(p.U), ordered(p.b), ordered(c, old_z and not is_zeros)


def by_layer(cells: Mapping[T, Stored]) -> dict[type, tuple[T, Stored]]:
    """Return a library's cell for each class of layers, the last in the table, and its row."""
    return {stored.cls: (cell, stored) for cell, stored in cells.items()}


def without_c(layer: CellParams) -> CellParams:
    """Return the layer with a GRU's c added to b, because most libraries have no c."""
    p: Any = layer
    if getattr(p, "c", None) is None:
        return layer
    b, n = jnp.split(p.b, [len(p.c)])
    return dataclasses.replace(p, b=jnp.concatenate([added(b, p.c), n]), c=None)


def added(b: AnyArray, c: AnyArray) -> Array:
    """Return b + c, and b bit for bit where c is zero (−0 + 0 would be 0)."""
    return jnp.where(c == 0, b, b + c)


# --- Layers


def directions(layers: Any) -> tuple[tuple[Any, ...], ...]:
    """Return the layers that read forward and, in a second tuple, any that read backward.

    They are given as one layer, a list or a pair of lists.
    """
    parts = layers if is_pair(layers) else (layers,)
    stacks = [tuple(part) if isinstance(part, Sequence) else (part,) for part in parts]
    if not stacks[0]:
        raise InteropError("there is no layer to convert.")
    if len({*map(len, stacks)}) > 1:
        ahead, back = map(len, stacks)
        raise InteropError(
            f"there are {ahead} forward and {back} backward layers; the numbers must be equal."
        )
    return tuple(stacks)


def call(module: Any, /, x: Float[AnyArray, "*B T F"], carry: Any = None, **options: Any) -> Any:
    """Run `jaxgru.unroll` with these arguments or, for a pair, `jaxgru.bidirectional`.

    Args:
      module: a library's `Layer`, whose method `layer` returns its layers. The products with their
        weights are in its `dtype`; None: that of the weights.
    """
    layers = _rounded(module)
    if is_pair(layers):
        return api.bidirectional(layers[0], layers[1], x, carry, **options)
    return api.unroll(layers, x, carry, **options)


def step(module: Any, /, x: Float[AnyArray, "*B F"], carry: Any, **options: Any) -> Any:
    """Compute `jaxgru.step` with these arguments, without dropout."""
    return api.step(_rounded(module), x, carry, **options)


def _rounded(module: Any) -> Any:
    layers = module.layer()
    return layers if module.dtype is None else round_weights(layers, module.dtype)


def initial_carry(layers: Any, batch_size: Any) -> Any:
    """Return the carry of what a `Layer` holds; for a pair of lists, a pair."""
    if is_pair(layers):
        return tuple(api.initial_carry(part, batch_size) for part in layers)
    return api.initial_carry(layers, batch_size)


def run_cell(
    layer: CellParams, x: AnyArray, state: Any, products: DTypeLike, **options: Any
) -> Any:
    """Run `jaxgru.unroll` as another library runs a cell.

    The products with the weights are in one dtype; the state keeps its own if that is wider.
    """
    states = jnp.result_type(products, *jax.tree.leaves(state))
    layer = jax.tree.map(lambda w: w.astype(products if w.ndim == 2 else states), layer)
    state = jax.tree.map(lambda leaf: leaf.astype(states), state)
    return api.unroll(layer, x, state, **options)


# --- Checks


def counterpart(layer: Any, counterparts: Mapping[type, T], theirs: str, *options: str) -> T:
    """Return what a library has for the class of a layer, or raise InteropError.

    `theirs` says what the library has; `options` are those of a layer's options that it has, too.
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


def check_class(
    what: str, value: Any, classes: Collection[type], library: str, hint: str = ""
) -> None:
    """Raise UnknownCell if a value is of none of a library's classes."""
    if type(value) not in classes:
        names = ", ".join(cls.__name__ for cls in classes)
        raise UnknownCell(
            f"{what} is {type_name(value)}; it must be one of {library}'s {names}, not a "
            f"subclass{hint}."
        )


def check_options(what: str, module: Any, **supported: Sequence[Any]) -> None:
    """Raise UnknownCell if a module has such an attribute, with none of the supported values."""
    word = lambda value: getattr(value, "__name__", shown(value))
    for name, values in supported.items():
        if not is_one_of(value := getattr(module, name, values[0]), values):
            wanted = " or ".join(dict.fromkeys(map(word, values)))
            raise UnknownCell(f"{what} has {name}={word(value)}; it must be {wanted}.")


def check_absent(unknown: UnknownCell, **options: Any) -> None:
    """Raise InteropError if an option is given that no other library has.

    Args:
      unknown: why the cell of a call is run by its own library's code.
      options: what the call was given; None, or the implementation "auto": nothing.
    """
    for name, value in options.items():
        if value is not None and not (name == "implementation" and value == "auto"):
            raise InteropError(f"{name} needs a cell that jaxgru knows: {unknown}") from unknown


def is_one_of(value: Any, candidates: Sequence[Any]) -> bool:
    """Return whether a value is among the candidates, or a copy of a function of JAX's that is.

    `copy.deepcopy` makes new objects of `jax.nn.sigmoid` and `jax.nn.relu`, without a name; they
    trace to the same program.
    """
    program = lambda function: str(jax.make_jaxpr(function)(0.0))
    kinds = type(jax.nn.sigmoid), type(jax.nn.relu)
    copied = lambda like: type(value) is type(like) in kinds and program(value) == program(like)
    return value in candidates or any(map(copied, candidates))


def activation(function: Any, relu: Sequence[Any] = RELU) -> str:
    """Return the name of a function that `check_options` has found to be tanh or ReLU."""
    return "relu" if is_one_of(function, relu) else "tanh"


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
    x = one_array(name, x)
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
    """Return a state as an array or, for a pair, an `LSTMState`, of arrays as from `of_shape`."""
    if pair and (not isinstance(state, tuple | list) or len(state) != 2):
        raise InteropError(f"{name} must be a pair of arrays {shape}, as an LSTM has.")
    if not pair:
        return of_shape(name, state, shape)
    return LSTMState(*(of_shape(name, part, shape) for part in state))
