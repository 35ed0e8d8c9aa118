"""Recurrent layers for a model of your own: `unroll`, `bidirectional`, `step`, `initial_carry`.

Batch-major. `implementations.py` decides who computes, time-major; the transposes are here. A call
is one compiled program: shapes, dtypes and options are checked while it is traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Integer, Shaped, UInt32

from jaxgru.cells.carry import AnyArray, Carry, Size, Tree
from jaxgru.cells.contract import CellParams, starts_at_zero
from jaxgru.cells.layout import IN_ROWS
from jaxgru.cells.marks import Marks
from jaxgru.cells.products import Lookup, looked_up, looks_up_first, of_steps
from jaxgru.cells.promotion import in_dtypes_of, vary_alike
from jaxgru.errors import check_flags, check_one_of, check_whole
from jaxgru.layers import validate
from jaxgru.layers.dropout import (
    Dropouts,
    checked,
    dropout_masks,
    in_rows,
    in_two_directions,
    seeded,
)
from jaxgru.layers.implementations import (
    IMPLEMENTATIONS,
    StackOptions,
    forward_mode_explained,
    plus_input,
    run_stack,
)
from jaxgru.layers.remat import run_in_segments
from jaxgru.layers.sharding import on_mesh, over_batch_axes, sharded_by_xla
from jaxgru.layers.stack import Layers
from jaxgru.layers.unread import with_unread, without_unread
from jaxgru.layers.validate import Carries


def unroll(
    layers: Layers,
    x: Float[AnyArray, "*B T F"] | Lookup,
    carry: Tree = None,
    *,
    reset: Shaped[AnyArray, "*B T"] | None = None,
    lengths: Integer[AnyArray, "*rows"] | None = None,
    mask: Shaped[AnyArray, "*B T"] | None = None,
    initial: Tree = None,
    reverse: bool = False,
    time_major: bool = False,
    return_carries: bool = False,
    dropout: Dropouts = None,
    remat: bool = False,
    implementation: str = "auto",
) -> tuple[Tree, ...]:
    """Run a recurrent layer, or a stack of layers, over a batch of sequences.

    The gradient is jaxgru's own, for reverse mode (`grad`, `grad` of `grad`, `hessian`). Forward
    mode alone (`jvp`, `jacfwd`) needs the implementation "autodiff".

    Args:
      layers: one layer's parameters (`init_gru`, `init_lstm`, `init_rnn`), or a list of them, each
        of which reads the output of the one below. In a `ResidualStack`, each layer above the first
        also adds its input to its output.
      x: the input (B, T, F): rows of the batch, steps, features. It is floating-point, and is
        converted to the dtype of the layer's biases. One sequence may come as (T, F); then neither
        the results nor any other argument has the axis B. There may also be several batch axes, as
        in (E, A, T, F) or, with `time_major`, (T, E, A, F); all arguments and results then have
        them in place of B. Or a `jaxgru.cells.Lookup` of row numbers (B, T) of a table (V, F), such
        as tokens and an embedding.
      carry: the state before the first step, as returned here or by `initial_carry`: h (B, H) for
        one layer, an `LSTMState` (h, c) for an LSTM (or a dict with the keys h and c), a tuple of
        these for a list of layers. None: `initial`.
      reset: (B, T), True at the first step of an episode, in time. No state crosses from one
        episode to another: the carry is set to `initial` before that step or, with `reverse`, after
        it. The carry that `reverse` returns is always that after step 0; if an episode begins
        there, give `initial` to the steps before it instead.
      lengths: (B,), the number of real steps of each row. The steps after them are padding: their
        outputs are zero, the carry stays that of the last real step, and neither their gradients
        nor their resets count.
      mask: (B, T), True at real steps, in place of `lengths` if padding may stand anywhere. A reset
        at a padded step counts: the next real step begins an episode. If none follows, the carry
        returned is `initial`, except with `reverse`. Outside `jit`, `reset` and `mask` may be
        numbers that are 0 or 1.
      initial: the state that a reset sets, in the form of `carry` or, for all rows alike, without
        the axis B. It is differentiated, so it can be learned. None: what `initial_carry` returns.
      reverse: read from the last real step to the first. y keeps the order of x.
      time_major: x and y are (T, B, ...), and so are `reset` and `mask`.
      return_carries: also return the carry after every step, in the form of `carry`, with a time
        axis as in y.
      dropout: a `Dropout`, for training; for several sites, a tuple of them with different keys.
      remat: for the gradient, keep only the carries between about √T segments of the sequence, and
        compute each segment again when it is needed: less memory, one more forward pass.
      implementation: "auto", "scan", "autodiff" or "wavefront"; see `IMPLEMENTATIONS` in
        `jaxgru.layers.implementations`.

    Returns:
      (y, carry): y (B, T, H), the last layer's h after every step, and the carry after the last
      step that is read. With `return_carries`, (y, carry, carries).

    Raises:
      ValueError: the shape or dtype of an argument does not fit; there is no step or no layer;
        `lengths` and `mask` are both given; a length is not in 0 … T (traced ones are clipped to
        it); the implementation or the dropout is unknown; or the cell cannot apply the dropout.
      TypeError: forward mode needs the implementation "autodiff".
    """
    validate.check_containers(layers, x, carry)
    options = _Options(implementation, time_major, return_carries, remat, reverse)
    arguments = _Arguments(validate.as_input(x), carry, reset, lengths, mask, initial, dropout)
    return _call(_unroll, options, arguments, layers=layers)


Resets: TypeAlias = tuple[Carry | None, ...]
"""What a reset sets, with an entry per layer; None: zeros."""


class _Options(NamedTuple):
    """How layers are computed; see `unroll`."""

    implementation: str
    time_major: bool = True
    return_carries: bool = False
    remat: bool = False
    reverse: bool = False

    def axis(self, shape: tuple[Size, ...]) -> int:
        """Return the axis of the steps, given the shape of the batch axes and the steps."""
        return 0 if self.time_major else len(shape) - 1


class _Arguments(NamedTuple):
    """What layers are computed of; see `unroll`."""

    x: AnyArray | Lookup
    carry: Tree
    reset: AnyArray | None = None
    lengths: AnyArray | None = None
    mask: AnyArray | None = None
    initial: Tree = None
    dropout: Dropouts = None


def _call(
    function: Callable[..., tuple[Tree, ...]],
    options: _Options,
    arguments: _Arguments,
    **layers: Layers,
) -> tuple[Tree, ...]:
    """Call a compiled function.

    Here, the values of flags and lengths are checked. All else is while the function is traced.
    """
    check_one_of("the implementation", options.implementation, IMPLEMENTATIONS)
    check_flags(**dict(zip(options._fields[1:], options[1:], strict=True)))
    _, carry, reset, lengths, mask, initial, dropout = arguments
    shape = arguments.x.shape[:-1]
    if dropout is not None:
        arguments = arguments._replace(dropout=checked(dropout))
    if reset is not None:
        arguments = arguments._replace(reset=validate.as_flags("reset", reset, shape))
    if mask is not None:
        arguments = arguments._replace(mask=validate.as_flags("mask", mask, shape))
    if lengths is not None:
        lengths = validate.as_lengths(lengths, shape, options.axis(shape))
        arguments = arguments._replace(lengths=lengths)
    try:
        with forward_mode_explained():
            return function(options, arguments, **layers)
    except TypeError:  # of `jit`, for what is not an array
        for name, of_direction in layers.items():
            validate.check_layers(name, of_direction)
            validate.check_arrays(f"a weight in {name}", of_direction)
        validate.check_arrays("the carry", carry)
        validate.check_arrays("initial", initial)
        raise


@partial(jax.jit, static_argnums=0)
def _unroll(options: _Options, arguments: _Arguments, layers: Layers) -> tuple[Tree, ...]:
    """Compute `unroll`: one program."""
    validate.check_layers("layers", layers)
    validate.check_order(layers, arguments.x, arguments.carry)
    stack, is_single, is_residual = validate.as_stack(layers)
    sequences = _enter(options, arguments)
    B = math.prod(sequences.batch)
    validate.check_stack(stack, sequences.x.shape[-1], is_residual, B)
    start, of_reset = _start(stack, is_single, sequences, arguments.carry, arguments.initial)
    y, *carries = _run(options, is_residual, stack, sequences, start, of_reset, arguments.dropout)
    return (sequences.left(y), *sequences.of_carries(carries, is_single))


@partial(jax.jit, static_argnums=0)
def _step(options: _Options, arguments: _Arguments, layers: Layers) -> tuple[Tree, ...]:
    """Compute `step`: one program."""
    at_steps = arguments.x, arguments.reset, arguments.mask
    x, reset, mask = jax.tree.map(lambda a: a[None], at_steps)
    arguments = arguments._replace(x=x, reset=reset, mask=mask)
    y, carry = _unroll(options, arguments, layers)
    return y[0], carry


class _Sequences(NamedTuple):
    """The input of `unroll` or `bidirectional`, time-major, with one batch axis.

    reset, real: (T, B), as in `Marks`. mask: real, if it was given as `mask`. batch: the batch axes
    that x had. axis: where it had its steps, before the batch axes or after them. rows: what stands
    for them inside: one axis B or, on a mesh, all of them.
    """

    x: Array | Lookup
    reset: Bool[Array, "T *B"] | None
    real: Bool[Array, "T *B"] | None
    mask: Bool[Array, "T *B"] | None
    batch: tuple[Size, ...]
    axis: int
    rows: tuple[Size, ...]

    def other_order(self) -> validate.OtherOrder | None:
        """Return what `time_major` would change; None for one step, which `step` has."""
        T = self.x.shape[0]
        shape = *self.batch[: self.axis], T, *self.batch[self.axis :]
        other_batch = shape[1:] if self.axis else shape[:-1]
        return None if T == 1 else validate.OtherOrder(other_batch, time_major=self.axis > 0)

    def left(self, tree: Tree) -> Tree:
        """Return outputs (T, B, …) with the axes that the input had."""
        tree = self.of_rows(tree, 1)
        return jax.tree.map(lambda h: jnp.moveaxis(h, 0, self.axis), tree) if self.axis else tree

    def of_rows(self, tree: Tree, axis: int) -> Tree:
        """Return what has the axis B, with the batch axes of the input in its place."""
        if self.rows == self.batch:
            return tree
        split = lambda h: h.reshape(*h.shape[:axis], *self.batch, *h.shape[axis + 1 :])
        return jax.tree.map(split, tree)

    def of_carries(self, carries: Sequence[Tree], is_single: bool) -> list[Tree]:
        """Return the last carry and, if there are, those of every step; of a layer alone, its."""
        last, *every = carries
        parts = [self.of_rows(last, 0), *self.left(every)]
        return [part[0] for part in parts] if is_single else parts


def _enter(options: _Options, arguments: _Arguments) -> _Sequences:
    """Return the input, and what marks its steps, as layers take them."""
    x, reset, mask = cast(tuple[Tree, ...], (arguments.x, arguments.reset, arguments.mask))
    lengths = arguments.lengths
    if lengths is not None and mask is not None:
        raise ValueError("both lengths and a mask are given; give one of them.")
    shape = x.shape[:-1]
    axis = options.axis(shape)
    batch, T = (*shape[:axis], *shape[axis + 1 :]), shape[axis]
    if T == 0:
        raise ValueError(f"x has the shape {x.shape}; it must have at least one step.")
    real = mask if lengths is None else validate.real_steps(lengths, shape, axis)
    if real is not None:  # whatever the padding holds, also NaN, which jax_debug_nans finds below
        x = of_steps(partial(IN_ROWS.choose, real), x)
    if isinstance(x, Lookup):
        x = _without_unread_rows(x, real)
    if reset is not None and lengths is not None:
        reset = reset & real
    # To merge axes that are sharded would bring all rows to each device
    rows = batch if len(batch) > 1 and on_mesh(x) else (math.prod(batch),)

    def enter(a: Array) -> Array:
        a = jnp.moveaxis(a, axis, 0) if axis else a
        return a if rows == batch else a.reshape(T, *rows, *a.shape[len(shape) :])

    if axis or rows != batch:
        x, (reset, real) = of_steps(enter, x), jax.tree.map(enter, (reset, real))
    return _Sequences(x, reset, real, None if mask is None else real, batch, axis, rows)


def _without_unread_rows(x: Lookup, real: Bool[Array, "..."] | None) -> Lookup:
    """Return a lookup whose table has zeros in the rows that no real step reads."""
    if real is None and looks_up_first(x):
        return x

    def cleaned(x: Lookup) -> Array:
        table, ids = vary_alike(x)
        is_read = jnp.zeros(len(table), bool)
        is_read = vary_alike((is_read, ids))[0]
        numbers = ids.astype(jnp.int32) if ids.dtype == bool else ids
        is_real = True if real is None else real
        is_read = is_read.at[numbers].max(is_real, wrap_negative_indices=False)
        return jnp.where(is_read[:, None], table, 0)

    return x._replace(table=sharded_by_xla(cleaned, x, (None, None))(x))


def _start(
    stack: Sequence[CellParams],
    is_single: bool,
    sequences: _Sequences,
    carry: Tree,
    initial: Tree,
) -> tuple[Carries, Resets]:
    """Return the carry before the first step, and what a reset sets, with an entry per layer."""
    batch = sequences.batch
    rows = sequences.rows
    other = sequences.other_order()
    like = validate.carry_like(stack, math.prod(batch))
    start = None
    if carry is not None:
        start = validate.as_carry(carry, like, is_single, batch, rows, other)
    if initial is not None:
        of_reset = validate.as_initial(initial, like, is_single, start, batch, rows, other)
        return start or of_reset, of_reset
    of_layers: Carries = initial_carry(stack, rows)
    start = start or of_layers
    if sequences.reset is None:
        return start, (None,) * len(stack)
    own = zip(stack, start, of_layers, strict=True)
    return start, tuple(None if starts_at_zero(p) else in_dtypes_of(c, o) for p, c, o in own)


def _run(
    options: _Options,
    is_residual: bool,
    stack: Sequence[CellParams],
    sequences: _Sequences,
    carry: Carries,
    initial: Resets,
    dropout: Dropouts,
) -> tuple[Tree, ...]:
    """Compute layers in one direction: y, the last carries and, if asked for, those of steps."""
    of_stack = StackOptions(options.implementation, options.return_carries, is_residual)
    reverse, x, rows = options.reverse, sequences.x, sequences.rows
    if options.remat and is_symbolic_dim(x.shape[0]):
        raise ValueError(f"the number of steps is {x.shape[0]}; remat needs it to be known.")

    def run(
        inputs: tuple[Array | Lookup, Array | None, Array | None, Array | None],
        carry: Carries,
        initial: Resets,
        row: UInt32[Array, "B"] | None,
        stack: Sequence[CellParams],
        dropout: Dropouts,
    ) -> tuple[Array, Carries, Tree]:
        """Compute rows of one batch axis."""
        x, reset, real, mask = inputs
        (T, B), dropout = x.shape[:2], in_rows(dropout, row)
        if reverse:
            reset = None if reset is None else validate.in_reading_order(reset, mask)
            x = of_steps(lambda a: a[::-1], x)
        of_layer = [None] * len(stack) if reset is None else initial
        marks = [Marks(reset, start, real) for start in of_layer]
        marks = [m.reversed() for m in marks] if reverse else marks
        given = carry
        carry = without_unread(stack, marks[0], given)
        if options.remat:
            seeds = seeded(dropout, stack)
            y, carry, carries = run_in_segments(of_stack, reverse, stack, x, carry, marks, seeds)
        else:
            masks = dropout_masks(stack, dropout, B, T, reverse)
            marks = [masked.marked(m) for masked, m in zip(masks, marks, strict=True)]
            y, carry, carries = run_stack(of_stack, stack, x, carry, marks)
        carry, carries = with_unread(marks[0], given, carry, carries)
        if reverse:
            y, carries = jax.tree.map(lambda h: h[::-1], (y, carries))
        return y if real is None else IN_ROWS.choose(real, y), carry, carries

    dtype = jax.tree.leaves(validate.carry_like(stack, 1))[0].dtype
    if isinstance(x, Lookup):
        x = Lookup(jnp.asarray(x.table, dtype), x.ids)
    else:
        x = jnp.asarray(x, dtype)
    row = None if len(rows) == 1 else jnp.arange(math.prod(rows), dtype=jnp.uint32).reshape(rows)
    axes = tuple(range(1, 1 + len(rows)))
    of_rows = over_batch_axes(run, x, rows)
    of_rows = sharded_by_xla(of_rows, x, (0, *axes, None), axes, (0, *axes))
    inputs = x, sequences.reset, sequences.real, sequences.mask
    y, last, carries = of_rows(inputs, carry, initial, row, stack, dropout)
    return (y, last, carries) if options.return_carries else (y, last)


def bidirectional(
    forward: Layers,
    backward: Layers,
    x: Float[AnyArray, "*B T F"] | Lookup,
    carry: Tree = None,
    *,
    reset: Shaped[AnyArray, "*B T"] | None = None,
    lengths: Integer[AnyArray, "*rows"] | None = None,
    mask: Shaped[AnyArray, "*B T"] | None = None,
    initial: Tree = None,
    time_major: bool = False,
    return_carries: bool = False,
    dropout: Dropouts = None,
    remat: bool = False,
    implementation: str = "auto",
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
      initial: a pair, each part as for `unroll`: what a reset sets, and the carry if that is None.
      return_carries: also return the carries after every step, as a pair.
      dropout: as for `unroll`; each direction has masks of its own.

    Returns:
      (y, carry): y (B, T, H + H), forward outputs first, and the pair of carries after the last
      step that each direction reads; for the backward layers, this is step 0. With
      `return_carries`, (y, carry, carries).

    Raises:
      ValueError: as `unroll`; the lists have different lengths, only one direction is a list, or
        only one is residual; or `carry` or `initial` is not a pair.
      TypeError: as `unroll`.
    """
    options = _Options(implementation, time_major, return_carries, remat)
    arguments = _Arguments(validate.as_input(x), carry, reset, lengths, mask, initial, dropout)
    return _call(_bidirectional, options, arguments, forward=forward, backward=backward)


@partial(jax.jit, static_argnums=0)
def _bidirectional(
    options: _Options, arguments: _Arguments, forward: Layers, backward: Layers
) -> tuple[Tree, ...]:
    """Compute `bidirectional`: one program."""
    validate.check_layers("forward", forward)
    validate.check_layers("backward", backward)
    (ahead, is_single, is_residual), (back, *kind) = map(validate.as_stack, (forward, backward))
    stacks, L = (ahead, back), len(ahead)
    if L != len(back):
        raise ValueError(
            f"there are {L} forward and {len(back)} backward layers; the numbers must be equal."
        )
    if is_residual != kind[1]:
        raise ValueError("only one direction is a ResidualStack; both must be, or neither.")
    if is_single != kind[0]:
        raise ValueError("only one direction is a list of layers; both must be, or neither.")
    sequences = _enter(options, arguments)
    levels = list(zip(*stacks, strict=True))
    B = math.prod(sequences.batch)
    validate.check_stack(levels, sequences.x.shape[-1], is_residual, B)
    carries, initials = _pair(arguments.carry, "carry"), _pair(arguments.initial, "initial")
    starts = [
        _start(stack, is_single, sequences, *parts)
        for stack, *parts in zip(stacks, carries, initials, strict=True)
    ]
    dropouts = in_two_directions(arguments.dropout, L)
    below = sequences
    results: list[list[tuple[Tree, ...]]] = []  # of each layer, in each direction
    for i in range(L):
        sides: list[tuple[Tree, ...]] = []
        for d, (stack, (start, of_reset)) in enumerate(zip(stacks, starts, strict=True)):
            layer = stack[i : i + 1], below, start[i : i + 1], of_reset[i : i + 1]
            direction = options._replace(reverse=bool(d))
            sides.append(_run(direction, False, *layer, dropouts[d][i]))
        y = jnp.concatenate([y for y, *_ in sides], axis=-1)
        below = below._replace(x=plus_input(y, looked_up(below.x)) if is_residual and i else y)
        results.append(sides)
    # Of each direction, for each layer: the last carry and, with return_carries, those of each step
    numbers = range(1, 2 + options.return_carries)
    ends = [
        sequences.of_carries([tuple(r[d][k][0] for r in results) for k in numbers], is_single)
        for d in (0, 1)
    ]
    return (sequences.left(below.x), *zip(*ends, strict=True))


def _pair(pair: Tree, name: str) -> Sequence[Tree]:
    """Return what is given for the forward and for the backward layers."""
    if pair is None:
        return None, None
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise ValueError(f"{name} must be a pair, the forward and the backward layers.")
    return pair


def step(
    layers: Layers,
    x: Float[AnyArray, "*B F"],
    carry: Tree,
    *,
    reset: Shaped[AnyArray, "*B"] | None = None,
    mask: Shaped[AnyArray, "*B"] | None = None,
    initial: Tree = None,
    implementation: str = "scan",
) -> tuple[Float[Array, "*B H"], Tree]:
    """Compute one step on an input without a time axis, e.g. for a policy that acts.

    It equals `unroll` up to rounding.

    Args:
      layers: as for `unroll`; likewise `initial`.
      x: the input (B, F) of this step, or (F,) of one sequence; or with more batch axes.
      carry: the state before this step, as for `unroll`, but not None.
      reset: (B,), True where the carry is set to `initial` before the step.
      mask: (B,), True where a row takes the step, such as an agent that lives. Another row's output
        is zero, and it keeps its carry, or `initial` if it is reset.
      implementation: as for `unroll`; forward mode needs "autodiff".

    Returns:
      The new h of the last layer (B, H), and the next carry.

    Raises:
      ValueError: the shape or dtype of an argument does not fit, the carry is None, or the
        implementation is unknown.
      TypeError: as `unroll`.
    """
    if carry is None:
        raise ValueError("carry is None; it must be the last step's, or from initial_carry.")
    validate.check_containers(layers, x, carry)
    x = validate.one_array("x", x)
    if x.ndim < 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x is {x.dtype} {x.shape}; it must be floating-point, (B, F), or (F,) for one "
            "sequence."
        )
    arguments = _Arguments(x, carry, reset, mask=mask, initial=initial)
    y, next_carry = _call(_step, _Options(implementation), arguments, layers=layers)
    return y, next_carry


def initial_carry(layers: Layers, batch_size: Size | tuple[Size, ...]) -> Tree:
    """Return the carry before the first step, in the dtype of the layer's biases.

    It is zeros, unless a cell of your own starts with something else. It is h (B, H) for one layer,
    (h, c) for an LSTM, and a tuple of these for a list of layers.

    Args:
      batch_size: B; or the sizes of several batch axes or, as (), of none, in a tuple.

    Raises:
      ValueError: `layers` is not a layer or a list of layers; or the batch size is not a whole
        number from 0 to 2³¹ − 1.
    """
    batch = batch_size if isinstance(batch_size, tuple) else (batch_size,)
    for size in batch:
        if not is_symbolic_dim(size):
            check_whole("batch_size", size, least=0)
    validate.check_layers("layers", layers)
    stack, is_single, _ = validate.as_stack(layers)
    carry = tuple(layer.zero_carry(math.prod(batch)) for layer in stack)
    carry = jax.tree.map(validate.strongly_typed, carry)
    if len(batch) != 1:
        carry = jax.tree.map(lambda leaf: leaf.reshape(*batch, *leaf.shape[1:]), carry)
    return carry[0] if is_single else carry
