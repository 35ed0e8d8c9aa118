"""Weights that are dropped for a whole sequence: the recurrent matrices of any layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from jaxgru.arrays import Tree, at_least_float32
from jaxgru.cells.contract import AnyCell, Cell
from jaxgru.layers.dropout import Rate, threshold_and_scale
from jaxgru.printing import type_name

T = TypeVar("T")


def drop_weights(key: PRNGKeyArray, layers: T, rate: Rate) -> T:
    """Return layers with some recurrent weights set to zero, and the others scaled, for training.

    Each weight of the matrices that multiply h, such as a GRU's U, is 0 with probability `rate` and
    otherwise divided by 1 − rate. So the recurrence has the same weights at each step: DropConnect
    (Merity et al. 2018, arXiv 1708.02182, section 2). Call it within the function that is
    differentiated.

    Args:
      key: a new one for each training step.
      layers: one layer's parameters, or any pytree with layers, such as a list or a whole model's.
        Layers that a cell of your own wraps drop theirs, too. Of a Flax `Layer`, pass what its
        method `layer` returns, and call `unroll` with the result.
      rate: in [0, 1). A traced rate that is out of range gives NaN.

    Raises:
      ValueError: the rate is not as described, or no layer has such a matrix.
    """
    _, scale = threshold_and_scale(rate)
    zero = 0 if scale is None else 0 * scale  # NaN if a traced rate is out of range
    parts = jax.tree.leaves(layers, is_leaf=_is_cell)
    cells = [part for part in parts if isinstance(part, Cell)]
    if not cells:
        raise ValueError(
            f"{type_name(layers)} contains no jaxgru layers; drop_weights takes layers, or a "
            "pytree with layers, such as what the method layer() of a Flax Layer returns."
        )
    if not any(map(has_recurrent_weights, cells)):
        raise ValueError(
            "the layers have no recurrent matrices, so none of their weights can drop."
        )

    def dropped(key: PRNGKeyArray, U: Array) -> Array:
        wide = at_least_float32(U)
        share = jnp.asarray(1 - rate, wide.dtype) + jnp.asarray(zero, wide.dtype)
        kept = jnp.where(jax.random.bernoulli(key, share, wide.shape), wide, 0)
        return (kept / share).astype(U.dtype)

    return _with_recurrent_weights(dropped, key, layers)


def _is_cell(node: object) -> bool:
    return isinstance(node, Cell)


def has_recurrent_weights(layer: AnyCell) -> bool:
    """Return whether a layer, or one that it wraps, has a matrix that multiplies h."""
    inner = filter(_is_cell, _children(layer)[0])
    return bool(layer.recurrent) or any(map(has_recurrent_weights, inner))


def _children(layer: AnyCell) -> tuple[list[Tree], Tree]:
    """Return what a layer's fields hold, each layer that it wraps as a whole; and its structure."""
    return jax.tree.flatten(layer, is_leaf=lambda node: node is not layer and _is_cell(node))


def _with_recurrent_weights(
    function: Callable[[PRNGKeyArray, Array], Array], key: PRNGKeyArray, layers: T
) -> T:
    """Return a tree whose layers, and those that they wrap, have other recurrent matrices.

    Args:
      function: (key, matrix) → matrix; each has a key of its own.
    """

    def changed(key: PRNGKeyArray, part: Tree) -> Tree:
        if not isinstance(part, Cell):
            return part
        *keys, key_of_inner = jax.random.split(key, len(part.recurrent) + 1)
        weights = {
            name: function(key_of_weight, getattr(part, name))
            for name, key_of_weight in zip(part.recurrent, keys, strict=True)
        }
        part = part.replace(**weights) if weights else part
        children, structure = _children(part)
        if not any(map(_is_cell, children)):
            return part
        keys = jax.random.split(key_of_inner, len(children))
        return jax.tree.unflatten(structure, map(changed, keys, children))

    parts, structure = jax.tree.flatten(layers, is_leaf=_is_cell)
    keys = jax.random.split(key, len(parts))
    return jax.tree.unflatten(structure, map(changed, keys, parts))
