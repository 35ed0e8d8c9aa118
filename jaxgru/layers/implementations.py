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
    Mask,
    ParallelLayer,
    RecurrentLayer,
    Size,
    Steps,
    apply_mask,
    vary_alike,
)
from jaxgru.cells.products import Lookup, dot, looked_up, product_of_steps, rows
from jaxgru.errors import shown
from jaxgru.layers import wavefront
from jaxgru.layers.arguments import check_features
from jaxgru.layers.layout import IN_ROWS
from jaxgru.layers.over_time import advance, over_time

IMPLEMENTATIONS = ("auto", "scan", "autodiff", "wavefront")
"""How layers can be computed. "scan" has a hand-written gradient. "autodiff" has JAX's, which
forward mode needs. "wavefront" (`wavefront.py`) computes the layers of a stack at the same time,
for GPUs. It falls back to "scan" if it does not support the layers, and for resets, padding,
`reverse` and `return_carries`. "auto" is "scan" until the wavefront has been timed on a GPU."""

ROWS_AT_ONCE = 512  # steps times rows of the batch: see `block_length`


def unroll_autodiff(
    params: CellParams,
    carry: Any,
    steps: Steps,
    constants: Constants = NO_CONSTANTS,
    reverse: bool = False,
    return_carries: bool = False,
) -> tuple[Any, Any]:
    """Compute a layer by its definition: the cell at each step, differentiated by JAX. Slow."""
    cell = cell_of(params)

    def equations(carry: Any, x: Array) -> tuple[Any, None]:
        return cell.step(params, carry, x), None

    def step(carry: Any, now: Steps) -> tuple[Any, Any]:
        carry, _ = advance(IN_ROWS, equations, carry, now, constants)
        return carry, carry if return_carries else hidden(carry)

    steps = steps._replace(x=looked_up(steps.x))
    carry, outputs = jax.lax.scan(step, carry, steps, reverse=reverse)
    return outputs, carry


def unroll_layer(
    params: CellParams,
    carry: Any,
    steps: Steps,
    constants: Constants = NO_CONSTANTS,
    implementation: str = "auto",
    reverse: bool = False,
    return_carries: bool = False,
) -> tuple[Any, Any]:
    """Compute one layer over time; it equals `unroll_autodiff` up to rounding.

    Args:
      params: one layer's parameters.
      carry: the state before the first step.
      steps: the layer's input, as an array or as a `Lookup`; dropout, resets and padding.
      implementation: one of IMPLEMENTATIONS; for a single layer, "wavefront" is "scan".
      reverse: run from the last step to the first.
      return_carries: return the whole carry of every step, not only h.

    Returns:
      The (masked) h' of every step, or the carry of every step; and the carry after the last one.

    Raises:
      ValueError: x does not have as many features as the layer takes.
    """
    cell = cell_of(params)
    layer = cell.prepare(params) if cell.prepare and implementation != "autodiff" else None
    marked = steps.reset is not None or steps.real is not None
    plain = not (marked or reverse or return_carries)
    if isinstance(layer, ParallelLayer) and (plain or layer.every_option):
        return layer.all_steps(carry, steps, constants, reverse)
    if not isinstance(layer, RecurrentLayer):
        return unroll_autodiff(params, carry, steps, constants, reverse, return_carries)
    E, H = sizes(params)
    x, times_W = product_of_steps(steps.x, layer.W)
    check_features(steps.x.table.shape[1] if isinstance(steps.x, Lookup) else x.shape[2], E)

    def run(carry: Any, steps: Steps) -> tuple[Any, Any]:
        """Compute some of the steps."""
        steps = steps._replace(x=layer.plus_bias(times_W(steps.x)))
        outputs, carry = over_time(
            layer.recurrence, layer.U, carry, steps, constants, reverse, return_carries
        )
        return carry, outputs

    # Narrow weights: one block, for the gradients of blocks would be added up in their dtype
    wide = jnp.finfo(layer.W.dtype).bits >= 32
    T, B = x.shape[:2]
    length = block_length(T, B, H) if wide else T
    carry, outputs = in_blocks(run, carry, steps._replace(x=x), length, reverse)
    return outputs, carry


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
    masks: Sequence[tuple[Mask, Mask]],
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
            "forward mode (jvp, jacfwd, hessian) cannot pass a hand-written gradient; it needs "
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
    reverse: bool,
    return_carries: bool,
    layers: Sequence[CellParams],
    x: Float[Array, "T B E"] | Lookup,
    carry: Sequence[Carry],
    masks: Sequence[tuple[Mask, Mask]],
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
        prepared = [make(layer) for layer in layers if (make := cell_of(layer).prepare)]
        recurrent = [layer for layer in prepared if isinstance(layer, RecurrentLayer)]
        if len(recurrent) == len(layers) and wavefront.supports(recurrent, T, carry):
            return *wavefront.unroll_stack(recurrent, x, carry, masks), None
    ends, each = [], []
    for i, (layer, c, (state_mask, output_mask)) in enumerate(
        zip(layers, carry, masks, strict=True)
    ):
        if i and not isinstance(x, Lookup):
            x = x.astype(hidden(c).dtype)  # layers can have different dtypes
        initial_of = None if initial is None or reset is None else initial[i]
        steps = Steps(x, state_mask.keep, reset, real)
        constants = Constants(initial_of, state_mask.scale)
        outputs, c = unroll_layer(
            layer, c, steps, constants, implementation, reverse, return_carries
        )
        x = apply_mask(hidden(outputs), *output_mask)
        ends.append(c)
        each.append(outputs)
    return looked_up(x), tuple(ends), tuple(each) if return_carries else None


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
    if not isinstance(layer, RecurrentLayer):
        return lambda carry, x: cell.step(params, carry, x if table is None else rows(table, x))
    U = jax.tree.map(IN_ROWS.turn, layer.U)
    gates_of = lambda x: IN_ROWS.gates(layer.plus_bias(dot(x, layer.W)), layer.recurrence.gates)
    tables = None if table is None else gates_of(table)

    def step(carry: Carry, x: Array) -> Carry:
        a = gates_of(x) if tables is None else [rows(gate, x) for gate in tables]
        return layer.recurrence.step(IN_ROWS, U, carry, a)[0]

    return step
