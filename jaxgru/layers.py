"""Recurrent layers over time: `unroll`, `bidirectional` and `step`; which implementation runs.

Users call these three, batch-major. Inside, arrays are time-major, and one layer is

    unroll_layer(params, x (T, B, E), carry, steps) -> (h' of every step (T, B, H), carry)

`unroll_plain` is the reference. `unroll_layer` computes the same values faster, in two ways. x·W of
many steps is ONE product before the scan. The backward scan carries only the gradient of the state
and stores `da`, the gradients of the gates' pre-activations, so the gradient
of each weight is ONE product after the scan. Autodiff would instead add an (H, H) product to an
accumulator at each step. See Appleyard et al. 2016 (arXiv 1604.01946), sections 3.2 and 3.4. On a
CPU, this is done block by block of the steps, so that the arrays stay in the cache.

Weights may be bfloat16 beside biases and states of float32: see `cells.products.dot`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Integer

from jaxgru import cells
from jaxgru.arguments import (
    as_array,
    as_carry,
    as_initial,
    as_input,
    as_jax,
    as_reset,
    as_stack,
    carry_like,
    check_features,
    check_layer,
    real_steps,
)
from jaxgru.cells import Carry, CellParams, cell_of, hidden
from jaxgru.cells.base import (
    PLAIN_STEPS,
    AnyArray,
    AtOnce,
    Mask,
    Recurrent,
    Size,
    Steps,
    apply_mask,
    check_flags,
    plus,
    vary_alike,
    with_hidden,
)
from jaxgru.cells.over_time import IN_ROWS, over_time
from jaxgru.cells.products import Lookup, dot, product_of_steps, rows
from jaxgru.dropout import Dropout, dropout_masks
from jaxgru.errors import shown
from jaxgru.kernels import wavefront

IMPLEMENTATIONS = ("auto", "scan", "plain", "wavefront")
"""How layers can be computed. "scan" has a hand-written gradient. "plain" is `unroll_plain`, which
forward mode needs. "wavefront" (`kernels/`) computes the layers of a stack at the same time, for
GPUs. It falls back to "scan" if it does not support the layers, and for resets, padding, `reverse`
and `return_carries`. "auto" is "scan" until the wavefront has been timed on a GPU."""

ROWS_AT_ONCE = 512  # steps times rows of the batch: see `block_length`


# --- For users: batch-major


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
    needs the implementation "plain".

    Args:
      layers: one layer's parameters (`init_gru`, `init_lstm`, `init_rnn`), or a list of them; the
        input of each is then the output of the one below.
      x: the input, in floating point. It is converted to the dtype of the layer's biases.
      carry: the state before the first step, as returned here or by `initial_carry`: for one layer
        h (B, H), or (h, c) for an LSTM; for a list of layers a tuple of these. None: `initial`.
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
      TypeError: in forward mode, without the implementation "plain".
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
        return _run(implementation, reverse, return_carries, layers, x, carry, masks, *of_steps)

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
    return y, (
        ahead_ends[0] if one_ahead else ahead_ends,
        back_ends[0] if one_back else back_ends,
    )


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
      implementation: one of `IMPLEMENTATIONS`; "plain" for forward mode.

    Returns:
      h' of the last layer (B, H), and the next carry.

    Raises:
      ValueError: the shape or dtype of an argument does not fit, or the carry is None.
      TypeError: in forward mode, without the implementation "plain".
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
      ValueError: the batch size is negative or not a whole number.
    """
    symbolic = is_symbolic_dim(batch_size)
    whole = isinstance(batch_size, int | np.integer) and not isinstance(batch_size, bool)
    if not symbolic and not (whole and batch_size >= 0):
        raise ValueError(
            f"batch_size is {shown(batch_size)}; it must be a whole number, 0 or more."
        )
    stack, one = as_stack("layers", layers)
    carry = tuple(cells.zero_carry(layer, batch_size) for layer in stack)
    return carry[0] if one else carry


# --- Inside: time-major


def unroll_plain(
    params: CellParams,
    x: Float[Array, "T B E"] | Lookup,
    carry: Carry,
    steps: Steps = PLAIN_STEPS,
    reverse: bool = False,
    return_carries: bool = False,
) -> tuple[Any, Carry]:
    """Compute a layer by its definition: the cell at each step, differentiated by JAX. Slow."""
    cell = cell_of(params)

    def step(carry: Carry, inputs: tuple) -> tuple[Carry, Any]:
        x, keep, reset, real = inputs
        current = carry if reset is None else IN_ROWS.choose(~reset, carry, steps.initial)
        after = cell.step(params, current, x)
        mask = steps.mask and steps.mask._replace(keep=keep)
        after = with_hidden(after, apply_mask(hidden(after), mask))
        after = after if real is None else IN_ROWS.choose(real, after, carry)
        return after, after if return_carries else hidden(after)

    inputs = _looked_up(x), steps.mask and steps.mask.keep, steps.reset, steps.real
    carry, h = jax.lax.scan(step, carry, inputs, reverse=reverse)
    return h, carry


def unroll_layer(
    params: CellParams,
    x: Float[Array, "T B E"] | Lookup,
    carry: Carry,
    steps: Steps = PLAIN_STEPS,
    implementation: str = "auto",
    reverse: bool = False,
    return_carries: bool = False,
) -> tuple[Any, Carry]:
    """Compute one layer over time, equal to `unroll_plain` up to rounding, with its own gradient.

    Args:
      params: one layer's parameters.
      x: the layer's input, as an array or as a `Lookup`.
      carry: the state before the first step.
      steps: dropout, resets and padding.
      implementation: one of IMPLEMENTATIONS; for a single layer, "wavefront" is "scan".
      reverse: run from the last step to the first.
      return_carries: return the whole carry of every step, not only h.

    Returns:
      The (masked) h' of every step, or the carry of every step; and the carry after the last one.

    Raises:
      ValueError: x does not have as many features as the layer takes.
    """
    cell = cell_of(params)
    layer = cell.fast(params) if cell.fast and implementation != "plain" else None
    marked = steps.reset is not None or steps.real is not None
    only_mask = not (marked or reverse or return_carries)
    if isinstance(layer, AtOnce) and only_mask:
        return layer.all_steps(_looked_up(x), carry, steps.mask)
    if not isinstance(layer, Recurrent):
        return unroll_plain(params, x, carry, steps, reverse, return_carries)
    features = x.table.shape[1] if isinstance(x, Lookup) else x.shape[2]
    check_features(features, layer.W.shape[0])
    of_steps, times_W = product_of_steps(x, layer.W)

    def run(carry: Carry, inputs: tuple) -> tuple[Carry, Any]:
        """Compute some of the steps."""
        x, keep, reset, real = inputs
        a = plus(times_W(x), layer.b)
        mask = steps.mask and steps.mask._replace(keep=keep)
        some = Steps(mask, reset, steps.initial, real)
        h, carry = over_time(layer.recurrence, layer.U, carry, a, some, reverse, return_carries)
        return carry, h

    T, B, H = *of_steps.shape[:2], hidden(carry).shape[-1]
    # Narrow weights: one block, for the gradients of blocks would be added up in their dtype
    wide = jnp.finfo(layer.W.dtype).bits >= 32
    inputs = of_steps, steps.mask and steps.mask.keep, steps.reset, steps.real
    carry, h = in_blocks(run, carry, inputs, block_length(T, B, H) if wide else T, reverse)
    return h, carry


def block_length(T: Size, B: Size, H: int) -> Size:
    """Return how many steps of a layer are computed at once: x·W, the recurrence, the gradients.

    All of them on a GPU. On a CPU, as many as fit in the cache, but enough to amortize the
    sum of the weights' gradients over the blocks. Measured on 2 cores, training steps are 1.2×
    (astra_alpha), 1.3× (astra_beta), 1.03× (astra_gamma) and 1.0× (leviathan) as fast as with all
    steps at once, and take 0.53 to 0.81 of the memory.
    """
    if jax.default_backend() != "cpu" or not isinstance(T, int) or not isinstance(B, int):
        return T  # `jax.export` has symbolic sizes
    most = (ROWS_AT_ONCE if H < 512 else 2 * ROWS_AT_ONCE) // max(B, 1)
    return min(T, 2 ** (max(most, 1).bit_length() - 1))  # divides most lengths that people use


def in_blocks(
    run: Callable[[Carry, Any], tuple[Carry, Any]],
    carry: Carry,
    inputs: Any,
    length: Size,
    reverse: bool = False,
) -> tuple[Carry, Any]:
    """Apply `run`, (carry, inputs (T, ...)) → (carry, outputs (T, ...)), block by block.

    A block has `length` steps; the last one of the sequence may be shorter.
    """
    T = jax.tree.leaves(inputs)[0].shape[0]
    if length == T:
        return run(carry, inputs)
    whole = T - T % length
    n = whole // length
    blocks = jax.tree.map(lambda a: a[:whole].reshape(n, length, *a.shape[1:]), inputs)
    rest, h_rest = jax.tree.map(lambda a: a[whole:], inputs), None
    if reverse and whole < T:
        carry, h_rest = run(carry, rest)
    carry, h = jax.lax.scan(run, carry, blocks, reverse=reverse)
    if not reverse and whole < T:
        carry, h_rest = run(carry, rest)
    h = jax.tree.map(lambda h: h.reshape(whole, *h.shape[2:]), h)
    return carry, h if h_rest is None else jax.tree.map(lambda *h: jnp.concatenate(h), h, h_rest)


def unroll_stack(
    layers: Sequence[CellParams],
    x: Float[Array, "T B E"] | Lookup,
    carry: Sequence[Carry],
    masks: Sequence[tuple[Mask | None, Mask | None]],
    implementation: str = "auto",
) -> tuple[Float[Array, "T B H"], tuple[Carry, ...]]:
    """Compute a stack of layers: the input of each is the output of the one below.

    Args:
      masks: a pair for each layer: dropout inside its recurrence, and on its output.
      implementation: one of IMPLEMENTATIONS.

    Returns:
      The last layer's (masked) output, and the carry of every layer.

    Raises:
      ValueError: the implementation is not one of IMPLEMENTATIONS.
    """
    check_implementation(implementation)
    return _run(implementation, False, False, layers, x, carry, masks)[:2]


@contextmanager
def forward_mode_explained() -> Iterator[None]:
    """Let JAX's error about forward mode through a hand-written gradient say what would work."""
    try:
        yield
    except TypeError as error:
        if not {"forward-mode", "custom_vjp"} <= set(str(error).split()):
            raise
        raise TypeError(
            "forward mode (jvp, jacfwd, hessian) cannot pass a hand-written gradient; it needs "
            'implementation="plain".'
        ) from None


def check_implementation(implementation: Any) -> None:
    """Raise ValueError if it is not one of IMPLEMENTATIONS."""
    if not isinstance(implementation, str) or implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"the implementation is {shown(implementation)}; it must be one of "
            f"{', '.join(IMPLEMENTATIONS)}."
        )


# Called outside of `jit`, this is one program, which is compiled once; within, it changes nothing
@partial(jax.jit, static_argnums=(0, 1, 2))
def _run(
    implementation: str,
    reverse: bool,
    return_carries: bool,
    layers: Sequence[CellParams],
    x: Float[Array, "T B E"] | Lookup,
    carry: Sequence[Carry],
    masks: Sequence[tuple[Mask | None, Mask | None]],
    reset: Bool[Array, "T B"] | None = None,
    initial: Sequence[Carry] | None = None,
    real: Bool[Array, "T B"] | None = None,
) -> tuple[Array, tuple[Carry, ...], tuple | None]:
    """Compute a stack of layers: the output, the last carries, and the carries of every step."""
    marked = reset is not None or real is not None
    only_masks = not (marked or reverse or return_carries)
    layers, x, carry, masks, reset, initial, real = vary_alike(
        (layers, x, carry, masks, reset, initial, real)
    )
    if implementation == "wavefront" and only_masks:
        T = (x.ids if isinstance(x, Lookup) else x).shape[0]
        fast = [make(layer) for layer in layers if (make := cell_of(layer).fast)]
        recurrent = [layer for layer in fast if isinstance(layer, Recurrent)]
        if len(recurrent) == len(layers) and wavefront.supports(recurrent, T, carry):
            return *wavefront.unroll_stack(recurrent, x, carry, masks), None
    ends, carries = [], []
    for i, (layer, c, (state_mask, output_mask)) in enumerate(
        zip(layers, carry, masks, strict=True)
    ):
        if i and not isinstance(x, Lookup):
            x = x.astype(hidden(c).dtype)  # layers can have different dtypes
        initial_of = None if initial is None or reset is None else initial[i]
        steps = Steps(state_mask, reset, initial_of, real)
        h, c = unroll_layer(layer, x, c, steps, implementation, reverse, return_carries)
        x = apply_mask(h[0] if isinstance(h, tuple) else h, output_mask)
        ends.append(c)
        carries.append(h)
    return _looked_up(x), tuple(ends), tuple(carries) if return_carries else None


def sharded_by_xla(function: Callable, x: Array, *outputs: tuple[int | None, ...]) -> Callable:
    """Return the function with its sharding left to XLA, if x is on a mesh of explicit axes.

    With such a mesh, the default of `jax.make_mesh`, the sharding is a part of an array's type, and
    a function has to state it where it is ambiguous. Here XLA infers it, as with other meshes.

    Args:
      outputs: of each output, for each of its axes, the axis of x that is sharded alike, or None.
    """
    sharding = jax.typeof(x).sharding
    mesh, spec = sharding.mesh, sharding.spec
    if AxisType.Explicit not in mesh.axis_types:
        return function
    specs = [P(*(None if axis is None else spec[axis] for axis in axes)) for axes in outputs]
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    return jax.sharding.auto_axes(function, out_sharding=shardings)


def layer_stepper(
    params: CellParams, table: Float[Array, "V E"] | None = None
) -> Callable[[Carry, Array], Carry]:
    """Return a one-step function with its step-independent products precomputed.

    Args:
      params: one layer's parameters.
      table: if given, each step takes row numbers (B,) of this table in place of the input (B, E).

    Returns:
      A function (carry, input) → next carry, equal to `cells.cell` up to rounding.
    """
    cell = cell_of(params)
    layer = cell.fast(params) if cell.fast else None
    if not isinstance(layer, Recurrent):
        return lambda carry, x: cell.step(params, carry, x if table is None else rows(table, x))
    W, b, H = layer.W, layer.b, layer.U[0].shape[0]
    gates = lambda a: IN_ROWS.gates(a, H)
    tables = None if table is None else gates(plus(dot(table, W), b))

    def step(carry: Carry, x: Array) -> Carry:
        a = gates(plus(dot(x, W), b)) if tables is None else [rows(gate, x) for gate in tables]
        return layer.recurrence.step(IN_ROWS, layer.U, carry, a)[0]

    return step


def _looked_up(x: Array | Lookup) -> Array:
    return x.rows() if isinstance(x, Lookup) else x
