"""What every cell offers (`Cell`), and what cells share: functions, carries, sizes.

Vectors are rows and weights are (in, out), so the code reads like the equations. Letters: T time,
B batch, E input size, H hidden size, G number of gates; σ is the logistic function, ⊙ the
elementwise product. Arrays are time-major.

`pytrees.py` makes a cell a pytree, `promotion.py` says in which dtype it computes, `products.py`
has the matrix products and `initial_weights.py` the distributions of new weights.
`layers/over_time.py` has the pass over time and its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray, PyTree, Shaped

from jaxgru.cells.products import dot
from jaxgru.cells.promotion import plus
from jaxgru.cells.pytrees import exportable, is_array, options_of, sizes_of_fields
from jaxgru.errors import a_type, check_one_of, shown

AnyArray: TypeAlias = Array | np.ndarray  # tokens can be NumPy arrays
Size: TypeAlias = Any  # an int, or a symbolic size within `jax.export`
Hidden: TypeAlias = Float[Array, "B H"]
Context: TypeAlias = Float[Array, "B _ _"]  # (B, K − 1, E); E differs from layer to layer
Carry: TypeAlias = Hidden | tuple[PyTree[Shaped[Array, "B ..."]], ...]  # begins with h
StateWeights: TypeAlias = Float[Array, "H GH"] | Float[Array, "n k Gk"]  # or n diagonal blocks
CellParams: TypeAlias = Any  # a `Cell`: one layer's parameters
C = TypeVar("C", bound="type[Cell]")


def check_flags(**flags: Any) -> None:
    """Raise ValueError if an option is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"{name} is {a_type(value)}; it must be True or False.")


ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu}
"""What a layer's `activation` can name."""


def clipped(a: Array, clip: float | None) -> Array:
    """Return a within ±clip; a itself if that is None."""
    return a if clip is None else jnp.clip(a, -clip, clip)


class Cell:
    """The base class of one layer's parameters, which hold its equations: a recurrence is one file.

    A subclass is a `struct` (or a `flax.struct.dataclass`) whose fields are arrays. It defines
    `sizes` and `step`, and the rest where the default does not fit:

    - `inputs`: what can be computed of x at all steps at once.
    - `by_hand` or `all_steps`: how many steps are computed faster than by `step` and its gradient.
    - `draw`, `name` and `options`, so that a config's `model.cell` can name it; see `register`.
    """

    name: ClassVar[str] = ""
    """The value of `model.cell` in a config."""
    options: ClassVar[frozenset[str]] = frozenset()
    """The fields of a config's `model` that this cell uses, besides the sizes."""

    @classmethod
    def draw(cls, key: PRNGKeyArray, E: int, H: int, options: Any, dtype: DTypeLike) -> CellParams:
        """Draw initial parameters; `options` is the config's `model`."""
        raise NotImplementedError

    def sizes(self) -> tuple[int, int] | None:
        """Return (E, H), the sizes of the input and of h; None if the shapes do not fit together.

        The other parts of a carry can be wider than h.
        """
        raise NotImplementedError

    def zero_carry(self, batch_size: Size) -> Carry:
        """Return the carry before the first step: h (B, H), or a tuple that begins with h.

        By default zeros (B, H), in the dtype of the biases b.
        """
        this: Any = self
        return jnp.zeros((batch_size, this.sizes()[1]), this.b.dtype)

    def inputs(self, x: Float[Array, "*n E"]) -> Array:
        """Return a, what a step reads of its input. By default, that is x itself."""
        return x

    def step(self, layout: Any, carry: Any, a: Array, /) -> Any:
        """Compute one step, carry → the next carry.

        Products with weights are written `layout.times(U, h)`, or `layout.product(P, m)` where m is
        not h, which dropout may drop units of. Then their gradients are computed for all steps at
        once. A step that multiplies by large weights in another way is differentiated by JAX.
        The carry's gradient is then added up in parts, so a `jax.custom_vjp` that is not linear in
        it, such as one that clips, must act on the next carry.

        Args:
          layout: a `Layout`.
          a: (B, …), a step of what `inputs` returns.
        """
        recurrence, U = cast(tuple[Recurrence, tuple[Array, ...]], self.by_hand())
        gates = layout.split(a, recurrence.num_gates)
        return recurrence.step(layout, layout.weights(U), carry, gates)[0]

    def by_hand(self) -> tuple[Recurrence, tuple[Array, ...]] | None:
        """Return a recurrence with a hand-written gradient, and its weights; None: there is none.

        The weights are the matrices U and the vectors, such as biases, of the step.
        """
        return None

    def all_steps(self, carry: Any, x: Any, marks: Any, /) -> tuple[Array, Any] | None:
        """Compute all steps at once, if they do not depend on one another; None: they do.

        Args:
          x: (T, B, E), or a `Lookup`.
          marks: `Marks`, of which only dropout matters unless `every_mark`.

        Returns:
          h' of every step, with dropout, and the last carry.
        """
        return None

    every_mark: ClassVar[bool] = False
    """Whether `all_steps` also computes resets and padding, and the carry is h alone."""

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self)
        known = self.sizes() if all(map(is_array, leaves)) else None
        if known is None:
            return sizes_of_fields(self)
        U: Any = getattr(self, "U", None)
        blocks = [f"num_blocks {len(U)}"] if getattr(U, "ndim", 0) == 3 else []
        dtypes = sorted({str(leaf.dtype) for leaf in leaves})
        options = [f"{name}={value!r}" for name, value in options_of(self).items()]
        parts = [f"in {known[0]}", self.hidden_sizes(), *blocks, *dtypes, *options]
        return f"{type(self).__name__}({', '.join(parts)})"

    def hidden_sizes(self) -> str:
        """Return the sizes of the state, for `repr`."""
        _, H = cast(tuple[int, int], self.sizes())
        return f"hidden {H}"


class Activated(Cell):
    """What cells share whose functions have options."""

    activation: str
    clip: float | None

    def __post_init__(self) -> None:
        check_one_of("activation", self.activation, ACTIVATIONS)
        if (clip := self.clip) is not None:
            if not (isinstance(clip, int | float) and 0 < clip < float("inf")):
                raise ValueError(f"clip is {shown(clip)}; it must be None or a positive number.")


class GatedCell(Activated):
    """What the GRUs and the LSTM share: these options, and a gradient without any."""

    def equations(self) -> tuple[Recurrence, tuple[Array, ...]]:
        """Return the recurrence, whose gradient is that with tanh and no clip, and its weights."""
        raise NotImplementedError

    def by_hand(self) -> tuple[Recurrence, tuple[Array, ...]] | None:
        return None if options_of(self) else self.equations()

    def step(self, layout: Any, carry: Any, a: Array) -> Any:
        (recurrence, U), functions = self.equations(), (ACTIVATIONS[self.activation], self.clip)
        gates = layout.split(a, recurrence.num_gates)
        return recurrence.step(layout, layout.weights(U), carry, gates, *functions)[0]


CELLS: dict[str, type[Cell]] = {}
"""Every cell that a config's `model.cell` can name."""


def register(cell: C) -> C:
    """Let a config's `model.cell` name this class's cell; also as a decorator.

    A cell that is defined again, as when a notebook's cell is rerun, replaces the earlier one; but
    `jax.export` then knows only the earlier class of parameters.

    Raises:
      ValueError: it has no name, or that of another cell.
    """
    if not cell.name:
        raise ValueError(f"{cell.__name__} has no name; it must be what model.cell calls it.")
    place = lambda cell: (cell.__module__, cell.__qualname__)
    if place(other := CELLS.get(cell.name, cell)) != place(cell):
        raise ValueError(f"the cell {cell.name} is {other.__qualname__} already.")
    exportable(cell)
    CELLS[cell.name] = cell
    return cell


class Recurrence(NamedTuple):
    """A recurrent layer's equations with their gradient; `over_time` runs them.

    Carries, a and the values that are passed from one function to another are stored in rows or
    in columns, as a `Layout` says.

    Attributes:
      num_gates: G, the number of gates, into which a (T, B, G·H) is split.
      step: (layout, U, carry, each gate's part of a) → the next carry, and `saved`: what the
        backward pass needs besides the carries.
      step_gradient: (layout, U, gradient of the next carry, the carry before the step, the carry
        after it, saved) → the gradient of the carry, and `kept`: what `gradients` needs. U is
        transposed.
      gradients: (layout, U, the carry before each step, the carry after it, saved, kept), all with
        a leading axis T → the gradients of U and of a.
      in_rows: whether the equations hold in rows only.
    """

    num_gates: int
    step: Callable[..., tuple[Any, tuple[Any, ...]]]
    step_gradient: Callable[..., tuple[Any, tuple[Any, ...]]]
    gradients: Callable[..., tuple[Any, Array]]
    in_rows: bool = False


class LSTMState(NamedTuple):
    """The carry of an LSTM: the output h and the cell state c, (B, H) each.

    With a projection, h is (B, p). PyTorch, Keras and Haiku have the same order, Flax has (c, h).
    """

    h: Array
    c: Array


export.register_namedtuple_serialization(LSTMState, serialized_name="jaxgru.LSTMState")


class AnyLSTM(Cell):
    """What the LSTMs share: the carry, and the input's part of the gates f, i, o and g."""

    W: Float[Array, "E GH"]
    b: Float[Array, "GH"]
    gates: ClassVar[str] = "fiog"

    def inputs(self, x: Float[Array, "*n E"]) -> Float[Array, "*n GH"]:
        """Return x·W + b."""
        return plus(dot(x, self.W), self.b)

    def zero_carry(self, batch_size: Size) -> LSTMState:
        """Return the carry before the first step: zeros for h and c, in the biases' dtype."""
        _, H = cast(tuple[int, int], self.sizes())
        zeros = lambda units: jnp.zeros((batch_size, units), self.b.dtype)
        return LSTMState(zeros(H), zeros(len(self.b) // 4))  # each can be donated


def named(name: str, state: Any, wanted: type) -> Any:
    """Return a layer's state; one with named parts may be a dict, as checkpoints return it.

    Parts without names are refused: by position, a pair in Flax's order, (c, h), would be taken
    for (h, c).
    """
    fields = getattr(wanted, "_fields", None)
    if not fields or isinstance(state, wanted):
        return state
    if isinstance(state, dict):
        if state.keys() == set(fields):
            return wanted(**state)
        seen = f"a dict with the keys {', '.join(map(shown, state))}"
    else:
        seen = f"an array {state.shape}" if hasattr(state, "shape") else a_type(state)
    parts = ", ".join(f"{field}=…" for field in fields)
    keys = " and ".join(fields)
    raise ValueError(
        f"{name} of a layer is {seen}; it must be {wanted.__name__}({parts}), or a dict with the "
        f"keys {keys}."
    )


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
