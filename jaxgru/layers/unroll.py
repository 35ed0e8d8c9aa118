"""Recurrent layers for a model of your own: `unroll`, `bidirectional`, `step`, `initial_carry`.

Batch-major. `implementations.py` decides who computes, time-major; the transposes are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Integer

from jaxgru import cells
from jaxgru.cells import CellParams
from jaxgru.cells.base import AnyArray, Size, check_flags, is_whole
from jaxgru.errors import shown
from jaxgru.layers.arguments import (
    as_array,
    as_carry,
    as_initial,
    as_input,
    as_jax,
    as_reset,
    as_stack,
    carry_like,
    check_layer,
    real_steps,
)
from jaxgru.layers.dropout import Dropout, dropout_masks
from jaxgru.layers.implementations import (
    check_implementation,
    forward_mode_explained,
    run_stack,
    sharded_by_xla,
)


def unroll(
    layers: CellParams | Sequence[CellParams],
    x: Float[AnyArray, "B T F"],
    carry: Any = None,
    *,
    reset: Bool[AnyArray, "B T"] | None = None,
    lengths: Integer[AnyArray, "rows"] | None = None,
    initial: Any = None,
    reverse: bool = False,
    time_major: bool = False,
    return_carries: bool = False,
    dropout: Dropout | None = None,
    implementation: str = "auto",
) -> tuple[Any, ...]:
    """Run a recurrent layer, or a stack of layers, over a batch of sequences.

    The gradient is hand-written, for reverse mode (`grad`, and `grad` of `grad`). Forward mode
    needs the implementation "autodiff".

    Args:
      layers: one layer's parameters (`init_gru`, `init_lstm`, `init_rnn`), or a list of them; the
        input of each is then the output of the one below.
      x: the input, in floating point. It is converted to the dtype of the layer's biases.
      carry: the state before the first step, as returned here or by `initial_carry`: for one layer
        h (B, H), or (h, c) for an LSTM, returned with these names; for a list of layers a tuple of
        these. None: `initial`.
      reset: where True, the carry is set to `initial` BEFORE that step: a new episode begins. Steps
        are read backward with `reverse`, so True must then stand at the LAST step of an episode. If
        `starts` (B, T) is True where an episode begins, these are
        `jnp.pad(starts[:, 1:], ((0, 0), (0, 1)))`, also with `lengths`.
      lengths: the number of steps of each row. Steps after it are padding: their outputs are zero,
        the carry stays that of the last real step, and no gradient comes from them.
      initial: the state that a reset sets, in the form of `carry`; without the batch axis, all rows
        have the same. It gets its gradient, so it can be learned. None: zeros.
      reverse: read from the last real step to the first. Padding stays at the end. See `reset`.
      time_major: x and the output are (T, B, ...), and so is `reset`.
      return_carries: also return the carry after every step, in the form of `carry`, with a time
        axis as in y.
      dropout: in training. The mask inside the recurrence is drawn per layer and step.
      implementation: one of `IMPLEMENTATIONS`.

    Returns:
      (y, carry): the last layer's h' of every step (B, T, H), and the carry after the last step.
      With `return_carries`, (y, carry, carries).

    Raises:
      ValueError: the shape or dtype of an argument does not fit; there is no step or no layer; a
        length is not in 0 … T, if the lengths are known (traced ones act as if within it); the
        implementation or the dropout is unknown.
      TypeError: in forward mode, without the implementation "autodiff".
    """
    stack, one = as_stack("layers", layers)
    check_flags(reverse=reverse, time_major=time_major, return_carries=return_carries)
    check_implementation(implementation)
    x = as_input(x)
    T, B, features = x.shape if time_major else (x.shape[1], x.shape[0], x.shape[2])
    if T == 0:
        raise ValueError(f"x is {x.dtype} {x.shape}; it must have at least one step.")
    for i, layer in enumerate(stack):
        features = check_layer(layer, features, i)
    like = carry_like(stack, B)
    if carry is not None:
        carry = as_carry(carry, like, one)
    if initial is not None:
        initial = as_initial(initial, like, one, carry)
    if carry is None:
        carry = initial_carry(stack, B) if initial is None else initial
    if reset is not None:
        reset = as_reset(reset, (T, B) if time_major else (B, T))
    real = None if lengths is None else real_steps(lengths, T, B)
    if not time_major:
        x, reset = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), (x, reset))
    x = jnp.asarray(x, jax.tree.leaves(like)[0].dtype)
    if real is not None:
        x = jnp.where(real[..., None], x, 0)  # whatever the padding holds, also NaN

    def run(layers: Any, x: Array, carry: Any, dropout: Dropout | None, *of_steps: Any) -> tuple:
        masks = dropout_masks(layers, dropout, B, T)
        return run_stack(
            implementation, reverse, return_carries, layers, x, carry, masks, *of_steps
        )

    run = sharded_by_xla(run, x, (0, 1, None), (1,), (0, 1))
    with forward_mode_explained():
        y, carry, carries = run(stack, x, carry, dropout, reset, initial, real)
    if real is not None:
        y = jnp.where(real[..., None], y, 0)
    if not time_major:
        y, carries = jax.tree.map(lambda h: jnp.swapaxes(h, 0, 1), (y, carries))
    carry, carries = (carry[0], carries and carries[0]) if one else (carry, carries)
    return (y, carry, carries) if return_carries else (y, carry)


def bidirectional(
    forward: CellParams | Sequence[CellParams],
    backward: CellParams | Sequence[CellParams],
    x: Float[AnyArray, "B T F"],
    carry: Any = None,
    *,
    lengths: Integer[AnyArray, "rows"] | None = None,
    time_major: bool = False,
    implementation: str = "auto",
) -> tuple[Array, Any]:
    """Run layers in both directions, as `torch.nn.GRU(bidirectional=True)` does.

    Each layer of a stack reads the outputs of both directions of the layer below, side by side.
    For resets, dropout or the carry of every step, call `unroll` in each direction; the resets of
    the backward direction are shifted, see `reset` of `unroll`.

    Args:
      forward: a layer, or a list of layers, that reads from the first step to the last.
      backward: a layer, or a list of as many layers, that reads from the last step to the first.
      x: as for `unroll`, and so are `lengths`, `time_major` and `implementation`.
      carry: a pair, of the forward and of the backward layers, each as for `unroll`.

    Returns:
      y (B, T, H + H), forward outputs first, and the pair of carries after the last steps. The last
      step of the backward layers is the one that reads the first input.

    Raises:
      ValueError: as `unroll`; the lists have different lengths; or the carry is no pair.
    """
    ahead, one_ahead = as_stack("forward", forward)
    back, one_back = as_stack("backward", backward)
    if len(ahead) != len(back):
        raise ValueError(
            f"there are {len(ahead)} forward and {len(back)} backward layers; the numbers must be "
            "equal."
        )
    check_flags(time_major=time_major)
    y = as_jax("x", as_input(x))
    (B, features), size = (y.shape[1 if time_major else 0], y.shape[2]), len(ahead)
    carries: list[Any] = [(None,) * size, (None,) * size]
    if carry is not None:
        if not isinstance(carry, list | tuple) or len(carry) != 2:
            raise ValueError("carry must be a pair: of the forward and of the backward layers.")
        for i, (layers, one) in enumerate(((ahead, one_ahead), (back, one_back))):
            if carry[i] is not None:
                carries[i] = as_carry(carry[i], carry_like(layers, B), one)
    options: dict[str, Any] = dict(
        lengths=lengths, time_major=time_major, implementation=implementation
    )
    ends = []
    for i, (f, b) in enumerate(zip(ahead, back, strict=True)):
        features = check_layer(f, features, i) + check_layer(b, features, i)
        y_ahead, end = unroll(f, y, carries[0][i], **options)
        y_back, back_end = unroll(b, y, carries[1][i], reverse=True, **options)
        y = jnp.concatenate([y_ahead, y_back], axis=-1)
        ends.append((end, back_end))
    ahead_ends, back_ends = zip(*ends, strict=True)
    return y, (ahead_ends[0] if one_ahead else ahead_ends, back_ends[0] if one_back else back_ends)


def step(
    layers: CellParams | Sequence[CellParams],
    x: Float[AnyArray, "B F"],
    carry: Any,
    *,
    reset: Bool[AnyArray, "B"] | None = None,
    initial: Any = None,
    implementation: str = "scan",
) -> tuple[Float[Array, "B H"], Any]:
    """Compute one step on an input without a time axis, e.g. for a policy that acts.

    It equals `unroll` up to rounding.

    Args:
      layers: as for `unroll`, and so are `carry` and `initial`.
      x: the input (B, F) of this step.
      reset: where True, the carry is set to `initial` before the step.
      implementation: one of `IMPLEMENTATIONS`; "autodiff" for forward mode.

    Returns:
      h' of the last layer (B, H), and the next carry.

    Raises:
      ValueError: the shape or dtype of an argument does not fit, or the carry is None.
      TypeError: in forward mode, without the implementation "autodiff".
    """
    if carry is None:
        raise ValueError("carry is None; it must be the one before this step, or initial_carry's.")
    x = as_array("x", x)
    if x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {x.dtype} {x.shape}; it must be floating-point, (B, F).")
    flags = None if reset is None else as_reset(reset, x.shape[:1])[None]
    options: dict[str, Any] = dict(
        reset=flags, initial=initial, time_major=True, implementation=implementation
    )
    y, carry = unroll(layers, x[None], carry, **options)
    return y[0], carry


def initial_carry(layers: CellParams | Sequence[CellParams], batch_size: Size) -> Any:
    """Return zeros as the carry before the first step: of one layer, or a tuple for a list.

    Raises:
      ValueError: the batch size is negative, 2³¹ or more, or not a whole number.
    """
    known = not is_symbolic_dim(batch_size)
    if known and not (is_whole(batch_size) and 0 <= batch_size < 2**31):
        raise ValueError(
            f"batch_size is {shown(batch_size)}; it must be a whole number from 0 to 2^31 − 1."
        )
    stack, one = as_stack("layers", layers)
    carry = tuple(cells.zero_carry(layer, batch_size) for layer in stack)
    return carry[0] if one else carry
