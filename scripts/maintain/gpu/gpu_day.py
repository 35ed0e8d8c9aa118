"""The GPU day: what to run on a machine with a GPU, in this order. NOTES.md says how.

    python gpu_day.py --out OUT --minutes 5.8 --only smoke steps gates more layers    the first call
    python gpu_day.py --out OUT --minutes 5.8 --only whole torch bench float32        the second
    python gpu_day.py --out DIR --rehearse                                    tiny, on a CPU, the kernel interpreted

Each case is a process of its own with a time limit, killed with its group; after a kill, a tiny program checks that
the GPU still answers, and if not, the rest is left out. Cases come in the order of their worth: what does not fit into
the minutes is named at the end. Every number is in day.jsonl the moment it is known.
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

# --- One case, in its own process ------------------------------------------------------------------------------------


def record(o, **row):
    line = json.dumps(row)
    with open(os.path.join(o.out, "day.jsonl"), "a") as file:
        file.write(line + "\n")
    print(line[:300], flush=True)


@contextlib.contextmanager
def computed(o, unroll=1, plan=None):
    """Let jaxgru unroll its scans, or use the kernel: what is traced inside. plan "auto" is `plan_for`'s."""
    from unittest import mock

    import jax.numpy as jnp
    import recurrent_kernel as rk
    from jaxgru.cells.marks import NO_MARKS, hidden
    from jaxgru.layers import implementations, over_time

    assert hasattr(over_time, "steps_at_once"), "apply unroll.patch to the checkout first (NOTES.md)"
    scan = over_time.over_time

    def kernel(recurrence, U, carry, a, marks=NO_MARKS, return_carries=False):
        if o.precision == "bf16":
            U = tuple(leaf.astype(jnp.bfloat16) if leaf.ndim > 1 else leaf for leaf in U)
        (B, H), cut = hidden(carry).shape, plan
        if cut == "auto":
            cut = rk.plan_for(H, B, a.shape[-1] // H, U[0].dtype)
        if return_carries or cut is None or not rk.supports(U, carry, a, marks):
            record(o, note="the kernel does not take this layer: the scan does", H=H, B=B, of=str(cut))
            return scan(recurrence, U, carry, a, marks, return_carries)
        record(o, uses=str(cut), H=H, B=B, T=len(a), resets=marks.reset is not None)
        cut = cut._replace(precision=product(o), sweep=o.rehearse and cut.programs > 1)
        return rk.over_time(recurrence, cut, o.rehearse, U, carry, a, marks)

    def narrow(recurrence, U, *rest):
        return scan(recurrence, tuple(u.astype(jnp.bfloat16) if u.ndim > 1 else u for u in U), *rest)

    run = kernel if plan else narrow if o.precision == "bf16" else scan
    implementations.run_stack.clear_cache()  # what was traced has the way before
    with (
        mock.patch.object(over_time, "steps_at_once", lambda T: unroll),
        mock.patch.object(implementations, "over_time", run),
    ):
        yield
    implementations.run_stack.clear_cache()


def product(o):
    """Return the precision of the kernel's products of float32."""
    import jax

    if o.rehearse or o.precision == "bf16":
        return None
    return jax.lax.DotAlgorithmPreset.TF32_TF32_F32 if o.precision == "tf32" else jax.lax.Precision.HIGHEST


def compiled(o, name, function, args, way=None, donate=()):
    """Compile a function with jaxgru computed in a way; record the seconds."""
    import jax

    began = time.perf_counter()
    with computed(o, **way) if way is not None else contextlib.nullcontext():
        program = jax.jit(function, donate_argnums=donate).lower(*args).compile()
    record(o, compiled=name, seconds=round(time.perf_counter() - began, 2))
    return program


def timed(o, programs, args, per_round=0.05):
    """Return each program's times, in µs; they take turns."""
    import jax

    calls, times = {}, {name: [] for name in programs}
    for name, program in programs.items():
        jax.block_until_ready(program(*args))
        began = time.perf_counter()
        jax.block_until_ready(program(*args))
        calls[name] = max(1, int(per_round / (time.perf_counter() - began)))
    for _ in range(o.rounds):
        for name, program in programs.items():
            began = time.perf_counter()
            for _ in range(calls[name]):
                result = program(*args)
            jax.block_until_ready(result)
            times[name].append((time.perf_counter() - began) / calls[name] * 1e6)
    return times


def plans_of(o):
    """Return the ways of the kernel: [rows, programs, warps] each, and False as a fourth where U is not stashed."""
    import recurrent_kernel as rk

    plans = json.loads(o.plans) if o.plans else []
    made = [rk.Plan(*cut[:3], stash=cut[3] if cut[3:] else True) for cut in plans]
    name = lambda p: f"kernel {p.programs}×{p.rows} rows, {p.warps} warps{'' if p.stash else ', not stashed'}"
    return {name(plan): {"plan": plan} for plan in made} or {"kernel auto": {"plan": "auto"}}


def layer_case(o):
    """One layer forward and backward, with its products with x: scans, kernels, Flax. Right before fast."""
    import jax
    import jax.numpy as jnp
    import jaxgru
    import numpy as np
    from bench import layers
    from bench.timing import LayerTask

    cell = {"before": "gru", "after": "gru, reset after", "lstm": "lstm"}[o.kind]
    T, B, H = o.T, o.B, o.H
    task = LayerTask(cell, B, T, H, H, resets=bool(o.resets))
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.normal(size=(T, B, H)), jnp.float32) for _ in range(2))
    reset = jnp.asarray(rng.random((T, B)) < 1 / 16) if o.resets else None
    ours = layers.jaxgru_layer(task, "scan")
    if o.smoke:  # every mark that the kernel knows, inside
        marks = dict(time_major=True, implementation="scan", lengths=jnp.asarray(rng.integers(0, T + 1, B)),
                     dropout=jaxgru.Dropout(jax.random.key(1), 0.1, "state"))  # fmt: skip
        ours = ours._replace(apply=lambda p, x, reset: jaxgru.unroll(p, x, reset=reset, **marks)[0])
    args = ours.params, x, reset, dy

    def both(apply):
        value = lambda params, x, reset, dy: jnp.vdot(apply(params, x, reset), dy)
        return jax.value_and_grad(value, (0, 1))

    unrolls = [int(n) for n in o.unrolls.split(",")]
    ways = {f"scan, unroll {n}" if n > 1 else "scan": {"unroll": n} for n in unrolls}
    ways |= plans_of(o) if o.kernel else {}
    label = {"kind": o.kind, "H": H, "B": B, "T": T, "precision": o.precision, "resets": bool(o.resets)}
    with jax.default_matmul_precision(None if o.rehearse else "float32"):
        exact = argparse.Namespace(**{**vars(o), "precision": "fp32"})
        right = compiled(exact, "exact", both(ours.apply), args, {"unroll": 1})(*args)
    norm = lambda leaf: float(jnp.linalg.norm(leaf.astype(jnp.float32).ravel()))
    off = lambda seen: [
        norm(s - r) / max(norm(r), 1e-30)
        for s, r in zip(jax.tree.leaves(seen), jax.tree.leaves(right), strict=True)
        if r.ndim  # the value itself is a sum of both signs
    ]
    programs, of_scan = {}, None  # by name; the errors of the first, a scan
    with jax.default_matmul_precision(None if o.rehearse else PRECISIONS[o.precision]):
        for name, way in ways.items():
            try:
                program = compiled(o, name, both(ours.apply), args, way)
                first = jax.block_until_ready(program(*args))
                errors = off(first)
                of_scan = of_scan or errors
                is_right = all(e < 3 * s + 1e-5 for e, s in zip(errors, of_scan, strict=True))  # False for NaN
                same = all(
                    bool((a == b).all())
                    for _ in range(10)
                    for a, b in zip(jax.tree.leaves(program(*args)), jax.tree.leaves(first), strict=True)
                )
                rounded = [float(f"{error:.1e}") for error in errors]
                record(o, checked=name, **label, errors=rounded, right=is_right, ten_alike=same)
                if is_right:
                    programs[name] = program
            except Exception as failure:
                record(o, failed=name, **label, error=f"{type(failure).__name__}: {failure}"[:400])
        if o.kind != "before" and o.precision != "bf16" and not o.smoke:
            with contextlib.suppress(ImportError):
                peer = layers.linen_layer(task) if o.resets else layers.nnx_layer(task)
                done = compiled(o, "Flax", both(peer.apply), (peer.params, x, reset, dy))
                programs["Flax"] = lambda _, *rest: done(peer.params, *rest)
        for name, times in timed(o, programs, args).items():
            us = statistics.median(times)
            record(o, case="layer", **label, contestant=name, us=round(us, 1), us_per_step=round(us / T, 3),
                   spread=[round(min(times), 1), round(max(times), 1)])  # fmt: skip


def vain_case(o):
    """A program that waits for one that never comes must end soon, with NaN and with no wrong number."""
    from unittest import mock

    import jax
    import jax.numpy as jnp
    import jaxgru
    import recurrent_kernel as rk

    p = jaxgru.init_lstm(jax.random.key(0), 64, 64)
    x = jax.random.normal(jax.random.key(1), (o.T, 32, 64))
    wait = rk.Program.wait
    later = lambda do, arrivals: wait(do, arrivals + 1)
    quick = [mock.patch.object(rk, "POLLS", 3), mock.patch.object(rk.plgpu, "debug_barrier", lambda: None)]
    with mock.patch.object(rk.Program, "wait", later), contextlib.ExitStack() as stack:
        for patch in quick if o.rehearse else []:
            stack.enter_context(patch)
        plan = rk.Plan(16, 2, 4, precision=product(o), chunk=64)
        recurrence, U = p.by_hand()
        run = jax.jit(lambda a: rk.over_time(recurrence, plan, bool(o.rehearse), U, jaxgru.initial_carry(p, 32), a)[0])
        program = run.lower(p.inputs(x)).compile()
    began = time.perf_counter()
    h = jax.block_until_ready(program(p.inputs(x)))
    seconds = time.perf_counter() - began
    record(o, checked="waiting in vain", seconds=round(seconds, 3), right=bool(jnp.isnan(h).all()))


def step_case(o):
    """A whole training step of a config: flags, unrolling, wavefront, kernel."""
    import jax
    from jaxgru.lm.config import load_config
    from jaxgru.lm.training.step import init_state, train_step

    options = {"training.implementation": o.implementation}
    if o.rehearse:
        options |= {"training.batch_size": 2, "training.sequence_length": 8, "model.hidden_dim": 32}
    c = load_config(o.config, options)
    state = init_state(c.model, c.training)
    tokens = jax.random.randint(jax.random.key(1), (100_000,), 0, c.model.vocab_size)
    way = next(iter(plans_of(o).values())) if o.kernel else {"unroll": o.unroll}
    name = f"{o.config} {o.implementation}" + (f", {next(iter(plans_of(o)))}" if o.kernel else f", unroll {o.unroll}")
    with jax.default_matmul_precision(None if o.rehearse else PRECISIONS[o.precision]):
        began = time.perf_counter()
        step = compiled(o, name, lambda s, t: train_step(c.training, s, t), (state, tokens), way, (0,))
        seconds = time.perf_counter() - began
        losses = []
        for _ in range(4):
            state, loss = step(state, tokens)
            losses.append(float(loss))
        times, calls = [], 1 if o.rehearse else 10
        for _ in range(o.rounds):
            began = time.perf_counter()
            for _ in range(calls):
                state, loss = step(state, tokens)
            jax.block_until_ready(state)
            times.append((time.perf_counter() - began) / calls * 1e3)
    record(o, case="step", config=o.config, contestant=name, precision=o.precision,
           flags=os.environ.get("XLA_FLAGS", ""), ms=round(statistics.median(times), 3),
           spread=[round(min(times), 3), round(max(times), 3)], compile_s=round(seconds, 1),
           losses=losses)  # fmt: skip


def ppo_case(o):
    """Whole trainings of examples/recurrent_ppo.py: scan, unrolled scan, kernel, Flax's ScannedRNN."""
    import jax

    ppo = runpy.run_path("examples/recurrent_ppo.py")
    s = ppo["Settings"](num_envs=o.B, num_steps=o.T, hidden_dim=o.H, updates=4)

    def train_with(rnn):
        def train(key):
            init_key, key = jax.random.split(key)
            params = ppo["init_policy"](init_key, ppo["RNNS"][rnn], s.hidden_dim)
            return ppo["train"](params, key, ppo["RNNS"][rnn], s)[1]

        return train

    ways = {"scan": {"unroll": 1}, f"scan, unroll {o.unroll}": {"unroll": o.unroll}, **plans_of(o), "Flax": None}
    args, programs = (jax.random.key(0),), {}
    with jax.default_matmul_precision(None if o.rehearse else PRECISIONS[o.precision]):
        for name, way in ways.items():
            try:
                rnn = "flax" if name == "Flax" else "jaxgru"
                programs[name] = compiled(o, name, train_with(rnn), args, way)
                returned = programs[name](*args)
                record(o, checked=f"ppo, {name}", returns=[float(leaf.mean()) for leaf in jax.tree.leaves(returned)])
            except Exception as failure:
                record(o, failed=f"ppo, {name}", error=f"{type(failure).__name__}: {failure}"[:400])
        for name, times in timed(o, programs, args).items():
            record(o, case="ppo", contestant=name, B=o.B, H=o.H, T=o.T, ms=round(statistics.median(times) / 1e3, 2),
                   spread=[round(min(times) / 1e3, 2), round(max(times) / 1e3, 2)])  # fmt: skip


def torch_case(o):
    """cuDNN's layer forward and backward, with its products with x."""
    try:
        import torch
    except ImportError:
        return record(o, skipped="torch is not installed")
    if not torch.cuda.is_available():
        return record(o, skipped="torch sees no GPU")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = o.precision == "tf32"
    dtype = torch.bfloat16 if o.precision == "bf16" else torch.float32
    for kind in ("after", "lstm"):
        for H, B in json.loads(o.sizes):
            rnn = (torch.nn.LSTM if kind == "lstm" else torch.nn.GRU)(H, H).to("cuda", dtype)
            x = torch.randn(o.T, B, H, device="cuda", dtype=dtype, requires_grad=True)
            dy = torch.randn(o.T, B, H, device="cuda", dtype=dtype)

            def both(rnn=rnn, x=x, dy=dy):
                torch.autograd.grad((rnn(x)[0] * dy).sum(), [x, *rnn.parameters()])

            for _ in range(3):
                both()
            times = []
            for _ in range(o.rounds):
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(10):
                    both()
                torch.cuda.synchronize()
                times.append((time.perf_counter() - began) * 1e5)
            us = statistics.median(times)
            record(o, case="layer", kind=kind, H=H, B=B, T=o.T, precision=o.precision, resets=False,
                   contestant="torch.nn (cuDNN)", us=round(us, 1), us_per_step=round(us / o.T, 3),
                   spread=[round(min(times), 1), round(max(times), 1)])  # fmt: skip
    return None


def bench_case(o):
    """scripts/benchmark.py, with the scans unrolled: its records and its page go to OUT/docs."""
    sys.path.insert(0, "scripts")
    import shutil

    docs = os.path.join(o.out, "docs")
    os.makedirs(docs, exist_ok=True)
    for name in ("benchmarks.json", "performance.md"):
        if not os.path.exists(os.path.join(docs, name)):
            shutil.copy(os.path.join("docs", name), docs)
    from jaxgru.layers import over_time

    over_time.UNROLL_ON_GPU = o.unroll
    quick = ["--quick", "--precision", "float32"] if o.rehearse else ["--precision", "tf32", "--repeats", "3"]
    only = ["jaxgru", "nnx"] if o.rehearse else ["jaxgru", "wavefront", "nnx", "haiku", "torch.nn"]
    sys.argv = ["benchmark.py", "--what", "training", "--configs", *o.config.split(","), "--only", *only, *quick,
                *("--docs", docs)]  # fmt: skip
    runpy.run_path("scripts/benchmark.py", run_name="__main__")


def alive_case(o):
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    ran = float(jnp.ones(1000).sum())
    record(o, alive=ran, device=device.device_kind, multiprocessors=getattr(device, "core_count", None),
           jax=jax.__version__, python=sys.version.split()[0])  # fmt: skip


# --- What is run, in which order -------------------------------------------------------------------------------------


def cases(o):
    """Yield (part, case, options, XLA's flags, the limit in seconds), the smallest first in a part."""
    W, U = "--xla_gpu_enable_command_buffer=+WHILE", "--xla_gpu_command_buffer_unroll_loops=true"
    yield "smoke", "alive", {}, "", 60
    for kind, H, B, plans in [
        ("after", 64, 64, [[16, 1, 4]]),
        ("lstm", 64, 50, [[16, 2, 4]]),
        ("before", 128, 64, [[16, 1, 8], [16, 4, 4]]),
        ("before", 512, 64, [[16, 32, 4]]),
    ]:
        yield "smoke", "layer", dict(kind=kind, H=H, B=B, plans=plans, resets=1, kernel=1, smoke=1, unrolls="1"), "", 60
        if kind == "lstm":
            yield "smoke", "vain", {}, "", 40

    gamma = dict(config="astra_gamma")
    for unroll in (1, 4, 8):
        yield "steps", "step", {**gamma, "unroll": unroll}, "", 75
    for kind, H, B, plans, resets in [
        ("after", 128, 1024, [[16, 1, 8], [32, 1, 8]], 1),
        ("lstm", 512, 64, [[16, 32, 4], [32, 32, 8]], 0),
        ("before", 512, 64, [[16, 32, 4], [32, 32, 8]], 0),
        ("after", 64, 1024, [[16, 1, 4], [16, 1, 8]], 1),
    ]:
        yield "gates", "layer", dict(kind=kind, H=H, B=B, plans=plans, resets=resets, kernel=1), "", 90
    for options, flags in [
        (dict(unroll=4), f"{W} {U}"),
        (dict(implementation="wavefront", unroll=1), ""),
        (dict(implementation="wavefront", unroll=4), ""),
        (dict(unroll=1), W),
    ]:
        yield "more", "step", {**gamma, **options}, flags, 75
    # What RL users have, then what language models have
    for kind, H, B, plans, resets in [
        ("lstm", 128, 1024, [[16, 2, 8], [16, 1, 8, False]], 1),
        ("before", 128, 1024, [[16, 1, 8]], 1),
        ("after", 512, 64, [[16, 32, 4]], 0),
        ("after", 128, 4096, [[32, 1, 8]], 1),
        ("lstm", 64, 1024, [[16, 1, 4]], 1),
        ("after", 128, 64, [[16, 1, 8], [16, 4, 4]], 1),
        ("lstm", 1024, 64, [[32, 64, 8, False]], 0),
        ("after", 128, 16, [[16, 1, 8], [16, 4, 4]], 1),
    ]:
        options = dict(kind=kind, H=H, B=B, plans=plans, resets=resets, kernel=1, unrolls="1,4")
        yield "layers", "layer", options, "", 75
    for kind, H, B, plans in [
        ("after", 128, 1024, [[16, 1, 8]]),
        ("after", 256, 1024, [[64, 4, 8]]),
        ("before", 512, 64, [[16, 16, 4], [64, 16, 8]]),
        ("lstm", 1024, 64, [[32, 64, 4]]),
        ("after", 256, 64, [[16, 4, 4]]),
    ]:
        options = dict(kind=kind, H=H, B=B, plans=plans, resets=0, kernel=1, unrolls="1,4", precision="bf16")
        yield "layers", "layer", options, "", 75

    for options in [dict(config="astra_gamma", plans=[[16, 32, 4]]), dict(config="astra_alpha")]:
        yield "whole", "step", {**options, "kernel": 1}, "", 75
    yield "whole", "ppo", dict(B=1024, H=128, T=128, rounds=3, unroll=4), "", 150
    for precision in ("tf32", "bf16"):
        sizes = [[128, 1024], [512, 64], [64, 1024], [1024, 64], [128, 64]]
        yield "torch", "torch", dict(precision=precision, sizes=sizes), "", 60
    for config in ("astra_gamma", "leviathan", "astra_alpha"):
        yield "bench", "bench", dict(config=config, unroll=o.unroll), "", 120
    yield "float32", "layer", dict(kind="after", H=64, B=1024, plans=[[16, 1, 8]], precision="fp32", kernel=1), "", 75
    yield "float32", "step", dict(config="astra_gamma", unroll=1, precision="fp32"), "", 75
    yield "float32", "step", dict(config="astra_gamma", unroll=o.unroll, precision="fp32"), "", 75


def smaller(case, options):
    """Return the options of a rehearsal; None to leave out what differs from an earlier one in its sizes alone."""
    options = {**options, "rounds": 1, "rehearse": 1}
    if case == "layer":
        plans = [[16, min(cut[1], 2), 4, *cut[3:]] for cut in options["plans"][:1]]
        options |= dict(T=3, B=17, H=32, plans=plans, unrolls="1" if options.get("smoke") else "1,2")
    if case == "step":
        options |= dict(plans=None) if options.get("kernel") else {}
    if case == "bench":
        options |= dict(config="astra_alpha")
    if case == "vain":
        options |= dict(T=3)
    if case == "ppo":
        options |= dict(B=8, H=32, T=20, unroll=2)
    if case == "torch":
        options |= dict(sizes=[[32, 4]], T=3)
    return options


def run(case, options, o, limit, flags):
    """Run a case in a process of its own; return how it ended."""
    values = {k: json.dumps(v) if isinstance(v, list) else v for k, v in options.items() if v is not None}
    command = [sys.executable, "-u", os.path.abspath(__file__), "--case", case, "--out", o.out]
    command += [str(word) for name, value in values.items() for word in (f"--{name}", value)]
    path = [HERE, os.getcwd(), os.path.join(os.getcwd(), "scripts"), os.environ.get("PYTHONPATH", "")]
    environment = dict(
        os.environ,
        PYTHONPATH=os.pathsep.join(path),
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
        TF_CPP_MIN_LOG_LEVEL="2",
        XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
    )
    print(f"--- {case} {options} {flags}", flush=True)
    began = time.time()
    log = os.path.join(o.out, "last.log")
    with open(log, "w+") as text:
        process = subprocess.Popen(command, stdout=text, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            ended = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            ended = "time limit"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        text.seek(0)
        said = text.read()
    tail = "" if ended == 0 else said[-1500:]
    if case == "bench" or tail:
        print(said[-2500:], flush=True)
    row = dict(process=case, options=options, flags=flags, ended=ended, seconds=round(time.time() - began, 1), tail=tail)
    record(o, **row)
    return ended


def summary(rows):
    """Print the tables."""
    of = lambda case: [row for row in rows if row.get("case") == case]
    print("\n--- layers, forward + backward: µs a step")
    groups = {}
    for row in of("layer"):
        name = f"{row['kind']:6s} H {row['H']:4d} B {row['B']:4d} {row['precision']} {'resets' if row['resets'] else ''}"
        groups.setdefault(name, []).append(row)
    for name, group in groups.items():
        print(f"{name:36s}", "; ".join(f"{row['contestant']} {row['us_per_step']:.2f}" for row in group))
    print("--- steps")
    for row in of("step"):
        print(f"{row['contestant']:50s} {row['precision']} {row['flags']:80s} {row['ms']:8.2f} ms, "
              f"compiled in {row['compile_s']} s, loss {row['losses'][-1]:.4f}")  # fmt: skip
    for row in of("ppo"):
        print(f"PPO {row['contestant']}: {row['ms']} ms")
    for row in rows:
        if row.get("right") is False or row.get("ten_alike") is False or "failed" in row or "note" in row:
            print("LOOK:", json.dumps(row)[:400])
        if "process" in row and row["ended"] != 0:
            print("DID NOT END WELL:", row["process"], row["options"], row["ended"])
        if "skipped" in row:
            print("skipped:", row["skipped"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--out", default=".")
    add("--minutes", type=float, default=5.8)
    add("--only", nargs="*", default=["smoke", "steps", "gates", "more", "layers", "whole", "torch", "bench", "float32"])
    add("--rehearse", type=int, nargs="?", const=1, default=0)
    add("--case")
    for name, default in [("kind", "before"), ("precision", "tf32"), ("config", "astra_gamma"), ("plans", None),
                          ("implementation", "scan"), ("sizes", "[]"), ("unrolls", "1,4,8")]:  # fmt: skip
        add(f"--{name}", default=default)
    for name, default in [("H", 128), ("B", 1024), ("T", 128), ("rounds", 5), ("unroll", 4), ("resets", 0),
                          ("kernel", 0), ("smoke", 0)]:  # fmt: skip
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
            options, limit = smaller(case, options), 600
            if (alike := (case, json.dumps(options, sort_keys=True))) in done:
                continue
            done.append(alike)
            flags = ""
        left = end - time.time()
        if left < 20:
            left_out.append(f"{case} {options} {flags}")
            continue
        if run(case, options, o, min(limit, left), flags) == "time limit" and run("alive", {}, o, 30, "") != 0:
            print("the GPU no longer answers: the rest is left out")
            break
    with open(os.path.join(o.out, "day.jsonl")) as file:
        summary([json.loads(line) for line in file])
    for what in left_out:
        print("no time was left for", what)
    return None


if __name__ == "__main__":
    main()
