"""Layer normalisation inside a cell (Ba et al. 2016, arXiv 1607.06450), and its gradient.

LN(x) = (x − m) / √(v + ε), with the mean m and the variance v of the units of one row. ε is 10⁻⁵,
as in PyTorch; the paper has no ε, and Keras a larger one. The gains and biases belong to the cells.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

EPSILON = 1e-5


def layer_norm(x: Array, gain: Float[Array, "... units"], axis: int = -1) -> Array:
    """Return LN(x) ⊙ gain, differentiated by JAX."""
    return standardized(x, axis)[0] * jax.lax.broadcast_to_rank(gain.astype(x.dtype), x.ndim)


def standardized(x: Array, axis: int = -1) -> tuple[Array, Array]:
    """Return LN(x), and 1 / √(v + ε), which its gradient needs."""
    x = x - x.mean(axis, keepdims=True)
    scale = jax.lax.rsqrt(jnp.square(x).mean(axis, keepdims=True) + EPSILON)
    return x * scale, scale


def standardized_gradient(d: Array, x: Array, scale: Array, axis: int = -1) -> Array:
    """Return the gradient of LN's argument, given that of LN and what `standardized` returned."""
    mean = lambda a: a.mean(axis, keepdims=True)
    return scale * (d - mean(d) - x * mean(d * x))
