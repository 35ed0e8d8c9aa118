"""Dropout masks: where units are dropped, and how the masks are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Int, PRNGKeyArray, UInt32

from jaxgru.cells import CellParams, hidden, zero_carry
from jaxgru.cells.base import Mask, Size, struct


@struct
class Dropout:
    """Dropout for one training step: a new mask per layer and time step, drawn from `key`.

    Attributes:
      key: a new one for each training step.
      rate: the probability of dropping a unit.
      site: where units are dropped: "state", inside the recurrence of every layer (as in the
        study's code); "between", in each layer's output to the next layer; "output", in the last
        layer's output.
      first_row: if the batch is a part of a larger one, the row of the larger batch at which it
        starts; the masks are then that part of the larger batch's masks.
      first_step: the same for the time step.
    """

    key: PRNGKeyArray
    rate: float = field(metadata={"static": True})
    site: str = field(metadata={"static": True}, default="state")
    first_row: int | Int[Array, ""] = 0
    first_step: int | Int[Array, ""] = 0


def dropout_masks(
    layers: Sequence[CellParams], dropout: Dropout | None, batch_size: Size, num_steps: Size
) -> list[tuple[Mask | None, Mask | None]]:
    """Draw a pair of masks (T, B, H) per layer: inside the recurrence, and on the layer's output.

    16 bits are drawn per unit, so the rate is rounded to a multiple of 2⁻¹⁶. The scale 1/(1 − rate)
    uses the rounded rate, so expectations are exact.

    Raises:
      ValueError: it is no Dropout; the rate is not in [0, 1); or the site is not state, between or
        output.
    """
    L = len(layers)
    if not isinstance(dropout, Dropout | None):
        raise ValueError(f"dropout is {dropout!r}; it must be a Dropout(key, rate, site).")
    if dropout is None or dropout.rate == 0:
        return [(None, None)] * L
    if not isinstance(dropout.rate, float | np.floating) or not 0 < dropout.rate < 1:
        raise ValueError(
            f"the dropout rate is {dropout.rate!r}; it must be at least 0 and below 1."
        )
    if dropout.site not in ("state", "between", "output"):
        raise ValueError(
            f"the dropout site is {dropout.site!r}; it must be state, between or output."
        )
    threshold = min(round(dropout.rate * 2**16), 2**16 - 1)
    masks: list[tuple[Mask | None, Mask | None]] = []
    for i, (layer, key) in enumerate(zip(layers, jax.random.split(dropout.key, L), strict=True)):
        last = i == L - 1
        if dropout.site == "between" and last or dropout.site == "output" and not last:
            masks.append((None, None))
            continue
        like = jax.eval_shape(lambda p: hidden(zero_carry(p, batch_size)), layer)
        H = like.shape[1]
        bits = _random_16_bits(
            key, (num_steps, batch_size, H), dropout.first_step, dropout.first_row
        )
        scale = jnp.asarray(1 / (1 - threshold / 2**16), like.dtype)
        mask = Mask(bits >= threshold, scale)
        masks.append((mask, None) if dropout.site == "state" else (None, mask))
    return masks


def _random_16_bits(
    key: PRNGKeyArray,
    shape: tuple[Size, Size, int],
    first_step: int | Int[Array, ""],
    first_row: int | Int[Array, ""],
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
    t, b = t + jnp.uint32(first_step), b + jnp.uint32(first_row)
    words = threefry2x32_p.bind(key_0, key_1, t, b * blocks + i)  # no two counters are alike
    halves = [part for word in words for part in (word & 0xFFFF, word >> 16)]
    return jnp.concatenate(halves, axis=-1)[..., :H]
