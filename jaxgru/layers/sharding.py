"""Inputs that are sharded over the devices of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxgru.cells.carry import Size
from jaxgru.cells.products import Lookup

Function: TypeAlias = Callable[..., Any]


def _sharding(x: Array | Lookup) -> NamedSharding:
    """Return how the steps of an input are sharded, as far as its type says."""
    return jax.typeof(x.ids if isinstance(x, Lookup) else x).sharding


def on_mesh(x: Array | Lookup) -> bool:
    """Return whether an input may be sharded, over several devices."""
    mesh = _sharding(x).mesh
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and kind != AxisType.Manual for size, kind in axes)


def over_batch_axes(run: Function, x: Array | Lookup, rows: Sequence[Size]) -> Function:
    """Return `run`, which takes one batch axis, for several: mapped over all but the largest.

    Its first arguments and its results have the batch axes, those of steps after T; the layers and
    the dropout have none. Each axis stays sharded as it is. Merged axes are up to twice as fast.
    """
    kept = max(range(len(rows)), key=lambda axis: rows[axis])
    of_x = lambda axis: x._replace(table=None, ids=axis) if isinstance(x, Lookup) else axis
    for axis in (axis for axis in range(len(rows)) if axis != kept):
        inputs = of_x(axis + 1), axis + 1, axis + 1, axis + 1
        run = jax.vmap(run, (inputs, axis, axis, axis, None, None), (axis + 1, axis, axis + 1))
    return run


def sharded_by_xla(
    function: Function, x: Array | Lookup, *outputs: tuple[int | None, ...]
) -> Function:
    """Return the function with its sharding left to XLA, if x is on a mesh of explicit axes.

    With such a mesh, the default of `jax.make_mesh`, the sharding is a part of an array's type, and
    a function has to state it where it is ambiguous. Here XLA infers it, as with other meshes.

    Args:
      outputs: of each output, for each of its axes, the axis of x that is sharded alike, or None.
    """
    sharding = _sharding(x)
    mesh, spec = sharding.mesh, sharding.spec
    if AxisType.Explicit not in mesh.axis_types:
        return function
    specs = [P(*(None if axis is None else spec[axis] for axis in axes)) for axes in outputs]
    several = tuple(NamedSharding(mesh, spec) for spec in specs)
    return jax.sharding.auto_axes(function, out_sharding=several if several[1:] else several[0])
