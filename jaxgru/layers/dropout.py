"""Dropout, as users pass it: where units are dropped, and when. `masks.py` draws its masks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from jaxgru.arrays import AnyArray, Tree, at_least_float32
from jaxgru.cells.contract import AnyCell
from jaxgru.errors import check_one_of, check_whole
from jaxgru.printing import shown, type_name


class Seeds(NamedTuple):
    """What a dropout's key becomes, so that its masks can be drawn again: a key may be used once.

    of_layers: two words; with zoneout, for each part of the layer's carry. None: it has no mask, or
    there is no key.
    """

    of_layers: tuple[UInt32[Array, "parts 2"] | None, ...]


Threshold: TypeAlias = int | UInt32[Array, ""]  # of the bit patterns that drop a unit
Scale: TypeAlias = float | Float[Array, ""]
ThresholdAndScale: TypeAlias = tuple[Threshold, Scale | None]
Rate: TypeAlias = float | Float[Array, ""]

Site: TypeAlias = Literal["input", "state", "between", "output"]
"""Where a `Dropout` drops units."""
Kind: TypeAlias = Literal["each_step", "variational", "zoneout"]
SITES: tuple[Site, ...] = get_args(Site)
"""Every `Site`."""
KINDS: tuple[Kind, ...] = get_args(Kind)


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
    site: Site
    kind: Kind = "each_step"
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

Dropouts: TypeAlias = Dropout | Sequence[Dropout | None] | None
"""What `dropout=` takes: one `Dropout`; for several sites, a sequence of them; or None."""


def each(dropout: Dropouts) -> list[Dropout]:
    """Return the dropouts as a list."""
    items = dropout if isinstance(dropout, list | tuple) else (dropout,)
    dropouts: list[Dropout] = []
    for item in items:
        if not isinstance(item, Dropout | None):
            raise ValueError(
                f"dropout is {shown(item)}; it must be a Dropout(key, rate, site), or a tuple of "
                "these."
            )
        if item is None:
            continue
        if item.site in [earlier.site for earlier in dropouts]:
            raise ValueError(f"two dropouts have the site {item.site!r}; each must have its own.")
        dropouts.append(item)
    return dropouts


def checked(dropout: Dropouts) -> list[Dropout] | None:
    """Return dropouts as `jit` takes them, and check the values that are known."""
    if dropout is None:
        return None
    dropouts = each(dropout)
    for item in dropouts:
        check_rates(item)
        _check_key(item.key)
    return [_for_jit(item) for item in dropouts]


def _check_key(key: object) -> None:
    """Raise ValueError unless this is one key, typed or of two words, or stands for one."""
    if isinstance(key, Seeds | None):
        return
    if not isinstance(key, Array | np.ndarray):
        key_type = type_name(key)
    else:
        key_type = f"{key.dtype} {key.shape}"
        is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        if key.ndim == (0 if is_typed else 1):
            return
    raise ValueError(
        f"the dropout's key is {key_type}; it must be one key, as from jax.random.key."
    )


def _for_jit(dropout: Dropout) -> Dropout:
    """Return the dropout with arrays that `jit` takes without an implicit transfer.

    Such a transfer is an error under `jax.transfer_guard("disallow")`, and an explicit one takes as
    long as a small layer. So a place that is 0, as by default, is left out: None.
    """
    places = {}
    for name in ("first_row", "first_step"):
        value = getattr(dropout, name)
        is_default = type(value) is int and value == 0
        places[name] = None if is_default else jax.device_put(as_place(name, value))
    return dropout.replace(rate=jax.tree.map(_in_float32, dropout.rate), **places)


def _in_float32(rate: Any) -> Any:
    """Return a rate that is an array in 32 bits at least; a whole number, which is 0, as such."""
    if not isinstance(rate, Array | np.ndarray) or isinstance(rate, Tracer):
        return rate
    is_float = jnp.issubdtype(rate.dtype, jnp.floating)
    return at_least_float32(rate) if is_float else rate.item()


def _in_32_bits(dropout: Dropout) -> Dropout:
    """Return the dropout with its first row and step in 32 bits."""
    first_row = as_place("first_row", dropout.first_row)
    first_step = as_place("first_step", dropout.first_step)
    return dropout.replace(first_row=first_row, first_step=first_step)


def check_rates(dropout: Dropout) -> list[ThresholdAndScale]:
    """Check a dropout, and return what `threshold_and_scale` makes of its rates."""
    site = dropout.site
    kind = dropout.kind
    is_several = isinstance(dropout.rate, tuple) and kind == "zoneout"
    rates: Any = dropout.rate if is_several else (dropout.rate,)
    thresholds = [threshold_and_scale(rate) for rate in rates]
    check_one_of("the dropout site", site, SITES)
    check_one_of("the dropout kind", kind, KINDS)
    if kind == "zoneout" and site != "state":
        raise ValueError(f"the dropout site is {site!r}; zoneout needs the site 'state'.")
    if dropout.key is None and kind != "zoneout":
        raise ValueError("the dropout's key is None; only zoneout has a mean to evaluate with.")
    return thresholds


def in_rows(dropout: Dropouts, rows: UInt32[Array, "B"] | None) -> Dropouts:
    """Return the dropout of a batch that has these rows of another one; None: all of them."""
    if rows is None:
        return dropout
    beyond = rows - jnp.arange(len(rows), dtype=rows.dtype)
    return [
        item.replace(first_row=as_place("first_row", item.first_row) + beyond)
        for item in each(dropout)
    ]


def dropout_at_step(dropout: Dropouts, step: int | Int[Array, ""]) -> Dropouts:
    """Return the dropout of the part of a sequence that begins at this step.

    Args:
      dropout: that of the whole sequence, as for `unroll`.
      step: the number of the part's first step in the sequence; may be traced.

    Raises:
      ValueError: the dropout is no `Dropout`, or two have the same site.
    """
    offset = jnp.asarray(step).astype(jnp.uint32)
    return [
        item.replace(first_step=as_place("first_step", item.first_step) + offset)
        for item in each(dropout)
    ]


def seed_dropout(dropout: Dropouts, layers: Sequence[AnyCell]) -> list[Dropout]:
    """Return dropouts that a loop can draw masks from in each of its turns: keys become seeds.

    A key may be used only once, and seeds may be used again. The masks are those of the keys.

    Args:
      dropout: as for `unroll`.
      layers: the layers that it is for.

    Raises:
      ValueError: the dropout is no `Dropout`, or two have the same site.
    """
    return [_in_32_bits(item).replace(key=seeds_of(item, layers)) for item in each(dropout)]


def seeds_of(dropout: Dropout, layers: Sequence[AnyCell]) -> Seeds:
    """Return the seeds of a dropout, from its key unless it has them."""
    if isinstance(dropout.key, Seeds):
        _check_seeds(dropout, dropout.key, layers)
        return dropout.key

    def of_layer(i: int, key: PRNGKeyArray | None) -> UInt32[Array, "parts 2"] | None:
        parts = num_parts(dropout, layers, i)
        if key is None or parts == 0:
            return None
        keys_of_parts: Tree = [key]
        if dropout.kind == "zoneout":
            keys_of_parts = jax.random.split(key, parts)
        return jnp.stack([jax.random.bits(part, (2,), jnp.uint32) for part in keys_of_parts])

    keys = _split(dropout.key, len(layers))
    return Seeds(tuple(of_layer(i, key) for i, key in enumerate(keys)))


def num_parts(dropout: Dropout, layers: Sequence[AnyCell], i: int) -> int:
    """Return the number of masks in layer i: with zoneout, one for each part of its carry."""
    if not has_mask(dropout.site, i, len(layers)):
        return 0
    if dropout.kind != "zoneout":
        return 1
    return len(jax.tree.leaves(jax.eval_shape(lambda p: p.zero_carry(1), layers[i])))


def _check_seeds(dropout: Dropout, seeds: Seeds, layers: Sequence[AnyCell]) -> None:
    """Raise ValueError if the seeds, unless all are None, are not of such layers."""
    parts = [num_parts(dropout, layers, i) for i in range(len(layers))]
    have = [0 if seed is None else len(seed) for seed in seeds.of_layers]
    if any(have) and have != parts:
        raise ValueError(
            f"the dropout's seeds are of other layers: there are {have} per layer, and "
            f"dropout of these layers needs {parts}; seed_dropout draws them."
        )


def _split(key: Tree, number: int) -> Tree:
    """Split a key; None for each part of None."""
    return [None] * number if key is None else jax.random.split(key, number)


def has_mask(site: str, i: int, L: int) -> bool:
    """Return whether a dropout at this site has a mask in layer i of L."""
    is_last = i == L - 1
    has_masks = {"input": i == 0, "between": not is_last, "output": is_last, "state": True}
    return has_masks[site]


def field_of(site: str) -> str:
    """Return the field of a layer's `StepMasks` that has the masks of a site."""
    return {"between": "output", "state": "hidden"}.get(site, site)


def in_two_directions(dropout: Dropouts, L: int) -> list[list[list[Dropout]]]:
    """Return, of each direction, for each layer, the dropouts for `unroll` of it alone."""
    directions: list[list[list[Dropout]]] = [[[] for _ in range(L)] for _ in range(2)]
    for item in each(dropout):
        if isinstance(item.key, Seeds):
            raise ValueError(
                "the dropout has seeds, which are of the layers of one direction; give two "
                "directions a key."
            )
        keys_of_directions = _split(item.key, 2)
        for layers, key in zip(directions, keys_of_directions, strict=True):
            keys_of_layers = _split(key, L)
            site = "output" if item.site == "between" else item.site
            for i, key_of_layer in enumerate(keys_of_layers):
                if has_mask(item.site, i, L):
                    layers[i].append(item.replace(key=key_of_layer, site=site))
    return directions


def threshold_and_scale(rate: Any) -> ThresholdAndScale:
    """Return the number of bit patterns that drop a unit, and the scale; it is None for rate 0."""
    if isinstance(rate, Array) and jnp.issubdtype(rate.dtype, jax.dtypes.prng_key):
        raise ValueError(
            "the dropout rate is a key; the order is Dropout(key, rate, site), or for drop_weights "
            "(key, layers, rate)."
        )
    if isinstance(rate, Tracer):
        return _of_traced_rate(rate)
    if getattr(rate, "shape", None) == ():  # a number of NumPy's or JAX's
        is_float = jnp.issubdtype(rate.dtype, jnp.floating)
        rate = float(rate) if is_float else rate.item()
    is_whole = isinstance(rate, int) and not isinstance(rate, bool)
    if is_whole and rate == 0:
        return 0, None
    if not isinstance(rate, float) or not 0 <= rate < 1:
        raise ValueError(
            f"the dropout rate is {shown(rate)}; it must be at least 0 and below 1 (for zoneout, "
            "also a tuple of such rates)."
        )
    threshold = min(round(rate * 2**16), 2**16 - 1)
    scale = 1 / (1 - threshold / 2**16)
    return threshold, scale if rate else None


def _of_traced_rate(rate: Array) -> ThresholdAndScale:
    """Return `threshold_and_scale` of a rate whose value is not known; NaN if it is impossible."""
    if rate.shape or not jnp.issubdtype(rate.dtype, jnp.floating):
        raise ValueError(f"the dropout rate is {rate.dtype} {rate.shape}; it must be one float.")
    rate = at_least_float32(rate)  # 2¹⁶ is ∞ in float16
    is_possible = (rate >= 0) & (rate < 1)
    threshold = jnp.minimum(jnp.round(rate * 2**16), 2**16 - 1)
    threshold = jnp.where(is_possible, threshold, 0)
    scale = jnp.where(is_possible, 1 / (1 - threshold / 2**16), jnp.nan)
    return threshold.astype(jnp.uint32), scale


def as_place(name: str, value: object) -> UInt32[AnyArray, "*B"]:
    """Return the number of a row or a step in 32 bits; None is 0."""
    if value is None:
        return np.zeros((), np.uint32)
    if isinstance(value, Tracer):
        return value.astype(jnp.uint32)
    return np.asarray(check_whole(f"{name} of the dropout", value, 2**32 - 1, least=0), np.uint32)
