"""What the modules for `flax.nnx` and `flax.linen` share: names, and a cell over time.

The carry of Flax's LSTMs is (c, h). Its RNNs compute padding like any other step; `seq_lengths`
only says which step's carry is returned and how sequences are reversed. `rnn` returns the same
numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.serialization import from_state_dict, register_serialization_state, to_state_dict
from flax.traverse_util import flatten_dict
from jax.tree_util import keystr, tree_flatten_with_path
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer, Shaped

from jaxgru.cells import CellParams, LSTMParams, LSTMState, sizes
from jaxgru.cells.carry import AnyArray
from jaxgru.cells.pytrees import for_every_struct, options_of
from jaxgru.layers.validate import as_flags, in_reading_order, real_steps
from jaxgru.libraries import InteropError, check_shapes, common
from jaxgru.libraries.common import Stored
from jaxgru.printing import shown


def _from_state_dict(layer: Any, state: dict[str, Any]) -> Any:
    arrays, options = _arrays(layer), options_of(layer)
    saved = {name: value for name, value in state.items() if name not in arrays}
    if saved != options:
        word = lambda of: ", ".join(f"{name}={shown(value)}" for name, value in of.items())
        raise InteropError(
            f"the saved {type(layer).__name__} has {word(saved) or 'no options'}; it must have "
            f"{word(options) or 'none'}."
        )
    saved_arrays = {name: value for name, value in state.items() if name in arrays}
    return dataclasses.replace(layer, **from_state_dict(arrays, saved_arrays))


def _arrays(layer: Any) -> dict[str, Any]:
    """Return the fields that are arrays; a GRU's `reset_gate` is part of the structure instead."""
    fields = dataclasses.fields(layer)
    return {f.name: getattr(layer, f.name) for f in fields if not f.metadata.get("static")}


def _to_state_dict(layer: Any) -> dict[str, Any]:
    """Return the arrays, and options that are not at their defaults: see `options_of`."""
    return to_state_dict(_arrays(layer)) | options_of(layer)


# Once this or another module of Flax's is imported
@for_every_struct
def _register(cls: type) -> None:
    register_serialization_state(cls, _to_state_dict, _from_state_dict, override=True)


def names(layers: Any, *above: str) -> tuple[tuple[str, ...], ...]:
    """Return a path for each array of the layers, in the order of `jax.tree.leaves`.

    A stack has ("0", "LSTMParams", "W", "kernel") and so on. The last name is "kernel", "bias" or
    "scale", as in Flax's own modules, because masks of weight decay go by it. The class of a layer,
    the optional fields that it has and its options are in the path, because Flax restores
    whatever names it looks for and ignores the others: a GRU's fields include those of a minGRU.
    """
    if hasattr(layers, "ndim"):
        vector = "bias" if above[-1].startswith(("b", "c")) else "scale"
        return ((*above, "kernel" if layers.ndim > 1 else vector),)
    if dataclasses.is_dataclass(layers):
        optional = [f.name for f in dataclasses.fields(layers) if f.default is None]
        present = [name for name in optional if getattr(layers, name) is not None]
        present += [f"{name}={value}" for name, value in options_of(layers).items()]
        above = (*above, "_".join([type(layers).__name__, *present]))
    parts, _ = tree_flatten_with_path(layers, is_leaf=lambda x: x is not layers and x is not None)
    return tuple(path for k, part in parts for path in names(part, *above, keystr(k, simple=True)))


def check_names(params: Any, wanted: Sequence[tuple[str, ...]]) -> None:
    """Raise InteropError unless the nested dict of a Layer's parameters has exactly these paths."""
    paths = [dict.fromkeys(map("/".join, each), ()) for each in (flatten_dict(params), wanted)]
    check_shapes("a Layer's parameters", *paths)


def stored(
    cls: type, order: str, W: Sequence[str], U: Sequence[str], b: Sequence[str], cn: str = ""
) -> Stored:
    """Return how a cell stores a layer, given the parts of the cell: a kernel and a bias each."""
    arrays = lambda parts, name: [f"{part}.{name}" for part in parts]
    kernels = arrays(W, "kernel"), arrays(U, "kernel")
    return Stored(cls, order, *kernels, arrays(b, "bias"), cn and f"{cn}.bias")


HAS = "Flax has LSTM cells, a SimpleCell, and a GRUCell whose reset gate acts after the product"


def check_cell(cell: Any, cells: Mapping[type, Stored], hint: str = "") -> None:
    """Raise UnknownCell if a cell is of none of these classes or computes with other functions."""
    common.check_class("the cell", cell, cells, "Flax", hint)
    options = dict(gate_fn=common.SIGMOID, activation_fn=common.PHI, residual=[False])
    common.check_options(f"this {type(cell).__name__}", cell, **options)


def from_cell(
    where: str, cell: Any, cells: Mapping[type, Stored], arrays: Mapping[str, Any]
) -> CellParams:
    """Return the layer of a cell, given its arrays by names such as "hn.kernel"."""
    activation = common.activation(cell.activation_fn)
    return common.from_arrays(where, cells[type(cell)], arrays, activation=activation)


def chosen(module: Any, *values: bool | None) -> dict[str, Any]:
    """Return the options of a call: where one is None, the module's own of that name."""
    names = ("time_major", "reverse", "keep_order", "return_carry")
    return {n: getattr(module, n) if v is None else v for n, v in zip(names, values, strict=True)}


def step_shape(inputs: Any, time_major: bool) -> tuple[int, ...]:
    """Return the shape (*batch, F) of one step of inputs (*batch, T, F), or (T, *batch, F)."""
    shape = common.with_steps("inputs", inputs).shape
    return shape[1:] if time_major else (*shape[:-2], shape[-1])


def rnn(
    layer: CellParams,
    inputs: Float[AnyArray, "..."],
    carry: Any,
    *,
    dtype: DTypeLike | None = None,
    reset: Shaped[AnyArray, "..."] | None = None,
    initial: Any = None,
    lengths: Integer[AnyArray, "..."] | None = None,
    time_major: bool = False,
    reverse: bool = False,
    keep_order: bool = False,
    return_carry: bool = True,
    implementation: str = "auto",
    carry_name: str = "initial_carry",
) -> Any:
    """Compute a layer over time as Flax's RNN does: the outputs, or (carry, outputs).

    Args:
      inputs: (*batch, T, F), or (T, *batch, F) with `time_major`; `reset` likewise.
      carry: before the first step: (*batch, H), or a pair (c, h) of these.
      dtype: of the products, like a cell's `dtype`; None: that of inputs and parameters.
      initial: the carry that a reset sets; None: zeros.
      lengths: (*batch); the carry returned is then that after so many steps.
      carry_name: what messages call the carry.
    """
    x = common.with_steps("inputs", inputs)
    axis, steps = 0 if time_major else x.ndim - 2, x.shape[:-1]
    batch, pair = step_shape(x, time_major)[:-1], isinstance(layer, LSTMParams)

    def ours(name: str, carry: Any) -> Any:
        carry = common.as_state(name, carry, pair, (*batch, sizes(layer)[1]))
        return LSTMState(*carry[::-1]) if pair else carry

    carry = ours(carry_name, carry)
    initial = None if initial is None else ours("the cell's carry", initial)
    products = jnp.result_type(x, *jax.tree.leaves(layer)) if dtype is None else dtype
    x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(products)
    reset = None if reset is None else common.of_shape("reset", reset, steps)
    lengths = None if lengths is None else common.of_shape("seq_lengths", lengths, batch)
    if lengths is not None and not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise InteropError(f"seq_lengths are {lengths.dtype}; they must be integers.")
    if reverse and lengths is not None:
        x = _flip(x, axis, lengths)
        if reset is not None:  # before step t, the step t + 1 is read, unless it is padding
            reset = as_flags("reset", reset, steps) & real_steps(lengths, steps, axis)
            ends = jnp.moveaxis(in_reading_order(jnp.moveaxis(reset, axis, 0)), 0, axis)
            reset = _flip(ends, axis, lengths)
    options = dict(time_major=time_major, reverse=reverse and lengths is None, initial=initial)
    options["return_carries"] = return_carry and lengths is not None
    y, carry, *carries = common.run_cell(
        layer, x, carry, products, reset=reset, implementation=implementation, **options
    )
    if lengths is not None and carries:
        carry = jax.tree.map(lambda c: _after(c, axis, lengths), carries[0])
    if reverse and keep_order == (lengths is not None):  # else it is in that order already
        y = _flip(y, axis, lengths)
    if not return_carry:
        return y
    return carry[::-1] if pair else carry, y


def _after(carries: Array, axis: int, lengths: Integer[AnyArray, "*B"]) -> Array:
    """Return the carry after so many steps of each row; after 0 or too many, Flax takes the last.

    Each row takes from itself, so a sharded batch stays where it is.
    """
    T = carries.shape[axis]
    last = jnp.clip(jnp.where(lengths == 0, T, lengths.astype(int)), 1, T) - 1
    return jnp.take_along_axis(carries, jnp.expand_dims(last, (axis, -1)), axis).squeeze(axis)


def _flip(x: AnyArray, axis: int, lengths: Integer[AnyArray, "*B"] | None) -> Array:
    """Reverse the real steps; the padding stays at the end, and is reversed, too."""
    if lengths is None:
        return jnp.flip(x, axis)
    T, lengths = x.shape[axis], jnp.expand_dims(lengths.astype(int), axis)
    steps = jnp.expand_dims(jnp.arange(T)[::-1], [i for i in range(lengths.ndim) if i != axis])
    order = (steps + lengths) % T
    return jnp.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - order.ndim)), axis)
