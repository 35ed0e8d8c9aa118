"""Where arrays lie: a batch's rows over devices, parameters on each of them or cut into pieces."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgru.errors import UserError

ROWS = "data"  # the mesh axis over which a batch's rows are spread, and parameters if they are cut


def data_mesh(batch_size: int) -> Mesh:
    """All devices of all processes, in one row, over which a batch's rows are spread.

    Raises:
      UserError: the batch does not divide; the message names the nearest sizes that do.
    """
    devices = np.array(jax.devices())
    n = len(devices)
    if batch_size % n:
        below = batch_size // n * n
        nearest = f"{below} or {below + n}" if below else str(n)
        raise UserError(
            f"the batch has {batch_size} rows, but there are {n} devices to share it; "
            f"the nearest sizes that divide are {nearest}."
        )
    return Mesh(devices, (ROWS,))


def cut(shape: tuple[int, ...], n: int) -> P:
    """How an array is cut into n: along its longest axis that divides; else not at all."""
    axes = [axis for axis, size in enumerate(shape) if n > 1 and size % n == 0]
    if not axes:
        return P()
    longest = max(axes, key=lambda axis: shape[axis])
    return P(*(None,) * longest, ROWS)


def specs(tree: Any, mesh: Mesh, sharded: bool) -> Any:
    """Each leaf's PartitionSpec: cut over the mesh, or whole on every device.

    Shapes alone decide, so that a parameter, its gradient and its two moments are cut alike; what
    is not trained (a key, a count) is whole.
    """

    def spec(leaf: jax.Array) -> P:
        trained = jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
        return cut(leaf.shape, mesh.size if sharded and trained else 1)

    return jax.tree.map(spec, tree)


def shardings(tree: Any, mesh: Mesh, sharded: bool) -> Any:
    """The same as `NamedSharding`s: what `jax.device_put`, `jax.jit` and Orbax take."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(tree, mesh, sharded))


def row_shardings(tree: Any, mesh: Mesh) -> Any:
    """Of arrays whose first axis is a batch's rows: each device has its own rows."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, P(ROWS)), tree)


def spread(tree: Any, shardings: Any) -> Any:
    """Lays arrays out over a mesh; of arrays that each process has alike, each device its part."""

    def put(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
        if sharding.is_fully_addressable or not leaf.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = put(jax.random.key_data(leaf), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        host = np.asarray(leaf)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, tree, shardings)


def gather(tree: Any, specs: Any) -> Any:
    """Inside shard_map: whole arrays from each device's piece of them."""

    def whole(leaf: jax.Array, spec: P) -> jax.Array:
        if ROWS not in spec:
            return leaf
        return jax.lax.all_gather(leaf, ROWS, axis=spec.index(ROWS), tiled=True)

    return jax.tree.map(whole, tree, specs)


def scatter_mean(tree: Any, specs: Any) -> Any:
    """Inside shard_map: the devices' mean of whole arrays, each device with its piece of it."""

    def mean(leaf: jax.Array, spec: P) -> jax.Array:
        if ROWS not in spec:
            return jax.lax.pmean(leaf, ROWS)
        axis, n = spec.index(ROWS), jax.lax.axis_size(ROWS)
        return jax.lax.psum_scatter(leaf, ROWS, scatter_dimension=axis, tiled=True) / n

    return jax.tree.map(mean, tree, specs)


def one_copy(tree: Any, mesh: Mesh | None) -> Any:
    """The whole of arrays that lie on a mesh, on this process's first device alone."""
    if mesh is None:
        return tree
    whole = jax.device_put(tree, NamedSharding(mesh, P()))
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), whole)
