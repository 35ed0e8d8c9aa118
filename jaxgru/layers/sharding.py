"""Inputs that are sharded over the devices of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import AxisType
from jaxtyping import Array

from jaxgru.arrays import Size
from jaxgru.cells.products import Lookup

Function: TypeAlias = Callable[..., Any]


def steps_of(x: Array | Lookup) -> Array:
    """Return the array of an input that has its steps, and is sharded as they are."""
    return x.ids if isinstance(x, Lookup) else x


def on_mesh(x: Array | Lookup) -> bool:
    """Return whether an input may be sharded, over several devices."""
    mesh = jax.typeof(steps_of(x)).sharding.mesh
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and kind != AxisType.Manual for size, kind in axes)


def over_batch_axes(run: Function, x: Array | Lookup, batch: Sequence[Size]) -> Function:
    """Return `run`, which takes one batch axis, for several: mapped over all but the largest.

    Its first arguments and its results have the batch axes, those of steps after T; the layers and
    the dropout have none. Each axis stays sharded as it is. Merged axes are up to twice as fast.
    """
    kept = max(range(len(batch)), key=lambda axis: batch[axis])
    for axis in range(len(batch)):
        if axis == kept:
            continue
        after_T = axis + 1
        axis_of_x = x._replace(table=None, ids=after_T) if isinstance(x, Lookup) else after_T
        in_axes = (axis_of_x, after_T, after_T, after_T), axis, axis, axis, None, None
        out_axes = after_T, axis, after_T
        run = jax.vmap(run, in_axes, out_axes)
    return run
