"""Who computes a stack of layers over time. Inside, arrays are time-major, and one layer is

    unroll_layer(params, carry, steps) -> (h' of every step (T, B, H), carry)

`unroll_autodiff` is the reference. `unroll_layer` computes the same values faster, in two ways. x·W
of many steps is ONE product before the scan. The backward scan carries only the gradient of the
state and stores `da`, the gradients of the gates' pre-activations, so the gradient of each weight
is ONE product after the scan. Autodiff would instead add an (H, H) product to an accumulator at
each step. See Appleyard et al. 2016 (arXiv 1604.01946), sections 3.2 and 3.4. On a CPU, this is
done block by block of the steps, so that the arrays stay in the cache.

Weights may be bfloat16 beside biases and states of float32: see `cells.products.dot`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from jaxgru.cells import Carry, CellParams, cell_of, hidden, sizes
from jaxgru.cells.base import (
    NO_CONSTANTS,
    Constants,
    ParallelLayer,
    RecurrentLayer,
    Size,
    Steps,
    apply_mask,
    rounded_inside,
    vary_alike,
)
from jaxgru.cells.products import Lookup, blocks_dot, dot, looked_up, matmul, product_of_steps, rows
from jaxgru.errors import shown
from jaxgru.layers import wavefront
from jaxgru.layers.arguments import check_features
from jaxgru.layers.dropout import Dropouts, LayerMasks, at_step, dropout_masks
from jaxgru.layers.layout import IN_ROWS, Layout
from jaxgru.layers.over_time import advance, over_time

IMPLEMENTATIONS = ("auto", "scan", "autodiff", "wavefront")
"""How layers can be computed. "scan" has a hand-written gradient, if the cell defines one.
"autodiff" has JAX's, which forward mode needs. "wavefront" (`wavefront.py`) computes the layers of
a stack at the same time, for GPUs. It falls back to "scan" if it does not support the layers, and
for resets, padding, `return_carries`, a `ResidualStack`, zoneout and variational dropout at the
state. "auto" is "scan": on the one GPU tried, the wavefront made GRUs faster, an LSTM slower."""

ROWS_AT_ONCE = 512  # steps times rows of the batch: see `block_length`


def unroll_autodiff(
    params: CellParams,
    carry: Any,
    steps: Steps,
    constants: Constants = NO_CONSTANTS,
    return_carries: bool = False,
) -> tuple[Any, Any]:
    """Compute a layer by its definition: the cell at each step, differentiated by JAX. Slow."""
    cell, weights = cell_of(params), rounded_inside(params)

    def step(carry: Any, now: Steps) -> tuple[Any, Any]:
        params = weights()
        equations = lambda carry, x: (cell.step(params, carry, x), None)
        if constants.keep is not None:
            equations = _with_masked_products(params, constants)
        carry, _, _ = advance(IN_ROWS, equations, carry, now, constants)
        return carry, carry if return_carries else hidden(carry)

    steps = steps._replace(x=looked_up(steps.x))
    carry, outputs = jax.lax.scan(step, carry, steps)
    return outputs, carry


def _with_masked_products(
    params: CellParams, constants: Constants
) -> Callable[[Any, Array], tuple[Any, Any]]:
    """Return a cell's equations, in whose products h lacks the units that dropout drops.

    Raises:
      ValueError: the cell has no known products of h with weights.
    """
    cell = cell_of(params)
    layer = cell.prepare(params) if cell.prepare else None
    if not isinstance(layer, RecurrentLayer) or layer.W is None:
        raise ValueError(
            "variational dropout at the state masks h in its products with weights, but jaxgru "
            f"knows of none in the cell {cell.name}; choose another site or kind."
        )
    product = lambda U, h: matmul(h, U) if U.ndim < 3 else blocks_dot(h, U)
    in_rows = Layout(-1, product, product)
    masked, U = in_rows.masked(constants.keep, constants.scale), tuple(map(in_rows.turn, layer.U))
    recurrence = layer.recurrence

    def equations(carry: Any, x: Array) -> tuple[Any, Any]:
        dtype = hidden(carry).dtype
        a = layer.plus_bias(matmul(x, layer.W)).astype(dtype)
        wide = tuple(leaf.astype(dtype) for leaf in U)
        return recurrence.step(masked, wide, carry, masked.gates(a, recurrence.gates))

    return equations


def unroll_layer(
    params: CellParams,
    carry: Any,
    steps: Steps,
    constants: Constants = NO_CONSTANTS,
    implementation: str = "auto",
    return_carries: bool = False,
) -> tuple[Any, Any]:
    """Compute one layer over time; it equals `unroll_autodiff` up to rounding.

    Args:
      params: one layer's parameters.
      carry: the state before the first step.
      steps: the layer's input, as an array or as a `Lookup`; dropout, zoneout, resets and padding.
      implementation: one of IMPLEMENTATIONS; for a single layer, "wavefront" is "scan".
      return_carries: return the whole carry of every step, not only h.

    Returns:
      The (masked) h' of every step, or the carry of every step; and the carry after the last one.

    Raises:
      ValueError: x does not have as many features as the layer takes; or there is variational
        dropout at the state, but the cell has no known products of h with weights.
    """
    cell = cell_of(params)
    layer = cell.prepare(params) if cell.prepare and implementation != "autodiff" else None
    marked = steps.reset is not None or steps.real is not None or return_carries
    only_masks = steps.update is None and constants.keep is None
    if isinstance(layer, ParallelLayer) and only_masks and (layer.every_option or not marked):
        return layer.all_steps(carry, steps, constants)
    if not isinstance(layer, RecurrentLayer) or (layer.W is None and constants.keep is not None):
        return unroll_autodiff(params, carry, steps, constants, return_carries)
    E, H = sizes(params)
    x, times_W = product_of_steps(steps.x, layer.W)
    check_features(steps.x.table.shape[1] if isinstance(steps.x, Lookup) else x.shape[2], E)

    # Narrow weights: one block, for the gradients of blocks would be added up in their dtype
    wide = jnp.finfo(layer.U[0].dtype).bits >= 32
    T, B = x.shape[:2]
    length = block_length(T, B, H) if wide else T
    steps = steps._replace(x=x)
    # To compute a shorter last block would be a second program, and take twice the time to compile.
    # So it reads steps of zeros beyond the last one, and the last carry is one of all carries.
    beyond = 0 if length == T else -T % length
    if beyond:
        steps = jax.tree.map(lambda a: jnp.pad(a, [(0, beyond)] + [(0, 0)] * (a.ndim - 1)), steps)

    def run(carry: Any, steps: Steps) -> tuple[Any, Any]:
        """Compute some of the steps."""
        steps = steps._replace(x=layer.plus_bias(times_W(steps.x)))
        every_carry = return_carries or beyond > 0
        outputs, carry = over_time(layer.recurrence, layer.U, carry, steps, constants, every_carry)
        return carry, outputs

    carry, outputs = in_blocks(run, carry, steps, length)
    if beyond:
        outputs = jax.tree.map(lambda h: h[:T], outputs)
        carry = jax.tree.map(lambda h: h[-1], outputs)
    return outputs if return_carries else hidden(outputs), carry


def block_length(T: Size, B: Size, H: int) -> Size:
    """Return how many steps of a layer are computed at once: x·W, the recurrence, the gradients.

    All of them on a GPU. On a CPU, as many as fit in the cache, but enough to amortize the
    sum of the weights' gradients over the blocks. Measured on 2 cores, training steps are 1.2×
    (astra_alpha), 1.3× (astra_beta), 1.03× (astra_gamma) and 1.0× (leviathan) as fast as with all
    steps at once, and take 0.53 to 0.81 of the memory.
    """
    if jax.default_backend() != "cpu" or not isinstance(T, int) or not isinstance(B, int):
        return T  # `jax.export` has symbolic sizes
    most = max((ROWS_AT_ONCE if H < 512 else 2 * ROWS_AT_ONCE) // max(B, 1), 1)
    if T <= most + most // 2:  # about as fast
        return T
    return nearest_divisor(T, most) or -(-T // -(-T // most))


def nearest_divisor(T: int, wanted: int) -> int | None:
    """Return the divisor of T nearest to a number; None if none is within half of it."""
    near = range(wanted // 2 + 1, wanted + wanted // 2 + 1)
    divisors = [length for length in near if T % length == 0]
    return min(divisors, key=lambda length: abs(length - wanted), default=None)


def in_blocks(
    run: Callable[[Any, Any], tuple[Any, Any]], carry: Any, inputs: Any, length: Size
) -> tuple[Any, Any]:
    """Apply `run`, (carry, inputs (T, ...)) → (carry, outputs (T, ...)), block by block.

    A block has `length` steps, which divides T.
    """
    T = jax.tree.leaves(inputs)[0].shape[0]
    if length == T:
        return run(carry, inputs)
    blocks = jax.tree.map(lambda a: a.reshape(T // length, length, *a.shape[1:]), inputs)
    carry, outputs = jax.lax.scan(run, carry, blocks)
    return carry, jax.tree.map(lambda h: h.reshape(T, *h.shape[2:]), outputs)


def unroll_stack(
    layers: Sequence[CellParams],
    x: Float[Array, "T B E"] | Lookup,
    carry: Sequence[Carry],
    masks: Sequence[LayerMasks],
    implementation: str = "auto",
) -> tuple[Float[Array, "T B H"], tuple[Carry, ...]]:
    """Compute a stack of layers: the input of each is the output of the one below.

    Args:
      masks: each layer's dropout.
      implementation: one of IMPLEMENTATIONS.

    Returns:
      The last layer's (masked) output, and the carry of every layer.

    Raises:
      ValueError: the implementation is not one of IMPLEMENTATIONS.
    """
    check_implementation(implementation)
    return run_stack(implementation, False, False, layers, x, carry, masks)[:2]


@contextmanager
def forward_mode_explained() -> Iterator[None]:
    """Let JAX's error about forward mode through a hand-written gradient say what would work."""
    try:
        yield
    except TypeError as error:
        if not {"forward-mode", "custom_vjp"} <= set(str(error).split()):
            raise
        raise TypeError(
            "forward mode (jvp, jacfwd) cannot pass a layer's hand-written gradient; it needs "
            'implementation="autodiff".'
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
def run_stack(
    implementation: str,
    return_carries: bool,
    residual: bool,
    layers: Sequence[CellParams],
    x: Float[Array, "T B E"] | Lookup,
    carry: Sequence[Carry],
    masks: Sequence[LayerMasks],
    reset: Bool[Array, "T B"] | None = None,
    initial: Sequence[Carry] | None = None,
    real: Bool[Array, "T B"] | None = None,
) -> tuple[Array, tuple[Carry, ...], tuple | None]:
    """Compute a stack of layers: the output, the last carries, and the carries of every step.

    With `residual`, each layer above the first adds its input to its output.
    """
    marked = reset is not None or real is not None
    only_masks = not (marked or return_carries or residual)
    layers, x, carry, masks, reset, initial, real = vary_alike(
        (layers, x, carry, masks, reset, initial, real)
    )
    if masks[0].input.keep is not None:
        x = apply_mask(looked_up(x), *masks[0].input)
    only_masks &= all(m.product.keep is None and m.zoneout.keep is None for m in masks)
    if implementation == "wavefront" and only_masks:
        T = (x.ids if isinstance(x, Lookup) else x).shape[0]
        prepared = [make(layer) for layer in layers if (make := cell_of(layer).prepare)]
        recurrent = [layer for layer in prepared if isinstance(layer, RecurrentLayer)]
        if len(recurrent) == len(layers) and wavefront.supports(recurrent, T, carry):
            return *wavefront.unroll_stack(recurrent, x, carry, masks), None
    ends, each = [], []
    for i, (layer, c, mask) in enumerate(zip(layers, carry, masks, strict=True)):
        if i and not isinstance(x, Lookup):
            x = x.astype(hidden(c).dtype)  # layers can have different dtypes
        initial_of = None if initial is None or reset is None else initial[i]
        steps = Steps(x, mask.state.keep, reset, real, mask.zoneout.keep)
        scale = mask.state.scale if mask.product.keep is None else mask.product.scale
        constants = Constants(initial_of, scale, mask.product.keep)
        outputs, c = unroll_layer(layer, c, steps, constants, implementation, return_carries)
        h = apply_mask(hidden(outputs), *mask.output)
        x = plus_input(h, looked_up(x)) if residual and i else h
        ends.append(c)
        each.append(outputs)
    return looked_up(x), tuple(ends), tuple(each) if return_carries else None


def plus_input(h: Float[Array, "*n H"], x: Float[Array, "*n H"]) -> Float[Array, "*n H"]:
    """Return a layer's output in a residual stack, in its own dtype."""
    return h + x.astype(h.dtype)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def run_in_segments(
    implementation: str,
    return_carries: bool,
    residual: bool,
    reverse: bool,
    layers: Sequence[CellParams],
    x: Float[Array, "T B E"],
    carry: Sequence[Carry],
    dropout: Dropouts,
    reset: Bool[Array, "T B"] | None = None,
    initial: Sequence[Carry] | None = None,
    real: Bool[Array, "T B"] | None = None,
) -> tuple[Array, tuple[Carry, ...], tuple | None]:
    """Compute `run_stack` `in_segments`, each of which also draws its masks anew.

    With `reverse`, the steps come from the last to the first, and so do the masks.
    """
    layers, x, carry, reset, initial, real = vary_alike((layers, x, carry, reset, initial, real))
    (T, B), weights = x.shape[:2], rounded_inside(layers)

    def segment(carry: Any, of_segment: tuple) -> tuple[Any, Any]:
        layers, (steps, x, reset, real) = weights(), of_segment
        first = at_step(dropout, steps[-1 if reverse else 0])
        masks = dropout_masks(layers, first, B, len(steps), reverse)
        options = implementation, return_carries, residual
        y, carry, carries = run_stack(*options, layers, x, carry, masks, reset, initial, real)
        return carry, (y, carries)

    steps = jnp.arange(T)[::-1] if reverse else jnp.arange(T)
    ends, (y, carries) = in_segments(segment, tuple(carry), (steps, x, reset, real))
    return y, ends, carries


def in_segments(
    run: Callable[[Any, Any], tuple[Any, Any]], carry: Any, inputs: Any
) -> tuple[Any, Any]:
    """Apply `run`, as `in_blocks`, to segments of √T steps, and keep no more than their carries.

    What the gradient needs of a segment is computed anew when its turn comes (Chen et al. 2016,
    arXiv 1604.06174): the memory of 2√T steps instead of T, and one more forward pass.
    """
    T = jax.tree.leaves(inputs)[0].shape[0]
    again = jax.checkpoint(run, prevent_cse=False)  # within a scan, nothing is merged
    length = nearest_divisor(T, math.isqrt(T)) or math.isqrt(T)
    whole = T - T % length
    most = jax.tree.map(lambda a: a[:whole], inputs)
    carry, first = in_blocks(again, carry, most, length)
    if whole == T:
        return carry, first
    carry, last = again(carry, jax.tree.map(lambda a: a[whole:], inputs))
    return carry, jax.tree.map(lambda *h: jnp.concatenate(h), first, last)


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
    layer = cell.prepare(params) if cell.prepare else None
    if not isinstance(layer, RecurrentLayer) or layer.W is None:
        return lambda carry, x: cell.step(params, carry, x if table is None else rows(table, x))
    U = jax.tree.map(IN_ROWS.turn, layer.U)
    gates_of = lambda x: IN_ROWS.gates(layer.plus_bias(dot(x, layer.W)), layer.recurrence.gates)
    tables = None if table is None else gates_of(table)

    def step(carry: Carry, x: Array) -> Carry:
        a = gates_of(x) if tables is None else [rows(gate, x) for gate in tables]
        return layer.recurrence.step(IN_ROWS, U, carry, a)[0]

    return step
