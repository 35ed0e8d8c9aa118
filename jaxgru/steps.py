"""Flags and lengths of the steps of sequences: which are read, and where a state is reset."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxgru.arguments import as_array, is_known
from jaxgru.arrays import AnyArray, Size, widest


def as_flags(name: str, flags: object, shape: tuple[Size, ...]) -> AnyArray:
    """Return flags as bool. They may be numbers that are 0 or 1, if their values are known."""
    array = as_array(name, flags)
    if array.dtype == bool and array.shape == shape:
        return array
    if array.shape != shape or not jnp.issubdtype(array.dtype, jnp.number):
        is_in_another_order = array.shape in (shape[1:] + shape[:1], shape[-1:] + shape[:-1])
        remedy = ", with its axes in the order of x's" if is_in_another_order else ""
        raise ValueError(
            f"{name} is {array.dtype} {array.shape}; it must be bool {shape}"
            f"{'' if array.shape == shape else remedy}."
        )
    if not is_known(array):
        raise ValueError(
            f"{name} is {array.dtype}, and its values are not known here; pass "
            f"{name}.astype(bool) if each of them is 0 or 1."
        )
    values = np.asarray(array)
    if (other := values[(values != 0) & (values != 1)]).size:
        raise ValueError(
            f"{name} contains {other[0]}; it must be bool, or numbers that are 0 or 1."
        )
    return values.astype(bool)


def as_lengths(lengths: object, shape: tuple[Size, ...], axis: int) -> AnyArray:
    """Return the number of steps of each row as an array; for the rest, see `valid_steps`."""
    array = as_array("lengths", lengths)
    T = shape[axis]
    batch = (*shape[:axis], *shape[axis + 1 :])
    if array.shape != batch or not jnp.issubdtype(array.dtype, jnp.integer):
        fits_other = T != 1 and array.shape == (shape[1:] if axis else shape[:-1]) != batch
        remedy = f"; with time_major={axis > 0} it would fit" if fits_other else ""
        raise ValueError(
            f"lengths is {array.dtype} {array.shape}; it must be integers, one per row: {batch}"
            f"{remedy}."
        )
    if is_known(array):
        values = np.asarray(array)
        if values.size and not 0 <= values.min() <= values.max() <= T:
            raise ValueError(
                f"lengths range from {values.min()} to {values.max()}; they must be in 0 … T = {T}."
            )
    return array


def valid_steps(lengths: object, shape: tuple[Size, ...], axis: int) -> Bool[Array, "..."]:
    """Return True where a step is not padding.

    Args:
      shape: of the result: (B, T), (T, B), or (T,) for one sequence.
      axis: that of T.
    """
    array = as_lengths(lengths, shape, axis)
    steps = jnp.arange(shape[axis], dtype=widest(jnp.int32, array))
    ends = jnp.expand_dims(jnp.asarray(array, steps.dtype), axis)
    return jnp.expand_dims(steps, [i for i in range(len(shape)) if i != axis]) < ends


def in_reading_order(
    reset: Bool[AnyArray, "T *B"], mask: Bool[AnyArray, "T *B"] | None = None
) -> Bool[Array, "T *B"]:
    """Return the steps before which a layer that reads backward resets its carry.

    These are the steps after which, in time, the next valid step belongs to a later episode; after
    the last one, it is in the next part of the sequence. An episode begins where `reset` is True,
    even if `mask` says that this step is padding.
    """
    if mask is None:
        return jnp.pad(reset[1:], [(0, 1)] + [(0, 0)] * (reset.ndim - 1))
    episode = jnp.cumsum(reset, 0, jnp.int32)
    read = jax.lax.cummin(jnp.where(mask, episode, episode[-1]), reverse=True)
    read = jnp.concatenate([read[1:], episode[-1:]])
    return (read != episode) & mask
