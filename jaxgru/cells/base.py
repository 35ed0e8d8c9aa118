"""What every cell offers (`Cell`), and what the recurrences share: carries, products, masks, scans.

Vectors are rows and weights are (in, out), so the code reads like the equations. Letters: T time,
B batch, E length of the input, H length of the hidden state, G gates; σ is logistic, ⊙ elementwise.
Everything here is time-major.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

Hidden: TypeAlias = Float[Array, "B H"]
Context: TypeAlias = Float[Array, "B K-1 E"]
Carry: TypeAlias = Hidden | tuple[Hidden, Hidden] | tuple[Hidden, Context]
CellParams: TypeAlias = Any  # a `flax.struct` of one layer's weights; `Cell.params` is its class


@dataclass(frozen=True)
class Cell:
    """One recurrence: all that the rest of the library knows of it.

    name: what a config's `model.cell` says.
    params: the class of one layer's parameters, a `flax.struct.dataclass`.
    init: (key, E, H, options, dtype) → fresh parameters; `options` is the model's config.
    step: (params, carry, x (B, E)) → the next carry: the equations.
    zero_carry: (params, batch size) → the carry before the first step.
    options: the config's fields, beyond the sizes, that this cell heeds.
    fast: how to compute many steps fast, with a hand-written gradient; None: `step`, by a scan.
    """

    name: str
    params: type
    init: Callable[[PRNGKeyArray, int, int, Any, DTypeLike], Any]
    step: Callable[[Any, Any, Array], Any]
    zero_carry: Callable[[Any, int], Any]
    options: frozenset[str] = frozenset()
    fast: Callable[[Any], Gated | AtOnce] | None = None


class Gated(NamedTuple):
    """One layer with what does not depend on the step computed once.

    The input's part, a = x·W + b, is ONE product for all steps; `over_time` does the rest.

    W: (E, G·H), the input weights side by side.
    b: (G·H), the biases, those that belong together added up.
    U: what acts on the state.
    step: (layout, U, carry, a) → the next carry, and what the backward pass needs.
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
    """Which units survive dropout, and the factor 1/(1 − p) that makes up for the others."""

    keep: Bool[Array, "T B H"]
    scale: Float[Array, ""]


class Lookup(NamedTuple):
    """A layer's input that is rows of a table, not looked up yet; outside the table it is NaN.

    With fewer rows than there are steps, (table·W)[index] is a smaller product than table[index]·W,
    and so are its gradients.
    """

    table: Float[Array, "V E"]
    index: Int[Array, "T B"]

    def rows(self) -> Float[Array, "T B E"]:
        """Look up the input."""
        return rows(self.table, self.index)


def rows(table: Float[Array, "V E"], index: Int[Array, "..."]) -> Float[Array, "... E"]:
    """Return the rows with these numbers; NaN where there is no such row, so for negative ones."""
    if index.dtype == bool:
        index = index.astype(jnp.int32)  # booleans would be a mask
    at = jnp.asarray(table).at[index]
    return at.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def hidden(carry: Carry) -> Hidden:
    """Return the part of a carry that the layer above sees: h of a pair, else the carry itself."""
    return carry[0] if isinstance(carry, tuple) else carry


def with_hidden(carry: Carry, h: Array) -> Carry:
    """Return the carry with another h."""
    return (h, carry[1]) if isinstance(carry, tuple) else h


def plus(b: Float[Array, "... H"], c: Float[Array, "H"] | None) -> Float[Array, "... H"]:
    """Return b + c, or b where there is no second bias c."""
    return b if c is None else b + c


def initializers(E: int, H: int, dtype: DTypeLike) -> tuple[Callable[..., Array], ...]:
    """Return how W, U and b are drawn from a key: uniform within ±1/√fan_in (PyTorch's Linear)."""

    def uniform(shape: tuple[int, ...], fan_in: int) -> Callable[[PRNGKeyArray], Array]:
        bound = fan_in**-0.5
        return lambda key: jax.random.uniform(key, shape, dtype, -bound, bound)

    return uniform((E, H), E), uniform((H, H), H), uniform((H,), E)


# --- Products


def _matmul(x: Array, y: Array, dtype: DTypeLike) -> Array:
    """Return x·y of factors of one dtype, summed in another, which is the result's.

    XLA's CPU back end settles how to multiply in bfloat16, and only then takes transpositions into
    the product; one with a transposed left factor it cannot execute ("UNIMPLEMENTED ... DotThunk").
    On a CPU, barriers therefore keep transpositions out of the product.
    """
    multiply = partial(jnp.matmul, preferred_element_type=dtype)
    if x.dtype == dtype:
        return multiply(x, y)
    apart = jax.lax.optimization_barrier
    return jax.lax.platform_dependent(
        x, y, cpu=lambda x, y: apart(multiply(*apart((x, y)))), default=multiply
    )


def dot(x: Float[Array, "... E"], W: Float[Array, "E H"]) -> Float[Array, "... H"]:
    """Return x·W in x's dtype. Where W is narrower, x is rounded to it; sums are in x's precision.

    So are the gradients: each is one product of operands rounded to W's dtype. That is what
    matrix units compute (bfloat16 in, float32 out), and what `x @ W` would not ask them for.
    """
    if W.dtype != x.dtype:
        return _narrow_dot(x, W)
    flat = x.reshape(-1, x.shape[-1])  # so that the gradients are products of two matrices, too
    return (flat @ W).reshape(*x.shape[:-1], W.shape[1])


@jax.custom_vjp
def _narrow_dot(x: Float[Array, "... E"], W: Float[Array, "E H"]) -> Float[Array, "... H"]:
    return _dot_forward(x, W)[0]


def _dot_forward(x, W):
    return _matmul(x.astype(W.dtype), W, x.dtype), (x, W)


def _dot_backward(residuals, dy):
    x, W = residuals
    return dot(dy, W.T), outer(x, dy, W.dtype)


_narrow_dot.defvjp(_dot_forward, _dot_backward)


def product(x: Array | Lookup, W: Array) -> Array:
    """Return x·W over all steps as one matrix product; its gradients are one product each, too."""
    if isinstance(x, Lookup):
        return rows(dot(x.table, W), x.index)
    T, B, E = x.shape
    return dot(x.reshape(T * B, E), W).reshape(T, B, W.shape[1])


def outer(x: Array, da: Array, dtype: DTypeLike) -> Array:
    """Return Σ over steps and batch of xᵀ·da: the gradient of a weight of this dtype."""
    flat_da = da.reshape(-1, da.shape[-1]).astype(dtype)
    if dtype == da.dtype:
        xT = x.reshape(-1, x.shape[-1]).T  # XLA needs no copy of it …
    else:
        xT = jnp.moveaxis(x.astype(dtype), -1, 0).reshape(x.shape[-1], -1)  # … but of bfloat16
    return _matmul(xT, flat_da, da.dtype).astype(dtype)


def columns_dot(U: Float[Array, "G H"], h: Float[Array, "H B"]) -> Float[Array, "G B"]:
    """Return U·h for a state in columns, rounded as in `dot`."""
    return _matmul(U, h.astype(U.dtype), h.dtype)


# --- Steps over time


def apply_mask(h: Array, mask: Mask | None) -> Array:
    """Return h with the dropped units zero and the others scaled; h itself without a mask."""
    return h if mask is None else jnp.where(mask.keep, h * mask.scale, 0)


def before(h0: Array, h: Array) -> Array:
    """Return the state before each step, from the first state and the state after each step."""
    return jnp.concatenate([h0[None], h[:-1]])


class Layout(NamedTuple):
    """How a batch of states is stored as a matrix: along which axis the units, and what U·h is.

    While training, the state is in columns, h (H, B), as in U·h. XLA's CPU matmul repacks its right
    operand at each step, so the small state goes on the right and the weights on the left
    (H = 512, B = 32: 161 GFLOP/s per core against 107). That is for training, where each core has
    its own rows (`hardware.share_cpu`). Without a gradient the state is in rows: there a product
    runs on all cores, and h·U is faster.
    """

    axis: int
    times: Callable[[Array, Array], Array]

    def split(self, x: Array, *units: int) -> list[Array]:
        """Cut x before these units."""
        return jnp.split(x, units, self.axis)

    def turn(self, x: Array) -> Array:
        """Transpose between (B, H) and this layout."""
        return x if self.axis else x.T

    def masked(self, h: Array, mask: Mask | None, keep: Bool[Array, "B H"] | None) -> Array:
        """Apply one step of the mask, which is `keep`, to h."""
        return h if mask is None else apply_mask(h, Mask(self.turn(keep), mask.scale))


IN_ROWS = Layout(1, lambda U, h: dot(h, U))  # h (B, H), U (H, G)
IN_COLUMNS = Layout(0, columns_dot)  # h (H, B), U (G, H)


def forward_scan(
    layout: Layout, step: Callable, U: tuple, carry: Carry, a: Array, mask: Mask | None
) -> tuple[Array, Carry, tuple[Array, ...]]:
    """Run all steps of a `Gated` cell.

    Returns h of each step (T, B, H), the last carry, and, in columns, what the backward pass needs
    of each step.
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
    """Return h of every step, and the last one, which is the carry."""
    return h, h[-1]
