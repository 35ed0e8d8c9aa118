"""The GPU day: what to run on a machine with a GPU, in this order. NOTES.md says how.

    python gpu_day.py --out OUT --only smoke steps act gates layers        the first call
    python gpu_day.py --out OUT --only bench rl whole flags float32        the second
    python gpu_day.py --out OUT --rehearse            tiny, on a CPU, the kernel interpreted

Each case is a process of its own with a time limit, killed with its group; after a kill, a tiny
program checks that the GPU still answers, and if not, the rest is left out. Cases come in the order
of their worth: what does not fit into the minutes is named at the end. Every number is in day.jsonl
the moment it is known.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import signal
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
PRECISIONS = {"tf32": "tensorfloat32", "fp32": "float32", "bf16": "tensorfloat32"}  # bf16: U only
OF_TORCH = {"tf32": "tf32", "fp32": "float32", "bf16": "bfloat16"}
CELLS = {"before": "GRU, reset before", "after": "GRU", "lstm": "LSTM", "rnn": "RNN"}
PARTS = "smoke steps act gates layers bench rl whole flags float32".split()

# --- One case, in its own process


def record(o, **row):
    line = json.dumps(row)
    with open(os.path.join(o.out, "day.jsonl"), "a") as file:
        file.write(line + "\n")
    print(line[:300], flush=True)


def failed(o, name, error, **label):
    record(o, failed=name, **label, error=f"{type(error).__name__}: {error}"[:400])


@contextlib.contextmanager
def computed(o, unroll=1, plan=None):
    """Let scans be unrolled, or jaxgru use the kernel: what is traced inside.

    plan: "auto" is that of `plan_for`.
    """
    from unittest import mock

    import jax
    import jax.numpy as jnp
    import recurrent_kernel as rk

    from jaxgru.cells.carry import hidden
    from jaxgru.cells.marks import NO_MARKS
    from jaxgru.layers import implementations, over_time

    assert hasattr(over_time, "steps_at_once"), "first apply unroll.patch (NOTES.md)"
    scan = over_time.over_time
    narrow = lambda U: tuple(u.astype(jnp.bfloat16) if u.ndim > 1 else u for u in U)
    weights = narrow if o.precision == "bf16" else lambda U: U

    def kernel(recurrence, U, carry, a, marks=NO_MARKS, return_carries=False):
        (B, H), U, cut = hidden(carry).shape, weights(U), plan
        if cut == "auto":
            cut = rk.plan_for(H, B, a.shape[-1] // H, U[0].dtype)
        takes = cut and not return_carries and rk.supports(recurrence, cut, U, carry, a, marks)
        size = dict(H=H, B=B, T=len(a), resets=marks.reset is not None)
        if not takes:
            record(o, note="the scan does what the kernel does not take", **size, of=str(cut))
            return scan(recurrence, U, carry, a, marks, return_carries)
        record(o, uses=str(cut), **size)
        cut = cut._replace(precision=product(o), sweep=bool(o.rehearse) and cut.programs > 1)
        return rk.over_time(recurrence, cut, bool(o.rehearse), U, carry, a, marks)

    scanned = lambda recurrence, U, *rest: scan(recurrence, weights(U), *rest)
    jax.clear_caches()  # what was traced has the way before
    with (
        mock.patch.object(jax, "default_backend", lambda: "gpu"),  # also in a rehearsal
        mock.patch.object(over_time, "UNROLL_ON_GPU", unroll),
        mock.patch.object(implementations, "over_time", kernel if plan else scanned),
    ):
        yield
    jax.clear_caches()


def product(o):
    """Return the precision of the kernel's products of float32."""
    import jax

    if o.rehearse or o.precision == "bf16":
        return None
    tf32, exact = jax.lax.DotAlgorithmPreset.TF32_TF32_F32, jax.lax.Precision.HIGHEST
    return tf32 if o.precision == "tf32" else exact


def precise(o, precision=None):
    """Return the context of a precision of XLA's products; on a CPU there is but one."""
    import jax

    return jax.default_matmul_precision(
        None if o.rehearse else PRECISIONS[precision or o.precision]
    )


def lowered(o, function, args, donate=(), **way):
    """Trace a function with what `computed` says."""
    import jax

    with computed(o, **way):
        return jax.jit(function, donate_argnums=donate).lower(*args)


def compiled(o, programs):
    """Compile lowered programs side by side; return those that compile, and record the seconds."""
    from concurrent.futures import ThreadPoolExecutor

    def compile_one(name, program):
        began = time.perf_counter()
        try:
            done = program.compile()
        except Exception as error:
            return failed(o, name, error)
        seconds = round(time.perf_counter() - began, 2)
        record(o, compiled=name, seconds=seconds, beside=len(programs) - 1)
        return done

    with ThreadPoolExecutor() as pool:
        done = list(pool.map(compile_one, programs, programs.values()))
    return {name: program for name, program in zip(programs, done, strict=True) if program}


def timed(o, calls):
    """Return the median, least and most µs of calls, which take turns, by name."""
    from bench.timing import Contestant, calling, measure, start

    as_contestant = lambda call: call if isinstance(call, Contestant) else Contestant(calling(call))
    started = {name: start(lambda call=call: as_contestant(call)) for name, call in calls.items()}
    return {
        name: [round(of(seconds) * 1e6, 1) for of in (statistics.median, min, max)]
        for name, seconds in measure(started, o.rounds, 0.05).items()
    }


def plans_of(o):
    """Return the ways of the kernel: [rows, programs, warps] each; with False, U is not stashed."""
    import recurrent_kernel as rk

    def name(plan):
        stashed = "" if plan.stash else ", not stashed"
        return f"kernel {plan.programs}×{plan.rows} rows, {plan.warps} warps{stashed}"

    made = [rk.Plan(*cut[:3], stash=all(cut[3:])) for cut in json.loads(o.plans or "[]")]
    return {name(plan): {"plan": plan} for plan in made} or {"kernel auto": {"plan": "auto"}}


def scans_of(o):
    """Return the ways of a scan, by how many steps it computes at once."""
    name = lambda n: f"scan, unroll {n}" if n > 1 else "scan"
    return {name(n): {"unroll": n} for n in json.loads(o.unrolls)}


def errors_of(seen, right):
    """Return the relative error of each leaf, in the norm, but of scalars: sums of both signs."""
    import jax
    import jax.numpy as jnp

    norm = lambda leaf: float(jnp.linalg.norm(leaf.astype(jnp.float32).ravel()))
    pairs = zip(jax.tree.leaves(seen), jax.tree.leaves(right), strict=True)
    return [norm(s - r) / max(norm(r), 1e-30) for s, r in pairs if r.ndim]


def layer_case(o):
    """One layer forward and backward, with its products with x. Right before fast."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxgru
    from bench import layers
    from bench.timing import LayerTask

    T, B, H = o.T, o.B, o.H
    task = LayerTask("resets" if o.resets else "layer", CELLS[o.kind], B, H, T)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(T, B, H)), jnp.float32)
    reset = jnp.asarray(rng.random((T, B)) < 1 / 16) if o.resets else None
    ours = layers.jaxgru_layer(task, "scan")
    if o.smoke:  # every mark that the kernel knows, inside
        marks = dict(
            time_major=True,
            implementation="scan",
            lengths=jnp.asarray(rng.integers(0, T + 1, B)),
            dropout=jaxgru.Dropout(jax.random.key(1), 0.1, "state"),
        )
        apply = lambda p, x, reset: jaxgru.unroll(p, x, reset=reset, **marks)[0]
        ours = ours._replace(apply=apply)

    def both(layer):
        value = lambda params, x, reset: jnp.square(layer.apply(params, x, reset)).sum()
        return jax.value_and_grad(value, (0, 1)), (layer.params, x, reset)

    label = {"kind": o.kind, "H": H, "B": B, "T": T, "precision": o.precision}
    label["resets"] = bool(o.resets)
    ways = scans_of(o) | (plans_of(o) if o.kernel else {})
    contestants = {name: (ours, way) for name, way in ways.items()}
    last = list(scans_of(o).values())[-1]
    if not o.smoke and o.precision != "bf16":
        contestants["autodiff"] = layers.jaxgru_layer(task, "autodiff"), last
        if o.resets and o.kind in ("after", "lstm"):
            peer = layers.linen_layer(task)
            contestants |= {"Flax": (peer, {}), f"Flax, unroll {last['unroll']}": (peer, last)}
    exact = argparse.Namespace(**{**vars(o), "precision": "fp32"})
    programs = {}
    with precise(o, "fp32"):
        programs["exact"] = lowered(exact, *both(ours))
    with precise(o):
        for name, (layer, way) in contestants.items():
            try:
                programs[name] = lowered(o, *both(layer), **way)
            except Exception as error:
                failed(o, name, error, **label)
        programs = compiled(o, programs)
    right = programs.pop("exact")(*both(ours)[1])
    calls, of_scan = {}, None  # the errors of the first, a scan
    for name, program in programs.items():
        args = both(contestants[name][0])[1]
        calls[name] = lambda program=program, args=args: program(*args)
        if name.startswith("Flax"):
            continue
        first = jax.block_until_ready(program(*args))
        errors = errors_of(first, right)
        of_scan = of_scan or errors
        # False for NaN, too
        is_right = all(e < 3 * s + 1e-5 for e, s in zip(errors, of_scan, strict=True))
        alike = lambda a, b: bool((a == b).all())
        same = all(jax.tree.all(jax.tree.map(alike, program(*args), first)) for _ in range(10))
        rounded = [float(f"{error:.1e}") for error in errors]
        record(o, checked=name, **label, errors=rounded, right=is_right, ten_alike=same)
        if not is_right:
            del calls[name]
    if o.kind in ("after", "lstm") and not o.resets:
        calls |= torch_layer(o, task)
    for name, (us, *spread) in timed(o, calls).items():
        per_step = round(us / T, 3)
        row = dict(contestant=name, us=us, us_per_step=per_step, spread=spread)
        record(o, case="layer", **label, **row)


def torch_layer(o, task):
    """Return cuDNN's layer, if torch has a GPU."""
    try:
        import torch

        from bench import torch_peers
    except ImportError:
        record(o, skipped="torch is not installed")
        return {}
    if not (torch.cuda.is_available() or o.rehearse):
        record(o, skipped="torch sees no GPU")
        return {}
    precision = "float32" if o.rehearse else OF_TORCH[o.precision]
    return {"torch.nn": torch_peers.contestant(task, precision)}


def vain_case(o):
    """A program that waits for one that never comes must end soon, with NaN and no wrong number."""
    from unittest import mock

    import jax
    import jax.numpy as jnp
    import recurrent_kernel as rk

    import jaxgru

    p = jaxgru.init_lstm(jax.random.key(0), 64, 64)
    x = jax.random.normal(jax.random.key(1), (o.T, 32, 64))
    carry, (recurrence, U) = jaxgru.initial_carry(p, 32), p.by_hand()
    plan = rk.Plan(16, 2, 4, precision=product(o), chunk=64)
    wait = rk.Program.wait
    later = lambda do, arrivals: wait(do, arrivals + 1)
    quick = [
        mock.patch.object(rk, "POLLS", 3),
        mock.patch.object(rk.plgpu, "debug_barrier", lambda: None),
    ]
    with mock.patch.object(rk.Program, "wait", later), contextlib.ExitStack() as stack:
        for patch in quick if o.rehearse else []:
            stack.enter_context(patch)
        run = lambda a: rk.over_time(recurrence, plan, bool(o.rehearse), U, carry, a)[0]
        program = jax.jit(run).lower(p.inputs(x)).compile()
    began = time.perf_counter()
    h = jax.block_until_ready(program(p.inputs(x)))
    seconds = round(time.perf_counter() - began, 3)
    record(o, checked="waiting in vain", seconds=seconds, right=bool(jnp.isnan(h).all()))


def step_case(o):
    """Whole training steps of a config, compiled one after another: scans, wavefront, kernel."""
    import jax

    from jaxgru.lm.config import load_config
    from jaxgru.lm.training.step import init_state, train_step

    of_scan = scans_of(o) | (plans_of(o) if o.kernel else {})
    ways = [(name, "scan", way) for name, way in of_scan.items()]
    ways += [(f"wavefront, unroll {n}", "wavefront", {"unroll": n}) for n in json.loads(o.waves)]
    tokens, states, steps, rows = None, {}, {}, {}
    for name, implementation, way in ways:
        options = {"training.implementation": implementation}
        if o.rehearse:
            options |= {"training.batch_size": 2, "training.sequence_length": 8}
            options |= {"model.hidden_dim": 32}
        c = load_config(o.config, options)
        if tokens is None:
            tokens = jax.random.randint(jax.random.key(1), (100_000,), 0, c.model.vocab_size)
        state = init_state(c.model, c.training)
        step = lambda state, tokens, c=c: train_step(c.training, state, tokens)
        try:
            with precise(o):
                began = time.perf_counter()
                program = lowered(o, step, (state, tokens), (0,), **way).compile()
                seconds = round(time.perf_counter() - began, 1)
        except Exception as error:
            failed(o, name, error, config=o.config)
            continue
        losses = []
        for _ in range(4):
            state, loss = program(state, tokens)
            losses.append(float(loss))
        states[name], steps[name] = state, program
        rows[name] = dict(compile_s=seconds, losses=losses)
        record(o, compiled=f"{o.config}, {name}", seconds=seconds)

    def call(name):
        states[name], loss = steps[name](states[name], tokens)
        return loss

    for name, times in timed(o, {name: lambda name=name: call(name) for name in steps}).items():
        ms, *spread = (round(us / 1e3, 3) for us in times)
        row = dict(contestant=name, precision=o.precision, ms=ms, spread=spread, **rows[name])
        flags = os.environ.get("XLA_FLAGS", "").strip()
        record(o, case="step", config=o.config, flags=flags, **row)


def act_case(o):
    """One `step` under `jit`, each waited for: jaxgru's, and Flax's."""
    from bench import layers
    from bench.timing import LayerTask

    makers = {
        "jaxgru": layers.jaxgru_layer,
        "Flax Linen": layers.linen_layer,
        "Flax NNX": layers.nnx_layer,
    }
    for cell in ("GRU", "LSTM"):
        for B in json.loads(o.sizes):
            task = LayerTask("step", cell, B, o.H, 1, jit=True)
            with precise(o):
                calls = {n: layers.contestant(task, make(task)) for n, make in makers.items()}
                for name, (us, *spread) in timed(o, calls).items():
                    row = dict(contestant=name, us=us, spread=spread, cell=cell, B=B, H=o.H)
                    record(o, case="act", **row)


def example(name, unroll=1):
    """Return the names of an example whose `nn.scan` of Flax computes some steps at once."""
    from functools import partial
    from unittest import mock

    from flax import linen as nn

    with mock.patch.object(nn, "scan", partial(nn.scan, unroll=unroll)):
        return runpy.run_path(f"examples/{name}.py")


def contest(o, case, programs, args, numbers):
    """Compile and time what examples compute; record what tells whether they compute the same.

    programs: (a function, whether it is Flax's, and what `computed` takes), by name.
    """
    import jax

    low = {}
    with precise(o):
        for name, (function, way) in programs.items():
            try:
                low[name] = lowered(o, function, args[name], **way)
            except Exception as error:
                failed(o, f"{case}, {name}", error)
        done = compiled(o, low)
    for name, program in done.items():
        seen = [float(leaf.mean()) for leaf in jax.tree.leaves(numbers(program(*args[name])))]
        record(o, checked=f"{case}, {name}", means=seen)
    calls = {name: lambda name=name: done[name](*args[name]) for name in done}
    for name, times in timed(o, calls).items():
        ms, *spread = (round(us / 1e3, 3) for us in times)
        record(o, case=case, contestant=name, B=o.B, H=o.H, T=o.T, ms=ms, spread=spread)


def rl_ways(o):
    """Return the ways of jaxgru, and those of Flax."""
    last = list(scans_of(o).values())[-1]
    return scans_of(o) | plans_of(o), {"Flax": {}, f"Flax, unroll {last['unroll']}": last}


def ppo_case(o):
    """Whole trainings of examples/recurrent_ppo.py."""
    import jax

    def train_with(rnn, unroll=1):
        ppo = example("recurrent_ppo", unroll)
        s = ppo["Settings"](num_envs=o.B, num_steps=o.T, hidden_dim=o.H, updates=4)

        def train(key):
            init_key, key = jax.random.split(key)
            params = ppo["init_policy"](init_key, ppo["RNNS"][rnn], s.hidden_dim)
            return ppo["train"](params, key, ppo["RNNS"][rnn], s)[1]

        return train

    ours, theirs = rl_ways(o)
    programs = {name: (train_with("jaxgru"), way) for name, way in ours.items()}
    programs |= {name: (train_with("flax", **way), way) for name, way in theirs.items()}
    args = dict.fromkeys(programs, (jax.random.key(0),))
    contest(o, "ppo", programs, args, lambda returns: returns)


def r2d2_case(o):
    """The gradient of examples/r2d2.py's loss, of sequences with a burn-in of one half."""
    from functools import partial

    import jax
    import jax.numpy as jnp
    import numpy as np

    n = o.T // 2
    rng, (T, B, H) = np.random.default_rng(0), (o.T + 1, o.B, o.H)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    starts, action = jnp.asarray(rng.random((T, B)) < 1 / 16), rng.integers(4, size=(T, B))
    flax_params = example("recurrent_ppo")["init_flax"](jax.random.key(1), H, H)

    def gradient_of(unroll=None):
        """Return the gradient, and its arguments; unroll: of Flax's layer."""
        ours = example("r2d2")
        s = ours["Settings"](hidden_dim=H, burn_in=n, learned=o.T - n, batch_size=B)
        params, ppo = ours["init"](jax.random.key(0), s), example("recurrent_ppo", unroll or 1)
        params["gru"] = ppo["from_linen"](flax_params["params"]["GRUCell_0"])
        if unroll:
            params["gru"] = flax_params

            def q_unroll(params, x, carry, starts):
                y = jax.nn.relu(x @ params["encoder"])
                y, carry = ppo["unroll_flax"](params["gru"], y, carry, starts)
                return y @ params["head"], carry

            ours["loss_fn"].__globals__["q_unroll"] = q_unroll
        step = ours["Step"](piece_x, starts, carry, jnp.asarray(action), reward, starts)
        target = jax.tree.map(lambda leaf: 0.9 * leaf, params)
        return jax.value_and_grad(partial(ours["loss_fn"], s=s)), (params, target, step)

    piece_x, carry, reward = normal(T, B, 6), 0.1 * normal(T, B, H), normal(T, B)
    ours, theirs = rl_ways(o)
    made = {name: (gradient_of(), way) for name, way in ours.items()}
    made |= {name: (gradient_of(**{"unroll": 1} | way), way) for name, way in theirs.items()}
    programs = {name: (function, way) for name, ((function, _), way) in made.items()}
    args = {name: args for name, ((_, args), _) in made.items()}
    size = lambda out: (out[0], jnp.sqrt(sum(jnp.sum(d**2) for d in jax.tree.leaves(out[1]))))
    contest(o, "r2d2", programs, args, size)


def bench_case(o):
    """scripts/benchmark.py, with unrolled scans: its records and its page go to OUT/docs."""
    sys.path.insert(0, "scripts")
    import shutil

    docs = os.path.join(o.out, "docs")
    os.makedirs(docs, exist_ok=True)
    for name in ("benchmarks.json", "performance.md"):
        if not os.path.exists(os.path.join(docs, name)):
            shutil.copy(os.path.join("docs", name), docs)
    from jaxgru.layers import over_time

    assert hasattr(over_time, "steps_at_once"), "first apply unroll.patch (NOTES.md)"
    over_time.UNROLL_ON_GPU = o.unroll
    only, options = "jaxgru wavefront nnx haiku torch.nn", "--precision tf32 --repeats 3"
    if o.rehearse:
        only, options = "jaxgru nnx", "--precision float32 --quick"
    words = f"benchmark.py --what training --configs {o.config} --only {only} {options} --docs"
    sys.argv = [*words.split(), docs]
    runpy.run_path("scripts/benchmark.py", run_name="__main__")


def alive_case(o):
    import jax
    import jax.numpy as jnp

    device, ran = jax.devices()[0], float(jnp.ones(1000).sum())
    versions = dict(jax=jax.__version__, python=sys.version.split()[0])
    count = getattr(device, "core_count", None)
    record(o, alive=ran, device=device.device_kind, multiprocessors=count, **versions)


# --- What is run, in which order


def cases(o):
    """Yield (part, case, options, XLA's flags, the limit in seconds), the most wanted first."""
    yield "smoke", "alive", {}, "", 60
    for kind, H, B, plans in [
        ("after", 64, 64, [[16, 1, 4]]),
        ("lstm", 64, 50, [[16, 2, 4]]),
        ("before", 128, 64, [[16, 1, 8], [16, 4, 4]]),
        ("before", 512, 64, [[16, 32, 4]]),
    ]:
        options = dict(kind=kind, H=H, B=B, plans=plans, resets=1, kernel=1, smoke=1, unrolls=[1])
        yield "smoke", "layer", options, "", 60
        if kind == "lstm":
            yield "smoke", "vain", {}, "", 40

    gamma, leviathan = dict(config="astra_gamma"), dict(config="leviathan")
    yield "steps", "step", {**gamma, "unrolls": [1, 4], "waves": [1, 4]}, "", 150
    yield "act", "act", dict(sizes=[1, 64, 1024]), "", 60
    for kind, H, B, plans, resets in [
        ("after", 128, 1024, [[16, 1, 8], [32, 1, 8]], 1),
        ("lstm", 512, 64, [[16, 32, 4], [32, 32, 8]], 0),
        ("before", 512, 64, [[16, 32, 4], [32, 32, 8]], 0),
        ("after", 64, 1024, [[16, 1, 4], [16, 1, 8]], 1),
    ]:
        options = dict(kind=kind, H=H, B=B, plans=plans, resets=resets, kernel=1)
        yield "gates", "layer", options, "", 90
    yield "steps", "step", {**leviathan, "unrolls": [1, 4]}, "", 75
    # What RL users have, then what language models have
    for kind, H, B, plans, resets in [
        ("lstm", 128, 1024, [[16, 2, 8], [16, 1, 8, False]], 1),
        ("before", 128, 1024, [[16, 1, 8]], 1),
        ("after", 512, 64, [[16, 32, 4]], 0),
        ("after", 128, 64, [[16, 1, 8], [16, 4, 4]], 1),
        ("lstm", 1024, 64, [[32, 64, 8, False]], 0),
        ("rnn", 128, 64, [[16, 1, 4]], 1),
        ("after", 128, 4096, [[32, 1, 8]], 1),
        ("lstm", 64, 1024, [[16, 1, 4]], 1),
        ("after", 128, 16, [[16, 1, 8], [16, 4, 4]], 1),
    ]:
        options = dict(kind=kind, H=H, B=B, plans=plans, resets=resets, kernel=1, unrolls=[1, 4])
        yield "layers", "layer", options, "", 75
    for kind, H, B, plans in [
        ("after", 128, 1024, [[16, 1, 8]]),
        ("after", 256, 1024, [[64, 4, 8]]),
        ("before", 512, 64, [[16, 16, 4], [64, 16, 8]]),
        ("lstm", 1024, 64, [[32, 64, 4]]),
        ("after", 256, 64, [[16, 4, 4]]),
    ]:
        options = dict(kind=kind, H=H, B=B, plans=plans, kernel=1, unrolls=[1, 4], precision="bf16")
        yield "layers", "layer", options, "", 75

    N = [1, o.unroll]
    for config in (gamma, leviathan):
        yield "bench", "bench", {**config, "unroll": o.unroll}, "", 120
    yield "rl", "ppo", dict(B=1024, H=128, T=128, rounds=3, unrolls=N), "", 120
    yield "rl", "r2d2", dict(B=64, H=128, T=80, unrolls=N), "", 60
    yield "whole", "step", {**gamma, "kernel": 1, "plans": [[16, 32, 4]], "unrolls": []}, "", 75
    plans = [[32, 64, 8, False]]
    yield "whole", "step", {**leviathan, "kernel": 1, "plans": plans, "unrolls": []}, "", 75
    yield "whole", "bench", dict(config="astra_alpha", unroll=o.unroll), "", 90
    W, U = "--xla_gpu_enable_command_buffer=+WHILE", "--xla_gpu_command_buffer_unroll_loops=true"
    for n, flags in (4, f"{W} {U}"), (1, W):
        yield "flags", "step", {**gamma, "unrolls": [n]}, flags, 75
    options = dict(kind="after", H=64, B=1024, plans=[[16, 1, 8]], precision="fp32", kernel=1)
    yield "float32", "layer", {**options, "unrolls": N}, "", 75
    yield "float32", "step", {**gamma, "unrolls": N, "precision": "fp32"}, "", 75


def smaller(case, options):
    """Return the options of a rehearsal; those that differ in their sizes become the same."""
    options = {**options, "rounds": 1, "rehearse": 1}
    match case:
        case "layer":
            plans = [[16, min(cut[1], 2), 4, *cut[3:]] for cut in options["plans"][:1]]
            unrolls = [1] if options.get("smoke") else [1, 2]
            options |= dict(T=3, B=17, H=32, plans=plans, unrolls=unrolls)
        case "step":
            options |= dict(plans=None)
        case "bench":
            options |= dict(config="astra_alpha")
        case "vain":
            options |= dict(T=3)
        case "ppo" | "r2d2":
            options |= dict(B=8, H=32, T=20, unrolls=[1, 2])
        case "act":
            options |= dict(sizes=[1, 4])
    return options


def run(case, options, o, limit, flags):
    """Run a case in a process of its own; return how it ended."""
    command = [sys.executable, "-u", os.path.abspath(__file__), "--case", case, "--out", o.out]
    for name, value in options.items():
        if value is not None:
            command += [f"--{name}", json.dumps(value) if isinstance(value, list) else str(value)]
    here, earlier = os.getcwd(), os.environ.get("PYTHONPATH", "")
    environment = dict(
        os.environ,
        PYTHONPATH=os.pathsep.join([HERE, here, os.path.join(here, "scripts"), earlier]),
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
        TF_CPP_MIN_LOG_LEVEL="2",
        XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
    )
    print(f"--- {case} {options} {flags}", flush=True)
    began = time.time()
    with open(os.path.join(o.out, "last.log"), "w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            ended = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            ended = "time limit"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.seek(0)
        said = log.read()
    tail = "" if ended == 0 else said[-1500:]
    if case == "bench" or tail:
        print(said[-2500:], flush=True)
    row = dict(process=case, options=options, flags=flags, ended=ended, tail=tail)
    record(o, **row, seconds=round(time.time() - began, 1))
    return ended


def summary(rows):
    """Print the tables."""
    of = lambda *cases: [row for row in rows if row.get("case") in cases]
    print("\n--- layers, forward + backward: µs a step")
    groups = {}
    for row in of("layer"):
        size = f"{row['kind']:6s} H {row['H']:4d} B {row['B']:4d} {row['precision']}"
        name = size + " resets" * row["resets"]
        groups.setdefault(name, []).append(f"{row['contestant']} {row['us_per_step']:.2f}")
    for name, group in groups.items():
        print(f"{name:36s}", "; ".join(group))
    print("--- training steps, PPO and R2D2")
    for row in of("step"):
        name = f"{row['config']}, {row['contestant']}, {row['precision']} {row['flags']}"
        loss = f"compiled in {row['compile_s']} s, loss {row['losses'][-1]:.4f}"
        print(f"{name:60s} {row['ms']:8.2f} ms, {loss}")
    for row in of("ppo", "r2d2"):
        print(f"{row['case']} {row['contestant']}: {row['ms']} ms")
    print("--- acting: µs a step")
    for row in of("act"):
        print(f"{row['cell']} H {row['H']} B {row['B']} {row['contestant']}: {row['us']:.0f}")
    for row in rows:
        wrong = False in (row.get("right"), row.get("ten_alike"))
        if wrong or "failed" in row or "note" in row:
            print("LOOK:", json.dumps(row)[:400])
        if "process" in row and row["ended"] != 0:
            print("DID NOT END WELL:", row["process"], row["options"], row["ended"])
        if "skipped" in row:
            print("skipped:", row["skipped"])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--out", default=".")
    add("--minutes", type=float, default=5.8)
    add("--only", nargs="*", default=PARTS)
    add("--rehearse", type=int, nargs="?", const=1, default=0)
    add("--case")
    texts = dict(kind="before", precision="tf32", config="astra_gamma", plans=None)
    for name, default in (texts | dict(sizes="[]", unrolls="[1, 4, 8]", waves="[]")).items():
        add(f"--{name}", default=default)
    numbers = dict(H=128, B=1024, T=128, rounds=5, unroll=4, resets=0, kernel=0, smoke=0)
    for name, default in numbers.items():
        add(f"--{name}", type=int, default=default)
    o = parser.parse_args()
    o.out = os.path.abspath(o.out)
    if o.case:
        return globals()[f"{o.case}_case"](o)
    os.makedirs(o.out, exist_ok=True)
    end, left_out, done = time.time() + 60 * o.minutes, [], []
    for part, case, options, flags, limit in cases(o):
        if part not in o.only:
            continue
        if o.rehearse:
            options, flags, limit = smaller(case, options), "", 600
            if (case, options) in done:
                continue
            done.append((case, options))
        left = end - time.time()
        if left < 20:
            left_out.append(f"{case} {options} {flags}")
            continue
        ended = run(case, options, o, min(limit, left), flags)
        if ended == "time limit" and run("alive", {}, o, 30, "") != 0:
            print("the GPU no longer answers: the rest is left out")
            break
    with open(os.path.join(o.out, "day.jsonl")) as file:
        summary([json.loads(line) for line in file])
    for what in left_out:
        print("no time was left for", what)
    return None


if __name__ == "__main__":
    main()
