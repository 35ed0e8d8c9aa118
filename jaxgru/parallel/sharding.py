"""Placement of arrays: a batch's rows over the devices; parameters replicated or sharded."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgru.errors import UserError
from jaxgru.printing import counted

ROWS = "data"
"""The mesh axis of a batch's rows, and of sharded parameters."""


def data_mesh(batch_size: int) -> Mesh:
    """Return a mesh of all devices for a batch's rows.

    Raises:
      UserError: the devices do not divide the rows.
    """
    devices = np.array(jax.devices())
    if batch_size % len(devices):
        raise UserError(
            f"the batch has {counted(batch_size, 'row')}, but there are {len(devices)} devices to "
            "share it; the rows must be a multiple of the devices."
        )
    return Mesh(devices, (ROWS,))


def partition_spec(shape: tuple[int, ...], n: int) -> P:
    """Return how to shard an array: its longest axis that n divides, or none (replicated)."""
    axes = [axis for axis, size in enumerate(shape) if n > 1 and size % n == 0]
    if not axes:
        return P()
    longest = max(axes, key=lambda axis: shape[axis])
    return P(*(None,) * longest, ROWS)


def specs(tree: Any, mesh: Mesh, sharded: bool) -> Any:
    """Return each leaf's PartitionSpec: cut over the mesh, or whole on every device.

    The shape alone decides, so a parameter, its gradient and its two moments are cut in the same
    way. Leaves that are not trained (a key, a count) are whole.
    """

    def spec(leaf: jax.Array | jax.ShapeDtypeStruct) -> P:
        is_trained = jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
        if sharded and is_trained:
            return partition_spec(leaf.shape, mesh.size)
        return P()

    return jax.tree.map(spec, tree)


def shardings(tree: Any, mesh: Mesh, sharded: bool) -> Any:
    """Return `specs` as `NamedSharding`s, for `jax.device_put`, `jax.jit` and Orbax."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(tree, mesh, sharded))


def shard_rows(tree: Any) -> Any:
    """Place a batch on all devices: each has its share of the rows, the first axis of every array.

    A `jax.jit` function of the batch and of parameters that are not committed to a device then
    computes each row on its device, and sums a gradient over the devices.

    Raises:
      UserError: the devices do not divide the rows.
    """
    rows = len(jax.tree.leaves(tree)[0])
    return jax.device_put(tree, NamedSharding(data_mesh(rows), P(ROWS)))


def shard(tree: Any, shardings: Any) -> Any:
    """Place arrays on a mesh. If every process has the whole array, each device gets its part."""

    def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
        if sharding.is_fully_addressable or not leaf.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = put(jax.random.key_data(leaf), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        host = np.asarray(leaf)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, tree, shardings)


def gather(tree: Any, specs: Any) -> Any:
    """Gather whole arrays from the devices' pieces, inside shard_map."""

    def whole(leaf: jax.Array, spec: P) -> jax.Array:
        if ROWS not in spec:
            return leaf
        return jax.lax.all_gather(leaf, ROWS, axis=spec.index(ROWS), tiled=True)

    return jax.tree.map(whole, tree, specs)


def scatter_mean(tree: Any, specs: Any) -> Any:
    """Return the mean over devices, inside shard_map; each device gets its piece of a cut array."""

    def mean(leaf: jax.Array, spec: P) -> jax.Array:
        if ROWS not in spec:
            return jax.lax.pmean(leaf, ROWS)
        total = jax.lax.psum_scatter(leaf, ROWS, scatter_dimension=spec.index(ROWS), tiled=True)
        return total / jax.lax.axis_size(ROWS)

    return jax.tree.map(mean, tree, specs)


def one_copy(tree: Any, mesh: Mesh | None) -> Any:
    """Return the arrays of a mesh as whole arrays on this process's first device."""
    if mesh is None:
        return tree
    whole = jax.device_put(tree, NamedSharding(mesh, P()))
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), whole)
