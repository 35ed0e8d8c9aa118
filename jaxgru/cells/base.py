"""The interface of a cell (`Cell`), and what cells share: carries, masks, promotion.

Vectors are rows and weights are (in, out), so the code reads like the equations. Letters: T time,
B batch, E input size, H hidden size, G number of gates; σ is the logistic function, ⊙ the
elementwise product. Arrays are time-major.

`products.py` has the matrix products, `initial_weights.py` the distributions of new weights,
`layers/over_time.py` the pass over time and its gradient.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxgru.errors import a_type, shown

AnyArray: TypeAlias = Array | np.ndarray  # tokens can be NumPy arrays
Size: TypeAlias = Any  # an int, or a symbolic size within `jax.export`
Hidden: TypeAlias = Float[Array, "B H"]
Context: TypeAlias = Float[Array, "B _ _"]  # (B, K − 1, E); E differs from layer to layer
Carry: TypeAlias = Hidden | tuple[Float[Array, "B ..."], ...]  # begins with h
StateWeights: TypeAlias = Float[Array, "H GH"] | Float[Array, "n k Gk"]  # or n diagonal blocks
CellParams: TypeAlias = Any  # a `struct` of one layer's weights; `Cell.params` is its class
T = TypeVar("T")


def check_flags(**flags: Any) -> None:
    """Raise ValueError if an option is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"{name} is {a_type(value)}; it must be True or False.")


def is_whole(value: Any) -> bool:
    """Return whether a value is a whole number of Python's or NumPy's, and not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def struct(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass and a pytree, with a method `replace`, as `flax.struct` does.

    Its fields are the pytree's children, in their order. A field with `metadata={"static": True}`
    is part of the tree's structure instead. Its `repr` shows arrays by their dtypes and shapes.
    """
    cls = dataclass(frozen=True, repr=False)(cls)
    cls.replace = replace  # pyright: ignore[reportAttributeAccessIssue]  a new attribute
    if cls.__repr__ is object.__repr__:
        cls.__repr__ = sizes_of_fields  # pyright: ignore[reportAttributeAccessIssue]
    return jax.tree_util.register_dataclass(cls)


def described(params: Any) -> str:
    """Return the fields of a struct for a message, with arrays as their dtypes and shapes."""
    has_shape = lambda leaf: hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    value = lambda leaf: f"{leaf.dtype} {leaf.shape}" if has_shape(leaf) else shown(leaf)
    return ", ".join(f"{name} {value(leaf)}" for name, leaf in vars(params).items())


def sizes_of_fields(params: Any) -> str:
    """Return a struct's `repr`."""
    return f"{type(params).__name__}({described(params)})"


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
      params: the class of one layer's parameters, a `struct` or a `flax.struct.dataclass`; or, if
        a cell has several kinds of layers, their classes.
      init: (key, E, H, options, dtype) → initial parameters; `options` is the model's config.
      sizes: params → (E, H), the sizes of the input and of h; None if the parameters' shapes
        contradict each other. The other parts of a carry can be wider than h.
      step: (params, carry, x (B, E)) → the next carry: the equations.
      zero_carry: (params, batch size) → the carry before the first step: h (B, H), or a tuple that
        begins with h, preferably a named one.
      options: the config's fields that this cell uses, besides the sizes.
      prepare: params → a `RecurrentLayer` or a `ParallelLayer`, which computes many steps faster;
        None: `step` is scanned over time, and JAX differentiates it.
    """

    name: str
    params: type | tuple[type, ...]
    init: Callable[[PRNGKeyArray, int, int, Any, DTypeLike], Any]
    sizes: Callable[[Any], tuple[int, int] | None]
    step: Callable[[Any, Any, Array], Any]
    zero_carry: Callable[[Any, int], Any]
    options: frozenset[str] = frozenset()
    prepare: Callable[[Any], RecurrentLayer | ParallelLayer] | None = None

    @property
    def classes(self) -> tuple[type, ...]:
        """The classes of one layer's parameters."""
        return self.params if isinstance(self.params, tuple) else (self.params,)


class Recurrence(NamedTuple):
    """A recurrent layer's equations after the input product a = x·W + b; `over_time` runs them.

    Carries, a and the values that are passed from one function to another are stored in rows or
    in columns, as a `Layout` says.

    Attributes:
      gates: G, the number of gates, into which a (T, B, G·H) is split.
      step: (layout, U, carry, each gate's part of a) → the next carry, and `saved`: what the
        backward pass needs besides the carries.
      factors: (layout, the carry before the step, the carry after it, saved) → `factors`, by which
        gradients are multiplied in a step. They do not depend on later steps, so they can be
        computed for one step, or for all steps, with a leading axis T.
      step_gradient: (layout, U, gradient of the next carry, factors) → the gradient of the carry,
        and `kept`: what `gradients` needs. U is transposed.
      gradients: (layout, U, the carry before each step, the carry after it, saved, kept), all with
        a leading axis T → the gradients of U and of a.
    """

    gates: int
    step: Callable[..., tuple[Any, tuple[Any, ...]]]
    factors: Callable[..., tuple[Any, ...]]
    step_gradient: Callable[..., tuple[Any, tuple[Any, ...]]]
    gradients: Callable[..., tuple[tuple[Array, ...], Array]]


class RecurrentLayer(NamedTuple):
    """A recurrent layer whose input product a = x·W + b is computed once, for all steps.

    Attributes:
      W: (E, G·H), the concatenated input weights; None: a is x itself, so G·H is E.
      b: (G·H), the summed biases; None: none.
      U: the recurrent weights (H, ...), and the vectors, such as biases, inside the recurrence.
      recurrence: what happens at each step.
      norm: a function (T, B, G·H) → (T, B, G·H) of x·W, before b is added; None: there is none.
    """

    W: Any  # an array or None, as is b
    b: Any
    U: tuple[Array, ...]
    recurrence: Recurrence
    norm: Callable[[Array], Array] | None = None

    def plus_bias(self, xW: Float[Array, "*n GH"]) -> Float[Array, "*n GH"]:
        """Return a, given the product x·W."""
        return plus(xW if self.norm is None else self.norm(xW), self.b)


class ParallelLayer(NamedTuple):
    """A layer whose steps do not depend on one another.

    Attributes:
      all_steps: (carry, `Steps`, `Constants`) → h' of every step, with dropout, and the
        last carry. The steps' x can be a `Lookup`.
      every_option: `all_steps` also computes resets and padding, and the carry is h alone. If it is
        False, such calls are scanned step by step.
    """

    all_steps: Callable[..., tuple[Array, Any]]
    every_option: bool = False


class LSTMState(NamedTuple):
    """The carry of an LSTM: the output h and the cell state c, (B, H) each.

    With a projection, h is (B, p). PyTorch, Keras and Haiku have the same order, Flax has (c, h).
    """

    h: Array
    c: Array


export.register_namedtuple_serialization(LSTMState, serialized_name="jaxgru.LSTMState")


def check_named(name: str, state: Any, wanted: type) -> None:
    """Raise ValueError if a layer's state has named parts, and this one does not name them.

    By position, a pair in Flax's order, (c, h), would be taken for (h, c).
    """
    fields = getattr(wanted, "_fields", None)
    if fields and not isinstance(state, wanted):
        seen = f"an array {state.shape}" if hasattr(state, "shape") else a_type(state)
        parts = ", ".join(f"{field}=…" for field in fields)
        how = ", restored with initial_carry's as the target" if isinstance(state, dict) else ""
        raise ValueError(
            f"{name} of a layer is {seen}; it must be {wanted.__name__}({parts}){how}."
        )


class Mask(NamedTuple):
    """A dropout mask: which units are kept, and the factor 1/(1 − rate) that scales them."""

    keep: Bool[Array, "... B H"] | None = None
    scale: Float[Array, ""] | None = None


class Steps(NamedTuple):
    """What the steps of a layer read besides the carry: arrays (T, B, ...), which a scan slices.

    x: the input: (T, B, E), or what a layer makes of it.
    keep: the units of h' that dropout inside the recurrence keeps; None: all.
    reset: where True, the carry is set to `Constants.initial` before the step.
    real: where False, the step is padding: the carry stays.
    update: zoneout, in the form of the carry: the units that take their new value, or the share of
      it that they take; None: all.
    """

    x: Any
    keep: Bool[Array, "*T B H"] | None = None
    reset: Bool[Array, "*T B"] | None = None
    real: Bool[Array, "*T B"] | None = None
    update: Any = None


class Constants(NamedTuple):
    """What is the same at each step of a layer.

    initial: the carry after a reset; None: zeros.
    scale: the factor by which dropout multiplies the units that it keeps.
    keep: the units of h that dropout keeps where h enters the products; None: all.
    """

    initial: Carry | None = None
    scale: Float[Array, ""] | None = None
    keep: Bool[Array, "B H"] | None = None


NO_CONSTANTS = Constants()


def hidden(carry: Any) -> Float[Array, "*T B H"]:
    """Return what the layer above reads of a carry: the first entry of a tuple, else the carry."""
    return carry[0] if isinstance(carry, tuple) else carry


def besides_hidden(carry: Any) -> list[Array]:
    """Return the other parts of a carry: c of an LSTM."""
    return jax.tree.leaves(carry)[1:]


def with_hidden(carry: Any, h: Array, others: Sequence[Array] | None = None) -> Any:
    """Return the carry with its h, and maybe its other parts, replaced."""
    parts = [h, *(besides_hidden(carry) if others is None else others)]
    return jax.tree.unflatten(jax.tree.structure(carry), parts)


def apply_mask(h: Array, keep: Array | None, scale: Array | None) -> Array:
    """Return h with dropped units set to zero and the others scaled; h itself if all are kept."""
    if keep is None or scale is None:
        return h
    return jnp.where(keep, h * scale.astype(h.dtype), 0)


def before_each(first: Array, after: Array) -> Array:
    """Return the state before each step, given the first state and the state after each step."""
    return jnp.concatenate([first[None], after[:-1]])


def mixed(update: Array, new: Array, old: Array | float) -> Array:
    """Return the new values of the units that are updated, else the old; or a mean of both."""
    if update.dtype == bool:
        return jnp.where(update, new, old)
    update = update.astype(new.dtype)
    return update * new + (1 - update) * old


def vary_alike(tree: Any) -> Any:
    """Return the tree with every array varying over the same axes of a `jax.shard_map`.

    A hand-written gradient must have the type of its argument, and within a `shard_map` the axes
    over which an array varies are a part of its type. JAX differentiates this function itself: the
    gradient of what did not vary is summed over the devices.
    """
    varying = lambda leaf: jax.typeof(leaf).manual_axis_type.varying
    axes = frozenset().union(*map(varying, jax.tree.leaves(tree)))
    if not axes:
        return tree

    def vary(leaf: Array) -> Array:
        if not (missing := axes - varying(leaf)):
            return leaf
        wide = jax.lax.pcast(at_least_float32(leaf), tuple(missing), to="varying")
        return wide.astype(leaf.dtype)

    return jax.tree.map(vary, tree)


# JAX promotes nothing implicitly under `jax_numpy_rank_promotion="raise"` and
# `jax_numpy_dtype_promotion="strict"`, so these do it.


def widest(*arrays: Any) -> DTypeLike:
    """Return the dtype, of arrays or dtypes, that all of them are promoted to."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*arrays)


def at_least_float32(tree: T) -> T:
    """Return the tree with floating-point arrays of 16 bits widened, as sums of many terms need."""
    narrow = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if narrow(leaf) else leaf, tree)


def in_dtypes_of(like: T, tree: T) -> T:
    """Return the tree with each array in the dtype of the one in `like`."""
    return jax.tree.map(lambda like, leaf: leaf.astype(like.dtype), like, tree)


def rounded_inside(weights: T) -> Callable[[], T]:
    """Return a function that returns the weights; the body of a loop calls it.

    JAX adds up the gradients of what a loop closes over in its dtype, and of a long sum in bfloat16
    little is left. So the loop closes over wide weights, and its body rounds them.
    """
    wide = at_least_float32(weights)
    return lambda: in_dtypes_of(weights, wide)


def plus(a: Float[Array, "*n H"], b: Float[Array, "... H"] | None) -> Float[Array, "*n H"]:
    """Return a + b in the wider dtype, with the bias b in each row; a, if there is no bias."""
    if b is None:
        return a
    dtype = widest(a, b)
    return a.astype(dtype) + jax.lax.broadcast_to_rank(b.astype(dtype), a.ndim)


def aligned(params: T, carry: Any, x: Array) -> tuple[T, Any, Array]:
    """Return the operands of a step in their widest dtype, and the biases as rows."""
    dtype = widest(*jax.tree.leaves((params, carry, x)))
    operands = jax.tree.map(lambda leaf: leaf.astype(dtype), (params, carry, x))
    row = lambda leaf: jax.lax.broadcast_to_rank(leaf, x.ndim) if leaf.ndim == 1 else leaf
    return jax.tree.map(row, operands[0]), *operands[1:]


def sizes_of_gates(
    G: int, W: Any, U: Any, vectors: Sequence[tuple[int, Any]], state_size: int | None = None
) -> tuple[int, int] | None:
    """Return (E, H) if W is (E, G·H), U (H, G·H) and each vector (its number of gates · H,).

    U can also be n blocks (n, k, G·k), where H = n·k, or (S, G·H) with a `state_size` S. Returns
    None if the shapes contradict each other.
    """

    def shape(leaf: Any) -> tuple[int, ...]:
        return getattr(leaf, "shape", ())

    if len(shape(W)) != 2 or shape(W)[1] % G:
        return None
    E, H = shape(W)[0], shape(W)[1] // G
    n = shape(U)[0] if len(shape(U)) == 3 else 1
    k = H / n
    fits = shape(U) in ((n, k, G * k), (H if state_size is None else state_size, G * H))
    fits &= all(shape(vector) == (count * H,) for count, vector in vectors)
    return (E, H) if fits else None
