"""Stacked layers at once, for GPUs: each works on the part of the sequence after its neighbour's.

A GPU finishes one step of one layer long before it is full, so T steps of L layers, one after
another, mostly wait. But layer l needs of the layer below no more than what that made of the same
steps: with the sequence cut into C parts of K steps, they run in C + L − 1 waves (L = 3, C = 5),

    layer 0   0 1 2 3 4
    layer 1     0 1 2 3 4            the number of the part; one wave a column
    layer 2       0 1 2 3 4

and a wave's steps are steps of all layers, with one batched product for what was L: T + (L − 1)·K
steps in place of T·L. Where a layer has nothing to do it computes with zeros and its state stays.
After Appleyard et al. 2016 (arXiv 1604.01946), who optimise the entire network so, their third
stage. With parts of several steps the inputs' products are still taken for K steps together, and so
are the weights' gradients.

In plain JAX: the recurrences of `cells/` and their gradients under `vmap`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxgru.cells.base import AtOnce, Carry, Gated, Lookup, Mask, apply_mask, hidden, product

PART = 16  # steps in a part, at most: with T = 128 and 3 layers 160 steps in 10 waves


def part_length(T: int) -> int:
    """K: the largest divisor of T that is at most `PART`."""
    return max(K for K in range(1, PART + 1) if T % K == 0)


def supports(layers: Sequence[Gated | AtOnce], T: int) -> bool:
    """Whether the layers can run at once, and with fewer steps: one recurrence, more than one part.

    A T with no divisor from 2 to `PART` would leave products of one step each.
    """
    first = layers[0]
    alike = all(isinstance(layer, Gated) and layer.step is first.step for layer in layers)
    return alike and len(layers) > 1 and 1 < part_length(T) < T


def unroll_layers(
    layers: Sequence[Gated],
    x: Float[Array, "T B E"] | Lookup,
    carry: Sequence[Carry],
    masks: Sequence[tuple[Mask | None, Mask | None]],
) -> tuple[Float[Array, "T B H"], tuple[Carry, ...]]:
    """Compute what `layers.unroll_layers` does, for layers and a T that are supported."""
    L, over_time = len(layers), layers[0].over_time
    W, b, U = ([getattr(layer, name) for layer in layers] for name in ("W", "b", "U"))
    first_a = product(x, W[0]) + b[0]
    T = len(first_a)
    C = T // part_length(T)
    W, b, U, carry = _stack(W[1:]), _stack(b[1:])[:, None, None], _stack(U), _stack(carry)

    def waves(y: Array, layer: int) -> Array:
        """(T, …) of a layer, its parts in the waves that they belong to: (C + L − 1, K, …)."""
        parts = y.reshape(C, T // C, *y.shape[1:])
        return jnp.pad(parts, [(layer, L - 1 - layer)] + [(0, 0)] * (parts.ndim - 1))

    def keep(masks: Sequence[Mask | None]) -> Bool[Array, "waves layers K B H"] | None:
        if masks[0] is None:
            return None
        return jnp.stack([waves(mask.keep, layer) for layer, mask in enumerate(masks)], axis=1)

    state_masks, output_masks = zip(*masks, strict=True)
    scale = next((mask.scale for pair in masks for mask in pair if mask), None)
    run = jax.vmap(lambda U, carry, a, keep: over_time(U, carry, a, _mask(keep, scale)))
    layer = jnp.arange(L)

    def wave(state: tuple, inputs: tuple) -> tuple[tuple, Array]:
        (carry, below), (number, first_a, state_keep, output_keep) = state, inputs
        a = jnp.concatenate([first_a[None], jax.vmap(product)(below, W) + b])
        h, new_carry = run(U, carry, a, state_keep)
        busy = (layer <= number) & (number < layer + C)
        carry = jax.tree.map(
            lambda new, old: jnp.where(busy[:, None, None], new, old), new_carry, carry
        )
        return (carry, apply_mask(h[:-1], _mask(output_keep, scale))), h[-1]

    inputs = jnp.arange(C + L - 1), waves(first_a, 0), keep(state_masks), keep(output_masks[:-1])
    below = jnp.zeros((L - 1, T // C, *hidden(carry).shape[1:]), first_a.dtype)
    (carry, _), h = jax.lax.scan(wave, (carry, below), inputs)
    h = apply_mask(h[L - 1 :].reshape(T, *h.shape[2:]), output_masks[-1])
    return h, tuple(jax.tree.map(lambda leaf, i=i: leaf[i], carry) for i in range(L))


def _stack(trees: Sequence) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _mask(keep: Array | None, scale: Array | None) -> Mask | None:
    return None if keep is None else Mask(keep, scale)
