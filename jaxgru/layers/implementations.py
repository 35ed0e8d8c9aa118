"""Who computes a stack of layers over time. Inside, arrays are time-major, and one layer is

    unroll_layer(params, carry, x, marks) -> (h' of every step (T, B, H), carry)

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
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxgru.cells import Carry, CellParams, cell, hidden, sizes
from jaxgru.cells.base import Size
from jaxgru.cells.layout import IN_ROWS, PLAIN
from jaxgru.cells.marks import NO_MARKS, Marks
from jaxgru.cells.products import Lookup, before_lookup, looked_up
from jaxgru.cells.promotion import rounded_inside, vary_alike
from jaxgru.layers import wavefront
from jaxgru.layers.arguments import check_features
from jaxgru.layers.derived import derived
from jaxgru.layers.dropout import Dropouts, at_step, dropout_masks
from jaxgru.layers.over_time import advance, over_time

IMPLEMENTATIONS = ("auto", "scan", "autodiff", "wavefront")
"""How layers can be computed. "scan" has a gradient of jaxgru's own, by hand or derived. "autodiff"
has JAX's, which forward mode needs. "wavefront" (`wavefront.py`) computes the layers of a stack at
the same time, for GPUs. It falls back to "scan" if it does not support the layers, and for resets,
padding, `return_carries`, a `ResidualStack`, zoneout and variational dropout at the state. "auto"
is "scan": on the one GPU tried, the wavefront made GRUs faster, an LSTM slower."""

ROWS_AT_ONCE, FEWEST_BLOCKS = 512, 4  # steps times rows of the batch: see `block_length`


def unroll_autodiff(
    params: CellParams,
    carry: Any,
    x: Array | Lookup,
    marks: Marks = NO_MARKS,
    return_carries: bool = False,
) -> tuple[Any, Any]:
    """Compute a layer by its definition: the cell at each step, differentiated by JAX. Slow."""
    weights, layout = rounded_inside(params), PLAIN.dropping(marks.product)

    def step(carry: Any, now: tuple[Array, Marks]) -> tuple[Any, Any]:
        equations = lambda carry: (cell(weights(), carry, now[0], layout), None)
        carry, _, _ = advance(IN_ROWS, equations, carry, marks.at(now[1]))
        return carry, carry if return_carries else hidden(carry)

    carry, outputs = jax.lax.scan(step, carry, (looked_up(x), marks.each_step()))
    return outputs, carry


def check_products(params: CellParams, carry: Any, a: jax.ShapeDtypeStruct) -> None:
    """Raise ValueError if a cell has no products of h with weights, which dropout could mask."""
    dropped: list[bool] = []
    layout = PLAIN._replace(drop=lambda h: (dropped.append(True), h)[1])
    jax.eval_shape(lambda params, carry, a: params.step(layout, carry, a), params, carry, a)
    if not dropped:
        raise ValueError(
            "variational dropout at the state masks h in its products with weights, but jaxgru "
            f"knows of none in the cell {params.name}; choose another site or kind."
        )


def unroll_layer(
    params: CellParams,
    carry: Any,
    x: Array | Lookup,
    marks: Marks = NO_MARKS,
    implementation: str = "auto",
    return_carries: bool = False,
) -> tuple[Any, Any]:
    """Compute one layer over time; it equals `unroll_autodiff` up to rounding.

    Args:
      params: one layer's parameters.
      carry: the state before the first step.
      x: the layer's input (T, B, E).
      marks: dropout, zoneout, resets and padding.
      implementation: one of IMPLEMENTATIONS; for a single layer, "wavefront" is "scan".
      return_carries: return the whole carry of every step, not only h.

    Returns:
      The (masked) h' of every step, or the carry of every step; and the carry after the last one.
    """
    E, H = sizes(params)
    T, B, features = x.shape
    check_features(features, E)
    dtype = hidden(carry).dtype
    first_a = lambda params: params.inputs(jnp.zeros((B, E), dtype)).astype(dtype)
    if marks.product.keep is not None:
        check_products(params, carry, jax.eval_shape(first_a, params))
    if implementation == "autodiff":
        return unroll_autodiff(params, carry, x, marks, return_carries)
    marked = marks.reset is not None or marks.real is not None or return_carries
    only_masks = marks.update is None and marks.product.keep is None
    at_once = only_masks and (params.every_mark or not marked)
    if at_once and (done := params.all_steps(carry, x, marks)) is not None:
        return done
    gradient = params.by_hand() or derived(params, carry, jax.eval_shape(first_a, params))
    if gradient is None:
        return unroll_autodiff(params, carry, x, marks, return_carries)
    recurrence, U = gradient
    inputs, steps = before_lookup(params.inputs, x)

    # Narrow weights: one block, for the gradients of blocks would be added up in their dtype
    wide = all(jnp.finfo(leaf.dtype).bits >= 32 for leaf in jax.tree.leaves(params))
    length = block_length(T, B, H, params.by_hand() is None) if wide else T
    steps = steps, marks.each_step()
    # To compute a shorter last block would be a second program, and take twice the time to compile.
    # So it reads the last step again and again, and the last carry is one of all carries.
    beyond = 0 if length == T else -T % length
    if beyond:
        more = lambda a: jnp.pad(a, [(0, beyond)] + [(0, 0)] * (a.ndim - 1), mode="edge")
        steps = jax.tree.map(more, steps)

    def run(carry: Any, steps: tuple[Array, Marks]) -> tuple[Any, Any]:
        """Compute some of the steps."""
        every, now = return_carries or beyond > 0, marks.at(steps[1])
        outputs, carry = over_time(recurrence, U, carry, inputs(steps[0]), now, every)
        return carry, outputs

    carry, outputs = in_blocks(run, carry, steps, length)
    if beyond:
        outputs = jax.tree.map(lambda h: h[:T], outputs)
        carry = jax.tree.map(lambda h: h[-1], outputs)
    return outputs if return_carries else hidden(outputs), carry


def block_length(T: Size, B: Size, H: int, is_derived: bool = False) -> Size:
    """Return how many steps of a layer are computed at once: x·W, the recurrence, the gradients.

    All of them on a GPU, or if they are few. On a CPU, as many as fit in the cache, but enough to
    amortize the sum of the weights' gradients over the blocks. With many rows and few units, one
    step is enough: over 64 rows × 128 steps, on one core of an AMD EPYC with JAX 0.12, the gradient
    of a GRU or an LSTM of 32 or 64 units is 1.06 to 1.15× as fast as with 8 steps at once, and a
    derived one, which saves more for each step, 1.1 to 1.5× up to 256 units.
    """
    if jax.default_backend() != "cpu" or not isinstance(T, int) or not isinstance(B, int):
        return T  # `jax.export` has symbolic sizes
    few = B >= 16 and H <= 256 if is_derived else B >= 32 and H <= 64
    most = max((32 if few else ROWS_AT_ONCE if H < 512 else 2 * ROWS_AT_ONCE) // max(B, 1), 1)
    if T < FEWEST_BLOCKS * most:  # about as fast, and compiled in three quarters of the time
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


@contextmanager
def forward_mode_explained() -> Iterator[None]:
    """Let JAX's error about forward mode through jaxgru's gradient say what would work."""
    try:
        yield
    except TypeError as error:
        if not {"forward-mode", "custom_vjp"} <= set(str(error).split()):
            raise
        raise TypeError(
            "forward mode (jvp, jacfwd) cannot pass a layer's own gradient; it needs "
            'implementation="autodiff".'
        ) from None


def run_stack(
    implementation: str,
    return_carries: bool,
    residual: bool,
    layers: Sequence[CellParams],
    x: Float[Array, "T B E"] | Lookup,
    carry: Sequence[Carry],
    marks: Sequence[Marks],
) -> tuple[Array, tuple[Carry, ...], tuple | None]:
    """Compute a stack of layers: the output, the last carries, and the carries of every step.

    With `residual`, each layer above the first adds its input to its output.
    """
    layers, x, carry, marks = vary_alike((layers, x, carry, marks))
    x = marks[0].input(looked_up(x)) if marks[0].input.keep is not None else x
    if implementation == "wavefront" and not (return_carries or residual):
        by_hand = [layer.by_hand() for layer in layers]
        if wavefront.supports(layers, by_hand, x, carry, marks):
            return *wavefront.unroll_stack(layers, by_hand, x, carry, marks), None
    ends, each = [], []
    for i, (layer, c, of_layer) in enumerate(zip(layers, carry, marks, strict=True)):
        if i and not isinstance(x, Lookup):
            x = x.astype(hidden(c).dtype)  # layers can have different dtypes
        outputs, c = unroll_layer(layer, c, x, of_layer, implementation, return_carries)
        h = of_layer.output(hidden(outputs))
        x = plus_input(h, looked_up(x)) if residual and i else h
        ends.append(c)
        each.append(outputs)
    return looked_up(x), tuple(ends), tuple(each) if return_carries else None


def plus_input(h: Float[Array, "*n H"], x: Float[Array, "*n H"]) -> Float[Array, "*n H"]:
    """Return a layer's output in a residual stack, in its own dtype."""
    return h + x.astype(h.dtype)


def run_in_segments(
    implementation: str,
    return_carries: bool,
    residual: bool,
    reverse: bool,
    layers: Sequence[CellParams],
    x: Float[Array, "T B E"] | Lookup,
    carry: Sequence[Carry],
    marks: Sequence[Marks],
    dropout: Dropouts,
) -> tuple[Array, tuple[Carry, ...], tuple | None]:
    """Compute `run_stack` `in_segments`, each of which also draws its masks anew.

    With `reverse`, the steps come from the last to the first, and so do the masks.
    """
    layers, x, carry, marks = vary_alike((layers, x, carry, marks))
    (T, B), steps = x.shape[:2], x.ids if isinstance(x, Lookup) else x
    weights = rounded_inside((layers, x.table if isinstance(x, Lookup) else None))

    def segment(carry: Any, of_segment: tuple) -> tuple[Any, Any]:
        (layers, table), (numbers, x, sliced) = weights(), of_segment
        x = x if table is None else Lookup(table, x)
        first = at_step(dropout, numbers[-1 if reverse else 0])
        masks = dropout_masks(layers, first, B, len(numbers), reverse)
        now = [masked.marked(m.at(s)) for masked, m, s in zip(masks, marks, sliced, strict=True)]
        options = implementation, return_carries, residual
        y, carry, carries = run_stack(*options, layers, x, carry, now)
        return carry, (y, carries)

    numbers = jnp.arange(T)[::-1] if reverse else jnp.arange(T)
    inputs = numbers, steps, [m.each_step() for m in marks]
    ends, (y, carries) = in_segments(segment, tuple(carry), inputs)
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


def _sharding(x: Any) -> NamedSharding:
    """Return how the steps of an input are sharded, as far as its type says."""
    return jax.typeof(x.ids if isinstance(x, Lookup) else x).sharding


def on_mesh(x: Any) -> bool:
    """Return whether an input may be sharded, over several devices."""
    mesh = _sharding(x).mesh
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and kind != AxisType.Manual for size, kind in axes)


def over_batch_axes(run: Callable, x: Any, rows: Sequence[Size]) -> Callable:
    """Return `run`, which takes one batch axis, for several: mapped over all but the largest.

    Its first arguments and its results have the batch axes, those of steps after T; the layers and
    the dropout have none. Each axis stays sharded as it is. Merged axes are up to twice as fast.
    """
    kept = max(range(len(rows)), key=lambda axis: rows[axis])
    of_x = lambda axis: x._replace(table=None, ids=axis) if isinstance(x, Lookup) else axis
    for axis in (axis for axis in range(len(rows)) if axis != kept):
        inputs = of_x(axis + 1), axis + 1, axis + 1, axis + 1
        run = jax.vmap(run, (inputs, axis, axis, axis, None, None), (axis + 1, axis, axis + 1))
    return run


def sharded_by_xla(function: Callable, x: Any, *outputs: tuple[int | None, ...]) -> Callable:
    """Return the function with its sharding left to XLA, if x is on a mesh of explicit axes.

    With such a mesh, the default of `jax.make_mesh`, the sharding is a part of an array's type, and
    a function has to state it where it is ambiguous. Here XLA infers it, as with other meshes.

    Args:
      outputs: of each output, for each of its axes, the axis of x that is sharded alike, or None.
    """
    sharding = _sharding(x)
    mesh, spec = sharding.mesh, sharding.spec
    if AxisType.Explicit not in mesh.axis_types:
        return function
    specs = [P(*(None if axis is None else spec[axis] for axis in axes)) for axes in outputs]
    several = tuple(NamedSharding(mesh, spec) for spec in specs)
    return jax.sharding.auto_axes(function, out_sharding=several if several[1:] else several[0])
