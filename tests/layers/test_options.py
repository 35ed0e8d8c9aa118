"""Any cell with any options of `unroll`, drawn together, against a loop over layers and steps."""

import itertools
import math
import random
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import gradients, randomized, value_and_gradients
from conftest import slow
from jaxtyping import Array
from random_models import INIT, in_blocks

import jaxgru
from jaxgru import SLSTMState, cells
from jaxgru.cells.carry import hidden, with_hidden
from jaxgru.cells.layout import IN_COLUMNS, IN_ROWS, PLAIN
from jaxgru.layers import blocks, over_time, wavefront
from jaxgru.layers.masks import dropout_masks

QUICK = 50
SAMPLES = 3000


@cells.struct
class Own(cells.Cell):
    """A cell of one's own."""

    W: Array
    U: Array
    sizes = lambda self: self.W.shape
    inputs = lambda self, x: x @ self.W

    def zero_carry(self, batch_size):
        return jnp.zeros((batch_size, len(self.U)), self.W.dtype)


@cells.struct
class Counting(Own):
    """With a scalar weight, a part of the carry that is (B,), and a whole number in it."""

    s: Array

    def zero_carry(self, batch_size):
        h = super().zero_carry(batch_size)
        return h, h[:, 0], jnp.zeros((batch_size, 1), jnp.int32)

    def step(self, layout, carry, a):
        h, mean, count = carry
        odd = jnp.where(count % 2 == 1, self.s, 1).astype(a.dtype)
        h = jnp.tanh(a + odd * layout.times(self.U, h) + mean[:, None])
        return h, 0.5 * mean + h.mean(-1), count + 1


@cells.struct
class Chained(Own):
    """With a product of a product, and weights that are computed."""

    V: Array

    def step(self, layout, h, a):
        y = layout.times(self.U / jnp.linalg.norm(self.U, axis=0), h)
        return 0.3 * h + jnp.tanh(a + layout.matmul(self.V, jnp.sin(y)))


@cells.struct
class Normalised(Own):
    """Whose carry does not begin with zeros, and which divides by it, as xLSTM's sLSTM does."""

    b: Array

    def zero_carry(self, batch_size):
        h = super().zero_carry(batch_size)
        return h, jnp.ones_like(h)

    def step(self, layout, carry, a):
        h, n = carry
        g = jnp.tanh(a + layout.times(self.U, h) + self.b)
        n = 0.9 * n + g * g
        return g / (0.1 + n * n), n


def own(cls, shape):
    zeros = lambda E, H: [(E, H), (H, H), shape(H)]
    return lambda key, E, H, dtype: cls(*(jnp.zeros(shape, dtype) for shape in zeros(E, H)))


def projected_to_h(key, E, H, dtype):
    """The factor of P is as wide as h, but it is not masked."""
    return jaxgru.init_lstm(key, E, H, proj_size=H, dtype=dtype)


KINDS = INIT | {
    "counting": own(Counting, lambda H: ()),
    "normalised": own(Normalised, lambda H: (H,)),
    "chained": own(Chained, lambda H: (H, H)),
    "gru, relu": partial(jaxgru.init_gru, activation="relu", reset_gate="before"),
    "gru, relu, clip": partial(jaxgru.init_gru, activation="relu", clip=1.0),
    "lstm, relu": in_blocks(jaxgru.init_lstm, activation="relu"),
    "lstm, clip": partial(jaxgru.init_lstm, clip=1.0),
    "lstm, projected to h": projected_to_h,
    "lstm, peepholes": partial(jaxgru.init_peephole_lstm, clip=2.0),
    "lstm, coupled": jaxgru.init_coupled_lstm,
}
BY_HAND = ["gru", "gru, reset after", "gru, blocks", "lstm", "lstm, norm", "lstm, projected", "rnn"]


def options_of(number) -> dict[str, Any]:
    """The options of a sample."""
    r = random.Random(number)
    maybe = lambda value: r.choice([None, value])
    kind = r.choice([*KINDS])
    batch = r.choice([(), (1,), (3,), (2, 2)])
    sites = ["input", "state", "between", "output"]
    kinds = (
        ["each_step"]
        if kind in ("min_gru", "min_lstm", "rg_lru", "mlp")
        else ["each_step", "variational"]
    )
    site = r.choice(sites)
    dropout = site, r.choice(kinds + ["zoneout", "zoneout, mean"] * (site == "state"))
    options = dict(
        kind=kind,
        E=r.choice([1, 3, 4]),
        H=r.choice([1, 4, 4]),
        L=r.choice([1, 2]),
        T=r.choice([1, 5, 6]),
        batch=batch,
        dtype=r.choice(["float64", "float64", "float32"]),
        steps_at_once=r.choice([1, 2, 512]),  # the last 2 of 5 read beyond the end
        layout=r.choice([IN_ROWS, IN_COLUMNS]),
        first=dict(first_row=r.randrange(5), first_step=r.randrange(5)),
        padding=r.choice([None, "lengths", "mask"]),
        reset=maybe("reset"),
        carry=maybe("carry"),
        reset_carry=r.choice([None, "rows", "all alike"]),
        dropout=maybe(dropout),
        rows_of_table=r.choice([None, None, 1, 5, 40]),
        residual=r.random() < 0.3,
        static=dict(
            reverse=r.random() < 0.5,
            time_major=r.random() < 0.5,
            return_carries=r.random() < 0.5,
            remat=r.random() < 0.4,
            implementation=r.choice(["auto", "scan", "autodiff", "wavefront"]),
        ),
    )
    if options["static"]["implementation"] == "wavefront" and r.random() < 0.5:
        # What it does not hand on to the scan, unless each step's carry is returned
        options |= dict(kind=r.choice(BY_HAND), L=r.choice([2, 3]), T=6, padding=None, reset=None)
    return options


def one_row(reverse, residual, layers, x, carry, initial, resets, real, masks):
    """The definition: for each layer, for each real step of one row (T, F), the cell.

    A carry has an axis B of 1. Returns h of every step, the last carries, and those of every step.
    """
    T = len(x)
    carries = []
    ends = []

    def choose(flag, new, old):
        return jax.tree.map(partial(jnp.where, flag), new, old)

    episodes = jnp.cumsum(resets)
    for i, (layer, c, start, mask) in enumerate(zip(layers, carry, initial, masks, strict=True)):
        h = [None] * T
        every = [None] * T
        layout = PLAIN._replace(drop=lambda h, mask=mask: mask["product"](h))
        read = episodes[-1]  # the episode of the step that was read last, or of the part after x
        for t in reversed(range(T)) if reverse else range(T):
            at_start = real[t] & (read != episodes[t]) if reverse else resets[t]
            old = choose(at_start, start, c)
            x_t = mask["input"](x[t], t)[None]
            new = cells.one_step(layer, old, x_t, layout)
            new = with_hidden(new, mask["state"](hidden(new), t))
            new = mask["update"](new, old, t)
            c = choose(real[t], new, old)
            read = jnp.where(real[t], episodes[t], read)
            h[t] = jnp.where(real[t], mask["output"](hidden(c)[0], t), 0)
            every[t] = c
            h[t] = h[t] + x[t] if residual and i else h[t]
        x = h
        ends = [*ends, c]
        carries.append(jax.tree.map(lambda *leaves: jnp.stack(leaves), *every))
    y = jnp.where(real[:, None], jnp.stack(x), 0)
    return y, tuple(ends), tuple(carries)


def valid(carry):
    """The carry of an sLSTM with a normaliser n ≥ 1, which it is after any step."""
    if not isinstance(carry, SLSTMState):
        return carry
    return carry._replace(n=1 + abs(carry.n))


def mask_of(marks, b):
    """The masks of one layer for row b, as functions."""

    def times(mask):
        if mask.keep is None:
            return lambda h, t: h
        return lambda h, t: jnp.where(mask.keep[t, b], h * mask.scale, 0)

    def product(h):
        if marks.recurrent.keep is None:
            return h
        keep = marks.recurrent.keep[b].reshape((1,) * (h.ndim - 1) + (-1,))
        return jnp.where(keep, h * marks.recurrent.scale, 0)

    def update(new, old, t):
        if marks.zoneout is None:
            return new
        share = jax.tree.map(lambda u: u[t, b][None], marks.zoneout)

        def mix(u, new, old):
            if u.dtype == bool:
                return jnp.where(u, new, old)
            return u * new + (1 - u) * old

        return jax.tree.map(mix, share, new, old)

    return dict(
        input=times(marks.input), state=times(marks.hidden), output=times(marks.output),
        product=product, update=update,
    )  # fmt: skip


def check(number, monkeypatch, forget_traces):
    o = options_of(number)
    monkeypatch.setattr(blocks, "ROWS_AT_ONCE", o["steps_at_once"] * math.prod(o["batch"]))
    monkeypatch.setattr(blocks, "FEWEST_BLOCKS", 1)
    monkeypatch.setattr(wavefront, "PART", 2)
    monkeypatch.setattr(over_time, "training_layout", lambda *_: o["layout"])
    forget_traces()
    rng = np.random.default_rng(number)
    static = o["static"]
    batch = o["batch"]
    T = o["T"]
    L = o["L"]
    reverse = static["reverse"]
    sizes = [(o["E"] if i == 0 else o["H"], o["H"]) for i in range(L)]
    B = math.prod(batch)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), o["dtype"])

    def make():
        return [KINDS[o["kind"]](jax.random.key(0), *s, dtype=o["dtype"]) for s in sizes]

    layers = randomized(jax.eval_shape(make), number)

    table = None if o["rows_of_table"] is None else normal(o["rows_of_table"], o["E"])
    ids = rng.integers(0, o["rows_of_table"] or 1, (B, T))
    x = normal(B, T, o["E"]) if table is None else table
    rows_of = lambda x: x if table is None else x[ids]

    like = jax.eval_shape(lambda: jaxgru.initial_carry(layers, B))

    def number_of(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return normal(*leaf.shape)
        return jnp.asarray(rng.integers(0, 9, leaf.shape), leaf.dtype)

    def draw():
        return tuple(map(valid, jax.tree.map(number_of, like)))

    zeros = jaxgru.initial_carry(layers, B)
    initial = zeros if o["reset_carry"] is None else draw()
    if o["reset_carry"] == "all alike":
        initial = jax.tree.map(lambda leaf: leaf[0], initial)
    carry = None if o["carry"] is None else draw()

    resets = rng.random((B, T)) < 0.4 if o["reset"] else np.zeros((B, T), bool)
    real = np.ones((B, T), bool)
    marks = {}
    if o["padding"] == "lengths":
        marks["lengths"] = rng.integers(0, T + 1, B)
        real = np.arange(T) < marks["lengths"][:, None]
    elif o["padding"] == "mask":
        marks["mask"] = real = rng.random((B, T)) < 0.6
    if o["reset"]:
        marks["reset"] = resets
        resets = resets & real if o["padding"] == "lengths" else resets
    masks = [cells.step_masks.NO_MASKS] * L
    if o["dropout"]:
        site, kind = o["dropout"]
        key = None if kind == "zoneout, mean" else jax.random.key(number)
        several = kind.startswith("zoneout") and rng.random() < 0.5
        parts = len(jax.tree.leaves(zeros)) // L
        rate = (0.5, 0.0, 0.7, 0.3)[-parts:] if several else 0.4
        marks["dropout"] = jaxgru.Dropout(key, rate, site, kind.split(",")[0], **o["first"])
        masks = dropout_masks(layers, marks["dropout"], B, T)

    def in_batch(a, axis=0):
        """With the batch axes, and the steps before them or behind; of a carry, without steps."""
        a = jnp.reshape(a, (*batch, *a.shape[1:]))
        return jnp.moveaxis(a, len(batch), 0) if axis and static["time_major"] else a

    def unrolled(layers, x, carry, initial):
        stack = jaxgru.ResidualStack(tuple(layers)) if o["residual"] else layers
        x = in_batch(x, 1) if table is None else cells.Lookup(x, in_batch(jnp.asarray(ids), 1))
        shaped = {
            name: in_batch(value, name != "lengths") if name != "dropout" else value
            for name, value in marks.items()
        }
        if o["reset_carry"] is not None:
            alike = o["reset_carry"] == "all alike"
            shaped["reset_carry"] = initial if alike else jax.tree.map(in_batch, initial)
        carry = None if carry is None else jax.tree.map(in_batch, carry)
        return jaxgru.unroll(stack, x, carry, **static, **shaped)

    def by_rows(layers, x, carry, initial):
        x = rows_of(x)
        if o["reset_carry"] == "all alike":
            initial = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (B, *leaf.shape)), initial)
        carry = initial if carry is None else carry

        def of_row(b):
            def row(tree):
                return jax.tree.map(lambda leaf: leaf[b][None], tree)

            states = map(row, (carry, initial))
            flags = (jnp.asarray(a)[b] for a in (resets, real))
            each = [mask_of(m, b) for m in masks]
            return one_row(reverse, o["residual"], layers, x[b], *states, *flags, each)

        y, *states = jax.vmap(of_row)(jnp.arange(B))

        def without(tree, axis):
            return jax.tree.map(lambda leaf: leaf.squeeze(axis), tree)

        ends, carries = map(without, states, (1, 2))
        time = lambda leaf: in_batch(leaf, 1)
        outputs = time(y), jax.tree.map(in_batch, ends)
        return (*outputs, jax.tree.map(time, carries)) if static["return_carries"] else outputs

    def with_nan(x, carry, initial):
        """NaN wherever nothing may be read."""
        has_event = resets.any(1)
        first_step = (T - 1 - real[:, ::-1].argmax(1)) if reverse else real.argmax(1)
        episodes = resets.cumsum(1)
        first_episode = episodes[:, -1] if reverse else 0
        reads = real.any(1) & (episodes[np.arange(B), first_step] == first_episode)

        def spoil(flags, leaf):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                return leaf
            ones = (1,) * (leaf.ndim - flags.ndim)
            return jnp.where(flags.reshape(flags.shape + ones), jnp.nan, leaf)

        if table is None:
            x = jnp.where(real[..., None], x, jnp.nan)
        else:
            x = spoil(~np.isin(np.arange(len(x)), ids[real]), x)
        if carry is not None:
            carry = jax.tree.map(partial(spoil, ~reads), carry)
            if o["reset_carry"] == "rows" or not has_event.any():
                of_rows = ~has_event if o["reset_carry"] == "rows" else np.array(True)
                initial = jax.tree.map(partial(spoil, of_rows), initial)
        return x, carry, initial

    arguments = layers, x, carry, initial
    compute = jax.jit(partial(gradients, unrolled))
    both = [compute(*arguments), value_and_gradients(by_rows, *arguments)]
    spoiled = compute(layers, *with_nan(*arguments[1:]))
    unspoiled = both[0]
    if o["reset_carry"] is None:  # it is not an argument then
        both = [(outputs, of[:3]) for outputs, of in both]

    def floats(tree):
        return [np.asarray(a) for a in jax.tree.leaves(tree) if a.dtype != jax.dtypes.float0]

    # float64 differs by the order of sums of at most 5 steps; ReLU and c can grow beyond 1
    tolerance = 1e-9 if o["dtype"] == "float64" else 2e-4
    chex.assert_trees_all_close(*map(floats, both), rtol=tolerance, atol=tolerance)

    (y, *carries), of = spoiled
    (clean_y, *clean_carries), clean_of = unspoiled
    chex.assert_trees_all_equal(y, clean_y)
    chex.assert_trees_all_equal(floats(of), floats(clean_of))
    # A row that takes no step gets its carry back
    kept = lambda a, clean: np.where(np.isnan(a), clean, a)
    chex.assert_trees_all_equal(jax.tree.map(kept, carries, clean_carries), clean_carries)


def quick_samples():
    """The samples that are not slow: each, of some, adds the most pairs of options to the others.

    Fifty of these have nearly as many pairs as a hundred by chance.
    """
    pairs = {}
    for number in range(6 * QUICK):
        options = options_of(number)
        options |= options.pop("static") | {"layout": options["layout"].axis, "first": None}
        pairs[number] = set(itertools.combinations(map(str, options.items()), 2))
    chosen = []
    seen = set()
    for _ in range(QUICK):
        chosen.append(max(pairs, key=lambda number: len(pairs[number] - seen)))
        seen |= pairs.pop(chosen[-1])
    return chosen


FIRST = quick_samples()


@pytest.mark.parametrize("number", [*FIRST, *slow(*sorted({*range(SAMPLES)} - {*FIRST}))])
def test_any_options_together(number, monkeypatch, forget_traces, float64):
    """Outputs, carries, and the gradients of layers, input or table, carry and `initial`."""
    check(number, monkeypatch, forget_traces)
