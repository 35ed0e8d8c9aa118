"""Compare recurrent_kernel.py, in Pallas's interpreter on a CPU, with float64.

    python check_interpreted.py [--all]

The reference is each cell's `step` in a `lax.scan` in float64, differentiated by JAX. Prints the
largest relative error (in the norm) of the outputs and of all gradients of each case. The barrier
is not interpreted: `sweep` computes what the exchange would, by running the kernel as often as
there are exchanges.
"""

from __future__ import annotations

import itertools
import sys
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import recurrent_kernel as rk
from jax import lax

import jaxgru
from jaxgru.cells.carry import LSTMState, hidden, with_hidden
from jaxgru.cells.contract import one_step
from jaxgru.cells.layout import IN_ROWS, PLAIN
from jaxgru.cells.marks import Marks, Mask
from jaxgru.layers.derived import derived

jax.config.update("jax_enable_x64", True)

INIT = {
    "after": jaxgru.init_gru,
    "before": lambda *args, **options: jaxgru.init_gru(*args, reset_gate="before", **options),
    "lstm": jaxgru.init_lstm,
    "rnn": jaxgru.init_rnn,
}


def layer(kind, E, H, rng):
    """Return a layer whose biases are not zero, in float64."""
    p = INIT[kind](jax.random.key(0), E, H, dtype=jnp.float64)
    return jax.tree.map(lambda w: w + 0.1 * rng.normal(size=w.shape), p)


def reference(p, x, carry, initial, marks):
    """Run the definition; dropout of h in the products is that of the step's layout."""
    layout = PLAIN.dropping(marks.product)

    def step(carry, now):
        x, reset, real, keep = now
        start = IN_ROWS.choose(reset, initial, carry)
        new = one_step(p, start, x, layout)
        new = with_hidden(new, Mask(keep, marks.state.scale)(hidden(new)))
        new = IN_ROWS.choose(real, new, start)
        return new, hidden(new)

    return lax.scan(step, carry, (x, marks.reset, marks.real, marks.state.keep))[::-1]


def kernel(p, x, carry, initial, marks, plan, dtype):
    """Run a layer with the kernel: its weights in `dtype`."""
    a = p.inputs(x)
    p = jax.tree.map(lambda w: w.astype(dtype) if w.ndim > 1 else w, p)
    recurrence, U = p.by_hand() or derived(p, carry, a[0])
    marks = marks._replace(initial=initial if marks.reset is not None else None)
    assert rk.supports(recurrence, plan, U, carry, a, marks)
    return rk.over_time(recurrence, plan, True, U, carry, a, marks)


def check(kind, T, B, H, plan, what, dtype=jnp.float32, E=3, seed=0):
    """Return the largest relative error of a case; `what` is of reset, real, keep, product."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape))
    state = lambda: LSTMState(normal(B, H), normal(B, H)) if kind == "lstm" else normal(B, H)
    p, x, carry, initial = layer(kind, E, H, rng), normal(T, B, E), state(), state()
    of_h, of_last = normal(T, B, H), state()
    mask = lambda *shape: Mask(jnp.asarray(rng.random(shape) < 0.8), jnp.float64(1.25))
    marks = Marks(
        reset=jnp.asarray(rng.random((T, B)) < 0.3) if "reset" in what else None,
        real=jnp.arange(T)[:, None] < rng.integers(0, T + 1, B) if "real" in what else None,
        state=mask(T, B, H) if "keep" in what else Mask(),
        product=mask(B, H) if "product" in what else Mask(),
    )
    none = jnp.zeros((T, B), bool)
    every = marks._replace(
        reset=none if marks.reset is None else marks.reset,
        real=~none if marks.real is None else marks.real,
        state=marks.state if "keep" in what else Mask(jnp.ones((T, B, H), bool), jnp.float64(1)),
    )

    def value(run):
        def function(p, x, carry, initial):
            h, last = out = run(p, x, carry, initial)
            weighted = lambda y, w: (y * w.astype(y.dtype)).sum()
            return sum(jax.tree.leaves(jax.tree.map(weighted, (h, last), (of_h, of_last)))), out

        return jax.jit(jax.grad(function, (0, 1, 2, 3), has_aux=True))

    single = lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.float64 else leaf
    narrow = lambda tree: jax.tree.map(single, tree)
    args = p, x, carry, initial
    right = value(lambda *args: reference(*args, every))(*args)
    seen = value(lambda *args: kernel(*args, narrow(marks), plan, dtype))(*narrow(args))

    def error(seen, right):
        off, size = jnp.linalg.norm(seen.astype(jnp.float64) - right), jnp.linalg.norm(right)
        return float(off / jnp.where(size > 0, size, 1))

    errors = jax.tree.leaves(jax.tree.map(error, seen, right))
    assert np.isfinite(errors).all(), errors
    return max(errors)


def cases(every):
    plain = rk.Plan(rows=16, precision=None)
    share = lambda P, **more: plain._replace(programs=P, sweep=True, chunk=32, **more)
    full, masks = ("keep", "reset", "real"), ("product", "reset", "real")
    for kind in INIT:
        yield kind, 5, 19, 32, plain, ()
        yield kind, 4, 33, 64, plain, full
        yield kind, 1, 1, 32, plain, full
        yield kind, 6, 1, 32, plain, masks
    for kind in ("after", "before", "lstm"):
        yield kind, 3, 19, 64, share(4), ("reset",)
        yield kind, 3, 7, 64, share(2, stash=False), masks
    if every:
        sizes = [(1, 1, 32), (7, 16, 64), (4, 33, 128), (9, 1, 64)]
        marks = [(), ("reset",), full, ("keep", "product")]
        for kind, size, what in itertools.product(INIT, sizes, marks):
            yield kind, *size, plain, what


def check_giving_up():
    """The interpreter runs one program after another, so the first waits in vain.

    It gives up: all that it computes is NaN. The second one meets it at the first barrier, but not
    at the next: what it computed before is right, and all else NaN, also after a reset.
    """
    rng, (T, B, H) = np.random.default_rng(0), (4, 16, 32)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    p = jax.tree.map(jnp.float32, layer("lstm", 3, H, rng))
    x, carry = normal(T, B, 3), LSTMState(normal(B, H), normal(B, H))
    marks = Marks(reset=jnp.zeros((T, B), bool).at[2].set(True))
    plan = rk.Plan(programs=2, precision=None, chunk=32)
    alone = mock.patch.object(rk.plgpu, "debug_barrier", lambda: None)
    with mock.patch.object(rk, "POLLS", 3), alone:
        seen, _ = kernel(p, x, carry, carry, marks, plan, jnp.float32)
    right, _ = kernel(p, x, carry, carry, marks, plan._replace(programs=1), jnp.float32)
    first, second = np.split(np.asarray(seen), 2, axis=-1)
    np.testing.assert_allclose(second[0], right[0, :, H // 2 :], rtol=1e-5, atol=1e-6)
    assert np.isnan(first).all() and np.isnan(second[1:]).all()
    print("a program that waits in vain gives up: NaN from there on, never a wrong number")


def check_refusals():
    """A derived step may do anything with h, so programs never share its units."""
    p = jaxgru.init_rnn(jax.random.key(0), 32, 32)
    carry, a = jnp.zeros((4, 32), jnp.float32), jnp.zeros((2, 4, 32), jnp.float32)
    recurrence, U = derived(p, carry, a[0])
    takes = lambda programs: rk.supports(recurrence, rk.Plan(16, programs), U, carry, a, Marks())
    assert takes(1) and not takes(2)


def main():
    check_giving_up()
    check_refusals()
    worst = {}
    for kind, T, B, H, plan, what in cases("--all" in sys.argv):
        began = time.time()
        error = check(kind, T, B, H, plan, what)
        worst[kind] = max(error, worst.get(kind, 0))
        name = "+".join(what) or "–"
        seconds = time.time() - began
        size = f"programs {plan.programs} T {T} B {B:3d} H {H:4d}"
        print(f"{kind:7s} {size} {name:20s} {error:.1e} ({seconds:.1f} s)", flush=True)
    print("the worst:", {kind: f"{error:.1e}" for kind, error in worst.items()}, flush=True)
    assert max(worst.values()) < 1e-6, worst
    plain = rk.Plan(rows=16, precision=None)
    for kind in INIT:
        error = check(kind, 5, 19, 64, plain, ("reset",), jnp.bfloat16)
        print(f"{kind:7s} U in bfloat16: {error:.1e}", flush=True)
        assert error < 1e-2


if __name__ == "__main__":
    main()
