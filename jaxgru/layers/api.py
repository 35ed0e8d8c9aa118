"""Recurrent layers for a model of your own: `unroll`, `bidirectional`, `step`, `initial_carry`.

Batch-major. `sequences.py` makes the arguments time-major, `direction.py` runs the layers, and
`implementations.py` decides who computes. A call is one compiled program: shapes, dtypes and
options are checked while it is traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float, Integer, Shaped

from jaxgru.arguments import one_array
from jaxgru.arrays import AnyArray, Size, Tree
from jaxgru.cells.carry import C
from jaxgru.cells.contract import AnyCell, Cell
from jaxgru.cells.products import Lookup, look_up
from jaxgru.errors import check_flags, check_one_of, check_whole, forward_mode_explained
from jaxgru.layers import validate
from jaxgru.layers.direction import Start, run_direction, start_of, zero_carries
from jaxgru.layers.dropout import Dropouts, checked, in_two_directions
from jaxgru.layers.implementations import IMPLEMENTATIONS, Implementation, plus_input
from jaxgru.layers.sequences import Arguments, Options, Sequences, enter
from jaxgru.layers.stack import Layers, Stack
from jaxgru.steps import as_flags, as_lengths

# The overloads tell type checkers what comes back. The carry of one layer is its cell's; the
# entries of a tuple of carries may differ, so their types are left open.
StackCarry: TypeAlias = tuple[Any, ...]
PairOfCarries: TypeAlias = tuple[Any, Any]


class Keywords(TypedDict, total=False):
    """The keywords of `unroll` and `bidirectional` that do not change how many values return."""

    reset: AnyArray | None
    lengths: AnyArray | None
    mask: AnyArray | None
    reset_carry: Tree
    time_major: bool
    dropout: Dropouts
    remat: bool
    implementation: Implementation


@overload
def unroll(
    layers: Cell[C],
    x: AnyArray | Lookup,
    carry: Tree = None,
    *,
    reverse: bool = False,
    return_carries: Literal[False] = False,
    **keywords: Unpack[Keywords],
) -> tuple[Array, C]: ...


@overload
def unroll(
    layers: Cell[C],
    x: AnyArray | Lookup,
    carry: Tree = None,
    *,
    reverse: bool = False,
    return_carries: Literal[True],
    **keywords: Unpack[Keywords],
) -> tuple[Array, C, C]: ...


@overload
def unroll(
    layers: Stack,
    x: AnyArray | Lookup,
    carry: Tree = None,
    *,
    reverse: bool = False,
    return_carries: Literal[False] = False,
    **keywords: Unpack[Keywords],
) -> tuple[Array, StackCarry]: ...


@overload
def unroll(
    layers: Stack,
    x: AnyArray | Lookup,
    carry: Tree = None,
    *,
    reverse: bool = False,
    return_carries: Literal[True],
    **keywords: Unpack[Keywords],
) -> tuple[Array, StackCarry, StackCarry]: ...


def unroll(
    layers: Layers,
    x: Float[AnyArray, "*B T F"] | Lookup,
    carry: Tree = None,
    *,
    reset: Shaped[AnyArray, "*B T"] | None = None,
    lengths: Integer[AnyArray, "*rows"] | None = None,
    mask: Shaped[AnyArray, "*B T"] | None = None,
    reset_carry: Tree = None,
    reverse: bool = False,
    time_major: bool = False,
    return_carries: bool = False,
    dropout: Dropouts = None,
    remat: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Tree, ...]:
    """Run a recurrent layer, or a stack of layers, over a batch of sequences.

    The gradient is jaxgru's own, for reverse mode (`grad`, `grad` of `grad`, `hessian`). Forward
    mode alone (`jvp`, `jacfwd`) needs the implementation "autodiff".

    Args:
      layers: one layer's parameters, as from an `init_…` function, or a list of them, each of which
        reads the output of the one below. In a `ResidualStack`, each layer above the first also
        adds its input to its output.
      x: the input (B, T, F): rows of the batch, steps, features. It is floating-point, and is
        converted to the dtype of the layer's biases. One sequence may come as (T, F); then neither
        the results nor any other argument has the axis B. There may also be several batch axes, as
        in (E, A, T, F) or, with `time_major`, (T, E, A, F); all arguments and results then have
        them in place of B. Or a `jaxgru.cells.Lookup` of row numbers (B, T) of a table (V, F), such
        as tokens and an embedding.
      carry: the state before the first step, as returned here or by `initial_carry`: h (B, H) for
        one layer, an `LSTMState` (h, c) for an LSTM (or a dict with the keys h and c), a tuple of
        these for a list of layers. None: `reset_carry`.
      reset: (B, T), True at the first step of an episode, in time. No state crosses from one
        episode to another: the carry is set to `reset_carry` before that step or, with `reverse`,
        after it. The carry that `reverse` returns is always that after step 0; if an episode begins
        there, give `reset_carry` to the steps before it instead.
      lengths: (B,), the number of valid steps of each row. The steps after them are padding: their
        outputs are zero, the carry stays that of the last valid step, and neither their gradients
        nor their resets count.
      mask: (B, T), True at valid steps, in place of `lengths` if padding may stand anywhere. A
        reset at a padded step counts: the next valid step begins an episode. If none follows, the
        carry returned is `reset_carry`, except with `reverse`. Outside `jit`, `reset` and `mask`
        may be numbers that are 0 or 1.
      reset_carry: the state that a reset sets, in the form of `carry` or, for all rows alike,
        without the axis B. It is differentiated, so it can be learned. None: what `initial_carry`
        returns.
      reverse: read from the last valid step to the first. y keeps the order of x.
      time_major: x and y are (T, B, ...), and so are `reset` and `mask`.
      return_carries: also return the carry after every step, in the form of `carry`, with a time
        axis as in y.
      dropout: a `Dropout`, for training; for several sites, a tuple of them with different keys.
      remat: for the gradient, keep only the carries between about √T segments of the sequence, and
        compute each segment again when it is needed: less memory, one more forward pass.
      implementation: who computes; see `Implementation` in `jaxgru.layers.implementations`.

    Returns:
      (y, carry): y (B, T, H), the last layer's h after every step, and the carry after the last
      step that is read. With `return_carries`, (y, carry, carries).

    Raises:
      ValueError: the shape or dtype of an argument does not fit; there is no step or no layer;
        `lengths` and `mask` are both given; a length is not in 0 … T (traced ones are clipped to
        it); the implementation or the dropout is unknown; or the cell cannot apply the dropout.
      TypeError: forward mode needs the implementation "autodiff".

    Example:
      ```python
      layer = jaxgru.init_gru(jax.random.key(0), in_features=3, hidden_dim=4)
      x = jnp.ones((2, 5, 3))
      y, carry = jaxgru.unroll(layer, x)  # y (2, 5, 4), carry (2, 4)
      y, carry = jaxgru.unroll(layer, x, carry)  # goes on where the first call ended
      ```
    """
    validate.check_containers(layers, x, carry)
    options = Options(implementation, time_major, return_carries, remat, reverse)
    arguments = Arguments(validate.as_input(x), carry, reset, lengths, mask, reset_carry, dropout)
    return _call(_unroll, options, arguments, layers=layers)


def _call(
    function: Callable[..., tuple[Tree, ...]],
    options: Options,
    arguments: Arguments,
    **layers: Layers,
) -> tuple[Tree, ...]:
    """Call a compiled function.

    Here, the values of flags and lengths are checked. All else is while the function is traced.
    """
    check_one_of("the implementation", options.implementation, IMPLEMENTATIONS)
    flags = options._asdict()
    del flags["implementation"]
    check_flags(**flags)
    arguments = _with_known_values(options, arguments)
    try:
        with forward_mode_explained():
            return function(options, arguments, **layers)
    except TypeError:  # of `jit`, for what is not an array
        for name, of_direction in layers.items():
            validate.check_layers(name, of_direction)
            validate.check_arrays(f"a weight in {name}", of_direction)
        validate.check_arrays("the carry", arguments.carry)
        validate.check_arrays("reset_carry", arguments.reset_carry)
        raise


def _with_known_values(options: Options, arguments: Arguments) -> Arguments:
    """Return the arguments with those checked whose values are looked at; most are None."""
    shape = arguments.x.shape[:-1]
    if arguments.dropout is not None:
        arguments = arguments._replace(dropout=checked(arguments.dropout))
    if arguments.reset is not None:
        reset = as_flags("reset", arguments.reset, shape)
        arguments = arguments._replace(reset=reset)
    if arguments.mask is not None:
        mask = as_flags("mask", arguments.mask, shape)
        arguments = arguments._replace(mask=mask)
    if arguments.lengths is not None:
        lengths = as_lengths(arguments.lengths, shape, options.axis(shape))
        arguments = arguments._replace(lengths=lengths)
    return arguments


@partial(jax.jit, static_argnums=0)
def _unroll(options: Options, arguments: Arguments, layers: Layers) -> tuple[Tree, ...]:
    """Compute `unroll`: one program."""
    validate.check_layers("layers", layers)
    validate.check_order(layers, arguments.x, arguments.carry)
    stack, is_single, is_residual = validate.as_stack(layers)
    sequences = enter(options, arguments)
    B = math.prod(sequences.batch)
    validate.check_stack(stack, sequences.x.shape[-1], is_residual, B)
    start = start_of(stack, is_single, sequences, arguments.carry, arguments.reset_carry)
    dropout = arguments.dropout
    y, last, each = run_direction(options, is_residual, stack, sequences, start, dropout)
    carries = [last, each] if options.return_carries else [last]
    return (sequences.leave(y), *sequences.leave_carries(carries, is_single))


@partial(jax.jit, static_argnums=0)
def _step(options: Options, arguments: Arguments, layers: Layers) -> tuple[Tree, ...]:
    """Compute `step`: one program."""
    at_steps = arguments.x, arguments.reset, arguments.mask
    x, reset, mask = jax.tree.map(lambda a: a[None], at_steps)
    arguments = arguments._replace(x=x, reset=reset, mask=mask)
    y, carry = _unroll(options, arguments, layers)
    return y[0], carry


@overload
def bidirectional(
    forward: Layers,
    backward: Layers,
    x: AnyArray | Lookup,
    carry: Tree = None,
    *,
    return_carries: Literal[False] = False,
    **keywords: Unpack[Keywords],
) -> tuple[Array, PairOfCarries]: ...


@overload
def bidirectional(
    forward: Layers,
    backward: Layers,
    x: AnyArray | Lookup,
    carry: Tree = None,
    *,
    return_carries: Literal[True],
    **keywords: Unpack[Keywords],
) -> tuple[Array, PairOfCarries, PairOfCarries]: ...


def bidirectional(
    forward: Layers,
    backward: Layers,
    x: Float[AnyArray, "*B T F"] | Lookup,
    carry: Tree = None,
    *,
    reset: Shaped[AnyArray, "*B T"] | None = None,
    lengths: Integer[AnyArray, "*rows"] | None = None,
    mask: Shaped[AnyArray, "*B T"] | None = None,
    reset_carry: Tree = None,
    time_major: bool = False,
    return_carries: bool = False,
    dropout: Dropouts = None,
    remat: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Tree, ...]:
    """Run layers in both directions, as `torch.nn.GRU(bidirectional=True)` does.

    Each layer of a stack reads the outputs of both directions of the layer below, side by side.

    Args:
      forward: a layer, or a list or `ResidualStack` of layers, that reads from the first step to
        the last.
      backward: as many layers, in the same form, that read from the last step to the first.
      x: as for `unroll`; likewise `reset`, `lengths`, `mask`, `time_major` and `implementation`.
      remat: as for `unroll`, in each layer and direction.
      carry: a pair, for the forward and the backward layers, each part as for `unroll`.
      reset_carry: a pair, each part as for `unroll`: what a reset sets, and the carry if that is
        None.
      return_carries: also return the carries after every step, as a pair.
      dropout: as for `unroll`; each direction has masks of its own.

    Returns:
      (y, carry): y (B, T, H + H), forward outputs first, and the pair of carries after the last
      step that each direction reads; for the backward layers, this is step 0. With
      `return_carries`, (y, carry, carries).

    Raises:
      ValueError: as `unroll`; the lists have different lengths, only one direction is a list, or
        only one is residual; or `carry` or `reset_carry` is not a pair.
      TypeError: as `unroll`.

    Example:
      ```python
      pair = jaxgru.init_stack("lstm", jax.random.key(0), 3, 4, num_layers=2, bidirectional=True)
      y, carry = jaxgru.bidirectional(*pair, jnp.ones((2, 5, 3)))  # y (2, 5, 4 + 4)
      of_forward, of_backward = carry
      ```
    """
    options = Options(implementation, time_major, return_carries, remat)
    arguments = Arguments(validate.as_input(x), carry, reset, lengths, mask, reset_carry, dropout)
    return _call(_bidirectional, options, arguments, forward=forward, backward=backward)


@partial(jax.jit, static_argnums=0)
def _bidirectional(
    options: Options, arguments: Arguments, forward: Layers, backward: Layers
) -> tuple[Tree, ...]:
    """Compute `bidirectional`: one program."""
    validate.check_layers("forward", forward)
    validate.check_layers("backward", backward)
    stack, is_single, is_residual = validate.as_stack(forward)
    back_stack, back_is_single, back_is_residual = validate.as_stack(backward)
    L = len(stack)
    if L != len(back_stack):
        raise ValueError(
            f"there are {L} forward and {len(back_stack)} backward layers; the numbers must be "
            "equal."
        )
    if is_residual != back_is_residual:
        raise ValueError("only one direction is a ResidualStack; both must be, or neither.")
    if is_single != back_is_single:
        raise ValueError("only one direction is a list of layers; both must be, or neither.")
    sequences = enter(options, arguments)
    levels = list(zip(stack, back_stack, strict=True))
    B = math.prod(sequences.batch)
    validate.check_stack(levels, sequences.x.shape[-1], is_residual, B)
    carries = _pair(arguments.carry, "carry")
    reset_carries = _pair(arguments.reset_carry, "reset_carry")
    dropouts = in_two_directions(arguments.dropout, L)
    directions = [
        _Direction(
            options._replace(reverse=is_backward),
            layers,
            start_of(layers, is_single, sequences, carry, reset_carry),
            dropout,
        )
        for is_backward, layers, carry, reset_carry, dropout in zip(
            (False, True), (stack, back_stack), carries, reset_carries, dropouts, strict=True
        )
    ]
    x = sequences.x
    for i in range(L):
        inputs = sequences._replace(x=x)
        y = jnp.concatenate([direction.run(i, inputs) for direction in directions], axis=-1)
        x = plus_input(y, look_up(x)) if is_residual and i else y
    ends = [direction.carries(sequences, is_single) for direction in directions]
    return (sequences.leave(x), *zip(*ends, strict=True))


class _Direction:
    """The layers of one direction, of which each reads what both directions of the one below give.

    Attributes:
      lasts: of each layer that has run, the carry after the last step. eaches: after each step.
    """

    def __init__(
        self,
        options: Options,
        stack: Sequence[AnyCell],
        start: Start,
        dropouts: Sequence[Dropouts],
    ):
        self.options = options
        self.stack = stack
        self.start = start
        self.dropouts = dropouts
        self.lasts: list[Tree] = []
        self.eaches: list[Tree] = []

    def run(self, i: int, sequences: Sequences) -> Array:
        """Run layer i, and return its output."""
        only = slice(i, i + 1)
        start = Start(self.start.carry[only], self.start.of_reset[only])
        y, last, each = run_direction(
            self.options, False, self.stack[only], sequences, start, self.dropouts[i]
        )
        self.lasts += last
        self.eaches += each or ()
        return y

    def carries(self, sequences: Sequences, is_single: bool) -> list[Tree]:
        """Return the last carries and, with `return_carries`, those of each step."""
        carries: list[Tree] = [tuple(self.lasts)]
        if self.options.return_carries:
            carries.append(tuple(self.eaches))
        return sequences.leave_carries(carries, is_single)


def _pair(pair: Tree, name: str) -> Sequence[Tree]:
    """Return what is given for the forward and for the backward layers."""
    if pair is None:
        return None, None
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise ValueError(f"{name} must be a pair, the forward and the backward layers.")
    return pair


@overload
def step(
    layers: Cell[C],
    x: AnyArray,
    carry: Tree,
    *,
    reset: AnyArray | None = None,
    mask: AnyArray | None = None,
    reset_carry: Tree = None,
    implementation: Implementation = "scan",
) -> tuple[Array, C]: ...


@overload
def step(
    layers: Stack,
    x: AnyArray,
    carry: Tree,
    *,
    reset: AnyArray | None = None,
    mask: AnyArray | None = None,
    reset_carry: Tree = None,
    implementation: Implementation = "scan",
) -> tuple[Array, StackCarry]: ...


def step(
    layers: Layers,
    x: Float[AnyArray, "*B F"],
    carry: Tree,
    *,
    reset: Shaped[AnyArray, "*B"] | None = None,
    mask: Shaped[AnyArray, "*B"] | None = None,
    reset_carry: Tree = None,
    implementation: Implementation = "scan",
) -> tuple[Float[Array, "*B H"], Tree]:
    """Compute one step on an input without a time axis, e.g. for a policy that acts.

    It equals `unroll` up to rounding.

    Args:
      layers: as for `unroll`; likewise `reset_carry`.
      x: the input (B, F) of this step, or (F,) of one sequence; or with more batch axes.
      carry: the state before this step, as for `unroll`, but not None.
      reset: (B,), True where the carry is set to `reset_carry` before the step.
      mask: (B,), True where a row takes the step, such as an agent that lives. Another row's output
        is zero, and it keeps its carry, or `reset_carry` if it is reset.
      implementation: as for `unroll`; forward mode needs "autodiff".

    Returns:
      The new h of the last layer (B, H), and the next carry.

    Raises:
      ValueError: the shape or dtype of an argument does not fit, the carry is None, or the
        implementation is unknown.
      TypeError: as `unroll`.

    Example:
      ```python
      layer = jaxgru.init_gru(jax.random.key(0), in_features=3, hidden_dim=4)
      carry = jaxgru.initial_carry(layer, batch_size=2)
      h, carry = jaxgru.step(layer, jnp.ones((2, 3)), carry)  # h (2, 4)
      ```
    """
    if carry is None:
        raise ValueError("carry is None; it must be the last step's, or from initial_carry.")
    validate.check_containers(layers, x, carry)
    x = one_array("x", x)
    if x.ndim < 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x is {x.dtype} {x.shape}; it must be floating-point, (B, F), or (F,) for one "
            "sequence."
        )
    arguments = Arguments(x, carry, reset, mask=mask, reset_carry=reset_carry)
    y, next_carry = _call(_step, Options(implementation), arguments, layers=layers)
    return y, next_carry


@overload
def initial_carry(layers: Cell[C], batch_size: Size | tuple[Size, ...]) -> C: ...


@overload
def initial_carry(layers: Stack, batch_size: Size | tuple[Size, ...]) -> StackCarry: ...


def initial_carry(layers: Layers, batch_size: Size | tuple[Size, ...]) -> Tree:
    """Return the carry before the first step, in the dtype of the layer's biases.

    It is zeros, unless a cell of your own starts with something else. It is h (B, H) for one layer,
    (h, c) for an LSTM, and a tuple of these for a list of layers.

    Args:
      batch_size: B; or the sizes of several batch axes or, as (), of none, in a tuple.

    Raises:
      ValueError: `layers` is not a layer or a list of layers; or the batch size is not a whole
        number from 0 to 2³¹ − 1.

    Example:
      ```python
      layers = jaxgru.init_stack("lstm", jax.random.key(0), 3, 4, num_layers=2)
      first, second = jaxgru.initial_carry(layers, batch_size=2)
      first.h, first.c  # (2, 4) each
      ```
    """
    batch = batch_size if isinstance(batch_size, tuple) else (batch_size,)
    for size in batch:
        if not is_symbolic_dim(size):
            check_whole("batch_size", size, least=0)
    validate.check_layers("layers", layers)
    stack, is_single, _ = validate.as_stack(layers)
    carry = zero_carries(stack, batch)
    return carry[0] if is_single else carry
