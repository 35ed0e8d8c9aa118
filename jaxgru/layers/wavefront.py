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
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxgru.arrays import Tree, choose_rows, rounded_inside, vary_alike
from jaxgru.cells.carry import Carry, hidden
from jaxgru.cells.contract import AnyCell, AnyRecurrence, Weights
from jaxgru.cells.products import Lookup, apply_to
from jaxgru.cells.step_masks import Mask, StepMasks
from jaxgru.layers.over_time import over_time

Gradient: TypeAlias = tuple[AnyRecurrence, Weights] | None

PART = 16  # the most steps in a part; T = 128 and 3 layers then take 160 steps in 10 waves


def part_length(T: int) -> int:
    """Return K, the largest divisor of T that is at most `PART`."""
    return max(K for K in range(1, PART + 1) if T % K == 0)


def supports(
    layers: Sequence[AnyCell],
    custom_gradient: Sequence[Gradient],
    x: Array | Lookup,
    carry: Sequence[Carry],
    masks: Sequence[StepMasks],
) -> bool:
    """Return whether the layers are alike, and T can be cut into parts of several steps.

    Alike: of one hand-written recurrence, size and dtype, which is the carry's, too; the first may
    take another input. If T has no divisor from 2 to `PART`, each part would be a single step.
    There must be no resets, padding, zoneout, or variational dropout at the state.
    """
    T = x.shape[0]
    if not isinstance(T, int) or not all(custom_gradient):  # T can be symbolic
        return False
    if jax.tree.leaves([(m.reset, m.valid, m.zoneout, m.recurrent.keep) for m in masks]):
        return False
    shapes = lambda tree: tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree))
    kinds = {(gradient[0], shapes(gradient[1])) for gradient in custom_gradient if gradient}
    alike = {shapes(layer) for layer in layers[1:]}
    start = [jax.eval_shape(lambda p: p.zero_carry(1), layer) for layer in layers]
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((carry, start))}
    return len(kinds) == len(alike) == len(dtypes) == 1 and 1 < part_length(T) < T


def unroll_stack(
    layers: Sequence[AnyCell],
    custom_gradient: Sequence[Gradient],
    x: Float[Array, "T B E"] | Lookup,
    carry: Sequence[Carry],
    masks: Sequence[StepMasks],
) -> tuple[Float[Array, "T B H"], tuple[Carry, ...]]:
    """Compute a stack of layers that `supports` accepts; `custom_gradient` is each one's."""
    recurrences, weights = zip(*[gradient for gradient in custom_gradient if gradient], strict=True)
    L = len(layers)
    a_of_first = apply_to(layers[0].inputs, x)
    T, B = a_of_first.shape[:2]
    H = hidden(carry[0]).shape[-1]
    C = T // part_length(T)
    state_masks = [of_layer.hidden for of_layer in masks]
    output_masks = [of_layer.output for of_layer in masks]
    weights_inside = rounded_inside((_stack(layers[1:]), _stack(weights)))

    def run_layer(U: Weights, carry: Carry, a: Array, keep: Array | None) -> tuple[Tree, Carry]:
        mask = Mask(keep, state_masks[0].scale)
        return over_time(recurrences[0], U, carry, a, StepMasks(hidden=mask))

    def wave(state: Tree, inputs: Tree) -> tuple[Tree, Array]:
        carry, below = state
        number, a_of_first, state_keep, output_keep = inputs
        upper_layers, U = weights_inside()
        a_of_upper = jax.vmap(lambda p, x: p.inputs(x))(upper_layers, below)
        a = jnp.concatenate([a_of_first[None], a_of_upper])
        h, new_carry = jax.vmap(run_layer)(U, carry, a, state_keep)
        is_busy = (jnp.arange(L) <= number) & (number < jnp.arange(L) + C)
        carry = choose_rows(is_busy, new_carry, carry)
        below = Mask(output_keep, output_masks[0].scale)(h[:-1])
        return (carry, below), h[-1]

    inputs = (
        jnp.arange(C + L - 1),
        _in_waves(a_of_first, 0, C, L),
        _keep_in_waves(state_masks, C, L),
        _keep_in_waves(output_masks[:-1], C, L),
    )
    below = jnp.zeros((L - 1, T // C, B, H), a_of_first.dtype)
    below, _ = vary_alike((below, a_of_first))
    (last, _), h = jax.lax.scan(wave, (_stack(carry), below), inputs)
    h = output_masks[-1](h[L - 1 :].reshape(T, B, H))
    return h, tuple(jax.tree.map(lambda leaf, i=i: leaf[i], last) for i in range(L))


def _in_waves(y: Array, layer: int, C: int, L: int) -> Array:
    """Place a layer's C parts in their waves: (T, …) → (C + L − 1, K, …)."""
    T = len(y)
    parts = y.reshape(C, T // C, *y.shape[1:])
    return jnp.pad(parts, [(layer, L - 1 - layer)] + [(0, 0)] * (parts.ndim - 1))


def _keep_in_waves(
    masks: Sequence[Mask], C: int, L: int
) -> Bool[Array, "waves layers K B H"] | None:
    """Return which units of each layer are kept, in its waves; None: there are no masks."""
    keeps = [_in_waves(mask.keep, i, C, L) for i, mask in enumerate(masks) if mask.keep is not None]
    return jnp.stack(keeps, axis=1) if keeps else None


def _stack(trees: Sequence[Tree]) -> Tree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
