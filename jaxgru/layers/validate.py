"""What users pass to recurrent layers, checked and converted.

Every error is one sentence that names the argument. `like` is the carry that the layers and the
batch need: shapes and dtypes, with an entry per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxgru.arguments import as_array, as_jax, one_array
from jaxgru.arrays import AnyArray, Size, Tree, widest
from jaxgru.cells.carry import Carry, hidden, named
from jaxgru.cells.contract import AnyCell, Cell, one_step
from jaxgru.cells.products import Lookup
from jaxgru.layers.stack import Layers, ResidualStack
from jaxgru.printing import type_name
from jaxgru.pytrees import described

Shapes: TypeAlias = tuple[Any, ...]  # of shapes, in tuples as the arrays are
Carries: TypeAlias = tuple[Carry, ...]  # an entry per layer


class OtherOrder(NamedTuple):
    """The batch axes that x would have with another value of `time_major`."""

    batch: tuple[Size, ...]
    time_major: bool


def as_input(x: object) -> AnyArray | Lookup:
    """Return the input of `unroll` or `bidirectional` as an array."""
    if isinstance(x, Lookup):
        table, ids = (as_jax("x", part) for part in x)
        whole = jnp.issubdtype(ids.dtype, jnp.integer) or ids.dtype == bool
        has_rows = table.ndim == 2 and table.shape[0] > 0
        if not (whole and ids.ndim and has_rows and jnp.issubdtype(table.dtype, jnp.floating)):
            raise ValueError(
                f"x is a Lookup of {ids.dtype} {ids.shape} in {table.dtype} {table.shape}; the ids "
                "must be whole numbers (B, T), or (T,) for one sequence, and the table "
                "floating-point (V, F) with at least one row."
            )
        return Lookup(table, ids)
    x = one_array("x", x)
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x is {x.dtype} {x.shape}; it must be floating-point, (B, T, F), or (T, B, F) with "
            "time_major=True, or (T, F) for one sequence."
        )
    return x


def check_arrays(name: str, tree: Tree) -> None:
    """Raise ValueError if a leaf of a state is not an array, nor like one."""
    jax.tree.map(partial(as_array, name), tree)


def check_order(layers: Layers, x: Tree, carry: Tree) -> None:
    """Raise ValueError if x and the carry are interchanged.

    Shapes cannot tell if the carry is one array and the input is as wide as the state.
    """
    stack, is_single, _ = as_stack(layers)
    sizes_of_layer = stack[0].sizes()
    if sizes_of_layer is None:
        return
    of_input = sizes_of_layer[:1]
    carry_fits_as_x = getattr(carry, "shape", ())[-1:] == of_input
    x_fits = getattr(x, "shape", ())[-1:] == of_input
    if x_fits or not carry_fits_as_x:
        return
    if _last_axes(x) == _as_passed(_last_axes(carry_like(stack, 1)), is_single):
        raise ValueError("the carry was passed as x; the order is layers, x (the input), carry.")


def _last_axes(tree: Tree) -> Tree:
    """Return the size of each leaf's last axis, as (H,)."""
    return jax.tree.map(lambda leaf: np.shape(leaf)[-1:], _as_tuples(tree))


def check_containers(layers: Layers, x: object, carry: Tree) -> None:
    """Raise ValueError if x is a carry in a list or a tuple, before it becomes one array."""
    if isinstance(x, list | tuple) and not isinstance(x, Lookup):
        check_layers("layers", layers)
        check_order(layers, x, carry)


def is_pair(layers: Any) -> bool:
    """Return whether these are the layers of two directions: a pair of lists or residual stacks."""
    is_two = isinstance(layers, list | tuple) and len(layers) == 2
    return is_two and all(isinstance(part, list | tuple | ResidualStack) for part in layers)


def as_stack(layers: Layers) -> tuple[tuple[AnyCell, ...], bool, bool]:
    """Return the layers as a tuple; and whether it was a single layer, or a residual stack."""
    is_residual = isinstance(layers, ResidualStack)
    layers = layers.layers if is_residual else layers
    is_single = not isinstance(layers, Sequence)
    return (layers,) if is_single else tuple(layers), is_single, is_residual


def check_layers(name: str, layers: Layers) -> None:
    """Raise ValueError unless these are a layer or several, whose weights are numbers."""
    if is_pair(layers):
        raise ValueError(
            f"{name} is a pair, with the layers of two directions, as of a bidirectional module; "
            "call jaxgru.bidirectional(*pair, x)."
        )
    stack, is_single, _ = as_stack(layers)
    if not stack:
        raise ValueError(f"{name} contains no layers; it must contain at least one.")
    for layer in stack:
        if not isinstance(cast(object, layer), Cell):
            raise ValueError(
                f"{name} {'is' if is_single else 'contains'} {type_name(layer)}; it must be one "
                "layer, as from init_gru, or a list of these; jaxgru.libraries runs or converts "
                "the modules of other libraries."
            )
    for leaf in jax.tree.leaves(layers):
        if isinstance(leaf, Cell):
            cell = type_name(leaf)
            raise ValueError(f"{cell} is no pytree: write @jaxgru.cells.struct above its class.")
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            seen = type_name(leaf) if dtype is None else dtype
            raise ValueError(f"a weight in {name} is {seen}; it must be a floating-point array.")


def check_stack(
    layers: Sequence[AnyCell | tuple[AnyCell, ...]],
    features: int,
    residual: bool = False,
    batch_size: Size = 1,
) -> None:
    """Check that each layer takes what the one below returns, or those of two directions.

    Args:
      layers: each layer, or its layers of two directions.
      features: the number that the first takes.
      residual: each layer above the first adds its input to its output.
      batch_size: B, the number of rows that the layers will be called with.
    """
    for i, layer in enumerate(layers):
        directions = layer if isinstance(layer, tuple) else (layer,)
        units = sum(_units(direction, features, i, batch_size) for direction in directions)
        if residual and i and units != features:
            raise ValueError(
                f"layer {i} of a residual stack takes {features} features and gives {units}; the "
                "numbers must be equal, because it adds its input to its output."
            )
        features = units


def check_features(features: int, takes: int, i: int = 0) -> None:
    """Raise ValueError if layer i takes another number of features than its input has."""
    if features != takes:
        what_has = "x has" if i == 0 else "the layer below it has"
        the_layer = "the layer" if i == 0 else f"layer {i}"
        raise ValueError(f"{what_has} {features} features per step; {the_layer} takes {takes}.")


def carry_like(layers: Sequence[AnyCell], batch_size: Size) -> tuple[Tree, ...]:
    """Return the shapes and dtypes of the carry that the layers and the batch need."""
    return tuple(jax.eval_shape(lambda p: p.zero_carry(batch_size), layer) for layer in layers)


def _units(layer: AnyCell, features: int, i: int, batch_size: Size) -> int:
    """Return the number of units of layer i, whose input has so many features."""
    sizes = layer.sizes()
    if sizes is not None:
        check_features(features, sizes[0], i)
        if _keeps_its_carry(layer, sizes[0], batch_size):
            return sizes[1]
    raise ValueError(
        f"the parameters of layer {i} do not fit together, or not to an input of {features} "
        f"features: {described(layer)}."
    )


def _keeps_its_carry(layer: AnyCell, E: int, batch_size: Size) -> bool:
    """Return whether a step returns a carry like that before it, in the parameters' dtype.

    It is tried with another number of rows than the batch has, so that a field with the batch axis
    is found whatever the batch is.
    """
    dtype = widest(*jax.tree.leaves(layer))
    rows = 3 if isinstance(batch_size, int) and batch_size == 2 else 2

    def change(layer: AnyCell) -> tuple[Carry, Carry]:
        carry = layer.zero_carry(rows)
        return carry, one_step(layer, carry, jnp.zeros((rows, E), hidden(carry).dtype))

    try:
        before, after = jax.eval_shape(change, layer)
    except (TypeError, ValueError) as error:
        error.add_note(
            f"This was a step of {type(layer).__name__} that jaxgru tried with {rows} rows. A cell "
            "computes with any number of rows, so its fields have no batch axis; jax.vmap runs "
            "layers whose weights differ from row to row."
        )
        raise
    types = lambda carry: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), carry)
    return jax.tree.leaves(before)[0].dtype == dtype and types(before) == types(after)


def strongly_typed(leaf: Array) -> Array:
    """Return an array whose dtype is not weak, as that of `jnp.full(shape, 0.1)` is."""
    return leaf.astype(leaf.dtype) if jax.typeof(leaf).weak_type else leaf


def as_carry(
    carry: Tree,
    like: tuple[Tree, ...],
    is_single: bool = False,
    batch: Sequence[Size] | None = None,
    inner_batch: Sequence[Size] | None = None,
    other: OtherOrder | None = None,
) -> Carries:
    """Return the carry in the form of `like`: a tuple with an entry per layer.

    Args:
      is_single: the carry is that of a single layer, not in a tuple.
      batch: its batch axes; None: it has one.
      inner_batch: what they become.
      other: what a message mentions if the carry fits it.
    """
    leaves, shapes = _leaves("the carry", carry, like, is_single)
    batch = tuple(jax.tree.leaves(like)[0].shape[:1] if batch is None else batch)
    needed = _with_batch(like, batch)
    if shapes != needed:
        remedy = ": one entry per layer, made by initial_carry or returned by the step before"
        remedy = _order_remedy(shapes, like, other) or remedy
        have = _as_passed(shapes, is_single)
        need = _as_passed(needed, is_single)
        raise ValueError(
            f"the carry's shapes are {have}, but these layers and the batch {batch} need {need}"
            f"{remedy}."
        )
    carry = jax.tree.unflatten(jax.tree.structure(like), leaves)
    for entry, like_entry in zip(carry, like, strict=True):
        _check_dtypes(entry, like_entry)
    if inner_batch is None or batch == inner_batch:
        return carry
    return jax.tree.map(lambda leaf: leaf.reshape(*inner_batch, *leaf.shape[len(batch) :]), carry)


def check_carry(layers: Layers, carry: Tree, batch_size: Size) -> Tree:
    """Return a carry as `unroll` takes it, after checking it: for what runs later or in a loop.

    Args:
      carry: as for `unroll`; its entries are (B, …). An entry with named parts may be a dict.
      batch_size: B.

    Raises:
      ValueError: the carry does not fit the layers and the batch.
    """
    stack, is_single, _ = as_stack(layers)
    carries = as_carry(carry, carry_like(stack, batch_size), is_single)
    return carries[0] if is_single else carries


def _check_dtypes(entry: Tree, like: Tree) -> None:
    """Raise ValueError unless a layer's carry has one dtype that is at least as wide as needed."""
    dtypes: set[np.dtype] = set()
    for leaf, needed in zip(jax.tree.leaves(entry), jax.tree.leaves(like), strict=True):
        dtype = jnp.result_type(leaf)
        fits = dtype == needed.dtype
        if jnp.issubdtype(needed.dtype, jnp.floating):
            fits = jnp.issubdtype(dtype, jnp.floating) and widest(dtype, needed) == dtype
            dtypes.add(dtype)
        if not fits:
            raise ValueError(f"the carry's dtype is {dtype}; these layers' is {needed.dtype}.")
    if len(dtypes) > 1:
        names = " and ".join(sorted(map(str, dtypes)))
        raise ValueError(f"a layer's carry has parts of {names}; it must have one dtype.")


def as_reset_carry(
    reset_carry: Tree,
    like: tuple[Tree, ...],
    is_single: bool,
    carry: Carries | None,
    batch: tuple[Size, ...],
    inner_batch: tuple[Size, ...],
    other: OtherOrder | None = None,
) -> Carries:
    """Return `reset_carry` in the form of `like`, with the axes `inner_batch`.

    Args:
      is_single: as for `as_carry`; likewise `batch`, `inner_batch` and `other`.
      carry: `reset_carry` is converted to its dtypes; None: to those of `like`.
    """
    leaves, shapes = _leaves("reset_carry", reset_carry, like, is_single)
    with_batch = _with_batch(like, batch)
    without_batch = _with_batch(like, ())
    if shapes not in (with_batch, without_batch):
        remedy = _order_remedy(shapes, like, other)
        have = _as_passed(shapes, is_single)
        need = _as_passed(without_batch, is_single)
        or_need = _as_passed(with_batch, is_single)
        raise ValueError(
            f"the shapes of reset_carry are {have}; these layers need {need}, or {or_need} with "
            f"the batch axis{remedy}."
        )

    def fitted(leaf: AnyArray, carried: Array) -> Array:
        """Return a part of `reset_carry` with the dtype and the shape of that of the carry."""
        _check_dtype_of_reset(jnp.result_type(leaf), carried.dtype)
        leaf = jnp.asarray(leaf, carried.dtype)
        shape = (*inner_batch, *carried.shape[1:]) if carry is None else carried.shape
        return leaf.reshape(shape) if shapes == with_batch else jnp.broadcast_to(leaf, shape)

    reset_carry = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return jax.tree.map(fitted, reset_carry, like if carry is None else carry)


def _check_dtype_of_reset(dtype: DTypeLike, needed: DTypeLike) -> None:
    """Raise ValueError unless a part of `reset_carry` can be converted to the carry's dtype."""
    if not jnp.issubdtype(needed, jnp.floating):
        if dtype != needed:
            raise ValueError(f"a part of reset_carry is {dtype}; it must be {needed}.")
    elif not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"reset_carry is {dtype}; it must be floating-point.")


def _leaves(
    name: str, carry: Tree, like: tuple[Tree, ...], is_single: bool
) -> tuple[list[AnyArray], Shapes]:
    """Return a carry's arrays, and their shapes in tuples with an entry per layer."""
    entries = (carry,) if is_single else carry
    if isinstance(entries, list | tuple):
        by_name = [named(name, *pair) for pair in zip(entries, map(type, like), strict=False)]
        entries = (*by_name, *entries[len(by_name) :])
    arrays = jax.tree.map(partial(as_array, name), _as_tuples(entries))
    return jax.tree.leaves(arrays), jax.tree.map(jnp.shape, arrays)


def _as_passed(shapes: Shapes, is_single: bool) -> Shapes:
    """Return the shapes of a carry as it is passed: that of a single layer is in no tuple."""
    return shapes[0] if is_single else shapes


def _with_batch(like: tuple[Tree, ...], batch: tuple[Size, ...]) -> Shapes:
    """Return the shapes of a carry with these batch axes."""
    return jax.tree.map(lambda leaf: (*batch, *leaf.shape[1:]), _as_tuples(like))


def _order_remedy(seen: Shapes, like: tuple[Tree, ...], other: OtherOrder | None) -> str:
    """Return how a message ends if a carry's shapes are those of the other order, else nothing."""
    if other is None or seen != _with_batch(like, other.batch):
        return ""
    return f"; with time_major={other.time_major} they would fit"


def _as_tuples(tree: Tree) -> Tree:
    """Return nested lists and named tuples as tuples."""
    return tuple(map(_as_tuples, tree)) if isinstance(tree, list | tuple) else tree
