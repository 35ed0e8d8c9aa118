"""The interface of a cell (`Cell`), and what cells share: carries, products, masks, scans.

Vectors are rows and weights are (in, out), so the code reads like the equations. Letters: T time,
B batch, E input size, H hidden size, G number of gates; σ is the logistic function, ⊙ the
elementwise product. Arrays are time-major.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Integer, PRNGKeyArray

AnyArray: TypeAlias = Array | np.ndarray  # tokens can be NumPy arrays
Hidden: TypeAlias = Float[Array, "B H"]
Context: TypeAlias = Float[Array, "B _ _"]  # (B, K − 1, E); E differs from layer to layer
Carry: TypeAlias = Hidden | tuple[Hidden, Hidden] | tuple[Hidden, Context]
CellParams: TypeAlias = Any  # a `flax.struct` of one layer's weights; `Cell.params` is its class


@dataclass(frozen=True)
class Cell:
    """One recurrence: everything that the rest of the library knows about it.

    name: the value of `model.cell` in a config.
    params: the class of one layer's parameters, a `flax.struct.dataclass`.
    init: (key, E, H, options, dtype) → initial parameters; `options` is the model's config.
    step: (params, carry, x (B, E)) → the next carry: the equations.
    zero_carry: (params, batch size) → the carry before the first step.
    options: the config's fields that this cell uses, besides the sizes.
    fast: params → a faster computation of many steps, with a hand-written gradient; with None,
      `step` is scanned over time.
    """

    name: str
    params: type
    init: Callable[[PRNGKeyArray, int, int, Any, DTypeLike], Any]
    step: Callable[[Any, Any, Array], Any]
    zero_carry: Callable[[Any, int], Any]
    options: frozenset[str] = frozenset()
    fast: Callable[[Any], Gated | AtOnce] | None = None


class Gated(NamedTuple):
    """A recurrent layer whose input product a = x·W + b is computed once, for all steps.

    W: (E, G·H), the concatenated input weights.
    b: (G·H), the summed biases.
    U: the recurrent weights.
    step: (layout, U, carry, a) → the next carry, and the values that the backward pass needs.
    over_time: (U, carry, a (T, B, G·H), mask) → h' of every step, and the last carry.
    """

    W: Array
    b: Array
    U: tuple[Array, ...]
    step: Callable[..., tuple[Any, tuple[Array, ...]]]
    over_time: Callable[..., tuple[Array, Any]]


class AtOnce(NamedTuple):
    """A layer whose steps do not depend on one another.

    all_steps: (x (T, B, E), carry, mask) → h' of every step, and the last carry.
    """

    all_steps: Callable[..., tuple[Array, Any]]


class Mask(NamedTuple):
    """A dropout mask: which units are kept, and the factor 1/(1 − p) that scales them."""

    keep: Bool[Array, "... B H"]
    scale: Float[Array, ""]


class Lookup(NamedTuple):
    """A layer's input as row numbers of a table, before the lookup. See `rows`.

    If the table has fewer rows than there are steps, (table·W)[ids] is a smaller product than
    table[ids]·W, and so are its gradients.
    """

    table: Float[Array, "V E"]
    ids: Integer[Array, "T B"]

    def rows(self) -> Float[Array, "T B E"]:
        """Look up the input."""
        return rows(self.table, self.ids)


def rows(
    table: Float[Array, "V E"], ids: Integer[Array, "*n"] | Bool[Array, "*n"]
) -> Float[Array, "*n E"]:
    """Return the rows with these numbers; NaN where the number is negative or too large."""
    if ids.dtype == bool:
        ids = ids.astype(jnp.int32)  # JAX would take booleans for a mask
    return table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def hidden(carry: Carry) -> Hidden:
    """Return the part of a carry that the layer above reads: h of a pair, else the carry itself."""
    return carry[0] if isinstance(carry, tuple) else carry


def with_hidden(carry: Carry, h: Array) -> Carry:
    """Return the carry with its h replaced."""
    return (h, carry[1]) if isinstance(carry, tuple) else h


def plus(b: Float[Array, "*n H"], c: Float[Array, "H"] | None) -> Float[Array, "*n H"]:
    """Return b + c, or b where there is no second bias c."""
    return b if c is None else b + c


def initializers(E: int, H: int, dtype: DTypeLike) -> tuple[Callable[..., Array], ...]:
    """Return functions that draw W, U and b from a key: uniform ±1/√fan_in (PyTorch's Linear)."""

    def uniform(shape: tuple[int, ...], fan_in: int) -> Callable[[PRNGKeyArray], Array]:
        bound = fan_in**-0.5
        return lambda key: jax.random.uniform(key, shape, dtype, -bound, bound)

    return uniform((E, H), E), uniform((H, H), H), uniform((H,), E)


# --- Products


def _matmul(x: Array, y: Array, dtype: DTypeLike) -> Array:
    """Return x·y, accumulated and returned in `dtype`; x and y have the same dtype.

    XLA's CPU back end first chooses how to multiply in bfloat16 and then fuses transpositions into
    the product, but it cannot execute one whose left factor is transposed ("UNIMPLEMENTED ...
    DotThunk"). On a CPU, barriers therefore keep transpositions out of the product.
    """
    multiply = partial(jnp.matmul, preferred_element_type=dtype)
    if x.dtype == dtype:
        return multiply(x, y)
    apart = jax.lax.optimization_barrier
    return jax.lax.platform_dependent(
        x, y, cpu=lambda x, y: apart(multiply(*apart((x, y)))), default=multiply
    )


def dot(x: Float[Array, "*n E"], W: Float[Array, "E H"]) -> Float[Array, "*n H"]:
    """Return x·W in x's dtype. If W's dtype is narrower, x is rounded to it; sums are in x's dtype.

    The gradients are computed in the same way: each is one product of operands rounded to W's
    dtype. Matrix units compute this (bfloat16 in, float32 out); `x @ W` would not request it.
    """
    if W.dtype != x.dtype:
        return _narrow_dot(x, W)
    flat = x.reshape(-1, x.shape[-1])  # the gradients, too, are then products of two matrices
    return (flat @ W).reshape(*x.shape[:-1], W.shape[1])


@jax.custom_vjp
def _narrow_dot(x: Float[Array, "*n E"], W: Float[Array, "E H"]) -> Float[Array, "*n H"]:
    return _dot_forward(x, W)[0]


def _dot_forward(x, W):
    return _matmul(x.astype(W.dtype), W, x.dtype), (x, W)


def _dot_backward(residuals, dy):
    x, W = residuals
    return dot(dy, W.T), outer(x, dy, W.dtype)


_narrow_dot.defvjp(_dot_forward, _dot_backward)


def product(x: Float[Array, "T B E"] | Lookup, W: Float[Array, "E GH"]) -> Float[Array, "T B GH"]:
    """Return x·W of all steps as one matrix product; each gradient is also one product."""
    if isinstance(x, Lookup):
        return rows(dot(x.table, W), x.ids)
    T, B, E = x.shape
    return dot(x.reshape(T * B, E), W).reshape(T, B, W.shape[1])


def outer(x: Array, da: Array, dtype: DTypeLike) -> Array:
    """Return the gradient of a weight of this dtype: the sum of xᵀ·da over steps and batch."""
    flat_da = da.reshape(-1, da.shape[-1]).astype(dtype)
    if dtype == da.dtype:
        xT = x.reshape(-1, x.shape[-1]).T  # XLA needs no copy here …
    else:
        xT = jnp.moveaxis(x.astype(dtype), -1, 0).reshape(x.shape[-1], -1)  # … but in bfloat16
    return _matmul(xT, flat_da, da.dtype).astype(dtype)


def columns_dot(U: Float[Array, "G H"], h: Float[Array, "H B"]) -> Float[Array, "G B"]:
    """Return U·h for a state stored in columns, rounded as in `dot`."""
    return _matmul(U, h.astype(U.dtype), h.dtype)


# --- Steps over time


def apply_mask(h: Array, mask: Mask | None) -> Array:
    """Return h with dropped units set to zero and the others scaled; without a mask, h itself."""
    return h if mask is None else jnp.where(mask.keep, h * mask.scale, 0)


def before(h0: Array, h: Array) -> Array:
    """Return the state before each step, given the first state and the state after each step."""
    return jnp.concatenate([h0[None], h[:-1]])


class Layout(NamedTuple):
    """How a batch of states is stored as a matrix: the axis of the units, and the product with U.

    In training the state is stored in columns, h (H, B), and multiplied as U·h. XLA's CPU matmul
    repacks its right operand at each step, so the small state goes on the right and the weights on
    the left (H = 512, B = 32: 161 GFLOP/s per core instead of 107). This holds in training, where
    each core has its own rows (`hardware.share_cpu`). Without a gradient the state is stored in
    rows: there one product uses all cores, and h·U is faster.
    """

    axis: int
    times: Callable[[Array, Array], Array]

    def split(self, x: Array, *units: int) -> list[Array]:
        """Split x before these units."""
        return jnp.split(x, units, self.axis)

    def turn(self, x: Array) -> Array:
        """Transpose between (B, H) and this layout."""
        return x if self.axis else x.T

    def masked(self, h: Array, mask: Mask | None, keep: Bool[Array, "B H"] | None) -> Array:
        """Apply one step of the mask to h, in this layout; `keep` is that step's."""
        if mask is None or keep is None:
            return h
        return apply_mask(h, Mask(self.turn(keep), mask.scale))


IN_ROWS = Layout(1, lambda U, h: dot(h, U))  # h (B, H), U (H, G)
IN_COLUMNS = Layout(0, columns_dot)  # h (H, B), U (G, H)


def forward_scan(
    layout: Layout, step: Callable, U: tuple, carry: Carry, a: Array, mask: Mask | None
) -> tuple[Array, Carry, tuple[Array, ...]]:
    """Run all steps of a `Gated` cell.

    Returns h of each step (T, B, H), the last carry, and, in columns, the values of each step that
    the backward pass needs.
    """

    def one(carry: Carry, a_keep: tuple) -> tuple[Carry, tuple]:
        a, keep = a_keep
        carry, saved = step(layout, U, carry, layout.turn(a))
        h = layout.masked(hidden(carry), mask, keep)
        kept = saved if layout is IN_COLUMNS else ()
        return with_hidden(carry, h), (layout.turn(h), kept)

    carry = jax.tree.map(layout.turn, carry)
    carry, (h, saved) = jax.lax.scan(one, carry, (a, mask and mask.keep))
    return h, jax.tree.map(layout.turn, carry), saved


def with_last(h: Array) -> tuple[Array, Array]:
    """Return h of every step, and the last h, which is the carry."""
    return h, h[-1]
