"""One GPU kernel for all steps of a recurrent layer, forward and backward.

A scan starts 6 to 8 kernels at every step. Here ONE kernel runs all T steps of a `Recurrence`: the
equations and the gradients in `cells/` run as they are, on tiles. A program owns `rows` of the
batch and a slice of the units, and computes these at every step, so state and gates stay in its
registers:

    programs = 1   it owns all units, and no program waits for another. For H up to 128.
    programs = P   P programs share the units of the same rows. Where the equations multiply by
                   weights, each publishes its slice through L2, waits at a barrier of the P
                   programs, and reads the slices of the others. The LSTM and the GRU with the
                   reset gate after do this once a step, the other twice.

As in `layers/over_time.py`, the backward kernel computes the gradient of the state and stores what
the gradients of the weights need, which are one product each afterwards, in XLA. Pallas's Triton
back end: JAX 0.10.2 to 0.12 have it; from 0.11 on it is deprecated. What `supports` refuses
(zoneout, blocks, a carry that is not float32, …) is for the scan.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxgru.cells.carry import hidden, with_hidden
from jaxgru.cells.layout import IN_ROWS
from jaxgru.cells.marks import NO_MARKS, Marks, Mask, before_each, mixed
from jaxgru.layers.over_time import advance

SLOTS = 2  # exchange buffers: a fast program publishes while a slow one still reads
POLLS = 2**18  # of the barrier, about 0.2 s: a kernel must not hang a GPU


class Plan(NamedTuple):
    """How a layer is cut into programs, and how one is compiled."""

    rows: int = 16  # of the batch, in a program: at least 16, a power of 2
    programs: int = 1  # that share the units of the same rows
    warps: int = 4
    precision: Any = lax.DotAlgorithmPreset.TF32_TF32_F32  # of float32 products
    stash: bool = True  # load U before the loop: Triton then keeps it in shared memory
    chunk: int = 128  # of the units of others, multiplied at once
    sweep: bool = False  # one sweep of `interpreted`: reads what the sweep before published


class Parts(list):
    """Several gates (rows, units) as one array: the equations only need arithmetic on them."""

    def __mul__(self, other):
        others = other if isinstance(other, Parts) else [other] * len(self)
        return Parts(x * y for x, y in zip(self, others, strict=True))

    def __rsub__(self, other):
        return Parts(other - x for x in self)


def flat(parts: Any) -> list:
    return list(parts) if isinstance(parts, Parts) else [parts]


def one_or_parts(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else Parts(values)


class Program:
    """What the equations see as their `Layout` within one program."""

    def __init__(self, plan, B, H, per_step, exchange, count, old):
        self.plan, self.B, self.H, self.units = plan, B, H, H // plan.programs
        self.chunk = min(plan.chunk, H) if plan.programs > 1 else H
        self.mine, self.tile = pl.program_id(0), pl.program_id(1)
        self.rows = pl.ds(self.tile * plan.rows, plan.rows)
        self.real = self.tile * plan.rows + jnp.arange(plan.rows) < B
        self.exchange, self.count, self.old = exchange, count, old
        self.per_step, self.drop = per_step, Mask()  # exchanges in a step; dropout in the products
        self.begin(0, np.int32(1))

    def begin(self, step: Any, met: Any) -> None:
        """Begin a step.

        met: whether all other programs have come to every barrier, 1 or 0.
        """
        self.now, self.exchanges, self.met = step, 0, met

    def place(self, ref: Any, t: Any, gate: int = 0) -> Any:
        first = gate * self.H + self.mine * self.units
        return ref.at[jnp.int32(t), self.rows, pl.ds(first, self.units)]

    def inside(self) -> Any:
        """Return which of the tile's elements lie in the batch; None: all."""
        whole = self.B % self.plan.rows == 0
        return None if whole else jnp.broadcast_to(self.real[:, None], (self.plan.rows, self.units))

    def read(self, ref: Any, t: Any, gate: int = 0) -> Any:
        mask = self.inside()
        return plgpu.load(self.place(ref, t, gate), mask=mask, other=None if mask is None else 0)

    def read_all(self, ref: Any, t: Any) -> Any:
        return one_or_parts([self.read(ref, t, i) for i in range(ref.shape[-1] // self.H)])

    def write(self, ref: Any, t: Any, values: Any) -> None:
        for gate, value in enumerate(flat(values)):
            plgpu.store(self.place(ref, t, gate), value.astype(ref.dtype), mask=self.inside())

    def write_each(self, refs: Sequence[Any], t: Any, tree: Any) -> None:
        for ref, values in zip(refs, jax.tree.leaves(tree), strict=True):
            self.write(ref, t, values)

    def flags(self, ref: Any, t: Any) -> Any:
        """Read one flag (an int8) for each row."""
        return plgpu.load(ref.at[jnp.int32(t), self.rows], mask=self.real, other=0) != 0

    # --- What `Layout` has

    def _replace(self, **attributes: Any) -> Program:
        other = copy.copy(self)
        other.__dict__.update(attributes)
        return other

    def split(self, x: Any, G: int) -> list:
        parts = flat(x)
        each = len(parts) // G
        return [one_or_parts(parts[i * each : (i + 1) * each]) for i in range(G)]

    def join(self, *parts: Any) -> Parts:
        return Parts(value for part in parts for value in flat(part))

    def choose(self, flag: Any, x: Any, y: Any = None) -> Any:
        other = jax.tree.map(jnp.zeros_like, x) if y is None else y
        return jax.tree.map(lambda x, y: jnp.where(flag[:, None], x, y), x, other)

    def times(self, U: Any, h: Any) -> Any:
        return self.product(U, self.drop(h))

    def times_transposed(self, U: Any, d: Any) -> Any:
        return self.drop(self.product(U, d))

    def product(self, U: Any, x: Any) -> Any:
        """Return this program's units of x·U, where U (nH, mH) has gates on both sides."""
        tiles, dtype = U
        xs = [value.astype(dtype) for value in flat(x)]
        precision = self.plan.precision if dtype == jnp.float32 else None
        sums: list[Any] = [None] * len(tiles[0][0])
        published = self.publish(xs) if self.plan.programs > 1 else None
        for k in range(self.H // self.chunk):
            for i, mine in enumerate(xs):
                value = mine if published is None else published(k, i)
                for j, load in enumerate(tiles[i][k]):
                    y = jnp.dot(
                        value, load(), precision=precision, preferred_element_type=jnp.float32
                    )
                    sums[j] = y if sums[j] is None else sums[j] + y
        if published is not None and not self.plan.sweep:
            # Nobody may take what was not exchanged for a number
            sums = [jnp.where(self.met > 0, y, jnp.nan) for y in sums]
        return one_or_parts(sums)

    def publish(self, values: list) -> Callable[[int, int], Any]:
        """Send one's slice to the other programs; return a function that reads any chunk."""
        event = self.now * self.per_step + self.exchanges
        self.exchanges += 1
        slot = event if self.plan.sweep else lax.rem(jnp.int32(event), np.int32(SLOTS))
        source = self.old if self.plan.sweep else self.exchange

        def place(ref, first, length):
            return ref.at[jnp.int32(slot), self.rows, pl.ds(first, length)]

        for i, value in enumerate(values):
            own = place(self.exchange, i * self.H + self.mine * self.units, self.units)
            mask = None if self.plan.sweep else jnp.broadcast_to(self.met > 0, value.shape)
            plgpu.store(own, value.astype(self.exchange.dtype), mask=mask)
        if not self.plan.sweep:
            self.wait((event + 1) * self.plan.programs)
        chunk = lambda k, i: place(source, i * self.H + k * self.chunk, self.chunk)
        # Volatile, because L1 may hold what the slot had before
        return lambda k, i: plgpu.load(chunk(k, i), volatile=True).astype(values[i].dtype)

    def wait(self, arrivals: Any) -> None:
        """Wait until the programs of these rows have arrived this many times, all together.

        A program that has waited too long gives up: it neither publishes nor arrives any more, so
        what others still read is whole, and at their next barrier they give up, too. From there on,
        everything is NaN.
        """
        plgpu.debug_barrier()  # all threads have stored; the atomic, by one thread, releases it
        plgpu.atomic_add(self.count, self.tile, self.met)
        seen, _ = lax.while_loop(
            lambda loop: (loop[0] < arrivals) & (loop[1] < POLLS),
            # It adds nothing, only reads; the interpreter takes no constant for that
            lambda loop: (
                plgpu.atomic_add(self.count, self.tile, loop[1] * np.int32(0)),
                loop[1] + 1,
            ),
            (np.int32(0), (1 - self.met) * np.int32(POLLS)),
        )
        plgpu.debug_barrier()
        self.met = jnp.where(seen < arrivals, np.int32(0), self.met)

    def weights(self, ref: Any) -> Any:
        """Return the tiles of a matrix that `product` needs, or a vector's slice, as a row."""
        mine = self.mine * self.units
        if len(ref.shape) == 1:
            return plgpu.load(ref.at[pl.ds(mine, self.units)])[None]

        def tile(i: int, k: int, j: int) -> Callable[[], Any]:
            part = pl.ds(i * self.H + k * self.chunk, self.chunk)
            load = partial(plgpu.load, ref.at[part, pl.ds(j * self.H + mine, self.units)])
            return (lambda value: lambda: value)(load()) if self.plan.stash else load

        n, m = (size // self.H for size in ref.shape)
        ks = range(self.H // self.chunk)
        return [[[tile(i, k, j) for j in range(m)] for k in ks] for i in range(n)], ref.dtype

    # --- Marks

    def marks(self, refs: Marks) -> Marks:
        """Read what holds for all steps: `initial`, the scales, and dropout in the products."""
        scale = lambda mask: None if mask.scale is None else mask.scale[0]
        initial = jax.tree.map(lambda ref: self.read(ref, 0), refs.initial)
        if refs.product.keep is not None:
            self.drop = Mask(self.read(refs.product.keep, 0) != 0, scale(refs.product))
        return Marks(initial=initial, state=Mask(None, scale(refs.state)))

    def marks_at(self, refs: Marks, t: Any) -> Marks:
        """Read the marks of a step, as `Marks.each_step` slices them."""
        keep = None if refs.state.keep is None else self.read(refs.state.keep, t) != 0
        flags = lambda ref: None if ref is None else self.flags(ref, t)
        return Marks(flags(refs.reset), None, flags(refs.real), None, Mask(keep))


def run(
    body: Callable, plan: Plan, B: int, H: int, inputs: Any, outputs: Any,
    exchanges: Sequence[tuple[int, int, Any]], interpret: bool,
) -> Any:  # fmt: skip
    """Call `body` in every program; return its outputs, arrays of these shapes.

    Args:
      body: (the program, its inputs, the leaves of its outputs) → None.
      exchanges: for each product of a step: (the number of steps, gates of x, dtype).
    """
    leaves, tree = jax.tree.flatten(inputs)
    shapes, tree_of_outputs = jax.tree.flatten(outputs)
    tiles = pl.cdiv(B, plan.rows)
    T, widest = exchanges[0][0], max(gates for _, gates, _ in exchanges)
    dtype = jnp.result_type(*[dtype for *_, dtype in exchanges])
    slots = T * len(exchanges) if plan.sweep else SLOTS
    shared = plan.programs > 1
    if shared and not interpret and plan.programs * tiles > multiprocessors():
        raise ValueError(
            f"{plan.programs * tiles} programs would wait for each other, but the GPU has only "
            f"{multiprocessors()} multiprocessors."
        )
    # Rows beyond the batch are exchanged, too, but never written out
    shape = (slots, tiles * plan.rows, widest * H) if shared else (1, 1, 1)
    buffer, count = jax.ShapeDtypeStruct(shape, dtype), jnp.zeros(tiles, jnp.int32)

    def call(old):
        def kernel(*refs):
            n = len(leaves)
            *outs, buffer, count = refs[n + 2 :]
            program = Program(plan, B, H, len(exchanges), buffer, count, old=refs[n + 1])
            body(program, jax.tree.unflatten(tree, refs[:n]), outs)

        return pl.pallas_call(
            kernel,
            out_shape=[*shapes, buffer, jax.ShapeDtypeStruct(count.shape, count.dtype)],
            grid=(plan.programs, tiles),
            input_output_aliases={len(leaves): len(shapes) + 1},
            compiler_params=plgpu.CompilerParams(num_warps=plan.warps, num_stages=1),
            interpret=interpret,
            name=body.__name__,
        )(*leaves, count, old)

    old = jnp.zeros(buffer.shape if plan.sweep else (1, 1, 1), dtype)
    results = call(old)
    if plan.sweep:  # each sweep makes one more exchange right; so this many sweeps make all right
        for _ in range(slots):
            results = call(results[-2])
    return jax.tree.unflatten(tree_of_outputs, results[: len(shapes)])


def multiprocessors() -> int:
    """Return how many programs run at the same time for certain: one on each multiprocessor."""
    return getattr(jax.devices()[0], "core_count", None) or 132


def over_steps(T: int, shapes: Any) -> Any:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct((T, *s.shape), s.dtype), shapes)


def one_step(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


def for_kernel(marks: Marks) -> Marks:
    """Return the marks with flags as int8, which every back end loads, and a first axis in all."""
    byte = lambda flag: None if flag is None else flag.astype(jnp.int8)
    scale = lambda mask: None if mask.scale is None else mask.scale[None].astype(jnp.float32)
    state = Mask(byte(marks.state.keep), scale(marks.state))
    product = Mask(one_step(byte(marks.product.keep)), scale(marks.product))
    flags = byte(marks.reset), one_step(marks.initial), byte(marks.real)
    return Marks(*flags, state=state, product=product)


def forward(recurrence, U, carry, a, marks, plan, interpret):
    """Return the carry after each step, what the equations save, and the carry after the last."""
    (T, B, _), H, G = a.shape, hidden(carry).shape[-1], recurrence.num_gates
    step_of = lambda U, carry, a: recurrence.step(IN_ROWS, U, carry, IN_ROWS.split(a, G))
    after, saved = jax.eval_shape(step_of, IN_ROWS.weights(U), carry, a[0])
    exchanges = [(T, 1, leaf.dtype) for leaf in U if leaf.ndim > 1]
    outputs = over_steps(T, (after, saved)), over_steps(1, after)
    n = len(jax.tree.leaves(outputs[0]))

    def recurrent_forward(do, inputs, outputs):
        U_refs, first, a, marks = inputs
        U, constant = tuple(map(do.weights, U_refs)), do.marks(marks)

        def step(t, state):
            carry, met = state
            do.begin(t, met)
            gates = do.split(do.read_all(a, t), G)
            equations = lambda carry: recurrence.step(do, U, carry, gates)
            carry, _, saved = advance(do, equations, carry, constant.at(do.marks_at(marks, t)))
            do.write_each(outputs[:n], t, (carry, saved))
            return carry, do.met

        start = jax.tree.map(lambda ref: do.read(ref, 0), first), do.met
        last, _ = lax.fori_loop(np.int32(0), np.int32(T), step, start)
        do.write_each(outputs[n:], 0, last)

    inputs = U, one_step(carry), a, for_kernel(marks)
    (after, saved), last = run(recurrent_forward, plan, B, H, inputs, outputs, exchanges, interpret)
    return after, saved, jax.tree.map(lambda leaf: leaf[0], last)


def retreat(layout, gradient, d_carry, d_initial, now):
    """Compute one step backward: the gradient of `advance`.

    Args:
      gradient: the gradient of the next carry → that of the carry, and what to keep.
      d_initial: the sum over the later steps; None: `initial` is zeros.
      now: the marks of the step.

    Returns:
      The gradients of the carry and of `initial`, and what is kept.
    """
    d_after = d_carry if now.real is None else layout.choose(now.real, d_carry)
    d_old = None
    if now.update is not None:
        d_old = jax.tree.map(lambda u, d: mixed(u, jnp.zeros_like(d), d), now.update, d_after)
        d_after = jax.tree.map(lambda u, d: mixed(u, d, 0), now.update, d_after)
    d_after = with_hidden(d_after, now.state(hidden(d_after)))
    d_before, kept = gradient(d_after)
    if d_old is not None:
        d_before = jax.tree.map(jnp.add, d_before, d_old)
    if now.real is not None:
        d_before = jax.tree.map(jnp.add, d_before, layout.choose(~now.real, d_carry))
    if now.reset is not None:
        if d_initial is not None:
            d_initial = jax.tree.map(jnp.add, d_initial, layout.choose(now.reset, d_before))
        d_before = layout.choose(~now.reset, d_before)
    return d_before, d_initial, kept


def backward(recurrence, U, first, after, saved, marks, d_h, d_last, plan, interpret):
    """Return the gradients of the first carry and of `initial`, and what those of U and a need."""
    T, B, H = d_h.shape
    transposed = tuple(leaf.mT if leaf.ndim > 1 else leaf for leaf in U)
    gradient_of = partial(recurrence.step_gradient, IN_ROWS)
    of_step = d_last, first, *jax.tree.map(lambda x: x[0], (after, saved))
    d_shape, kept = jax.eval_shape(gradient_of, IN_ROWS.weights(transposed), *of_step)
    exchanges = [(T, leaf.shape[0] // H, leaf.dtype) for leaf in transposed if leaf.ndim > 1]
    ends = d_shape, None if marks.initial is None else d_shape
    outputs = over_steps(T, kept), over_steps(1, ends)
    n = len(jax.tree.leaves(outputs[0]))

    def recurrent_backward(do, inputs, outputs):
        U_refs, first, after, saved, marks, d_h, d_last = inputs
        U, constant = tuple(map(do.weights, U_refs)), do.marks(marks)
        at = lambda refs, t: jax.tree.map(lambda ref: do.read_all(ref, t), refs)
        first = at(first, 0)

        def step(i, state):
            t, (d_carry, d_initial, met) = T - 1 - i, state
            do.begin(i, met)
            now = constant.at(do.marks_at(marks, t))
            earlier = at(after, jnp.maximum(t - 1, 0))
            before = jax.tree.map(lambda x, y: jnp.where(t == 0, x, y), first, earlier)
            if now.reset is not None:
                before = do.choose(~now.reset, before, now.initial)
            d_carry = with_hidden(d_carry, hidden(d_carry) + do.read(d_h, t))
            sources = before, at(after, t), at(saved, t)
            gradient = lambda d: recurrence.step_gradient(do, U, d, *sources)
            d_carry, d_initial, kept = retreat(do, gradient, d_carry, d_initial, now)
            do.write_each(outputs[:n], t, kept)
            return d_carry, d_initial, do.met

        start = at(d_last, 0), jax.tree.map(jnp.zeros_like, constant.initial), do.met
        *ends, _ = lax.fori_loop(np.int32(0), np.int32(T), step, start)
        do.write_each(outputs[n:], 0, ends)

    inputs = transposed, one_step(first), after, saved, for_kernel(marks), d_h, one_step(d_last)
    kept, ends = run(recurrent_backward, plan, B, H, inputs, outputs, exchanges, interpret)
    return *jax.tree.map(lambda leaf: leaf[0], ends), kept


def over_time(recurrence, plan, interpret, U, carry, a, marks=NO_MARKS):
    """Compute `jaxgru.layers.over_time.over_time`: h of every step, and the last carry."""
    as_carry = lambda leaf: leaf.astype(hidden(carry).dtype)
    U = tuple(leaf if leaf.ndim > 1 else as_carry(leaf) for leaf in U)
    marks = marks._replace(initial=jax.tree.map(as_carry, marks.initial))
    return _over_time(recurrence, plan, interpret, U, carry, as_carry(a), marks)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _over_time(recurrence, plan, interpret, U, carry, a, marks):
    after, _, last = forward(recurrence, U, carry, a, marks, plan, interpret)
    return hidden(after), last


def _forward(recurrence, plan, interpret, U, carry, a, marks):
    after, saved, last = forward(recurrence, U, carry, a, marks, plan, interpret)
    return (hidden(after), last), (U, carry, after, saved, marks)


def _backward(recurrence, plan, interpret, residuals, cotangents):
    U, first, after, saved, marks = residuals
    d_first, d_initial, kept = backward(
        recurrence, U, first, after, saved, marks, *cotangents, plan, interpret
    )
    before = jax.tree.map(before_each, first, after)
    if marks.reset is not None:
        before = IN_ROWS.choose(~marks.reset, before, marks.initial)
    in_rows = IN_ROWS.dropping(marks.product)
    dU, da = recurrence.gradients(in_rows, U, before, after, saved, kept)
    return dU, d_first, da, Marks(initial=d_initial)


_over_time.defvjp(_forward, _backward)


def supports(recurrence: Any, plan: Plan, U: Any, carry: Any, a: Any, marks: Marks) -> bool:
    """Return whether the kernel can compute a layer: all that it exchanges are units of a state.

    A derived step (`in_rows`) may do anything with h, and splits its gates itself. So it is refused
    with several gates, vectors, or programs that share the units.
    """
    (B, H), leaves = hidden(carry).shape, jax.tree.leaves(carry)
    of_units = lambda leaf: leaf.ndim < 3 and all(size % H == 0 for size in leaf.shape)
    alike = all(leaf.shape == (B, H) and leaf.dtype == jnp.float32 for leaf in leaves)
    one_gate = plan.programs == a.shape[-1] // H == 1 and all(u.shape == (H, H) for u in U)
    fits = alike and a.shape[-1] % H == 0 and all(map(of_units, U)) and marks.update is None
    return fits and (one_gate or not recurrence.in_rows)


def plan_for(H: int, B: int, gates: int, dtype: Any, sms: int | None = None) -> Plan | None:
    """Return how to cut a layer, or None for the scan. A GPU's timings have yet to choose these."""
    sms = sms or multiprocessors()
    if H & (H - 1) or not 32 <= H <= 1024:
        return None
    bytes_of_U, programs = gates * H * H * jnp.dtype(dtype).itemsize, 1
    while bytes_of_U // programs > (200 if programs == 1 else 128) * 1024 or H // programs > 128:
        programs *= 2
    if H // programs < 16:
        return None
    rows = 16
    while pl.cdiv(B, rows) * programs > sms and rows < 64:
        rows *= 2
    if programs > 1 and pl.cdiv(B, rows) * programs > sms:
        return None  # some would wait for others that have no place
    return Plan(rows, programs, warps=4 if rows * H // programs < 2048 else 8)
