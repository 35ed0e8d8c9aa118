"""The contract: what a `Cell` and a `Recurrence` are, and how a cell gets a name.

Vectors are rows and weights are (in, out), so the code reads like the equations. Letters: T time,
B batch, E input size, H hidden size, G number of gates; σ is the logistic function, ⊙ the
elementwise product. Arrays are time-major.

`carry.py` has the types of carries, `layout.py` the products that a step may use, `step_masks.py`
what it needs besides its input, and `initial_weights.py` the distributions of new weights.
`jaxgru/pytrees.py` makes a cell a pytree, and `jaxgru/arrays.py` says in which dtype it computes.
`layers/over_time.py` has the pass over time and its gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from jaxgru.arrays import Size
from jaxgru.cells.carry import C, Carry, hidden, named
from jaxgru.cells.layout import IN_ROWS, PLAIN, Layout
from jaxgru.cells.products import Lookup, embed
from jaxgru.cells.step_masks import StepMasks
from jaxgru.printing import type_name
from jaxgru.pytrees import described, exportable, is_array, options_of, sizes_of_fields

Weights: TypeAlias = tuple[Array, ...]
"""The matrices U and the vectors, such as biases, of a step."""


class Recurrence(Generic[C]):
    """A recurrent layer's equations with their gradient; `over_time` runs them.

    Carries, a and the values that are passed from one function to another are stored in rows or
    in columns, as a `Layout` says. U are the weights of a step.
    """

    num_gates: ClassVar[int] = 1
    """G, the number of gates, into which a (T, B, G·H) is split."""

    def step(self, layout: Layout, U: Weights, carry: C, a: Sequence[Array]) -> tuple[C, Weights]:
        """Return the next carry, and the residuals: what a gradient needs besides the carries.

        Args:
          a: each gate's part.
        """
        raise NotImplementedError

    def step_gradient(
        self, layout: Layout, U: Weights, d_carry: C, carry: C, after: C, residuals: Weights
    ) -> tuple[C, Weights]:
        """Return the gradient of the carry before a step, and the residuals that `gradients` needs.

        Args:
          U: transposed.
          d_carry: the gradient of the carry after the step.
        """
        raise NotImplementedError

    def gradients(
        self,
        layout: Layout,
        U: Weights,
        carry: C,
        after: C,
        residuals: Weights,
        backward_residuals: Weights,
    ) -> tuple[Weights, Array]:
        """Return the gradients of U and of a, given all steps: carries and residuals (T, …)."""
        raise NotImplementedError


class Cell(Generic[C]):
    """The base class of one layer's parameters, which hold its equations: a recurrence is one file.

    A subclass is a `struct` (or a `flax.struct.dataclass`) whose fields are arrays. It defines
    `sizes` and `step`, and the rest where the default does not fit:

    - `inputs`: what can be computed of x at all steps at once.
    - `custom_gradient` or `parallel`: how many steps are computed faster than by `step` and its
      gradient. Where a step is linear in h, `LinearCell` has these.
    - `recurrent`: the weights that `training.weight_drop` drops.

    C is the type of its carry. A function that draws its parameters gives it a name: `register`.
    """

    recurrent: ClassVar[tuple[str, ...]] = ()
    """The names of the recurrent matrices: those that multiply h."""

    gates: ClassVar[str] = ""
    """The order of the gates side by side, a letter each."""

    def __init_subclass__(cls) -> None:
        exportable(cls)
        bases = cls.__mro__
        defines = lambda name: next(i for i, base in enumerate(bases) if name in vars(base))
        # What stands in a base behind that of `step` computes another step
        for name in ("prepared_step", "custom_gradient", "parallel"):
            if defines("step") < defines(name):
                setattr(cls, name, vars(Cell)[name])

    if TYPE_CHECKING:  # of `struct`

        def replace(self, **fields: Any) -> Self: ...

    else:

        def __init__(self, *values: Any, **fields: Any) -> None:
            """Refuse what only the method that `struct` writes takes: values of the fields."""
            if values or fields:
                cell = type_name(self)
                raise TypeError(
                    f"{cell} has no fields: write @jaxgru.cells.struct above its class."
                )

    def sizes(self) -> tuple[int, int] | None:
        """Return (E, H), the sizes of the input and of h; None if the shapes do not fit together.

        The other parts of a carry can be wider than h.
        """
        raise NotImplementedError

    def zero_carry(self, batch_size: Size) -> C:
        """Return the carry before the first step: h (B, H), or a tuple that begins with h.

        A reset without `reset_carry` sets it, too. By default zeros (B, H), in the dtype of the
        biases b.

        Raises:
          TypeError: there are no biases b, so the cell has to define this method.
        """
        biases = getattr(self, "b", None)
        if biases is None:
            raise TypeError(
                f"{type_name(self)} has no field b, whose dtype would be that of its carry: define "
                "its method zero_carry."
            )
        return cast(C, jnp.zeros((batch_size, sizes(self)[1]), biases.dtype))

    def inputs(self, x: Float[Array, "*n E"]) -> Array:
        """Return a, what a step reads of its input. By default, that is x itself."""
        return x

    def step(self, layout: Layout, carry: C, a: Array, /) -> C:
        """Compute one step, carry → the next carry.

        Products with weights are written `layout.times(U, h)`, or `layout.matmul(P, m)` where m is
        not h, which dropout may drop units of. Then their gradients are computed for all steps at
        once. JAX differentiates everything else, such as a product that is written in another way.

        Args:
          a: (B, …), a step of what `inputs` returns.
        """
        raise NotImplementedError

    def prepared_step(self) -> Callable[[Layout, C, Array], C]:
        """Return `step` for a loop: what depends on the weights alone is computed here, once."""
        return self.step

    def custom_gradient(self) -> tuple[Recurrence[C], Weights] | None:
        """Return a recurrence with a gradient written by hand, and its weights, if there is one."""
        return None

    def parallel(
        self, carry: C, x: Float[Array, "T B E"] | Lookup, masks: StepMasks, /
    ) -> tuple[Array, C] | None:
        """Compute all steps at once, if they do not depend on one another; None: they do.

        Args:
          masks: only dropout matters unless `parallel_masks`.

        Returns:
          h' of every step, with dropout, and the last carry.
        """
        return None

    parallel_masks: ClassVar[bool] = False
    """Whether `parallel` also computes resets, padding and zoneout, and the carry is h alone."""

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self)
        if not all(map(is_array, leaves)) or self.sizes() is None:
            return sizes_of_fields(self)
        dtypes = sorted({str(leaf.dtype) for leaf in leaves})
        options = [f"{name}={value!r}" for name, value in options_of(self).items()]
        parts = [f"in {sizes(self)[0]}", self.hidden_sizes(), *dtypes, *options]
        return f"{type(self).__name__}({', '.join(parts)})"

    def hidden_sizes(self) -> str:
        """Return the sizes of the state, for `repr`."""
        return f"hidden {sizes(self)[1]}"


AnyCell: TypeAlias = Cell[Any]
"""One layer's parameters, of any cell."""
AnyRecurrence: TypeAlias = Recurrence[Any]


def sizes(params: AnyCell) -> tuple[int, int]:
    """Return the sizes (E, H) of a layer's input and of its h."""
    sizes_of_layer = params.sizes()
    if sizes_of_layer is None:
        raise ValueError(f"the parameters of a layer do not fit together: {described(params)}.")
    return sizes_of_layer


def starts_at_zero(params: AnyCell) -> bool:
    """Return whether the carry before the first step is zeros, whatever the parameters are."""
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        start = params.zero_carry(1)
    is_zero = lambda leaf: not isinstance(leaf, Tracer) and not np.asarray(leaf).any()
    return all(map(is_zero, jax.tree.leaves(start)))


def one_step(
    params: AnyCell, carry: Carry, x: Float[Array, "B E"], layout: Layout = PLAIN
) -> Carry:
    """Compute one step by its definition, in the carry's dtype, differentiated by JAX."""
    start = jax.eval_shape(lambda: params.zero_carry(1))
    carry = named("the carry", carry, type(start))
    dtype = hidden(carry).dtype
    params, x = jax.tree.map(lambda leaf: leaf.astype(dtype), (params, x))
    return params.step(layout, carry, params.inputs(x))


def stepper(
    params: AnyCell, table: Float[Array, "V E"] | None = None
) -> Callable[[Carry, Array], Carry]:
    """Return a function that computes one step: (carry, input) → the next carry.

    Args:
      params: one layer's parameters.
      table: if given, each step takes row numbers (B,) of this table in place of the input (B, E);
        what the layer's `inputs` makes of it is computed once.
    """
    inputs = params.inputs if table is None else partial(embed, params.inputs(table))
    step = params.prepared_step()
    return lambda carry, x: step(IN_ROWS, carry, inputs(x).astype(hidden(carry).dtype))


Init: TypeAlias = Callable[..., AnyCell]
"""(key, in_features, hidden_dim, *, dtype, and the cell's options) → initial parameters."""
CellName: TypeAlias = Literal[
    "coupled_lstm",
    "gru",
    "lstm",
    "min_gru",
    "min_lstm",
    "mlp",
    "mogrifier_gru",
    "peephole_lstm",
    "rg_lru",
    "rnn",
    "slstm",
]
"""The names of jaxgru's own cells, for type checkers, which cannot read `CELLS`.

They read `Literal[…] | str` as `str`, so a misspelled name would pass. So they take a cell of your
own as the function that draws it, or as `CELLS[name]` if its name is known only at run time.
"""
F = TypeVar("F", bound=Any)

CELLS: dict[str, Init] = {}
"""Every cell that a config's `model.cell` and `init_stack` can name, and what draws it."""


def register(init: F) -> F:
    """Let a config's `model.cell`, and `init_stack`, name the cell that this function draws.

    A decorator. `init_gru` draws the cell "gru". The function takes `(key, in_features, hidden_dim,
    *, dtype)`, and options as further keywords: those that a config's `model` has are passed to it.
    A function that is defined again, as when a notebook's cell is rerun, replaces the earlier one.

    Raises:
      ValueError: its name does not begin with init_, or is that of another cell's function.
    """
    place = f"{init.__module__}.{init.__qualname__}"
    name = init.__name__.removeprefix("init_")
    if name == init.__name__:
        raise ValueError(
            f"{place} is not named init_…; the rest of the name is what model.cell calls the cell "
            "that a function draws."
        )
    other: Any = CELLS.get(name, init)
    other_place = f"{other.__module__}.{other.__qualname__}"
    if other_place != place:
        raise ValueError(f"the cell {name} is drawn by {other_place} already.")
    CELLS[name] = init
    return init


def options_of_cell(name: str) -> dict[str, inspect.Parameter]:
    """Return the options of a cell: the keywords of the function that draws it."""
    parameters = inspect.signature(CELLS[name]).parameters
    return {key: p for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
