"""Matrix products with a layer's weights, each with gradients that are one product, too.

If the weights are bfloat16, the product is computed in bfloat16 and accumulated in the state's
dtype. Letters as in `contract.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import export
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Integer

from jaxgru.arrays import Size, at_least_float32, vary_alike
from jaxgru.printing import shown

T = TypeVar("T")
AxesPair: TypeAlias = tuple[Sequence[int], Sequence[int]]  # of each factor


class Lookup(NamedTuple):
    """A layer's input as row numbers of a table, such as an embedding. See `embed`.

    `unroll` takes it in place of x. If the table has fewer rows than there are steps, T·B,
    (table·W)[ids] is a smaller product than table[ids]·W, and so are its gradients.
    """

    table: Float[Array, "V E"]
    ids: Integer[Array, "T B"]

    def embed(self) -> Float[Array, "T B E"]:
        """Look up the input."""
        return embed(self.table, self.ids)

    @property
    def shape(self) -> tuple[Size, ...]:
        """The shape of the rows."""
        return *self.ids.shape, self.table.shape[-1]


export.register_namedtuple_serialization(Lookup, serialized_name="jaxgru.Lookup")


def map_steps(function: Callable[[Array], Array], x: Array | Lookup) -> Array | Lookup:
    """Apply a function to the axes T and B of an input."""
    return x._replace(ids=function(x.ids)) if isinstance(x, Lookup) else function(x)


def look_up(x: Array | Lookup) -> Array:
    """Return the input itself."""
    return x.embed() if isinstance(x, Lookup) else x


def embed(
    table: Float[Array, "V E"], ids: Integer[Array, "*n"] | Bool[Array, "*n"]
) -> Float[Array, "*n E"]:
    """Return the rows with these numbers; NaN where the number is negative or too large."""
    if ids.dtype == bool:
        ids = ids.astype(jnp.int32)  # JAX would take booleans for a mask
    wide = at_least_float32(table)  # the gradient of a row is a sum over many steps
    found = wide.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    return found.astype(table.dtype)


def contract_axes(
    x: Array, y: Array, axes: AxesPair, dtype: DTypeLike, batch: AxesPair = ((), ())
) -> Array:
    """Return the contraction of x and y, of one dtype, accumulated and returned in `dtype`.

    XLA's CPU back end first chooses how to multiply in bfloat16 and then fuses transpositions into
    the product, but it cannot execute one whose left factor is transposed ("UNIMPLEMENTED ...
    DotThunk"). On a CPU, barriers therefore keep transpositions out of the product.
    """
    multiply = partial(
        jax.lax.dot_general, dimension_numbers=(axes, batch), preferred_element_type=dtype
    )
    if x.dtype == dtype:
        return multiply(x, y)
    barrier = jax.lax.optimization_barrier
    return jax.lax.platform_dependent(
        x, y, cpu=lambda x, y: barrier(multiply(*barrier((x, y)))), default=multiply
    )


def as_factors(x: Array, W: Array) -> tuple[Array, Array]:
    """Return x and W, with integers and booleans in the dtype of the other."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(W.dtype)
    if not jnp.issubdtype(W.dtype, jnp.inexact):
        W = W.astype(x.dtype)
    return x, W


def check_blocks(W: Float[Array, "blocks k gk"]) -> None:
    """Raise ValueError if the blocks of block-diagonal weights have fewer columns than rows."""
    if W.shape[1] > W.shape[2]:
        raise ValueError(
            f"block-diagonal weights are {W.shape}; they must be (n, k, g·k): n blocks of k inputs "
            "and of k outputs for each of g gates."
        )


def matmul(
    x: Float[Array, "*n E"], W: Float[Array, "E H"] | Float[Array, "blocks k gk"]
) -> Float[Array, "*n H"]:
    """Return x·W in x's dtype. If W's dtype is narrower, x is rounded to it; sums are in x's dtype.

    Each gradient is one product, too, of operands rounded to W's dtype. Matrix units compute this
    (bfloat16 in, float32 out); `x @ W` would not request it. Integers and booleans, such as those
    of a permutation, are converted to the dtype of the other factor.

    No axes are merged: if the batch is sharded, XLA keeps every row on its device.

    Raises:
      ValueError: the blocks of W have fewer columns than rows.
    """
    if W.ndim == 3:
        check_blocks(W)
        return blocked_matmul(x, W)
    x, W = as_factors(x, W)
    return x @ W if x.ndim < 3 and x.dtype == W.dtype else _matmul(*vary_alike((x, W)))


def rounded_matmul(
    x: Float[Array, "*n E"], W: Float[Array, "E H"] | Float[Array, "blocks k gk"]
) -> Array:
    """Return `matmul` without a gradient of its own: a Hessian's forward mode passes it."""
    if W.ndim == 3:
        return blocked_matmul(x, W)
    x, W = as_factors(x, W)
    return contract_axes(x.astype(W.dtype), W, ((x.ndim - 1,), (0,)), x.dtype)


@jax.custom_vjp
def _matmul(x: Float[Array, "*n E"], W: Float[Array, "E H"]) -> Float[Array, "*n H"]:
    return rounded_matmul(x, W)


def _matmul_forward(x: Array, W: Array) -> tuple[Array, tuple[Array, Array]]:
    return rounded_matmul(x, W), (x, W)


def _matmul_backward(residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, W = residuals
    return rounded_matmul(dy, W.T), dense_weight_gradient(x, dy, W.dtype)


_matmul.defvjp(_matmul_forward, _matmul_backward)


# Block-diagonal weights: U (n, k, g·k) stands for n blocks (k, k) of each of g gates, side by side.
# In a state (..., H) and in a gate, the i-th k of the H = n·k units belong to block i.


def by_block(x: Float[Array, "*n GH"], U: Array) -> Float[Array, "blocks *n Gk"]:
    """Split the units of each gate into the blocks of U (n, ...)."""
    n = len(U)
    k = min(U.shape[1:])
    gates = x.shape[-1] // (n * k)
    x = jnp.moveaxis(x.reshape(*x.shape[:-1], gates, n, k), -2, 0)
    return x.reshape(*x.shape[:-2], gates * k)


def blocked_matmul(
    x: Float[Array, "*n H"], U: Float[Array, "blocks k gk"]
) -> Float[Array, "*n GH"]:
    """Return x·U for block-diagonal weights; if U is transposed, x holds the gates."""
    x, U = as_factors(x, U)
    n = len(U)
    k = min(U.shape[1:])
    y = contract_axes(by_block(x.astype(U.dtype), U), U, ((x.ndim,), (1,)), x.dtype, ((0,), (0,)))
    y = jnp.moveaxis(y.reshape(*y.shape[:-1], U.shape[2] // k, k), 0, -2)
    return y.reshape(*x.shape[:-1], n * U.shape[2])


def weight_gradient(U: Array, x: Float[Array, "*n E"], dy: Float[Array, "*n H"]) -> Array:
    """Return the gradient of the weights U, given that of x·U."""
    if U.ndim == 2:
        return dense_weight_gradient(x, dy, U.dtype)
    x = by_block(x.astype(U.dtype), U)
    narrow_dy = by_block(dy.astype(U.dtype), U)
    axes = tuple(range(1, x.ndim - 1))
    return contract_axes(x, narrow_dy, (axes, axes), dy.dtype, ((0,), (0,))).astype(U.dtype)


def apply_to(function: Callable[[Array], Array], x: Float[Array, "T B E"] | Lookup) -> Array:
    """Return function(x), for a function of each step alone."""
    inputs, steps = before_lookup(function, x)
    return inputs(steps)


def before_lookup(
    function: Callable[[Array], Array], x: Float[Array, "T B E"] | Lookup
) -> tuple[Callable[[Array], Array], Array]:
    """Return an array (T, B, …), and what maps any of its steps to a function of x.

    A table with fewer rows than there are steps goes through the function here, once.
    """
    if not isinstance(x, Lookup):
        return function, x
    if looks_up_first(x):
        return function, x.embed()
    return partial(embed, function(x.table)), x.ids


def looks_up_first(x: Lookup) -> bool:
    """Return whether the table has more rows than there are steps."""
    steps: Size = math.prod(x.ids.shape)
    return isinstance(steps, int) and steps < len(x.table)  # in `jax.export`, it is symbolic


def round_weights(layers: T, dtype: DTypeLike) -> T:
    """Return layers whose matrices are rounded to a narrower dtype, for mixed precision.

    Products with them then take operands of that dtype, and are added up in float32 or wider.
    Biases keep their dtype, which is also that of gates, states and outputs. Round within the
    function that is differentiated, so that the gradient is that of the wide weights.

    Args:
      layers: one layer's parameters, or any pytree of layers, such as a list or a pair of lists.
      dtype: of the matrices; bfloat16 is tested.

    Raises:
      ValueError: the dtype is not a floating-point one.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype is {shown(dtype)}; it must be floating-point, such as bfloat16.")
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim > 1 else leaf, layers)


def dense_weight_gradient(
    x: Float[Array, "*n E"], dy: Float[Array, "*n H"], dtype: DTypeLike
) -> Array:
    """Return the gradient (E, H) of a weight of this dtype: the sum of xᵀ·dy over the other axes.

    In this order of the operands; the other order is half as fast on a CPU.
    """
    x = x.astype(dtype)
    narrow_dy = dy.astype(dtype)
    axes = tuple(range(x.ndim - 1))
    axes_of_x = axes
    if dtype != dy.dtype:  # in bfloat16, XLA's fast CPU product needs xᵀ as a matrix
        x = jnp.moveaxis(x, -1, 0)
        axes_of_x = tuple(range(1, x.ndim))
    return contract_axes(x, narrow_dy, (axes_of_x, axes), dy.dtype).astype(dtype)
