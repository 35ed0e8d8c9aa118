"""What layers are computed of: from the axes that users have to time-major ones, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxgru.arrays import AnyArray, Size, Tree, choose_rows, sharded_by_xla, vary_alike
from jaxgru.cells.products import Lookup, looks_up_first, map_steps
from jaxgru.layers import validate
from jaxgru.layers.dropout import Dropouts
from jaxgru.layers.implementations import Implementation
from jaxgru.layers.sharding import on_mesh
from jaxgru.steps import valid_steps


class Options(NamedTuple):
    """How layers are computed; see `unroll`."""

    implementation: Implementation
    time_major: bool = True
    return_carries: bool = False
    remat: bool = False
    reverse: bool = False

    def axis(self, shape: tuple[Size, ...]) -> int:
        """Return the axis of the steps, given the shape of the batch axes and the steps."""
        return 0 if self.time_major else len(shape) - 1


class Arguments(NamedTuple):
    """What layers are computed of; see `unroll`."""

    x: AnyArray | Lookup
    carry: Tree
    reset: AnyArray | None = None
    lengths: AnyArray | None = None
    mask: AnyArray | None = None
    reset_carry: Tree = None
    dropout: Dropouts = None


class Sequences(NamedTuple):
    """The input of `unroll` or `bidirectional`, time-major, with one batch axis.

    Attributes:
      reset: (T, B), as in `StepMasks`; likewise valid.
      mask: valid, if it was given as `mask`.
      batch: the batch axes that x had.
      axis: where x had its steps, before the batch axes or after them.
      inner_batch: what stands for the batch axes inside: one axis B or, on a mesh, all of them.
    """

    x: Array | Lookup
    reset: Bool[Array, "T *B"] | None
    valid: Bool[Array, "T *B"] | None
    mask: Bool[Array, "T *B"] | None
    batch: tuple[Size, ...]
    axis: int
    inner_batch: tuple[Size, ...]

    def other_order(self) -> validate.OtherOrder | None:
        """Return what `time_major` would change; None for one step, which `step` has."""
        T = self.x.shape[0]
        if T == 1:
            return None
        shape = *self.batch[: self.axis], T, *self.batch[self.axis :]
        is_batch_major = self.axis > 0
        other_batch = shape[1:] if is_batch_major else shape[:-1]
        return validate.OtherOrder(other_batch, time_major=is_batch_major)

    def leave(self, tree: Tree) -> Tree:
        """Return outputs (T, B, …) with the axes that the input had."""
        tree = self.leave_rows(tree, 1)
        if self.axis == 0:
            return tree
        return jax.tree.map(lambda h: jnp.moveaxis(h, 0, self.axis), tree)

    def leave_rows(self, tree: Tree, axis: int) -> Tree:
        """Return what has the axis B, with the batch axes of the input in its place."""
        if self.inner_batch == self.batch:
            return tree

        def split(h: Array) -> Array:
            return h.reshape(*h.shape[:axis], *self.batch, *h.shape[axis + 1 :])

        return jax.tree.map(split, tree)

    def leave_carries(self, carries: Sequence[Tree], is_single: bool) -> list[Tree]:
        """Return the last carry and, if there are, those of every step; of a layer alone, its."""
        last, *every = carries
        parts = [self.leave_rows(last, 0), *self.leave(every)]
        return [part[0] for part in parts] if is_single else parts


def enter(options: Options, arguments: Arguments) -> Sequences:
    """Return the input, and what masks its steps, as layers take them.

    Raises:
      ValueError: there is no step, or lengths and a mask are both given.
    """
    x = arguments.x
    lengths = arguments.lengths
    if lengths is not None and arguments.mask is not None:
        raise ValueError("both lengths and a mask are given; give one of them.")
    shape = x.shape[:-1]
    axis = options.axis(shape)
    T = shape[axis]
    batch = *shape[:axis], *shape[axis + 1 :]
    if T == 0:
        raise ValueError(f"x has the shape {x.shape}; it must have at least one step.")
    valid: Tree = arguments.mask
    if lengths is not None:
        valid = valid_steps(lengths, shape, axis)
    reset: Tree = arguments.reset
    if reset is not None and lengths is not None:
        reset = reset & valid
    x = _without_padding(x, valid)
    # To merge axes that are sharded would bring all rows to each device
    inner_batch = batch if len(batch) > 1 and on_mesh(x) else (math.prod(batch),)

    def time_major(a: Array) -> Array:
        if axis:
            a = jnp.moveaxis(a, axis, 0)
        return a if inner_batch == batch else a.reshape(T, *inner_batch, *a.shape[len(shape) :])

    if axis or inner_batch != batch:
        x = map_steps(time_major, x)
        reset = jax.tree.map(time_major, reset)
        valid = jax.tree.map(time_major, valid)
    mask = None if arguments.mask is None else valid
    return Sequences(x, reset, valid, mask, batch, axis, inner_batch)


def _without_padding(x: Tree, valid: Tree) -> Tree:
    """Return the input with zeros for what no valid step reads, whatever it holds, also NaN.

    `jax_debug_nans` would find it. Of a lookup, these are also rows of the table.
    """
    if valid is not None:
        x = map_steps(partial(choose_rows, valid), x)
    if not isinstance(x, Lookup) or (valid is None and looks_up_first(x)):
        return x

    def without_unread_rows(x: Lookup, valid: Tree) -> Array:
        table, ids = vary_alike(x)
        is_read, _ = vary_alike((jnp.zeros(len(table), bool), ids))
        is_valid = True if valid is None else valid
        numbers = ids.astype(jnp.int32) if ids.dtype == bool else ids
        is_read = is_read.at[numbers].max(is_valid, wrap_negative_indices=False)
        return jnp.where(is_read[:, None], table, 0)

    read_rows = sharded_by_xla(without_unread_rows, x.ids, (None, None))
    return x._replace(table=read_rows(x, valid))
