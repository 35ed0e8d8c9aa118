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

from jaxgru.arguments import check_shapes
from jaxgru.arrays import AnyArray
from jaxgru.cells import AnyCell, LSTMCell, LSTMState, sizes
from jaxgru.errors import LibraryError
from jaxgru.layers import Implementation
from jaxgru.libraries import common
from jaxgru.libraries.common import Storage
from jaxgru.printing import shown
from jaxgru.pytrees import for_every_struct, options_of
from jaxgru.steps import as_flags, in_reading_order, valid_steps


def _from_state_dict(layer: Any, state: dict[str, Any]) -> Any:
    arrays = _arrays(layer)
    options = options_of(layer)
    saved_options = {name: value for name, value in state.items() if name not in arrays}
    if saved_options != options:
        raise LibraryError(
            f"the saved {type(layer).__name__} has {_in_words(saved_options) or 'no options'}; it "
            f"must have {_in_words(options) or 'none'}."
        )
    saved_arrays = {name: value for name, value in state.items() if name in arrays}
    return dataclasses.replace(layer, **from_state_dict(arrays, saved_arrays))


def _in_words(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={shown(value)}" for name, value in options.items())


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

    A stack has ("0", "LSTMCell", "W", "kernel") and so on. The last name is "kernel", "bias" or
    "scale", as in Flax's own modules, because masks of weight decay go by it. The class of a layer,
    the optional fields that it has and its options are in the path, because Flax restores
    whatever names it looks for and ignores the others: a GRU's fields include those of a minGRU.
    """
    if hasattr(layers, "ndim"):
        return ((*above, _kind_of_weight(layers, above[-1])),)
    if dataclasses.is_dataclass(layers):
        above = (*above, _kind_of_layer(layers))
    parts, _ = tree_flatten_with_path(layers, is_leaf=lambda x: x is not layers and x is not None)
    paths: list[tuple[str, ...]] = []
    for key, part in parts:
        paths += names(part, *above, keystr(key, simple=True))
    return tuple(paths)


def _kind_of_weight(weight: Any, field: str) -> str:
    """Return what Flax's modules call such a weight."""
    if weight.ndim > 1:
        return "kernel"
    return "bias" if field.startswith(("b", "c")) else "scale"


def _kind_of_layer(layer: Any) -> str:
    """Return the name of a layer's class, its optional fields and its options."""
    optional = [field.name for field in dataclasses.fields(layer) if field.default is None]
    fields = [name for name in optional if getattr(layer, name) is not None]
    options = [f"{name}={value}" for name, value in options_of(layer).items()]
    return "_".join([type(layer).__name__, *fields, *options])


def check_names(params: Any, wanted: Sequence[tuple[str, ...]]) -> None:
    """Raise LibraryError unless the nested dict of a Layer's parameters has exactly these paths."""
    # Only the names are compared, so all have one shape.
    names_of_params = dict.fromkeys(map("/".join, flatten_dict(params)), ())
    wanted_names = dict.fromkeys(map("/".join, wanted), ())
    check_shapes("a Layer's parameters", names_of_params, wanted_names)


def storage(
    cls: type, order: str, W: Sequence[str], U: Sequence[str], b: Sequence[str], cn: str = ""
) -> Storage:
    """Return how a cell stores a layer, given the parts of the cell: a kernel and a bias each."""
    return Storage(
        cls,
        order,
        W=[f"{part}.kernel" for part in W],
        U=[f"{part}.kernel" for part in U],
        b=[f"{part}.bias" for part in b],
        cn=f"{cn}.bias" if cn else "",
    )


HAS = "Flax has LSTM cells, a SimpleCell, and a GRUCell whose reset gate acts after the product"


def check_cell(cell: Any, cells: Mapping[type, Storage], hint: str = "") -> None:
    """Raise UnknownCell if a cell is of none of these classes or computes with other functions."""
    common.check_class("the cell", cell, cells, "Flax", hint)
    common.check_options(
        f"this {type(cell).__name__}",
        cell,
        gate_fn=common.SIGMOID,
        activation_fn=common.PHI,
        residual=[False],
    )


def from_cell(
    where: str, cell: Any, cells: Mapping[type, Storage], arrays: Mapping[str, Any]
) -> AnyCell:
    """Return the layer of a cell, given its arrays by names such as "hn.kernel"."""
    activation = common.activation(cell.activation_fn)
    return common.from_arrays(where, cells[type(cell)], arrays, activation=activation)


def call_options(module: Any, **options: bool | None) -> dict[str, Any]:
    """Return the options of a call: where one is None, the module's own of that name."""
    return {
        name: getattr(module, name) if value is None else value for name, value in options.items()
    }


def step_shape(inputs: Any, time_major: bool) -> tuple[int, ...]:
    """Return the shape (*batch, F) of one step of inputs (*batch, T, F), or (T, *batch, F)."""
    shape = common.with_steps("inputs", inputs).shape
    if time_major:
        return shape[1:]
    return (*shape[:-2], shape[-1])


def rnn(
    layer: AnyCell,
    inputs: Float[AnyArray, "..."],
    carry: Any,
    *,
    dtype: DTypeLike | None = None,
    reset: Shaped[AnyArray, "..."] | None = None,
    reset_carry: Any = None,
    lengths: Integer[AnyArray, "..."] | None = None,
    time_major: bool = False,
    reverse: bool = False,
    keep_order: bool = False,
    return_carry: bool = True,
    implementation: Implementation = "auto",
    carry_name: str = "initial_carry",
) -> Any:
    """Compute a layer over time as Flax's RNN does: the outputs, or (carry, outputs).

    Args:
      inputs: (*batch, T, F), or (T, *batch, F) with `time_major`; `reset` likewise.
      carry: before the first step: (*batch, H), or a pair (c, h) of these.
      dtype: of the products, like a cell's `dtype`; None: that of inputs and parameters.
      reset_carry: the carry that a reset sets; None: zeros.
      lengths: (*batch); the carry returned is then that after so many steps.
      carry_name: what messages call the carry.
    """
    x = common.with_steps("inputs", inputs)
    axis = 0 if time_major else x.ndim - 2
    steps = x.shape[:-1]
    batch = step_shape(x, time_major)[:-1]
    carry = _our_carry(layer, carry_name, carry, batch)
    if reset_carry is not None:
        reset_carry = _our_carry(layer, "the cell's carry", reset_carry, batch)
    if dtype is None:
        dtype = jnp.result_type(x, *jax.tree.leaves(layer))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(dtype)
    if reset is not None:
        reset = common.of_shape("reset", reset, steps)
    if lengths is not None:
        lengths = _as_lengths(lengths, batch)

    # `unroll` reverses whole sequences; those with lengths are reversed here.
    if reverse and lengths is not None:
        x = _flip(x, axis, lengths)
        if reset is not None:
            reset = _flip_resets(reset, axis, lengths)
    y, carry, *carries = common.run_cell(
        layer,
        x,
        carry,
        dtype,
        reset=reset,
        reset_carry=reset_carry,
        time_major=time_major,
        reverse=reverse and lengths is None,
        return_carries=return_carry and lengths is not None,
        implementation=implementation,
    )
    # `unroll` returns y in the order of x, so after a flip in the order that was read.
    is_in_reading_order = lengths is not None
    if reverse and keep_order == is_in_reading_order:
        y = _flip(y, axis, lengths)
    if not return_carry:
        return y
    if lengths is not None:
        carry = jax.tree.map(lambda c: _after(c, axis, lengths), carries[0])
    return _their_carry(carry), y


def _our_carry(layer: AnyCell, name: str, carry: Any, batch: tuple[int, ...]) -> Any:
    """Return the carry of one of Flax's cells as our layer's; `name` is what messages call it."""
    _, H = sizes(layer)
    pair = isinstance(layer, LSTMCell)
    carry = common.as_state(name, carry, pair, (*batch, H))
    if not pair:
        return carry
    c, h = carry
    return LSTMState(h, c)


def _their_carry(carry: Any) -> Any:
    """Return our layer's carry as that of one of Flax's cells."""
    if not isinstance(carry, LSTMState):
        return carry
    return carry.c, carry.h


def _as_lengths(lengths: Any, batch: tuple[int, ...]) -> Array:
    lengths = common.of_shape("seq_lengths", lengths, batch)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise LibraryError(f"seq_lengths are {lengths.dtype}; they must be integers.")
    return lengths


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
    T = x.shape[axis]
    lengths = jnp.expand_dims(lengths.astype(int), axis)
    batch_axes = [i for i in range(lengths.ndim) if i != axis]
    steps = jnp.expand_dims(jnp.arange(T)[::-1], batch_axes)
    order = (steps + lengths) % T
    features = [1] * (x.ndim - order.ndim)
    return jnp.take_along_axis(x, order.reshape(*order.shape, *features), axis)


def _flip_resets(reset: Array, axis: int, lengths: Array) -> Array:
    """Return the resets of reversed sequences, where each acts before its step is read.

    In the order of x, what is read before step t is step t + 1, unless that is padding.
    """
    flags = as_flags("reset", reset, reset.shape) & valid_steps(lengths, reset.shape, axis)
    ends = in_reading_order(jnp.moveaxis(flags, axis, 0))
    return _flip(jnp.moveaxis(ends, 0, axis), axis, lengths)
