"""The hidden layer of Bengio et al. 2003 (JMLR 3, section 2), written as a cell.

    h' = tanh(x₋ₖ₊₁·W[0] + … + x₋₁·W[K−2] + x·W[K−1] + b)

The state is the K − 1 inputs before the current one, oldest first, padded with zeros at the start.
The carry also holds h, but only for the layer above to read: h' does not depend on it. The paper's
optional direct connections from the inputs to the logits are left out.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.cells.base import (
    Cell,
    Constants,
    Context,
    Hidden,
    ParallelLayer,
    Size,
    Steps,
    aligned,
    apply_mask,
    plus,
    struct,
    widest,
)
from jaxgru.cells.initial_weights import initializers
from jaxgru.cells.products import looked_up, product

UNROLLED = 16  # up to so many positions, each has a product of its own; XLA takes minutes for 100


@struct
class MLPParams:
    """Parameters of an MLP layer: W[j] for the input of K − 1 − j steps ago, b the bias."""

    W: Float[Array, "K E H"]
    b: Float[Array, "H"]


def init_mlp(
    key: PRNGKeyArray, E: int, H: int, K: int, dtype: DTypeLike = jnp.float32
) -> MLPParams:
    """Draw initial parameters. W, b: uniform ±1/√(K·E) (`nn.Linear` of K concatenated inputs)."""
    W, _, b = initializers(K * E, H, dtype)
    k_weight, k_bias = jax.random.split(key)
    return MLPParams(W=W(k_weight).reshape(K, E, H), b=b(k_bias))


def mlp_cell(
    p: MLPParams, carry: tuple[Hidden, Context], x: Float[Array, "B E"]
) -> tuple[Hidden, Context]:
    """Compute one step: (h, the K − 1 inputs before x) → (h', the K − 1 inputs up to x)."""
    p, (_, context), x = aligned(p, carry, x)
    context = jnp.concatenate([context, x[:, None]], axis=1)
    h = jnp.tanh(jnp.einsum("bke,keh->bh", context, p.W) + p.b)
    return h, context[:, 1:]


def sizes(p: MLPParams) -> tuple[int, int] | None:
    """Return (E, H), or None if the shapes contradict each other."""
    if p.W.ndim != 3 or p.b.shape != p.W.shape[2:]:
        return None
    _, E, H = p.W.shape
    return E, H


def zero_carry(p: MLPParams, batch_size: Size) -> tuple[Hidden, Context]:
    """Return the state before the first step: zeros, (B, H) and (B, K − 1, E)."""
    K, E, H = p.W.shape
    dtype = p.b.dtype
    return jnp.zeros((batch_size, H), dtype), jnp.zeros((batch_size, K - 1, E), dtype)


def prepare(p: MLPParams) -> ParallelLayer:
    """Prepare a layer for many steps, all computed at once, because there is no recurrence."""

    def all_steps(
        carry: tuple[Hidden, Context], steps: Steps, constants: Constants
    ) -> tuple[Float[Array, "T B H"], tuple[Hidden, Context]]:
        x = looked_up(steps.x)
        T, dtype = len(x), widest(carry[1], x)
        x = jnp.concatenate([carry[1].swapaxes(0, 1).astype(dtype), x.astype(dtype)])
        K = len(p.W)

        @partial(jax.checkpoint, prevent_cse=False)  # keeps W, and not the inputs of each position
        def add(a: Array, position: tuple[Array, Array]) -> tuple[Array, None]:
            j, W = position
            return a + product(jax.lax.dynamic_slice_in_dim(x, j, T), W), None

        if K <= UNROLLED:
            a: Any = sum(product(x[j : j + T], W) for j, W in enumerate(p.W))
        else:
            a, _ = jax.lax.scan(add, product(x[:T], p.W[0]), (jnp.arange(1, K), p.W[1:]))
        h = apply_mask(jnp.tanh(plus(a, p.b)), steps.keep, constants.scale)
        return h, (h[-1], x[T:].swapaxes(0, 1))

    return ParallelLayer(all_steps)


MLP = Cell(
    name="mlp",
    params=MLPParams,
    init=lambda key, E, H, options, dtype: init_mlp(key, E, H, options.context_length, dtype),
    sizes=sizes,
    step=mlp_cell,
    zero_carry=zero_carry,
    options=frozenset({"context_length"}),
    prepare=prepare,
)
