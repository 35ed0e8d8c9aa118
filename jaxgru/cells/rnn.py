"""The vanilla RNN."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.cells.base import (
    Cell,
    Hidden,
    Recurrence,
    RecurrentLayer,
    Size,
    aligned,
    sizes_of_gates,
    struct,
)
from jaxgru.cells.initial_weights import initializers
from jaxgru.cells.products import gradients_of_one_matrix


@struct
class RNNParams:
    """Parameters of a vanilla RNN layer: W for the input, U for the state, b the bias.

        h' = tanh(x·W + h·U + b)

    See Elman 1990 (Cognitive Science 14(2)).
    """

    W: Float[Array, "E H"]
    U: Float[Array, "H H"]
    b: Float[Array, "H"]
    gates: ClassVar[str] = "h"


def init_rnn(
    key: PRNGKeyArray,
    in_features: int,
    hidden_dim: int,
    *,
    dtype: DTypeLike = jnp.float32,
    kernel_init: Initializer | None = None,
    recurrent_kernel_init: Initializer | None = None,
    bias_init: Initializer | None = None,
) -> RNNParams:
    """Draw the initial parameters of a vanilla RNN layer.

    W and b are uniform in ±1/√E, and U in ±1/√H, as in PyTorch's `nn.Linear`.

    Args:
      in_features: E, the size of the input at a step.
      hidden_dim: H, the size of the state.
      dtype: of the parameters, floating-point.
      kernel_init: draws W (E, H) instead: a function `(key, shape, dtype)`, such as
        `jax.nn.initializers.orthogonal()`.
      recurrent_kernel_init: draws U (H, H) instead.
      bias_init: draws b (H,) instead.

    Raises:
      ValueError: a size is not a positive whole number; the dtype is not floating-point; or an
        initializer is not a function, or does not return floating-point numbers of the given shape.
    """
    W, U, b = initializers(
        in_features, hidden_dim, dtype, kernel_init, recurrent_kernel_init, bias_init
    )
    k = jax.random.split(key, 3)
    return RNNParams(W=W(k[0]), U=U(k[1]), b=b(k[2]))


def rnn_cell(p: RNNParams, h: Hidden, x: Float[Array, "B E"]) -> Hidden:
    """Compute one step: h' = tanh(x·W + h·U + b)."""
    p, h, x = aligned(p, h, x)
    return jnp.tanh(x @ p.W + h @ p.U + p.b)


def sizes(p: RNNParams) -> tuple[int, int] | None:
    """Return (E, H), or None if the shapes contradict each other."""
    return sizes_of_gates(1, p.W, p.U, [(1, p.b)])


def zero_carry(p: RNNParams, batch_size: Size) -> Hidden:
    """Return the state before the first step: zeros (B, H) in the bias's dtype."""
    return jnp.zeros((batch_size, *p.b.shape), p.b.dtype)


# --- Many steps. a (T, B, H) is x·W + b. U (H, H).


def prepare(p: RNNParams) -> RecurrentLayer:
    """Prepare a layer for many steps."""
    return RecurrentLayer(p.W, p.b, (p.U,), RECURRENCE)


def _step(layout, U, h, a):
    h = jnp.tanh(a[0] + layout.times(U[0], h))
    return h, (h,)


def _factors(layout, h, after, saved):
    """Return the factor of da = dh·(…)."""
    (n,) = saved
    return (1 - n * n,)


def _step_gradient(layout, U, dh, factors):
    da = dh * factors[0]
    return layout.times(U[0], da), (da,)


RECURRENCE = Recurrence(1, _step, _factors, _step_gradient, gradients_of_one_matrix)


RNN = Cell(
    name="rnn",
    params=RNNParams,
    init=lambda key, E, H, options, dtype: init_rnn(key, E, H, dtype=dtype),
    sizes=sizes,
    step=rnn_cell,
    zero_carry=zero_carry,
    prepare=prepare,
)
