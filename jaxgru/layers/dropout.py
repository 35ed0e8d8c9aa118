"""Dropout masks: where units are dropped, and how the masks are drawn."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from jaxgru.cells import CellParams, hidden, zero_carry
from jaxgru.cells.base import Mask, Size
from jaxgru.errors import shown


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Dropout:
    """Dropout for one training step: a new mask per layer and time step, drawn from `key`.

    It is a pytree. A rate that is a Python or NumPy number is part of its structure; one that is an
    array of JAX is a leaf, so it can be traced, e.g. to change during training.

    Attributes:
      key: a new one for each training step.
      rate: the probability of dropping a unit. Out of range, a traced rate gives NaN.
      site: where units are dropped: "state", inside the recurrence of every layer (as in the
        study's code); "between", in each layer's output to the next layer; "output", in the last
        layer's output.
      first_row: if the batch is a part of a larger one, the row of the larger batch at which it
        starts; the masks are then that part of the larger batch's masks.
      first_step: the same for the time step.
    """

    key: PRNGKeyArray
    rate: float | Float[Array, ""]
    site: str = "state"
    first_row: int | Int[Array, ""] = 0
    first_step: int | Int[Array, ""] = 0

    def tree_flatten(self) -> tuple[tuple, tuple]:
        static = isinstance(self.rate, float | int | str | np.generic)
        rates = (None, self.rate) if static else (self.rate, None)
        return (self.key, rates[0], self.first_row, self.first_step), (rates[1], self.site)

    @classmethod
    def tree_unflatten(cls, structure: tuple, leaves: tuple) -> Dropout:
        (key, rate, *first), (static_rate, site) = leaves, structure
        return cls(key, rate if static_rate is None else static_rate, site, *first)

    def replace(self, **fields: Any) -> Dropout:
        """Return a copy with other values of these fields."""
        return replace(self, **fields)


NO_MASK = Mask()


def dropout_masks(
    layers: Sequence[CellParams], dropout: Dropout | None, batch_size: Size, num_steps: Size
) -> list[tuple[Mask, Mask]]:
    """Draw a pair of masks (T, B, H) per layer: inside the recurrence, and on the layer's output.

    16 bits are drawn per unit, so the rate is rounded to a multiple of 2⁻¹⁶. The scale 1/(1 − rate)
    uses the rounded rate, so expectations are exact.

    Raises:
      ValueError: it is no Dropout; the rate is not in [0, 1); the site is not state, between or
        output; or the first row or step is no whole number that fits into 32 bits.
    """
    L = len(layers)
    if not isinstance(dropout, Dropout | None):
        raise ValueError(f"dropout is {shown(dropout)}; it must be a Dropout(key, rate, site).")
    if dropout is None:
        return [(NO_MASK, NO_MASK)] * L
    threshold, scale = _threshold_and_scale(dropout.rate)
    if dropout.site not in ("state", "between", "output"):
        raise ValueError(
            f"the dropout site is {shown(dropout.site)}; it must be state, between or output."
        )
    if scale is None:
        return [(NO_MASK, NO_MASK)] * L
    first_step = _whole("first_step", dropout.first_step)
    first_row = _whole("first_row", dropout.first_row)
    masks: list[tuple[Mask, Mask]] = []
    for i, (layer, key) in enumerate(zip(layers, jax.random.split(dropout.key, L), strict=True)):
        last = i == L - 1
        if dropout.site == "between" and last or dropout.site == "output" and not last:
            masks.append((NO_MASK, NO_MASK))
            continue
        like = jax.eval_shape(lambda p: hidden(zero_carry(p, batch_size)), layer)
        bits = _random_16_bits(key, (num_steps, batch_size, like.shape[1]), first_step, first_row)
        mask = Mask(bits >= threshold, jnp.asarray(scale, like.dtype))
        masks.append((mask, NO_MASK) if dropout.site == "state" else (NO_MASK, mask))
    return masks


def of_layer(dropout: Dropout | None, direction: int, i: int, L: int) -> Dropout | None:
    """Return the dropout of layer i of L in one of two directions, for `unroll` of it alone."""
    if not isinstance(dropout, Dropout):
        return dropout
    key = jax.random.split(jax.random.split(dropout.key)[direction], L)[i]
    if dropout.site == "between":
        return None if i == L - 1 else dropout.replace(key=key, site="output")
    return None if dropout.site == "output" and i < L - 1 else dropout.replace(key=key)


def _threshold_and_scale(rate: Any) -> tuple[Any, Any]:
    """Return the bits from which on a unit is kept, and the scale; no scale for a rate of 0."""
    if isinstance(rate, Tracer):
        if rate.shape or not jnp.issubdtype(rate.dtype, jnp.floating):
            raise ValueError(f"the dropout rate is {rate.dtype} {rate.shape}; it must be a number.")
        rate = rate.astype(jnp.promote_types(rate.dtype, jnp.float32))  # 2¹⁶ is ∞ in float16
        possible = (rate >= 0) & (rate < 1)
        threshold = jnp.where(possible, jnp.minimum(jnp.round(rate * 2**16), 2**16 - 1), 0)
        scale = jnp.where(possible, 1 / (1 - threshold / 2**16), jnp.nan)
        return threshold.astype(jnp.uint32), scale
    if getattr(rate, "shape", None) == ():  # a number of NumPy's or JAX's
        rate = float(rate) if jnp.issubdtype(rate.dtype, jnp.floating) else rate.item()
    if not isinstance(rate, bool) and isinstance(rate, int) and rate == 0:
        return 0, None
    if not isinstance(rate, float) or not 0 <= rate < 1:
        raise ValueError(f"the dropout rate is {shown(rate)}; it must be at least 0 and below 1.")
    threshold = min(round(rate * 2**16), 2**16 - 1)
    return threshold, 1 / (1 - threshold / 2**16) if rate else None


def _whole(name: str, value: Any) -> UInt32[Array, ""]:
    """Return the number of a row or a step in 32 bits."""
    if isinstance(value, Tracer):
        return value.astype(jnp.uint32)
    try:
        known = operator.index(value)
    except TypeError:
        known = -1
    if not 0 <= known < 2**32:
        raise ValueError(
            f"{name} of the dropout is {shown(value)}; it must be a whole number from 0 to "
            "2^32 − 1."
        )
    return jnp.uint32(known)


def _random_16_bits(
    key: PRNGKeyArray,
    shape: tuple[Size, Size, int],
    first_step: UInt32[Array, ""],
    first_row: UInt32[Array, ""],
) -> UInt32[Array, "T B H"]:
    """Draw uniformly from 0 … 2¹⁶ − 1, four numbers per Threefry block (Salmon et al., SC 2011).

    `jax.random.bits` computes one block per number, however few its bits: five times slower. The
    primitive itself is used because JAX's `threefry_2x32` flattens the counters: each device would
    then compute the blocks of the whole batch.
    """
    T, B, H = shape
    key_0, key_1 = jax.random.bits(key, (2,), jnp.uint32)
    blocks = -(-H // 4)
    t, b, i = (jax.lax.broadcasted_iota(jnp.uint32, (T, B, blocks), axis) for axis in range(3))
    t, b = t + first_step, b + first_row
    words = threefry2x32_p.bind(key_0, key_1, t, b * blocks + i)  # no two counters are alike
    halves = [part for word in words for part in (word & 0xFFFF, word >> 16)]
    return jnp.concatenate(halves, axis=-1)[..., :H]
