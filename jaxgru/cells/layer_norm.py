"""Layer normalisation inside a cell (Ba et al. 2016, arXiv 1607.06450).

LN(x) = (x − m) / √(v + ε), with the mean m and the variance v of the units of one row. ε is 10⁻⁵,
as in PyTorch; the paper has no ε, and Keras a larger one. The gains and biases belong to the cells.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxgru.arrays import at_least_float32

EPSILON = 1e-5


def layer_norm(x: Float[Array, "*n H"], gain: Float[Array, "H"]) -> Float[Array, "*n H"]:
    """Return LN(x) ⊙ gain."""
    # Of a zero x, the gradient of 1/√v is about ε^−1.5, which is infinite in float16
    wide = at_least_float32(x)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + EPSILON)
    normalised = wide.astype(x.dtype)
    return normalised * jax.lax.broadcast_to_rank(gain.astype(x.dtype), x.ndim)
