"""Recurrent layers on a CPU by a native kernel in C++: the implementation "cpu".

It computes what `over_time` computes, together with the input product, in float32. `pass.cc` says
how. Within JAX a call is a primitive, so that every transformation finds what it needs:

    jit, shard_map     the kernel; a batch that is split stays split
    grad               the kernel's own backward pass
    grad of grad       the scan's, of the same values
    vmap               over rows: one call; over weights: one call after another
    jax.export, and any other platform than a CPU: the scan

`library.py` loads the kernel; without it, the scan runs.
"""

from __future__ import annotations

import os
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxgru.cells import gru, lstm, rnn
from jaxgru.cells.base import (
    Carry,
    Constants,
    RecurrentLayer,
    Steps,
    hidden,
    plus,
    vary_alike,
)
from jaxgru.cells.products import Lookup, dot, rows
from jaxgru.layers.cpu.library import kernel, why_not
from jaxgru.layers.over_time import over_time as by_scan

RECURRENCES = rnn.RECURRENCE, lstm.RECURRENCE, gru.RESET_BEFORE, gru.RESET_AFTER  # as enum Kind
LSTM = 1
FEWEST = 16  # steps times rows: to pack the weights takes as long as to multiply some rows


class Options(NamedTuple):
    """What is known when a call is traced."""

    kind: int
    reverse: bool
    every_c: bool  # return c of every step, not only of the last


class Differentiable(NamedTuple):
    """What has a gradient. An array without entries is an absent one."""

    x: Float[Array, "T B E"]
    table: Float[Array, "V GH"]  # of x·W + b, where the input is looked up
    W: Float[Array, "E GH"]
    b: Float[Array, "GH"]
    U: Float[Array, "H GH"]
    Un: Float[Array, "H H"]
    cn: Float[Array, "H"]
    h0: Float[Array, "B H"]
    c0: Float[Array, "B H"]
    h_reset: Float[Array, "B H"]
    c_reset: Float[Array, "B H"]


class Marks(NamedTuple):
    """What has none."""

    ids: Int[Array, "T B"]
    reset: Bool[Array, "T B"]
    real: Bool[Array, "T B"]
    keep: Bool[Array, "T B H"]
    scale: Float[Array, ""]


def supports(layer: RecurrentLayer, carry: Any, steps: Steps) -> bool:
    """Return whether the kernel is there and computes this layer."""
    x = steps.x.ids if isinstance(steps.x, Lookup) else steps.x
    sizes = (*x.shape[:2], *hidden(carry).shape)
    looked_up = steps.x.table if isinstance(steps.x, Lookup) else steps.x
    leaves = (looked_up, layer.W, layer.b, *layer.U, *jax.tree.leaves(carry))
    return (
        jax.default_backend() == "cpu"
        and any(layer.recurrence is known for known in RECURRENCES)
        and all(leaf.dtype == jnp.float32 for leaf in leaves)
        and all(isinstance(size, int) and size for size in sizes)  # `jax.export`: symbolic
        and sizes[0] * sizes[1] >= FEWEST
        and why_not() is None
    )


def over_time(
    layer: RecurrentLayer,
    carry: Carry,
    steps: Steps,
    constants: Constants,
    reverse: bool = False,
    return_carries: bool = False,
) -> tuple[Any, Carry]:
    """Compute a layer that `supports` accepts; steps.x is its input, or a `Lookup`.

    Returns:
      h (T, B, H) of every step, or the carry of every step; and the carry after the last one.
    """
    no = partial(jnp.zeros, (0,))
    there = lambda array, dtype=jnp.float32: no(dtype) if array is None else array
    kind = next(i for i, known in enumerate(RECURRENCES) if known is layer.recurrence)
    of_lstm = lambda state: state[1] if kind == LSTM and state is not None else no()
    x, W, b, table, ids = steps.x, layer.W, layer.b, no(), no(jnp.int32)
    if isinstance(x, Lookup):
        table, ids = plus(dot(x.table, W), b), x.ids.astype(jnp.int32)
        x, W, b = no(), no(), no()
    second = [*layer.U[1:], no()][0]
    before = RECURRENCES[kind] is gru.RESET_BEFORE
    differentiable = Differentiable(
        x, table, W, b, layer.U[0], second if before else no(), no() if before else second,
        hidden(carry), of_lstm(carry),
        there(None if constants.initial is None else hidden(constants.initial)),
        of_lstm(constants.initial),
    )  # fmt: skip
    scale = jnp.float32(1) if constants.scale is None else constants.scale.astype(jnp.float32)
    marks = Marks(
        ids, there(steps.reset, bool), there(steps.real, bool), there(steps.keep, bool), scale
    )
    options = Options(kind, reverse, return_carries)
    y, c = _over_time(options, *vary_alike((differentiable, marks)))
    last = 0 if reverse else -1
    if kind != LSTM:
        return y, y[last]
    state = lstm.LSTMState(y[last], c[last] if c.ndim == 3 else c)
    return lstm.LSTMState(y, c) if return_carries else y, state


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_time(options: Options, d: Differentiable, m: Marks) -> tuple[Array, Array]:
    """Return h of every step, and an LSTM's c: of every step, or after the last."""
    return tuple(_bind(_forward_p, (options, False), (d, m))[:2])


def _forward(options, d, m):
    y, c, saved = _saving(options, d, m)
    last = 0 if options.reverse else -1
    of_caller = c if options.kind != LSTM or options.every_c else c[last]
    return (y, of_caller), (d, m, y, c, saved)


def _backward(options, residuals, cotangents):
    return _gradients(options, *residuals, cotangents), None


_over_time.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _saving(options, d, m):
    """Return h and c of every step, and what the kernel's backward pass needs besides."""
    return tuple(_bind(_forward_p, (options, True), (d, m)))


def _saving_forward(options, d, m):
    results = _saving(options, d, m)
    return results, (d, m, *results)


def _saving_backward(options, residuals, cotangents):
    return _gradients(options._replace(every_c=True), *residuals, cotangents[:2]), None


_saving.defvjp(_saving_forward, _saving_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(options, d, m, y, c, saved, cotangents):
    """Return the gradients of `d`: a function whose own gradient is the scan's."""
    dy, dc = cotangents
    no = jnp.zeros((0,), jnp.float32)
    zeros = jnp.zeros_like(d.h0)
    if options.kind != LSTM:
        given = dy, no, zeros, no
    elif options.every_c:
        given = dy, dc, zeros, zeros
    else:
        given = dy, no, zeros, dc
    return Differentiable(*_bind(_backward_p, (options,), (d, m, y, c, saved, given)))


def _gradients_forward(options, d, m, y, c, saved, cotangents):
    return _gradients(options, d, m, y, c, saved, cotangents), (d, m, cotangents)


def _gradients_backward(options, residuals, d_gradients):
    d, m, cotangents = residuals

    def gradients(d, cotangents):
        return jax.vjp(lambda d: _scanned(options, d, m), d)[1](cotangents)[0]

    dd, d_cotangents = jax.vjp(gradients, d, cotangents)[1](d_gradients)
    return dd, None, None, None, None, d_cotangents  # y, c and saved depend on d alone


_gradients.defvjp(_gradients_forward, _gradients_backward)


def _scanned(options: Options, d: Differentiable, m: Marks) -> tuple[Array, Array]:
    """Compute what `_over_time` returns by the scan."""
    there = lambda array: array if array.size else None
    carry, initial = d.h0, there(d.h_reset)
    if options.kind == LSTM:
        carry = lstm.LSTMState(d.h0, d.c0)
        initial = None if initial is None else lstm.LSTMState(d.h_reset, d.c_reset)
    a = rows(d.table, m.ids) if m.ids.size else plus(dot(d.x, d.W), d.b)
    steps = Steps(a, there(m.keep), there(m.reset), there(m.real))
    U = tuple(part for part in (d.U, d.Un, d.cn) if part.size)
    constants = Constants(initial, None if steps.keep is None else m.scale)
    outputs, last = by_scan(
        RECURRENCES[options.kind], U, carry, steps, constants, options.reverse, options.every_c
    )
    if options.kind != LSTM:
        return outputs, jnp.zeros((0,), jnp.float32)
    return (outputs.h, outputs.c) if options.every_c else (outputs, last.c)


# --- The two primitives. Their operands are the leaves of what they are called with, in order.

_forward_p, _backward_p = Primitive("jaxgru_forward"), Primitive("jaxgru_backward")
ARGUMENTS = len(Differentiable._fields) + len(Marks._fields)


def _bind(primitive: Primitive, static: tuple, operands: Any) -> list[Array]:
    operands = jax.tree.leaves(vary_alike(operands))
    axes = tuple(jax.typeof(operands[0]).manual_axis_type.varying)
    results = _call(primitive, operands, static)
    return [jax.lax.pcast(r, axes, to="varying") for r in results] if axes else results


def _call(primitive: Primitive, operands: Any, static: tuple) -> list[Array]:
    # JAX looks for primitives that need to know the devices in the parameters' programs, too
    native = jax.make_jaxpr(_partitioned(primitive.name, static, *_ranks(static, operands)))
    shapes = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in operands]
    return primitive.bind(*operands, static=static, native=native(*shapes))


def _split(operands: Any) -> tuple[Differentiable, Marks, list]:
    n = len(Differentiable._fields)
    d, m = Differentiable(*operands[:n]), Marks(*operands[n:ARGUMENTS])
    return d, m, list(operands[ARGUMENTS:])


def _shapes(static: tuple, operands: Any) -> list[jax.ShapeDtypeStruct]:
    """Return the results' shapes."""
    d, m, rest = _split(operands)
    float32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    if rest:
        return [float32(part.shape) for part in d]
    (options, save), (T, B) = static, (m.ids if np.prod(m.ids.shape) else d.x).shape[:2]
    H = d.h0.shape[1]
    c = (0,) if options.kind != LSTM else (T, B, H) if save or options.every_c else (B, H)
    saved = (T, B, kernel().saved_floats(options.kind, H)) if save else (0,)
    return [float32((T, B, H)), float32(c), float32(saved)]


def _native(*operands: Array, name: str, static: tuple) -> list[Array]:
    """Call the kernel."""
    options, *save = static
    d, m, rest = _split(operands)
    common = (d.x, m.ids, d.table, d.W, d.U, d.Un, d.h0, d.c0, m.reset, m.real, m.keep, m.scale,
              d.h_reset, d.c_reset)  # fmt: skip
    attributes: dict[str, Any] = dict(
        kind=np.int64(options.kind),
        threads=np.int64(max(1, (os.cpu_count() or 1) // jax.local_device_count("cpu"))),
        reverse=options.reverse,
        batch_major=False,
    )
    shapes = _shapes(static, operands)
    if save:
        call = jax.ffi.ffi_call(name, shapes)
        return list(call(*common, d.b, d.cn, **attributes, save=save[0]))
    order = "x table W b U Un cn h0 c0 h_reset c_reset".split()
    by_name = dict(zip(Differentiable._fields, shapes, strict=True))
    results = jax.ffi.ffi_call(name, [by_name[n] for n in order])(*common, *rest, **attributes)
    return list(Differentiable(**dict(zip(order, results, strict=True))))


def _forward_scanned(*operands: Array, static: tuple) -> list[Array]:
    """Compute the forward primitive without the kernel; `saved` is then nothing."""
    options, save = static
    d, m, _ = _split(operands)
    y, c = _scanned(options._replace(every_c=options.every_c or save), d, m)
    return [y, c, jnp.zeros(_shapes(static, operands)[2].shape, jnp.float32)]


def _backward_scanned(*operands: Array, static: tuple) -> list[Array]:
    """Compute the backward primitive without the kernel: forward again, then backward."""
    d, m, (_, _, _, dy, dc, dh_last, dc_last) = _split(operands)
    options = static[0]._replace(every_c=True)
    _, gradient = jax.vjp(lambda d: _scanned(options, d, m), d)
    last = 0 if options.reverse else -1
    dy = dy.at[last].add(dh_last)
    if options.kind == LSTM:
        dc = (dc if dc.size else jnp.zeros_like(dy)).at[last].add(dc_last)
    return list(gradient((dy, dc))[0])


SCANNED = {"jaxgru_forward": _forward_scanned, "jaxgru_backward": _backward_scanned}
AXIS_OF_ROWS = dict(x=1, ids=1, reset=1, real=1, keep=1, h0=0, c0=0, h_reset=0, c_reset=0)


def _rows_axes(operands: Any) -> list[int | None]:
    """Return the axis of the batch's rows in each operand."""
    names = [*Differentiable._fields, *Marks._fields]
    axes = [AXIS_OF_ROWS.get(name) for name in names]
    if len(operands) > ARGUMENTS:
        axes += [1, 1, 1, 1, 1, 0, 0]  # y, c, saved, dy, dc, dh_last, dc_last
    return [axis if o.ndim > 1 else None for axis, o in zip(axes, operands, strict=True)]


def _lower(ctx, *operands, static, native, cpu=True):
    if cpu and not ctx.module_context.lowering_parameters.for_export:
        function = jaxpr_as_fun(native)
    else:
        function = partial(SCANNED[ctx.primitive.name], static=static)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def _ranks(static: tuple, operands: Any) -> tuple[tuple[int, ...], ...]:
    ranks = lambda arrays: tuple(len(array.shape) for array in arrays)
    return ranks(operands), ranks(_shapes(static, operands))


@lru_cache
def _partitioned(name: str, static: tuple, ranks: tuple, result_ranks: tuple) -> Any:
    """Return the kernel's call, which XLA may split along the rows of the batch."""
    call = partial(_native, name=name, static=static)
    shapes = [jax.ShapeDtypeStruct((1,) * rank, jnp.float32) for rank in ranks]
    axes = _rows_axes(shapes)
    if len(ranks) > ARGUMENTS:
        result_axes = axes[: len(Differentiable._fields)]
    else:
        result_axes = [1, 0 if result_ranks[1] == 2 else 1, 1]
    result_axes = [a if r > 1 else None for a, r in zip(result_axes, result_ranks, strict=True)]
    letters = iter(f"f{i}" for i in range(1000))
    factors = lambda axes, ranks: ", ".join(
        " ".join("rows" if i == axis else next(letters) for i in range(rank))
        for axis, rank in zip(axes, ranks, strict=True)
    )
    rule = f"{factors(axes, ranks)} -> {factors(result_axes, result_ranks)}"
    names = tuple(f for f in rule.replace(",", " ").replace("->", " ").split() if f != "rows")

    @custom_partitioning
    def function(*operands):
        return tuple(call(*operands))

    def partition(mesh, operands, results):
        split: Any = None
        for axis, operand in zip(axes, operands, strict=True):
            spec = getattr(operand.sharding, "spec", ())
            if axis is not None and len(spec) > axis and spec[axis] is not None:
                split = spec[axis]

        def sharding(axis, rank):
            spec = PartitionSpec(*(split if i == axis else None for i in range(rank)))
            return NamedSharding(mesh, spec)

        def part(*operands):
            results = call(*operands)
            if len(ranks) == ARGUMENTS or split is None:
                return tuple(results)
            return tuple(
                r if axis is not None else jax.lax.psum(r, split)
                for axis, r in zip(result_axes, results, strict=True)
            )

        return (
            mesh,
            part,
            tuple(map(sharding, result_axes, result_ranks)),
            tuple(map(sharding, axes, ranks)),
        )

    function.def_partition(partition, sharding_rule=rule, need_replication_factors=names)
    return function


def _batch(primitive, operands, dims, *, static, native):
    """Compute several calls: as one, of more rows, if they differ in their rows only."""
    N = next(o.shape[d] for o, d in zip(operands, dims, strict=True) if d is not None)
    one = [
        jax.ShapeDtypeStruct(np.delete(o.shape, d) if d is not None else o.shape, o.dtype)
        for o, d in zip(operands, dims, strict=True)
    ]
    axes = _rows_axes(one)
    same_weights = all(
        d is None or o.size == 0 or axis is not None
        for o, d, axis in zip(operands, dims, axes, strict=True)
    )
    if same_weights and len(operands) > ARGUMENTS:
        # JAX may want the weights' gradients of each call, or their sum: the scan has both
        function = partial(_backward_scanned, static=static)
        return jax.vmap(function, in_axes=tuple(dims))(*operands), [0] * len(Differentiable._fields)
    if not same_weights:
        each = zip(operands, dims, strict=True)
        batched = [jnp.moveaxis(o, d, 0) for o, d in each if d is not None]

        def call(some):
            some = iter(some)
            one = [o if d is None else next(some) for o, d in zip(operands, dims, strict=True)]
            return _call(primitive, one, static)

        results = jax.lax.map(call, batched)
        return results, [0] * len(results)

    def folded(operand, d, axis):
        if axis is None:
            return operand if d is None else jnp.zeros((0,), operand.dtype)
        if d is None:
            operand = jnp.repeat(jnp.expand_dims(operand, axis), N, axis)
        else:
            operand = jnp.moveaxis(operand, d, axis)
        return operand.reshape(*operand.shape[:axis], -1, *operand.shape[axis + 2 :])

    y, c, saved = _call(primitive, list(map(folded, operands, dims, axes)), static)
    unfold = lambda a, axis: a.reshape(*a.shape[:axis], N, -1, *a.shape[axis + 1 :])
    results, out = [], []
    for a, axis in ((y, 1), (c, c.ndim - 2), (saved, 1)):
        results.append(unfold(a, axis) if a.ndim > 1 else a)
        out.append(axis if a.ndim > 1 else None)
    return results, out


for _primitive in (_forward_p, _backward_p):
    _primitive.multiple_results = True
    _primitive.def_abstract_eval(
        lambda *operands, static, native: [
            jax.core.ShapedArray(shape.shape, shape.dtype) for shape in _shapes(static, operands)
        ]
    )
    _primitive.def_impl(
        lambda *operands, bind=_primitive.bind, **parameters: jax.jit(partial(bind, **parameters))(
            *operands
        )
    )
    mlir.register_lowering(_primitive, partial(_lower, cpu=False))
    mlir.register_lowering(_primitive, _lower, platform="cpu")
    batching.primitive_batchers[_primitive] = partial(_batch, _primitive)
