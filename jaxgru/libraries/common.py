"""What the conversions share: gates in another order, z of the other sign, biases that are added.

Other libraries store the gates of a layer side by side, each in an order of its own, written here
as a string: "rzn" is r, then z, then n. All functions work under `jit` and `grad`, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.scipy.linalg import block_diag
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxgru.arguments import as_array, check_shapes, one_array
from jaxgru.arrays import AnyArray
from jaxgru.cells import AnyCell, GRUCell, LSTMState, ResetBeforeGRUCell, round_weights
from jaxgru.errors import LibraryError
from jaxgru.layers import bidirectional, unroll
from jaxgru.layers import initial_carry as carry_of_layers
from jaxgru.layers import step as step_of_layers
from jaxgru.layers.validate import is_pair
from jaxgru.printing import shown, type_name
from jaxgru.pytrees import options_of

T = TypeVar("T")


class UnknownCell(LibraryError):
    """A cell that may compute something else than what jaxgru knows.

    What stands in for another library's class runs it by that library's own code.
    """


SIGMOID = (jax.nn.sigmoid, jax.lax.logistic)
TANH = (jnp.tanh, jax.lax.tanh)
RELU = (jax.nn.relu,)
PHI = TANH + RELU
"""What a layer's `activation` can be, as functions of JAX."""

# --- Weights


class Storage(NamedTuple):
    """How another library stores a layer: as arrays by name.

    Attributes:
      cls: the layer's class.
      order: of the gates, which are side by side in an array, or have one each.
      W: the names of the arrays that are W, side by side.
      U: likewise for U.
      b: likewise for b.
      cn: the name of a GRU's cn.
      out_in: W and U are (out, in).
      old_z: see `layer_from_weights`.
    """

    cls: type
    order: str
    W: Sequence[str]
    U: Sequence[str]
    b: Sequence[str]
    cn: str = ""
    out_in: bool = False
    old_z: bool = True


def from_arrays(where: str, storage: Storage, arrays: Mapping[str, Any], **others: Any) -> AnyCell:
    """Return the layer with these arrays; `others` are other fields.

    Raises:
      LibraryError: they are not the arrays of such a layer; `where` begins the message.
    """
    arrays = as_weights(where, arrays)
    shapes = {name: array.shape for name, array in arrays.items()}
    expected = _expected_shapes(storage, shapes)
    if shapes.keys() > expected.keys():
        name = min(shapes.keys() - expected.keys())
        raise UnknownCell(f"{where}: the tensor {name} does not belong there.")
    check_shapes(where, shapes, expected)

    if storage.out_in:
        arrays = {name: array.T for name, array in arrays.items()}
    W = _side_by_side(arrays, storage.W)
    U = _side_by_side(arrays, storage.U)
    b = None
    if storage.b:
        b = _side_by_side(arrays, storage.b)
    if storage.cn:
        others["cn"] = jnp.asarray(arrays[storage.cn])
    return layer_from_weights(storage.cls, storage.order, W, U, b, old_z=storage.old_z, **others)


def _expected_shapes(
    storage: Storage, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's arrays, whose sizes are those of its first W and U."""

    def in_out(shape: tuple[int, ...]) -> tuple[int, ...]:
        """Turn a stored shape into (in, out), or back."""
        return shape[::-1] if storage.out_in else shape

    W_shape = in_out(shapes.get(storage.W[0], ()))
    U_shape = in_out(shapes.get(storage.U[0], ()))
    E = W_shape[0] if W_shape else 0
    width = U_shape[-1] if U_shape else 0
    H = width * len(storage.U) // len(storage.order)

    expected: dict[str, tuple[int, ...]] = {}
    expected |= {name: in_out((E, width)) for name in storage.W}
    expected |= {name: in_out((H, width)) for name in storage.U}
    expected |= {name: (width,) for name in storage.b}
    if storage.cn:
        expected[storage.cn] = (H,)
    return expected


def _side_by_side(arrays: Mapping[str, AnyArray], names: Sequence[str]) -> Array:
    return jnp.concatenate([arrays[name] for name in names], axis=-1)


def to_arrays(layer: Any, storage: Storage) -> dict[str, Array]:
    """Return a layer's arrays by name; a GRU's c is added to b."""
    weights = weights_in_order(without_c(layer), storage.order, storage.old_z)
    named_weights = [(storage.W, weights.W), (storage.U, weights.U), (storage.b, weights.b)]
    arrays: dict[str, Array] = {}
    for names, weight in named_weights:
        parts = jnp.split(weight, len(names), axis=-1)
        if storage.out_in:
            parts = [part.T for part in parts]
        arrays |= zip(names, parts, strict=True)
    if storage.cn:
        arrays[storage.cn] = layer.cn
    return arrays


def layer_from_weights(
    cls: type,
    order: str,
    W: AnyArray,
    U: AnyArray,
    b: AnyArray | None = None,
    c: AnyArray | None = None,
    old_z: bool = True,
    **others: Any,
) -> AnyCell:
    """Return a layer, given W (E, G·H), U (H, G·H) and b (G·H) with gates in another order.

    Args:
      b: None: zeros.
      c: second biases (G·H). Those that act only as a sum with b are added to it: all of an LSTM's
        and an RNN's, and n's of a GRU whose reset gate acts before the product.
      old_z: z weights the old state of a GRU, as everywhere but in jaxgru and Haiku.
      others: other fields of the layer.
    """
    in_our_order = partial(reorder_gates, order=order, wanted=cls.gates, old_z=old_z)
    if b is None:
        b = np.zeros(W.shape[-1], W.dtype)
    b = in_our_order(b)
    if c is not None:
        c = in_our_order(c)

    if issubclass(cls, GRUCell | ResetBeforeGRUCell):
        H = len(U)
        if c is None:
            c_n = jnp.zeros(H, U.dtype)
        else:
            c, c_n = jnp.split(c, [2 * H])
        others["c"] = c
        if cls is GRUCell:
            others.setdefault("cn", c_n)
        else:
            b = jnp.concatenate([b[: 2 * H], add_biases(b[2 * H :], c_n)])
    elif c is not None:
        b = add_biases(b, c)
    return cls(W=in_our_order(W), U=in_our_order(U), b=b, **others)


def reorder_gates(weights: AnyArray, order: str, wanted: str, old_z: bool = False) -> Array:
    """Return a copy of weights (..., G·H) with their gates in another order; zeros, of others.

    For a NumPy array, this compiles nothing.

    Args:
      old_z: the weights of z change sign, so that z becomes 1 − z.
    """
    numpy = np if isinstance(weights, np.ndarray) else jnp
    gates = dict(zip(order, numpy.split(weights, len(order), axis=-1), strict=True))
    zeros = numpy.zeros_like(gates[order[0]])
    if old_z and "z" in gates:
        gates["z"] = -gates["z"]
    return jnp.array(numpy.concatenate([gates.get(gate, zeros) for gate in wanted], axis=-1))


def dense(params: T) -> T:
    """Return the layer with block-diagonal matrices (H, H), one per gate, in place of blocks."""

    def matrix(U: Array) -> Array:
        if U.ndim < 3:
            return U
        gates = jnp.split(U, U.shape[2] // U.shape[1], axis=-1)
        return jnp.concatenate([block_diag(*gate) for gate in gates], axis=-1)

    return jax.tree.map(matrix, params)


class Weights(NamedTuple):
    """A layer's W (E, G·H), U (H, G·H), b and c (G·H), as most libraries have them."""

    W: Array
    U: Array
    b: Array
    c: Array


def weights_in_order(layer: AnyCell, order: str, old_z: bool = True) -> Weights:
    """Return the weights with the gates in another order.

    A missing c is zeros. Blocks of U become a block-diagonal matrix, because no other library has
    them. `old_z` is as for `layer_from_weights`.
    """
    p: Any = dense(layer)
    in_order = partial(reorder_gates, order=p.gates, wanted=order)
    has_c = getattr(p, "c", None) is not None
    return Weights(
        W=in_order(p.W, old_z=old_z),
        U=in_order(p.U, old_z=old_z),
        b=in_order(p.b, old_z=old_z),
        # A missing c stays 0, also in z, where a change of sign would make it −0.
        c=in_order(_second_biases(p), old_z=old_z and has_c),
    )


def _second_biases(p: Any) -> Array:
    """Return c (G·H), which is zeros where a layer has none."""
    zeros = jnp.zeros_like(p.b)
    if not isinstance(p, GRUCell | ResetBeforeGRUCell):
        return zeros
    zeros_zr, zeros_n = jnp.split(zeros, [len(zeros) // 3 * 2])
    c = zeros_zr if p.c is None else p.c
    return jnp.concatenate([c, getattr(p, "cn", zeros_n)])


def by_layer(cells: Mapping[T, Storage]) -> dict[type, tuple[T, Storage]]:
    """Return a library's cell for each class of layers, the last in the table, and its row."""
    return {storage.cls: (cell, storage) for cell, storage in cells.items()}


def without_c(layer: AnyCell) -> AnyCell:
    """Return the layer with a GRU's c added to b, because most libraries have no c."""
    p: Any = layer
    if getattr(p, "c", None) is None:
        return layer
    b_zr, b_n = jnp.split(p.b, [len(p.c)])
    b = jnp.concatenate([add_biases(b_zr, p.c), b_n])
    return dataclasses.replace(p, b=b, c=None)


def add_biases(b: AnyArray, c: AnyArray) -> Array:
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
        raise LibraryError("there is no layer to convert.")
    depths = [len(stack) for stack in stacks]
    if depths[0] != depths[-1]:
        raise LibraryError(
            f"there are {depths[0]} forward and {depths[1]} backward layers; the numbers must be "
            "equal."
        )
    return tuple(stacks)


def call(module: Any, /, x: Float[AnyArray, "*B T F"], carry: Any = None, **options: Any) -> Any:
    """Run `jaxgru.unroll` with these arguments or, for a pair, `jaxgru.bidirectional`.

    Args:
      module: a library's `Layer`, whose method `layer` returns its layers. The products with their
        weights are in its `dtype`; None: that of the weights.
    """
    layers = _layers_of(module)
    if is_pair(layers):
        return bidirectional(layers[0], layers[1], x, carry, **options)
    return unroll(layers, x, carry, **options)


def step(module: Any, /, x: Float[AnyArray, "*B F"], carry: Any, **options: Any) -> Any:
    """Compute `jaxgru.step` with these arguments, without dropout."""
    return step_of_layers(_layers_of(module), x, carry, **options)


def _layers_of(module: Any) -> Any:
    """Return the layers of a `Layer`, with weights of its dtype."""
    layers = module.layer()
    if module.dtype is None:
        return layers
    return round_weights(layers, module.dtype)


def initial_carry(layers: Any, batch_size: Any) -> Any:
    """Return the carry of what a `Layer` holds; for a pair of lists, a pair."""
    if is_pair(layers):
        return tuple(carry_of_layers(part, batch_size) for part in layers)
    return carry_of_layers(layers, batch_size)


def run_cell(
    layer: AnyCell, x: AnyArray, state: Any, product_dtype: DTypeLike, **options: Any
) -> Any:
    """Run `jaxgru.unroll` as another library runs a cell.

    The products with the weights are in one dtype; the state keeps its own if that is wider.
    """
    state_dtype = jnp.result_type(product_dtype, *jax.tree.leaves(state))

    def converted(weight: AnyArray) -> AnyArray:
        return weight.astype(product_dtype if weight.ndim == 2 else state_dtype)

    layer = jax.tree.map(converted, layer)
    state = jax.tree.map(lambda leaf: leaf.astype(state_dtype), state)
    return unroll(layer, x, state, **options)


# --- Checks


def counterpart(layer: Any, counterparts: Mapping[type, T], theirs: str, *options: str) -> T:
    """Return what a library has for the class of a layer, or raise LibraryError.

    Args:
      theirs: says what the library has.
      options: those of a layer's options that it has, too.
    """
    if type(layer) not in counterparts:
        raise LibraryError(f"{type_name(layer)} cannot be converted: {theirs}.")
    for name, value in options_of(layer).items():
        if name not in options:
            raise LibraryError(
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
    for name, values in supported.items():
        value = getattr(module, name, values[0])
        if not is_one_of(value, values):
            names = dict.fromkeys(_name_of(each) for each in values)
            raise UnknownCell(
                f"{what} has {name}={_name_of(value)}; it must be {' or '.join(names)}."
            )


def _name_of(value: Any) -> str:
    """Return the name of a function, or any other value, for a message."""
    return getattr(value, "__name__", shown(value))


def check_absent(unknown: UnknownCell, **options: Any) -> None:
    """Raise LibraryError if an option is given that no other library has.

    Args:
      unknown: why the cell of a call is run by its own library's code.
      options: what the call was given; None, or the implementation "auto": nothing.
    """
    for name, value in options.items():
        is_default = name == "implementation" and value == "auto"
        if value is not None and not is_default:
            raise LibraryError(f"{name} needs a cell that jaxgru knows: {unknown}") from unknown


def is_one_of(value: Any, candidates: Sequence[Any]) -> bool:
    """Return whether a value is among the candidates, or a copy of a function of JAX's that is.

    `copy.deepcopy` makes new objects of `jax.nn.sigmoid` and `jax.nn.relu`, without a name; they
    trace to the same program.
    """
    return value in candidates or any(_is_copy(value, candidate) for candidate in candidates)


def _is_copy(value: Any, function: Any) -> bool:
    """Return whether a value traces to the program of such a function of JAX's."""
    kinds = (type(jax.nn.sigmoid), type(jax.nn.relu))
    if type(function) not in kinds or type(value) is not type(function):
        return False
    return _program(value) == _program(function)


def _program(function: Callable[[float], Any]) -> str:
    return str(jax.make_jaxpr(function)(0.0))


def activation(function: Any, relu: Sequence[Any] = RELU) -> str:
    """Return the name of a function that `check_options` has found to be tanh or ReLU."""
    return "relu" if is_one_of(function, relu) else "tanh"


def check_dtype(name: str, dtype: str, or_else: str = "") -> None:
    """Raise LibraryError if weights are neither float32 nor, if JAX has 64 bits, float64."""
    if dtype not in ("float32", "float64"):
        raise LibraryError(f"{name} are {dtype}; they must be float32 or float64.")
    x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]  set at run time
    if dtype == "float64" and not x64:
        raise LibraryError(
            f"{name} are float64, which JAX rounds to float32 unless 64 bits are enabled; "
            f"{or_else}set JAX_ENABLE_X64=1."
        )


def check_known(weights: Any, theirs: str) -> None:
    """Raise LibraryError for traced weights: `theirs`, which begins the message, needs values."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(weights)):
        raise LibraryError(
            f"{theirs} needs the values of the weights, which are not known under a "
            "transformation; convert outside."
        )


def as_weights(where: str, weights: Mapping[str, Any]) -> dict[str, AnyArray]:
    """Return weights by name as arrays; raise LibraryError if one is not of floating point."""
    arrays: dict[str, AnyArray] = {}
    for name, weight in weights.items():
        array = as_array(f"{where}: the tensor {name}", weight)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise LibraryError(
                f"{where}: the tensor {name} is {array.dtype}; it must be floating-point."
            )
        arrays[name] = array
    return arrays


def with_steps(name: str, x: Any) -> AnyArray:
    """Return x, with the axes of steps and features, and of batches, as an array."""
    x = one_array(name, x)
    if x.ndim < 2:
        raise LibraryError(f"{name} has shape {x.shape}; it must have steps and features.")
    return x


def of_shape(name: str, x: Any, shape: tuple[int, ...]) -> Array:
    """Return x, which must have this shape, as an array of JAX's."""
    x = as_array(name, x)
    if x.shape != shape:
        raise LibraryError(f"{name} has shape {x.shape}; it must be {shape}.")
    return jnp.asarray(x)


def as_state(name: str, state: Any, pair: bool, shape: tuple[int, ...]) -> Any:
    """Return a state as an array or, for a pair, an `LSTMState`, of arrays as from `of_shape`."""
    if not pair:
        return of_shape(name, state, shape)
    if not isinstance(state, tuple | list) or len(state) != 2:
        raise LibraryError(f"{name} must be a pair of arrays {shape}, as an LSTM has.")
    return LSTMState(*(of_shape(name, part, shape) for part in state))
