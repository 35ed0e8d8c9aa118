"""Dropout masks: where units are dropped, and how the masks are drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.core import Tracer
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from jaxgru.cells.carry import AnyArray, Size, Tree
from jaxgru.cells.contract import Cell, CellParams, sizes
from jaxgru.cells.marks import NO_MARKS, Marks, Mask
from jaxgru.cells.promotion import at_least_float32
from jaxgru.errors import check_one_of, check_whole
from jaxgru.printing import counted, shown, type_name


class Seeds(NamedTuple):
    """What a dropout's key becomes, so that its masks can be drawn again: a key may be used once.

    of_layers: two words; with zoneout, for each part of the layer's carry. None: it has no mask, or
    there is no key.
    """

    of_layers: tuple[UInt32[Array, "parts 2"] | None, ...]


T = TypeVar("T")
Threshold: TypeAlias = int | UInt32[Array, ""]  # of the bit patterns that drop a unit
Scale: TypeAlias = float | Float[Array, ""]
Rate: TypeAlias = float | Float[Array, ""]

SITES = ("input", "state", "between", "output")


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Dropout:
    """Dropout for one training step. Each layer and each row of the batch has its own mask.

    It is a pytree. A rate that is a Python or NumPy number is part of its structure; one that is a
    JAX array is a leaf, so it can be traced, e.g. to change during training.

    Attributes:
      key: a new one for each training step.
      rate: the probability of dropping a unit, in [0, 1); the others are scaled by 1/(1 − rate). A
        traced rate that is out of range gives NaN.
      site: where units are dropped: "input", in the input of the first layer; "state", inside the
        recurrence of every layer, as `kind` says; "between", in each layer's output to the next
        layer; "output", in the last layer's output.
      kind: "each_step" draws a new mask at each step. At the state, it drops units of the new h,
        which is also the output (as in the study's code). "variational" draws one mask for all
        steps (Gal & Ghahramani 2016, arXiv 1512.05287). At the state, it drops units of h only in
        the products with the weights; a minGRU does not have them. "zoneout", for the state alone,
        draws at each step which units keep their old value (Krueger et al. 2017, arXiv 1606.01305),
        and scales nothing. h and c of an LSTM have masks of their own and, if `rate` is a tuple
        (rate of h, rate of c), rates of their own. With the key None, each unit takes the mean of
        both values, as in the paper's evaluation.
      first_row: if the batch is part of a larger one, the row at which it starts there. Its masks
        are then those of these rows.
      first_step: likewise the step, if the sequences are parts of longer ones.
    """

    key: PRNGKeyArray | Seeds | None
    rate: Rate | tuple[Rate, ...]
    site: str
    kind: str = "each_step"
    first_row: int | Int[Array, "*B"] = 0
    first_step: int | Int[Array, ""] = 0

    def tree_flatten(self) -> tuple[tuple[Tree, ...], tuple[Tree, ...]]:
        rates = self.rate if isinstance(self.rate, tuple) else (self.rate,)
        traced = tuple(None if _is_static(rate) else rate for rate in rates)
        static = tuple(rate if _is_static(rate) else None for rate in rates)
        leaves = self.key, traced, self.first_row, self.first_step
        return leaves, (static, isinstance(self.rate, tuple), self.site, self.kind)

    @classmethod
    def tree_unflatten(cls, structure: tuple[Tree, ...], leaves: Iterable[Tree]) -> Dropout:
        key, traced, *first = leaves
        static, is_tuple, site, kind = structure
        rates = tuple(
            leaf if known is None else known for leaf, known in zip(traced, static, strict=True)
        )
        return cls(key, rates if is_tuple else rates[0], site, kind, *first)

    def replace(self, **fields: Any) -> Dropout:
        """Return a copy with other values of these fields."""
        return replace(self, **fields)


def _is_static(rate: object) -> bool:
    """Return whether a rate is part of a dropout's structure, and not a leaf of it."""
    return isinstance(rate, float | int | str | np.generic)


def _structure_as_text(structure: tuple[Tree, ...]) -> bytes:
    """Return what `tree_flatten` says of a dropout besides its leaves, as JSON."""
    rates, *others = structure
    rates = [rate.item() if isinstance(rate, np.generic) else rate for rate in rates]
    return json.dumps([rates, *others]).encode()


def _structure_from_text(text: bytes | bytearray) -> tuple[Tree, ...]:
    rates, *others = json.loads(text)
    return tuple(rates), *others


export.register_namedtuple_serialization(Seeds, serialized_name="jaxgru.Seeds")
export.register_pytree_node_serialization(
    Dropout,
    serialized_name="jaxgru.Dropout",
    serialize_auxdata=_structure_as_text,
    deserialize_auxdata=_structure_from_text,
)

Dropouts: TypeAlias = Dropout | Sequence[Dropout | None] | None  # what `dropout=` takes


def each(dropout: Dropouts) -> list[Dropout]:
    """Return the dropouts as a list."""
    several = dropout if isinstance(dropout, list | tuple) else (dropout,)
    dropouts: list[Dropout] = []
    for item in several:
        if not isinstance(item, Dropout | None):
            raise ValueError(
                f"dropout is {shown(item)}; it must be a Dropout(key, rate, site), or a tuple of "
                "these."
            )
        if item and item.site in [before.site for before in dropouts]:
            raise ValueError(f"two dropouts have the site {item.site!r}; each must have its own.")
        dropouts += [item] if item else []
    return dropouts


def checked(dropout: Dropouts) -> list[Dropout] | None:
    """Return dropouts as `jit` takes them, and check the values that are known."""
    if dropout is None:
        return None
    several = each(dropout)
    for item in several:
        _checked_rates(item)
        key, seen = item.key, type_name(item.key)
        if isinstance(key, Array | np.ndarray):
            seen = f"{key.dtype} {key.shape}"
            is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
            if key.ndim == (0 if is_typed else 1):
                continue
        if not isinstance(key, Seeds | None):
            raise ValueError(
                f"the dropout's key is {seen}; it must be one key, as from jax.random.key."
            )
    return [_for_jit(item) for item in several]


def _for_jit(dropout: Dropout) -> Dropout:
    """Return the dropout with arrays that `jit` takes without an implicit transfer.

    Such a transfer is an error under `jax.transfer_guard("disallow")`, and an explicit one takes as
    long as a small layer. So a place that is 0, as by default, is left out: None.
    """
    places = {}
    for name in ("first_row", "first_step"):
        value = getattr(dropout, name)
        is_default = type(value) is int and value == 0
        places[name] = None if is_default else jax.device_put(_whole(name, value))
    return dropout.replace(rate=jax.tree.map(_in_float32, dropout.rate), **places)


def _in_float32(rate: Any) -> Any:
    """Return a rate that is an array in 32 bits at least; a whole number, which is 0, as such."""
    if not isinstance(rate, Array | np.ndarray) or isinstance(rate, Tracer):
        return rate
    is_float = jnp.issubdtype(rate.dtype, jnp.floating)
    return at_least_float32(rate) if is_float else rate.item()


def _in_32_bits(dropout: Dropout) -> Dropout:
    """Return the dropout with its first row and step in 32 bits."""
    places = {name: _whole(name, getattr(dropout, name)) for name in ("first_row", "first_step")}
    return dropout.replace(**places)


def dropout_masks(
    layers: Sequence[CellParams],
    dropout: Dropouts,
    batch_size: Size,
    num_steps: Size,
    reverse: bool = False,
) -> list[Marks]:
    """Draw the masks of each layer; with `reverse`, from the last step to the first.

    16 bits are drawn per unit, so the rate is rounded to a multiple of 2⁻¹⁶. The scale 1/(1 − rate)
    uses the rounded rate, so expectations are exact.
    """
    L = len(layers)
    by_layer = [NO_MARKS] * L
    for item in each(dropout):
        rates = _checked_rates(item)
        rows = _whole("first_step", item.first_step), _whole("first_row", item.first_row)
        if not isinstance(item.rate, tuple) and rates[0][1] is None:
            continue
        seeds = _seeds(item, layers).of_layers
        for i in (i for i in range(L) if _is_at(item.site, i, L)):
            carry = jax.eval_shape(lambda p: p.zero_carry(batch_size), layers[i])
            is_input = item.site == "input"
            parts = jax.tree.leaves(carry)
            units = sizes(layers[i])[0] if is_input else parts[0].shape[1]
            of_parts = rates if isinstance(item.rate, tuple) else rates * len(parts)
            if len(of_parts) != len(parts):
                raise ValueError(
                    f"the dropout has {counted(len(rates), 'rate')}; layer {i} has a carry of "
                    f"{counted(len(parts), 'part')}, which can also share one number as the rate."
                )
            draw = _Draw(seeds[i], of_parts, (num_steps, batch_size), *rows, carry)
            by_layer[i] = by_layer[i]._replace(**KINDS[item.kind](draw, item.site, units))
    return [marks.reversed() for marks in by_layer] if reverse else by_layer


def _checked_rates(dropout: Dropout) -> list[tuple[Threshold, Scale | None]]:
    """Check a dropout, and return what `_threshold_and_scale` makes of its rates."""
    site, kind, rate = dropout.site, dropout.kind, dropout.rate
    several = rate if isinstance(rate, tuple) and kind == "zoneout" else (rate,)
    rates = list(map(_threshold_and_scale, several))
    check_one_of("the dropout site", site, SITES)
    check_one_of("the dropout kind", kind, KINDS)
    if kind == "zoneout" and site != "state":
        raise ValueError(f"the dropout site is {site!r}; zoneout needs the site 'state'.")
    if dropout.key is None and kind != "zoneout":
        raise ValueError("the dropout's key is None; only zoneout has a mean to evaluate with.")
    return rates


class _Draw(NamedTuple):
    """How the units of a layer are drawn. `carry` has the shapes of the layer's.

    rates: of each part of the carry, a threshold and a scale; all alike, but for zoneout.
    """

    seed: UInt32[Array, "parts 2"] | None
    rates: Sequence[tuple[Threshold, Scale | None]]
    shape: tuple[Size, Size]  # T, B
    first_step: UInt32[AnyArray, ""]
    first_row: UInt32[AnyArray, "*B"]
    carry: Tree

    def keep(self, units: int, part: int = 0) -> Bool[Array, "T B H"]:
        """Return which units are kept at each step."""
        seed: Tree = self.seed
        shape, (threshold, _) = (*self.shape, units), self.rates[part]
        return _random_16_bits(seed[part], shape, self.first_step, self.first_row) >= threshold

    def mask(self, keep: Array) -> Mask:
        """Return the mask that keeps these units and scales them."""
        scale: Tree = self.rates[0][1]
        return Mask(keep, jnp.asarray(scale, jax.tree.leaves(self.carry)[0].dtype))


# A kind of dropout is a function (draw, site, units) → the fields of a layer's `Marks`.


def _each_step(draw: _Draw, site: str, units: int) -> dict[str, Tree]:
    return {_field(site): draw.mask(draw.keep(units))}


def _variational(draw: _Draw, site: str, units: int) -> dict[str, Tree]:
    T, B = draw.shape
    keep = draw._replace(shape=(1, B), first_step=jnp.uint32(0)).keep(units)
    if site == "state":
        return dict(product=draw.mask(keep[0]))
    return {_field(site): draw.mask(jnp.broadcast_to(keep, (T, *keep.shape[1:])))}


def _zoneout(draw: _Draw, site: str, units: int) -> dict[str, Tree]:
    """Return which units of a carry are updated; without a key, the share of the new values.

    Whole numbers, such as counts, always are.
    """
    parts, structure = jax.tree.flatten(draw.carry)
    updates = []
    for i, (part, (_, scale)) in enumerate(zip(parts, draw.rates, strict=True)):
        shape = draw.shape[0], *part.shape
        if scale is None or not jnp.issubdtype(part.dtype, jnp.floating):
            update = jnp.ones(shape, bool)
        elif draw.seed is None:
            update = jnp.broadcast_to(jnp.asarray(1 / scale, part.dtype), shape)
        else:
            update = draw.keep(math.prod(part.shape[1:]), i).reshape(shape)
            if isinstance(scale, Array):  # traced: NaN if the rate is out of range
                update = jnp.where(jnp.isnan(scale), scale, update.astype(scale.dtype))
        updates.append(update)
    return dict(update=jax.tree.unflatten(structure, updates))


def _field(site: str) -> str:
    return "output" if site == "between" else site


KINDS = {"each_step": _each_step, "variational": _variational, "zoneout": _zoneout}


def in_rows(dropout: Dropouts, rows: UInt32[Array, "B"] | None) -> Dropouts:
    """Return the dropout of a batch that has these rows of another one; None: all of them."""
    if rows is None:
        return dropout
    beyond = rows - jnp.arange(len(rows), dtype=rows.dtype)
    first_row = lambda item: _whole("first_row", item.first_row) + beyond
    return [item.replace(first_row=first_row(item)) for item in each(dropout)]


def at_step(dropout: Dropouts, step: int | Int[Array, ""]) -> Dropouts:
    """Return the dropout of the part of a sequence that begins at this step."""
    offset = jnp.asarray(step).astype(jnp.uint32)
    first_step = lambda item: _whole("first_step", item.first_step) + offset
    return [item.replace(first_step=first_step(item)) for item in each(dropout)]


def seeded(dropout: Dropouts, layers: Sequence[CellParams]) -> list[Dropout]:
    """Return dropouts that a loop can draw masks from in each of its turns: keys become seeds."""
    return [_in_32_bits(item).replace(key=_seeds(item, layers)) for item in each(dropout)]


def _seeds(dropout: Dropout, layers: Sequence[CellParams]) -> Seeds:
    """Return the seeds of a dropout, from its key unless it has them."""
    if isinstance(dropout.key, Seeds):
        return dropout.key
    L = len(layers)

    def of_layer(i: int, key: PRNGKeyArray | None) -> UInt32[Array, "parts 2"] | None:
        if key is None or not _is_at(dropout.site, i, L):
            return None
        keys: Tree = [key]
        if dropout.kind == "zoneout":
            carry = jax.eval_shape(lambda p: p.zero_carry(1), layers[i])
            keys = jax.random.split(key, len(jax.tree.leaves(carry)))
        return jnp.stack([jax.random.bits(key, (2,), jnp.uint32) for key in keys])

    return Seeds(tuple(of_layer(i, key) for i, key in enumerate(_split(dropout.key, L))))


def drop_weights(key: PRNGKeyArray, layers: T, rate: Rate) -> T:
    """Return layers with some recurrent weights set to zero, and the others scaled, for training.

    Each weight of the matrices that multiply h, such as a GRU's U, is 0 with probability `rate` and
    otherwise divided by 1 − rate. So the recurrence has the same weights at each step: DropConnect
    (Merity et al. 2018, arXiv 1708.02182, section 2). Call it within the function that is
    differentiated.

    Args:
      key: a new one for each training step.
      layers: one layer's parameters, or any pytree with layers, such as a list or a whole model's.
        Layers that a cell of your own wraps drop theirs, too. Of a Flax `Layer`, pass what its
        method `layer` returns, and call `unroll` with the result.
      rate: in [0, 1). A traced rate that is out of range gives NaN.

    Raises:
      ValueError: the rate is not as described, or no layer has such a matrix.
    """
    _, scale = _threshold_and_scale(rate)
    zero = 0 if scale is None else 0 * scale  # NaN if a traced rate is out of range
    parts = jax.tree.leaves(layers, is_leaf=_is_cell)
    cells = [part for part in parts if isinstance(part, Cell)]
    if not cells:
        raise ValueError(
            f"{type_name(layers)} contains no jaxgru layers; drop_weights takes layers, or a "
            "pytree with layers, such as what the method layer() of a Flax Layer returns."
        )
    if not any(map(has_recurrent_weights, cells)):
        raise ValueError(
            "the layers have no recurrent matrices, so none of their weights can drop."
        )

    def dropped(key: PRNGKeyArray, U: Array) -> Array:
        wide = at_least_float32(U)
        share = jnp.asarray(1 - rate, wide.dtype) + jnp.asarray(zero, wide.dtype)
        kept = jnp.where(jax.random.bernoulli(key, share, wide.shape), wide, 0)
        return (kept / share).astype(U.dtype)

    return _with_recurrent_weights(dropped, key, layers)


def _is_cell(node: object) -> bool:
    return isinstance(node, Cell)


def has_recurrent_weights(layer: CellParams) -> bool:
    """Return whether a layer, or one that it wraps, has a matrix that multiplies h."""
    inner = filter(_is_cell, _children(layer)[0])
    return bool(layer.recurrent) or any(map(has_recurrent_weights, inner))


def _children(layer: CellParams) -> tuple[list[Tree], Tree]:
    """Return what a layer's fields hold, each layer that it wraps as a whole; and its structure."""
    return jax.tree.flatten(layer, is_leaf=lambda node: node is not layer and _is_cell(node))


def _with_recurrent_weights(
    function: Callable[[PRNGKeyArray, Array], Array], key: PRNGKeyArray, layers: T
) -> T:
    """Return a tree whose layers, and those that they wrap, have other recurrent matrices.

    Args:
      function: (key, matrix) → matrix; each has a key of its own.
    """

    def changed(key: PRNGKeyArray, part: Tree) -> Tree:
        if not isinstance(part, Cell):
            return part
        *keys, key_of_inner = jax.random.split(key, len(part.recurrent) + 1)
        weights = {
            name: function(key_of_weight, getattr(part, name))
            for name, key_of_weight in zip(part.recurrent, keys, strict=True)
        }
        part = part.replace(**weights) if weights else part
        children, structure = _children(part)
        if not any(map(_is_cell, children)):
            return part
        keys = jax.random.split(key_of_inner, len(children))
        return jax.tree.unflatten(structure, map(changed, keys, children))

    parts, structure = jax.tree.flatten(layers, is_leaf=_is_cell)
    keys = jax.random.split(key, len(parts))
    return jax.tree.unflatten(structure, map(changed, keys, parts))


def _split(key: Tree, number: int) -> Tree:
    """Split a key; None for each part of None."""
    return [None] * number if key is None else jax.random.split(key, number)


def _is_at(site: str, i: int, L: int) -> bool:
    """Return whether a dropout at this site has a mask in layer i of L."""
    first, last = i == 0, i == L - 1
    return not (
        site == "input" and not first or site == "between" and last or site == "output" and not last
    )


def in_two_directions(dropout: Dropouts, L: int) -> list[list[list[Dropout]]]:
    """Return, of each direction, for each layer, the dropouts for `unroll` of it alone."""
    parts: list[list[list[Dropout]]] = [[[] for _ in range(L)] for _ in range(2)]
    for item in each(dropout):
        for layers, key in zip(parts, _split(item.key, 2), strict=True):
            for i, of_layer in enumerate(_split(key, L)):
                if _is_at(item.site, i, L):
                    layers[i].append(item.replace(key=of_layer, site=_field(item.site)))
    return parts


def _threshold_and_scale(rate: Any) -> tuple[Threshold, Scale | None]:
    """Return the number of bit patterns that drop a unit, and the scale; it is None for rate 0."""
    if isinstance(rate, Array) and jnp.issubdtype(rate.dtype, jax.dtypes.prng_key):
        raise ValueError(
            "the dropout rate is a key; the order is Dropout(key, rate, site), or for drop_weights "
            "(key, layers, rate)."
        )
    if isinstance(rate, Tracer):
        if rate.shape or not jnp.issubdtype(rate.dtype, jnp.floating):
            raise ValueError(
                f"the dropout rate is {rate.dtype} {rate.shape}; it must be one float."
            )
        rate = at_least_float32(rate)  # 2¹⁶ is ∞ in float16
        possible = (rate >= 0) & (rate < 1)
        threshold = jnp.where(possible, jnp.minimum(jnp.round(rate * 2**16), 2**16 - 1), 0)
        scale = jnp.where(possible, 1 / (1 - threshold / 2**16), jnp.nan)
        return threshold.astype(jnp.uint32), scale
    if getattr(rate, "shape", None) == ():  # a number of NumPy's or JAX's
        rate = float(rate) if jnp.issubdtype(rate.dtype, jnp.floating) else rate.item()
    if not isinstance(rate, bool) and isinstance(rate, int) and rate == 0:
        return 0, None
    if not isinstance(rate, float) or not 0 <= rate < 1:
        raise ValueError(
            f"the dropout rate is {shown(rate)}; it must be at least 0 and below 1 (for zoneout, "
            "also a tuple of such rates)."
        )
    threshold = min(round(rate * 2**16), 2**16 - 1)
    return threshold, 1 / (1 - threshold / 2**16) if rate else None


def _whole(name: str, value: object) -> UInt32[AnyArray, "*B"]:
    """Return the number of a row or a step in 32 bits; None is 0."""
    if value is None:
        return np.zeros((), np.uint32)
    if isinstance(value, Tracer):
        return value.astype(jnp.uint32)
    return np.asarray(check_whole(f"{name} of the dropout", value, 2**32 - 1, least=0), np.uint32)


def _random_16_bits(
    seed: UInt32[Array, "2"],
    shape: tuple[Size, Size, int],
    first_step: UInt32[AnyArray, ""],
    first_row: UInt32[AnyArray, "*B"],
) -> UInt32[Array, "T B H"]:
    """Draw uniformly from 0 … 2¹⁶ − 1, four numbers per Threefry block (Salmon et al., SC 2011).

    `jax.random.bits` computes one block per number, however few its bits: five times slower. The
    primitive itself is used because JAX's `threefry_2x32` flattens the counters: each device would
    then compute the blocks of the whole batch.
    """
    T, B, H = shape
    blocks = -(-H // 4)
    t, b, i = (jax.lax.broadcasted_iota(jnp.uint32, (T, B, blocks), axis) for axis in range(3))
    first_row = jax.lax.broadcast_in_dim(first_row, t.shape, [1][: first_row.ndim])
    t, b = t + first_step + 0 * first_row, b + first_row  # under `vmap`, both with the same axes
    words = threefry2x32_p.bind(*seed, t, b * blocks + i)  # no two counters are alike
    halves = [part for word in words for part in (word & 0xFFFF, word >> 16)]
    return jnp.concatenate(halves, axis=-1)[..., :H]
