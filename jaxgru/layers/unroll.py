"""Recurrent layers for a model of your own: `unroll`, `bidirectional`, `step`, `initial_carry`.

Batch-major. `implementations.py` decides who computes, time-major; the transposes are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float, Integer, Shaped

from jaxgru import cells
from jaxgru.cells import CellParams
from jaxgru.cells.base import AnyArray, Size, check_flags, is_whole
from jaxgru.errors import shown
from jaxgru.layers.arguments import (
    as_array,
    as_carry,
    as_flags,
    as_initial,
    as_input,
    as_stack,
    carry_like,
    check_layer,
    check_order,
    check_sum,
    in_reading_order,
    real_steps,
)
from jaxgru.layers.dropout import Dropouts, dropout_masks, in_two_directions, seeded
from jaxgru.layers.implementations import (
    check_implementation,
    forward_mode_explained,
    plus_input,
    run_in_segments,
    run_stack,
    sharded_by_xla,
)
from jaxgru.layers.stack import ResidualStack


def unroll(
    layers: CellParams | Sequence[CellParams],
    x: Float[AnyArray, "*B T F"],
    carry: Any = None,
    *,
    reset: Shaped[AnyArray, "*B T"] | None = None,
    lengths: Integer[AnyArray, "*rows"] | None = None,
    mask: Shaped[AnyArray, "*B T"] | None = None,
    initial: Any = None,
    reverse: bool = False,
    time_major: bool = False,
    return_carries: bool = False,
    dropout: Dropouts = None,
    remat: bool = False,
    implementation: str = "auto",
) -> tuple[Any, ...]:
    """Run a recurrent layer, or a stack of layers, over a batch of sequences.

    The gradient is hand-written, for reverse mode (`grad`, `grad` of `grad`, `hessian`). Forward
    mode alone (`jvp`, `jacfwd`) needs the implementation "autodiff".

    Args:
      layers: one layer's parameters (`init_gru`, `init_lstm`, `init_rnn`), or a list of them, each
        of which reads the output of the one below. In a `ResidualStack`, each layer above the first
        also adds its input to its output.
      x: the input (B, T, F): rows of the batch, steps, features. It is floating-point, and is
        converted to the dtype of the layer's biases. One sequence may come as (T, F); then neither
        the results nor any other argument has the axis B.
      carry: the state before the first step, as returned here or by `initial_carry`: h (B, H) for
        one layer, an `LSTMState` (h, c) for an LSTM, a tuple of these for a list of layers. None:
        `initial`.
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
        the axis B. It is differentiated, so it can be learned. None: zeros.
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
    stack, one = as_stack("layers", layers)
    check_flags(reverse=reverse, time_major=time_major, return_carries=return_carries, remat=remat)
    check_implementation(implementation)
    check_order(stack, one, x, carry)
    x = as_input(x)
    alone = x.ndim == 2
    axis = 0 if time_major or alone else 1
    T, B, features = x.shape[axis], 1 if alone else x.shape[1 - axis], x.shape[-1]
    if T == 0:
        raise ValueError(f"x is {x.dtype} {x.shape}; it must have at least one step.")
    if remat and is_symbolic_dim(T):
        raise ValueError(f"the number of steps is {T}; remat needs it to be known.")
    residual = isinstance(layers, ResidualStack)
    for i, layer in enumerate(stack):
        units = check_layer(layer, features, i)
        if residual:
            check_sum(units, features, i)
        features = units
    like = carry_like(stack, B)
    if carry is not None:
        carry = as_carry(carry, like, one, alone)
    if initial is not None:
        initial = as_initial(initial, like, one, carry)
    if carry is None:
        carry = initial_carry(stack, B) if initial is None else initial
    if lengths is not None and mask is not None:
        raise ValueError("both lengths and a mask are given; give one of them.")
    if reset is not None:
        reset = as_flags("reset", reset, x.shape[:-1])
    if mask is not None:
        mask = as_flags("mask", mask, x.shape[:-1])
    real = mask if lengths is None else real_steps(lengths, x.shape[:-1], axis)
    if real is not None:  # whatever the padding holds, also NaN, which jax_debug_nans finds below
        x = jnp.where(real[..., None], x, 0)
    if alone:
        x, reset, real = jax.tree.map(lambda a: jnp.expand_dims(a, 1), (x, reset, real))
    elif not time_major:
        x, reset, real = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), (x, reset, real))
    x = jnp.asarray(x, jax.tree.leaves(like)[0].dtype)
    if mask is not None:
        mask = real
    elif reset is not None and real is not None:
        reset = reset & real

    def run(layers: Any, x: Array, carry: Any, dropout: Dropouts, *flags: Any) -> tuple:
        reset, initial, real, mask = flags
        if reverse:
            reset = None if reset is None else in_reading_order(reset, mask)
            x, reset, real = jax.tree.map(lambda a: a[::-1], (x, reset, real))
        options = implementation, return_carries, residual
        if remat:
            more = seeded(dropout, layers), reset, initial, real
            y, carry, carries = run_in_segments(*options, reverse, layers, x, carry, *more)
        else:
            masks = dropout_masks(layers, dropout, B, T, reverse)
            y, carry, carries = run_stack(*options, layers, x, carry, masks, reset, initial, real)
        if reverse:
            y, carries = jax.tree.map(lambda h: h[::-1], (y, carries))
        return y, carry, carries

    run = sharded_by_xla(run, x, (0, 1, None), (1,), (0, 1))
    with forward_mode_explained():
        y, carry, carries = run(stack, x, carry, dropout, reset, initial, real, mask)
    if real is not None:
        y = jnp.where(real[..., None], y, 0)
    if alone:
        y, carries = jax.tree.map(lambda h: h[:, 0], (y, carries))
        carry = jax.tree.map(lambda h: h[0], carry)
    elif not time_major:
        y, carries = jax.tree.map(lambda h: jnp.swapaxes(h, 0, 1), (y, carries))
    carry, carries = (carry[0], carries and carries[0]) if one else (carry, carries)
    return (y, carry, carries) if return_carries else (y, carry)


def bidirectional(
    forward: CellParams | Sequence[CellParams],
    backward: CellParams | Sequence[CellParams],
    x: Float[AnyArray, "*B T F"],
    carry: Any = None,
    *,
    reset: Shaped[AnyArray, "*B T"] | None = None,
    lengths: Integer[AnyArray, "*rows"] | None = None,
    mask: Shaped[AnyArray, "*B T"] | None = None,
    initial: Any = None,
    time_major: bool = False,
    return_carries: bool = False,
    dropout: Dropouts = None,
    remat: bool = False,
    implementation: str = "auto",
) -> tuple[Any, ...]:
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
    ahead, one_ahead = as_stack("forward", forward)
    back, one_back = as_stack("backward", backward)
    stacks, one, L = (ahead, back), one_ahead, len(ahead)
    if L != len(back):
        raise ValueError(
            f"there are {L} forward and {len(back)} backward layers; the numbers must be equal."
        )
    residual = isinstance(forward, ResidualStack)
    if residual != isinstance(backward, ResidualStack):
        raise ValueError("only one direction is a ResidualStack; both must be, or neither.")
    if one != one_back:
        raise ValueError("only one direction is a list of layers; both must be, or neither.")
    check_flags(time_major=time_major, return_carries=return_carries)
    y: Any = as_input(x)
    alone, features = y.ndim == 2, y.shape[-1]
    B = 1 if alone else y.shape[1 if time_major else 0]
    dropouts = in_two_directions(dropout, L)
    options: list[list[dict[str, Any]]] = []  # of each direction, for each layer
    for d, layers in enumerate(stacks):
        like, part = carry_like(layers, B), _part_of_pair(carry, d, "carry")
        start: Any = None if part is None else as_carry(part, like, one, alone)
        if (part := _part_of_pair(initial, d, "initial")) is not None:
            part = as_initial(part, like, one, start)
        if alone:
            start, part = jax.tree.map(lambda leaf: leaf[0], (start, part))
        options.append(
            [
                dict(
                    carry=start and start[i],
                    initial=part and part[i],
                    dropout=dropouts[d][i],
                    reverse=bool(d),
                )
                for i in range(L)
            ]
        )
    both: dict[str, Any] = dict(
        reset=reset,
        lengths=lengths,
        mask=mask,
        time_major=time_major,
        return_carries=return_carries,
        remat=remat,
        implementation=implementation,
    )
    results: list[list[tuple]] = []  # of each layer, in each direction
    for i, layers in enumerate(zip(ahead, back, strict=True)):
        units = sum(check_layer(layer, features, i) for layer in layers)
        if residual:
            check_sum(units, features, i)
        features = units
        results.append(
            [unroll(layer, y, **options[d][i], **both) for d, layer in enumerate(layers)]
        )
        sides = jnp.concatenate([result[0] for result in results[-1]], axis=-1)
        y = plus_input(sides, y) if residual and i else sides
    # Of each direction, for each layer: the carry and, with return_carries, those of every step
    ends = [
        [tuple(result[d][k] for result in results) for d in (0, 1)]
        for k in range(1, 2 + return_carries)
    ]
    pairs = [tuple(e[0] if one else e for e in pair) for pair in ends]
    return (y, *pairs)


def _part_of_pair(pair: Any, direction: int, name: str) -> Any:
    """Return a direction's part of a pair; None, if that is None."""
    if pair is None:
        return None
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise ValueError(f"{name} must be a pair, the forward and the backward layers.")
    return pair[direction]


def step(
    layers: CellParams | Sequence[CellParams],
    x: Float[AnyArray, "*B F"],
    carry: Any,
    *,
    reset: Shaped[AnyArray, "*B"] | None = None,
    initial: Any = None,
    implementation: str = "scan",
) -> tuple[Float[Array, "*B H"], Any]:
    """Compute one step on an input without a time axis, e.g. for a policy that acts.

    It equals `unroll` up to rounding.

    Args:
      layers: as for `unroll`; likewise `initial`.
      x: the input (B, F) of this step, or (F,) of one sequence.
      carry: the state before this step, as for `unroll`, but not None.
      reset: (B,), True where the carry is set to `initial` before the step.
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
    check_order(*as_stack("layers", layers), x, carry)
    x = as_array("x", x)
    if x.ndim not in (1, 2) or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x is {x.dtype} {x.shape}; it must be floating-point, (B, F), or (F,) for one "
            "sequence."
        )
    flags = None if reset is None else as_flags("reset", reset, x.shape[:-1])[None]
    options: dict[str, Any] = dict(
        reset=flags, initial=initial, time_major=True, implementation=implementation
    )
    y, carry = unroll(layers, x[None], carry, **options)
    return y[0], carry


def initial_carry(layers: CellParams | Sequence[CellParams], batch_size: Size) -> Any:
    """Return the carry before the first step: zeros, in the dtype of the layer's biases.

    It is h (B, H) for one layer, (h, c) for an LSTM, and a tuple of these for a list of layers.

    Raises:
      ValueError: `layers` is not a layer or a list of layers; or the batch size is not a whole
        number from 0 to 2³¹ − 1.
    """
    known = not is_symbolic_dim(batch_size)
    if known and not (is_whole(batch_size) and 0 <= batch_size < 2**31):
        raise ValueError(
            f"batch_size is {shown(batch_size)}; it must be a whole number from 0 to 2^31 − 1."
        )
    stack, one = as_stack("layers", layers)
    carry = tuple(cells.zero_carry(layer, batch_size) for layer in stack)
    return carry[0] if one else carry
