"""Stacked layers in parallel, for GPUs: each layer works on a different part of the sequence.

One step of one layer does not fill a GPU, so T · L steps in sequence (L layers) leave it mostly
idle. But to compute some steps, a layer needs only the same steps of the layer below. The sequence
is therefore cut into C parts of K steps, which run in C + L − 1 waves (here L = 3, C = 5):

    layer 0   0 1 2 3 4
    layer 1     0 1 2 3 4            the numbers of the parts; each column is one wave
    layer 2       0 1 2 3 4

All layers step together within a wave, and one batched product replaces L products: T + (L − 1)·K
steps instead of T·L. An idle layer computes with zeros and keeps its state.

This is the third stage of Appleyard et al. 2016 (arXiv 1604.01946), which optimises the whole
network. Because a part has several steps, the products with the inputs, and the gradients of the
weights, are still computed for K steps at once.

The code is plain JAX: `vmap` of the recurrences in `cells/` and of their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxgru.cells.base import (
    Carry,
    Constants,
    Mask,
    RecurrentLayer,
    Size,
    Steps,
    apply_mask,
    hidden,
    plus,
    rounded_inside,
    vary_alike,
)
from jaxgru.cells.products import Lookup, product
from jaxgru.layers.dropout import LayerMasks
from jaxgru.layers.over_time import over_time

PART = 16  # the most steps in a part; T = 128 and 3 layers then take 160 steps in 10 waves


def part_length(T: int) -> int:
    """Return K, the largest divisor of T that is at most `PART`."""
    return max(K for K in range(1, PART + 1) if T % K == 0)


def supports(layers: Sequence[RecurrentLayer], T: Size, carry: Sequence[Carry] = ()) -> bool:
    """Return whether the layers are alike and T can be cut into parts of several steps.

    Alike: of one recurrence, size and dtype, which is the carry's, too, without a norm; the first
    may take another input. If T has no divisor from 2 to `PART`, each part would be a single step.
    """
    if not isinstance(T, int):  # symbolic, within `jax.export`
        return False
    if any(layer.W is None or layer.norm for layer in layers):
        return False
    kinds = {
        (id(layer.recurrence), *((a.shape, a.dtype) for a in (layer.b, *layer.U)))
        for layer in layers
    }
    inputs = {(layer.W.shape, layer.W.dtype) for layer in layers[1:]}
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((carry, [layer.b for layer in layers]))}
    return len(kinds) == len(inputs) == len(dtypes) == 1 and 1 < part_length(T) < T


def unroll_stack(
    layers: Sequence[RecurrentLayer],
    x: Float[Array, "T B E"] | Lookup,
    carry: Sequence[Carry],
    masks: Sequence[LayerMasks],
) -> tuple[Float[Array, "T B H"], tuple[Carry, ...]]:
    """Compute a stack of layers that `supports` accepts."""
    L, recurrence = len(layers), layers[0].recurrence
    first_a = plus(product(x, layers[0].W), layers[0].b)
    (T, B), H = first_a.shape[:2], hidden(carry[0]).shape[-1]
    C = T // part_length(T)
    W, b = _stack([layer.W for layer in layers[1:]]), _stack([layer.b for layer in layers[1:]])
    U, stacked_carry = _stack([layer.U for layer in layers]), _stack(carry)

    def waves(y: Array, layer: int) -> Array:
        """Place a layer's parts in their waves: (T, …) → (C + L − 1, K, …)."""
        parts = y.reshape(C, T // C, *y.shape[1:])
        return jnp.pad(parts, [(layer, L - 1 - layer)] + [(0, 0)] * (parts.ndim - 1))

    def keep(masks: Sequence[Mask]) -> Bool[Array, "waves layers K B H"] | None:
        kept = [waves(mask.keep, i) for i, mask in enumerate(masks) if mask.keep is not None]
        return jnp.stack(kept, axis=1) if kept else None

    state_masks, output_masks = [m.state for m in masks], [m.output for m in masks]
    scale, scale_between = state_masks[0].scale, output_masks[0].scale
    run = jax.vmap(
        lambda U, carry, steps: over_time(recurrence, U, carry, steps, Constants(scale=scale))
    )
    input_product = jax.vmap(lambda x, W, b: plus(product(x, W), b))
    layer, weights = jnp.arange(L), rounded_inside((W, b, U))

    def wave(state: tuple, inputs: tuple) -> tuple[tuple, Array]:
        (carry, below), (number, first_a, state_keep, output_keep) = state, inputs
        W, b, U = weights()
        a = jnp.concatenate([first_a[None], input_product(below, W, b)])
        h, new_carry = run(U, carry, Steps(a, state_keep))
        busy = (layer <= number) & (number < layer + C)
        carry = jax.tree.map(
            lambda new, old: jnp.where(busy[:, None, None], new, old), new_carry, carry
        )
        return (carry, apply_mask(h[:-1], output_keep, scale_between)), h[-1]

    inputs = jnp.arange(C + L - 1), waves(first_a, 0), keep(state_masks), keep(output_masks[:-1])
    below = jnp.zeros((L - 1, T // C, B, H), first_a.dtype)
    below, _ = vary_alike((below, first_a))
    (stacked_carry, _), h = jax.lax.scan(wave, (stacked_carry, below), inputs)
    h = apply_mask(h[L - 1 :].reshape(T, B, H), *output_masks[-1])
    return h, tuple(jax.tree.map(lambda leaf, i=i: leaf[i], stacked_carry) for i in range(L))


def _stack(trees: Sequence) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
