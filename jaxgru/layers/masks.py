"""Dropout masks: how the units of each layer are drawn. `dropout.py` says where they drop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, UInt32

from jaxgru.arrays import AnyArray, Size, Tree
from jaxgru.cells.contract import AnyCell, sizes
from jaxgru.cells.step_masks import NO_MASKS, Mask, StepMasks
from jaxgru.layers.dropout import (
    Dropout,
    Dropouts,
    Seeds,
    ThresholdAndScale,
    as_place,
    check_rates,
    each,
    field_of,
    has_mask,
    seeds_of,
)
from jaxgru.printing import counted


def dropout_masks(
    layers: Sequence[AnyCell],
    dropout: Dropouts,
    batch_size: Size,
    num_steps: Size,
    reverse: bool = False,
) -> list[StepMasks]:
    """Draw the masks of each layer; with `reverse`, from the last step to the first.

    16 bits are drawn per unit, so the rate is rounded to a multiple of 2⁻¹⁶. The scale 1/(1 − rate)
    uses the rounded rate, so expectations are exact.
    """
    L = len(layers)
    masks = [NO_MASKS] * L
    for item in each(dropout):
        rates = check_rates(item)
        drops_nothing = not isinstance(item.rate, tuple) and rates[0][1] is None
        if drops_nothing:
            continue
        seeds = seeds_of(item, layers)
        for i in range(L):
            if has_mask(item.site, i, L):
                draw = _draw(item, i, layers[i], rates, seeds, (num_steps, batch_size))
                masks[i] = masks[i]._replace(**DRAWN[item.kind](draw))
    return [mask.reversed() for mask in masks] if reverse else masks


class _Draw(NamedTuple):
    """How the units of a layer are drawn.

    Attributes:
      rates: of each part of the carry; all alike, but for zoneout.
      shape: T, B.
      carry: the shapes of the layer's.
      units: the number of units that a mask has.
    """

    site: str
    seed: UInt32[Array, "parts 2"] | None
    rates: Sequence[ThresholdAndScale]
    shape: tuple[Size, Size]
    first_step: UInt32[AnyArray, ""]
    first_row: UInt32[AnyArray, "*B"]
    carry: Tree
    units: int

    def keep(self, units: int, part: int = 0) -> Bool[Array, "T B H"]:
        """Return which units are kept at each step."""
        seed: Tree = self.seed
        threshold, _ = self.rates[part]
        shape = *self.shape, units
        bits = random_16_bits(seed[part], shape, self.first_step, self.first_row)
        return bits >= threshold

    def mask(self, keep: Array) -> Mask:
        """Return the mask that keeps these units and scales them."""
        scale: Tree = self.rates[0][1]
        return Mask(keep, jnp.asarray(scale, jax.tree.leaves(self.carry)[0].dtype))


def _draw(
    dropout: Dropout,
    i: int,
    layer: AnyCell,
    rates: Sequence[ThresholdAndScale],
    seeds: Seeds,
    shape: tuple[Size, Size],
) -> _Draw:
    """Return how the units of layer i are drawn."""
    _, B = shape
    carry = jax.eval_shape(lambda p: p.zero_carry(B), layer)
    parts = jax.tree.leaves(carry)
    units = sizes(layer)[0] if dropout.site == "input" else parts[0].shape[1]
    of_parts = rates if isinstance(dropout.rate, tuple) else [*rates] * len(parts)
    if len(of_parts) != len(parts):
        raise ValueError(
            f"the dropout has {counted(len(rates), 'rate')}; layer {i} has a carry of "
            f"{counted(len(parts), 'part')}, which can also share one number as the rate."
        )
    return _Draw(
        dropout.site,
        seeds.of_layers[i],
        of_parts,
        shape,
        as_place("first_step", dropout.first_step),
        as_place("first_row", dropout.first_row),
        carry,
        units,
    )


Fields: TypeAlias = dict[str, Tree]
"""Fields of a layer's `StepMasks`."""


def _each_step(draw: _Draw) -> Fields:
    return {field_of(draw.site): draw.mask(draw.keep(draw.units))}


def _variational(draw: _Draw) -> Fields:
    T, B = draw.shape
    keep = draw._replace(shape=(1, B), first_step=jnp.uint32(0)).keep(draw.units)
    if draw.site == "state":
        return {"recurrent": draw.mask(keep[0])}
    at_every_step = jnp.broadcast_to(keep, (T, *keep.shape[1:]))
    return {field_of(draw.site): draw.mask(at_every_step)}


def _zoneout(draw: _Draw) -> Fields:
    """Return which units of a carry are updated; without a key, the share of the new values."""
    parts, structure = jax.tree.flatten(draw.carry)
    updated = [_updated_units(draw, i, part) for i, part in enumerate(parts)]
    return {"zoneout": jax.tree.unflatten(structure, updated)}


def _updated_units(draw: _Draw, i: int, part: jax.ShapeDtypeStruct) -> Array:
    """Return which units of a part of the carry are updated; of whole numbers, all."""
    _, scale = draw.rates[i]
    shape = draw.shape[0], *part.shape
    if scale is None or not jnp.issubdtype(part.dtype, jnp.floating):
        return jnp.ones(shape, bool)
    if draw.seed is None:
        return jnp.broadcast_to(jnp.asarray(1 / scale, part.dtype), shape)
    kept = draw.keep(math.prod(part.shape[1:]), i).reshape(shape)
    if not isinstance(scale, Array):
        return kept
    # A traced rate that is out of range gives NaN
    return jnp.where(jnp.isnan(scale), scale, kept.astype(scale.dtype))


DRAWN: dict[str, Callable[[_Draw], Fields]] = {
    "each_step": _each_step,
    "variational": _variational,
    "zoneout": _zoneout,
}
"""For each of `dropout.KINDS`, what it draws."""


def random_16_bits(
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
    num_blocks = -(-H // 4)
    shape_of_blocks = T, B, num_blocks
    t = jax.lax.broadcasted_iota(jnp.uint32, shape_of_blocks, 0)
    b = jax.lax.broadcasted_iota(jnp.uint32, shape_of_blocks, 1)
    i = jax.lax.broadcasted_iota(jnp.uint32, shape_of_blocks, 2)
    axes_of_row = [1] if first_row.ndim == 1 else []
    first_row = jax.lax.broadcast_in_dim(first_row, shape_of_blocks, axes_of_row)
    t = t + first_step + 0 * first_row  # under `vmap`, with the same axes as b
    b = b + first_row
    words = threefry2x32_p.bind(*seed, t, b * num_blocks + i)  # no two counters are alike
    halves = [part for word in words for part in (word & 0xFFFF, word >> 16)]
    return jnp.concatenate(halves, axis=-1)[..., :H]
