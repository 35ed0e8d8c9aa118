"""Types of arrays and trees, and what every room does with them: dtypes, choices and meshes.

JAX promotes nothing implicitly under `jax_numpy_rank_promotion="raise"` and
`jax_numpy_dtype_promotion="strict"`, so functions here do it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

__all__ = ["AnyArray", "Size", "Tree"]

AnyArray: TypeAlias = Array | np.ndarray
"""An array of JAX's or NumPy's, such as tokens can be."""
Tree: TypeAlias = Any
"""A pytree of arrays: an array, or tuples, dicts and structs of arrays. Type checkers take all."""
Size: TypeAlias = Any
"""The size of an axis: an int, or a symbolic size within `jax.export`."""
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


def promoted_matmul(x: Float[Array, "*n E"], W: Float[Array, "E H"]) -> Float[Array, "*n H"]:
    """Return x·W in the wider dtype, differentiated by JAX: for forward mode."""
    dtype = widest(x, W)
    return x.astype(dtype) @ W.astype(dtype)


def choose_rows(flag: Bool[Array, "*n"], x: T, y: T | None = None) -> T:
    """Return a tree of arrays (*n, …): x in the rows where the flag is set, else y or zeros."""

    def where(x: Array, y: Array) -> Array:
        return jnp.where(flag.reshape(*flag.shape, *[1] * (x.ndim - flag.ndim)), x, y)

    return jax.tree.map(where, x, jax.tree.map(jnp.zeros_like, x) if y is None else y)


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


def sharded_by_xla(
    function: Callable[..., Any], x: Array, *outputs: tuple[int | None, ...]
) -> Callable[..., Any]:
    """Return the function with its sharding left to XLA, if x is on a mesh of explicit axes.

    With such a mesh, the default of `jax.make_mesh`, the sharding is a part of an array's type, and
    a function has to state it where it is ambiguous. Here XLA infers it, as with other meshes.

    Args:
      outputs: of each output, for each of its axes, the axis of x that is sharded alike, or None.
    """
    sharding = jax.typeof(x).sharding
    mesh = sharding.mesh
    spec = sharding.spec
    if AxisType.Explicit not in mesh.axis_types:
        return function
    specs = [P(*(None if axis is None else spec[axis] for axis in axes)) for axes in outputs]
    several = tuple(NamedSharding(mesh, spec) for spec in specs)
    return jax.sharding.auto_axes(function, out_sharding=several if several[1:] else several[0])
