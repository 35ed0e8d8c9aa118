"""The interface of a cell (`Cell`), and what cells share: carries, products, masks, scans.

Vectors are rows and weights are (in, out), so the code reads like the equations. Letters: T time,
B batch, E input size, H hidden size, G number of gates; σ is the logistic function, ⊙ the
elementwise product. Arrays are time-major.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Integer, PRNGKeyArray

AnyArray: TypeAlias = Array | np.ndarray  # tokens can be NumPy arrays
Size: TypeAlias = Any  # an int, or a symbolic size within `jax.export`
Hidden: TypeAlias = Float[Array, "B H"]
Context: TypeAlias = Float[Array, "B _ _"]  # (B, K − 1, E); E differs from layer to layer
Carry: TypeAlias = Hidden | tuple[Hidden, Hidden] | tuple[Hidden, Context]
CellParams: TypeAlias = Any  # a `struct` of one layer's weights; `Cell.params` is its class
T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def struct(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass and a pytree, with a method `replace`, as `flax.struct` does.

    Its fields are the pytree's children, in their order. A field with `metadata={"static": True}`
    is part of the tree's structure instead.
    """
    cls = dataclass(frozen=True)(cls)
    cls.replace = replace  # pyright: ignore[reportAttributeAccessIssue]  a new attribute
    return jax.tree_util.register_dataclass(cls)


def exportable(cls: type) -> None:
    """Let `jax.export` serialize functions that take this `struct` as an argument."""
    export.register_pytree_node_serialization(
        cls,
        serialized_name=f"{cls.__module__}.{cls.__qualname__}",
        serialize_auxdata=lambda fields: json.dumps(fields).encode(),
        deserialize_auxdata=lambda text: tuple(json.loads(text)),
    )


@dataclass(frozen=True)
class Cell:
    """One recurrence: everything that the rest of the library knows about it.

    Attributes:
      name: the value of `model.cell` in a config.
      params: the class of one layer's parameters, a `struct`, or a `flax.struct.dataclass`.
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


class Recurrence(NamedTuple):
    """The equations of a gated layer after the input product a = x·W + b; `over_time` runs them.

    Carries, a and the values that are passed from one function to another are in a `Layout`.

    Attributes:
      step: (layout, U, carry, each gate's part of a) → the next carry, and `saved`: what the
        backward pass needs. If the carry is a pair (h, c), the next c comes first in `saved`.
      factors: (layout, carry, saved) → `factors`: what gradients are multiplied by in a step. Of
        one step, or of all with a first axis T: it does not depend on the steps after.
      step_gradient: (layout, U, gradient of the next carry, factors) → the gradient of the carry,
        and `kept`: what `gradients` needs. U is transposed.
      gradients: (U, h before each step (T, B, H), saved, kept), batch-major: (T, B, ...) → the
        gradients of U and of a.
    """

    step: Callable[..., tuple[Any, tuple[Array, ...]]]
    factors: Callable[..., tuple[Array, ...]]
    step_gradient: Callable[..., tuple[Any, tuple[Array, ...]]]
    gradients: Callable[..., tuple[tuple[Array, ...], Array]]


class Gated(NamedTuple):
    """A recurrent layer whose input product a = x·W + b is computed once, for all steps.

    Attributes:
      W: (E, G·H), the concatenated input weights.
      b: (G·H), the summed biases.
      U: the recurrent weights (H, ...), and the biases (H) inside the recurrence.
      recurrence: what happens at each step.
    """

    W: Array
    b: Array
    U: tuple[Array, ...]
    recurrence: Recurrence


class AtOnce(NamedTuple):
    """A layer whose steps do not depend on one another.

    Attributes:
      all_steps: (x (T, B, E), carry, mask) → h' of every step, and the last carry.
    """

    all_steps: Callable[..., tuple[Array, Any]]


class Mask(NamedTuple):
    """A dropout mask: which units are kept, and the factor 1/(1 − p) that scales them."""

    keep: Bool[Array, "... B H"]
    scale: Float[Array, ""]


class Steps(NamedTuple):
    """What happens at particular steps of a layer.

    mask: dropout inside the recurrence: h' is multiplied by keep · scale.
    reset: where True, the carry is set to `start` before the step.
    start: the carry after a reset; None: zeros.
    real: where False, the step is padding: the carry stays.
    """

    mask: Mask | None = None
    reset: Bool[Array, "T B"] | None = None
    start: Carry | None = None
    real: Bool[Array, "T B"] | None = None


EVERY_STEP = Steps()


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
    """Return b + c, or b if there is no second bias c."""
    return b if c is None else b + c


def initializers(E: int, H: int, dtype: DTypeLike) -> tuple[Callable[..., Array], ...]:
    """Return functions that draw W, U and b from a key: uniform ±1/√fan_in (PyTorch's Linear)."""

    def uniform(shape: tuple[int, ...], fan_in: int) -> Callable[[PRNGKeyArray], Array]:
        bound = fan_in**-0.5
        return lambda key: jax.random.uniform(key, shape, dtype, -bound, bound)

    return uniform((E, H), E), uniform((H, H), H), uniform((H,), E)


# --- Products


def _contract(x: Array, y: Array, axes: tuple, dtype: DTypeLike) -> Array:
    """Return the contraction of x and y, of one dtype, accumulated and returned in `dtype`.

    XLA's CPU back end first chooses how to multiply in bfloat16 and then fuses transpositions into
    the product, but it cannot execute one whose left factor is transposed ("UNIMPLEMENTED ...
    DotThunk"). On a CPU, barriers therefore keep transpositions out of the product.
    """
    multiply = partial(
        jax.lax.dot_general, dimension_numbers=(axes, ((), ())), preferred_element_type=dtype
    )
    if x.dtype == dtype:
        return multiply(x, y)
    apart = jax.lax.optimization_barrier
    return jax.lax.platform_dependent(
        x, y, cpu=lambda x, y: apart(multiply(*apart((x, y)))), default=multiply
    )


def dot(x: Float[Array, "*n E"], W: Float[Array, "E H"]) -> Float[Array, "*n H"]:
    """Return x·W in x's dtype. If W's dtype is narrower, x is rounded to it; sums are in x's dtype.

    Each gradient is one product, too, of operands rounded to W's dtype. Matrix units compute this
    (bfloat16 in, float32 out); `x @ W` would not request it.

    No axes are merged: if the batch is sharded, XLA keeps every row on its device.
    """
    return x @ W if x.ndim < 3 and x.dtype == W.dtype else _dot(x, W)


@jax.custom_vjp
def _dot(x: Float[Array, "*n E"], W: Float[Array, "E H"]) -> Float[Array, "*n H"]:
    return _dot_forward(x, W)[0]


def _dot_forward(x, W):
    return _contract(x.astype(W.dtype), W, ((x.ndim - 1,), (0,)), x.dtype), (x, W)


def _dot_backward(residuals, dy):
    x, W = residuals
    return dot(dy, W.T), outer(x, dy, W.dtype)


_dot.defvjp(_dot_forward, _dot_backward)


def product(x: Float[Array, "T B E"] | Lookup, W: Float[Array, "E GH"]) -> Float[Array, "T B GH"]:
    """Return x·W of all steps as one matrix product; each gradient is also one product."""
    of_steps, times_W = product_of_steps(x, W)
    return times_W(of_steps)


def product_of_steps(
    x: Float[Array, "T B E"] | Lookup, W: Float[Array, "E GH"]
) -> tuple[Array, Callable[[Array], Array]]:
    """Return an array (T, B, ...) and the function that makes x·W of any of its steps.

    The table of a `Lookup` is multiplied here, once.
    """
    if isinstance(x, Lookup):
        return x.ids, partial(rows, dot(x.table, W))
    return x, lambda x: dot(x, W)


def outer(x: Float[Array, "*n E"], dy: Float[Array, "*n H"], dtype: DTypeLike) -> Array:
    """Return the gradient (E, H) of a weight of this dtype: the sum of xᵀ·dy over the other axes.

    In this order of the operands; the other order is half as fast on a CPU.
    """
    axes = tuple(range(x.ndim - 1))
    x, narrow_dy = x.astype(dtype), dy.astype(dtype)
    if dtype != dy.dtype:  # in bfloat16, XLA's fast CPU product needs xᵀ as a matrix
        x, axes_of_x = jnp.moveaxis(x, -1, 0), tuple(range(1, x.ndim))
    else:
        axes_of_x = axes
    return _contract(x, narrow_dy, (axes_of_x, axes), dy.dtype).astype(dtype)


# --- Steps over time


def apply_mask(h: Array, mask: Mask | None) -> Array:
    """Return h with dropped units set to zero and the others scaled; without a mask, h itself."""
    return h if mask is None else jnp.where(mask.keep, h * mask.scale, 0)


def before(first: Array, after: Array, reverse: bool = False) -> Array:
    """Return the state before each step, given the first state and the state after each step."""
    first = first[None]
    return jnp.concatenate([after[1:], first] if reverse else [first, after[:-1]])


class Layout(NamedTuple):
    """How a batch of states is stored as a matrix: the axis of the units, and the product with U.

    XLA's CPU matmul repacks its right operand at each step. In columns, h (H, B), the state is that
    operand and not the weights, which is faster for large weights and few rows (LSTM, H = 1,024,
    B = 32 on one core: by 1.11). In rows, h (B, H), nothing is transposed, and one product uses all
    cores, which is faster for many rows (H = 128, B = 1,024: by 1.24), for small ones (H = 128,
    B = 16: by 1.2) and without a gradient.
    """

    axis: int
    times: Callable[[Array, Array], Array]

    def turn(self, x: Array) -> Array:
        """Transpose between (..., B, H) and this layout; a vector (H) becomes a row or a column."""
        if self.axis == -1:
            return x
        return x[:, None] if x.ndim == 1 else jnp.swapaxes(x, -1, -2)

    def gates(self, x: Array, H: int) -> list[Array]:
        """Split x into gates of H units."""
        return jnp.split(x, x.shape[self.axis] // H, self.axis)

    def join(self, *parts: Array) -> Array:
        """Concatenate units."""
        return jnp.concatenate(parts, self.axis)

    def choose(self, flag: Bool[Array, "*T B"], x: Any, y: Any = None) -> Any:
        """Return a carry: x in the rows of the batch where the flag is set, else y or zeros."""

        def where(x: Array, y: Array) -> Array:
            if self.axis == -2:
                return jnp.where(flag[..., None, :], x, y)
            return jnp.where(flag.reshape(*flag.shape, *[1] * (x.ndim - flag.ndim)), x, y)

        return jax.tree.map(where, x, jax.tree.map(jnp.zeros_like, x) if y is None else y)


def _columns_dot(U: Float[Array, "G H"], h: Float[Array, "H B"]) -> Float[Array, "G B"]:
    return _contract(U, h.astype(U.dtype), ((1,), (0,)), h.dtype)


IN_ROWS = Layout(-1, lambda U, h: dot(h, U))  # h (B, H), U (H, G)
IN_COLUMNS = Layout(-2, _columns_dot)  # h (H, B), U (G, H)


def is_small(B: Size, H: int) -> bool:
    """Return whether a step takes as long for the number of its operations as for their size.

    The factors of its gradient are then computed beforehand, for all steps at once: a training step
    of H = 128 and B = 16, 32, 64 is faster by 1.2, 1.1, 1.04, of H = 512 and B = 64 slower by 1.05.
    """
    return B * H <= 2**13


def training_layout(B: Size, H: int) -> Layout:
    """Return the layout of a forward pass whose gradient is taken, and of its backward pass."""
    return IN_ROWS if B >= 64 or is_small(B, H) else IN_COLUMNS


def one_matrix(
    U: tuple[Array], h: Float[Array, "T B H"], saved: Any, kept: tuple[Float[Array, "T B GH"]]
) -> tuple[tuple[Array], Array]:
    """Return the gradients of U and a for a cell whose state enters only as h·U, given (da,)."""
    (U_,), (da,) = U, kept
    return (outer(h, da, U_.dtype),), da


def over_time(
    recurrence: Recurrence,
    U: tuple[Array, ...],
    carry: Carry,
    a: Float[Array, "T B GH"],
    steps: Steps = EVERY_STEP,
    reverse: bool = False,
    every: bool = False,
) -> tuple[Any, Carry]:
    """Run a recurrence over all steps, with a hand-written gradient.

    The backward scan carries only the gradient of the state and stores what the gradients of the
    weights need, so each of these is ONE product after the scan.

    Args:
      carry: the state before the first step.
      a: x·W + b of every step.
      steps: dropout, resets and padding. Of these, only `start` is differentiated.
      reverse: run from the last step to the first.
      every: return the whole carry of every step, not only h.

    Returns:
      h (T, B, H) of every step, or the carry of every step; and the carry after the last one.
    """
    flags = steps.mask, steps.reset, steps.real
    outputs: Any = _over_time(recurrence, reverse, every, U, carry, a, steps.start, flags)
    h, c = outputs
    end = 0 if reverse else -1
    if not isinstance(carry, tuple):
        return h, h[end]
    return ((h, c) if every else h), (h[end], c[end] if every else c)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _over_time(recurrence, reverse, every, U, carry, a, start, flags):
    return _scan(IN_ROWS, recurrence, reverse, every, U, carry, a, start, flags)[0]


def _scan(layout, recurrence, reverse, every, U, carry, a, start, flags, save=False):
    """Return h of every step, with c of every step or the last; and what the gradient needs.

    h and c are (T, B, H). What the gradient needs is in the layout.
    """
    (mask, reset, real), pair = flags, isinstance(carry, tuple)
    H = hidden(carry).shape[-1]
    # Without a gradient, XLA vectorizes the gates only if each is an array of its own: with the
    # reset after the product, H = 128 and B = 16, a step then takes 21 µs instead of 50
    apart = [a] if save else IN_ROWS.gates(a, H)
    U, carry, start = jax.tree.map(layout.turn, (U, carry, start))

    def step(carry, inputs):
        apart, keep, reset, real = inputs
        gates = [gate for part in apart for gate in layout.gates(layout.turn(part), H)]
        current = carry if reset is None else layout.choose(~reset, carry, start)
        after, saved = recurrence.step(layout, U, current, gates)
        after = with_hidden(after, apply_mask(hidden(after), mask and mask._replace(keep=keep)))
        if real is not None:
            after = layout.choose(real, after, carry)
        c = after[1:] if pair else ()
        outputs = layout.turn(hidden(after)), jax.tree.map(layout.turn, c) if every else None
        return after, (outputs, (*c, *saved) if save else None)

    inputs = apart, mask and layout.turn(mask.keep), reset, real
    carry, ((h, c), saved) = jax.lax.scan(step, carry, inputs, reverse=reverse)
    last_c = layout.turn(carry[1]) if pair else None
    return (h, c[0] if c else last_c), saved


def _forward(recurrence, reverse, every, U, carry, a, start, flags):
    layout = training_layout(*hidden(carry).shape)
    (h, c), saved = _scan(layout, recurrence, reverse, every, U, carry, a, start, flags, save=True)
    return (h, c), (U, carry, h, saved, start, flags)


def _backward(recurrence, reverse, every, residuals, cotangents):
    U, carry, h, saved, start, (mask, reset, real) = residuals
    pair, layout = isinstance(carry, tuple), training_layout(*h.shape[1:])
    dh_out, dc_out = jax.tree.map(layout.turn, cotangents)
    transposed_U = jax.tree.map(jnp.transpose, U)
    turned_U, first, start = jax.tree.map(layout.turn, (transposed_U, carry, start))
    previous = before(hidden(first), layout.turn(h), reverse)
    if pair:
        previous = previous, before(first[1], saved[0], reverse)
    if reset is not None:
        previous = layout.choose(~reset, previous, start)
    factors_of, sources = partial(recurrence.factors, layout), (previous, saved)
    if is_small(*h.shape[1:]):
        factors_of, sources = lambda *factors: factors, factors_of(*sources)

    def step(gradients, inputs):
        (dh, *dc), d_start = gradients
        dh_out, dc_out, sources, keep, reset, real = inputs
        dh = dh + dh_out
        if dc_out is not None:
            dc = [dc[0] + dc_out]
        d_after = (dh, *dc) if real is None else layout.choose(real, (dh, *dc))
        dh_step = apply_mask(d_after[0], mask and mask._replace(keep=keep))
        d_step = (dh_step, *d_after[1:]) if pair else dh_step
        d_before, kept = recurrence.step_gradient(layout, turned_U, d_step, factors_of(*sources))
        if reset is not None:
            if d_start is not None:
                d_start = jax.tree.map(jnp.add, d_start, layout.choose(reset, d_before))
            d_before = layout.choose(~reset, d_before)
        d_before = d_before if pair else (d_before,)
        if real is not None:
            d_before = jax.tree.map(jnp.add, d_before, layout.choose(~real, (dh, *dc)))
        return (d_before, d_start), kept

    dh = jnp.zeros_like(hidden(first))
    dc = () if not pair else (jnp.zeros_like(dh),) if every else (dc_out,)
    (d_carry, d_start), kept = jax.lax.scan(
        step,
        ((dh, *dc), jax.tree.map(jnp.zeros_like, start)),
        (dh_out, dc_out if every else None, sources, mask and layout.turn(mask.keep), reset, real),
        reverse=not reverse,
    )
    d_carry, d_start = jax.tree.map(layout.turn, (d_carry, d_start))
    in_rows = jax.tree.map(layout.turn, (previous[0] if pair else previous, saved, kept))
    dU, da = recurrence.gradients(U, *in_rows)
    return dU, d_carry if pair else d_carry[0], da, d_start, None


_over_time.defvjp(_forward, _backward)
