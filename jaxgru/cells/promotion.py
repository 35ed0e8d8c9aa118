"""In which dtype arrays are added and multiplied, and over which axes of a mesh they vary.

JAX promotes nothing implicitly under `jax_numpy_rank_promotion="raise"` and
`jax_numpy_dtype_promotion="strict"`, so these functions do it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

T = TypeVar("T")


def widest(*arrays: object) -> DTypeLike:
    """Return the dtype, of arrays or dtypes, that all of them are promoted to."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*arrays)


def at_least_float32(tree: T) -> T:
    """Return the tree with floating-point arrays of 16 bits widened, as sums of many terms need."""

    def widen(leaf: Array) -> Array:
        is_narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
        return leaf.astype(jnp.float32) if is_narrow else leaf

    return jax.tree.map(widen, tree)


def in_dtypes_of(like: T, tree: T) -> T:
    """Return the tree with each array in the dtype of the one in `like`."""
    return jax.tree.map(lambda like, leaf: leaf.astype(like.dtype), like, tree)


def rounded_inside(weights: T) -> Callable[[], T]:
    """Return a function that returns the weights; the body of a loop calls it.

    JAX adds up the gradients of what a loop closes over in its dtype, and of a long sum in bfloat16
    little is left. So the loop closes over wide weights, and its body rounds them.
    """
    wide = at_least_float32(weights)
    return lambda: in_dtypes_of(weights, wide)


def plus(a: Float[Array, "*n H"], b: Float[Array, "... H"] | None) -> Float[Array, "*n H"]:
    """Return a + b in the wider dtype, with the bias b in each row; a, if there is no bias."""
    if b is None:
        return a
    dtype = widest(a, b)
    return a.astype(dtype) + jax.lax.broadcast_to_rank(b.astype(dtype), a.ndim)


def vary_alike(tree: T) -> T:
    """Return the tree with every array varying over the same axes of a `jax.shard_map`.

    A hand-written gradient must have the type of its argument, and within a `shard_map` the axes
    over which an array varies are a part of its type. JAX differentiates this function itself: the
    gradient of what did not vary is summed over the devices.
    """
    varying = lambda leaf: jax.typeof(leaf).manual_axis_type.varying
    axes = frozenset().union(*map(varying, jax.tree.leaves(tree)))
    if not axes:
        return tree

    def vary(leaf: Array) -> Array:
        missing = axes - varying(leaf)
        if not missing:
            return leaf
        wide = jax.lax.pcast(at_least_float32(leaf), tuple(missing), to="varying")
        return wide.astype(leaf.dtype)

    return jax.tree.map(vary, tree)
