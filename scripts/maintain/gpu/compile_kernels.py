"""Compile recurrent_kernel.py for an H200 without a GPU; report registers, spills, shared memory.

    python compile_kernels.py after,128,1024,16,1,8,tf32 before,512,64,16,16,4,bf16,reset …

A spec is kind,H,B,rows,programs,warps,precision and any of reset, keep, nostash, chunkN. PTXAS_LOG
names the log that the wrapper in the place of ptxas writes (NOTES.md), which also counts the
instructions of a step; without the wrapper, only whether it compiles, and how long. `--day`
compiles every plan that gpu_day.py names. With `--lower`, it goes no further than Triton's program,
which needs no CUDA wheels either.
"""

# ruff: noqa: E402  JAX reads the flags when it is imported

from __future__ import annotations

import argparse
import glob
import os
import re
import shutil
import sys
import tempfile

DUMP = tempfile.mkdtemp(prefix="thunks_")
os.environ["XLA_FLAGS"] = " ".join([
    os.environ.get("XLA_FLAGS", ""), f"--xla_dump_to={DUMP}", "--xla_dump_hlo_as_text",
    "--xla_gpu_enable_libnvptxcompiler=false",
])  # fmt: skip
LOG = os.environ.get("PTXAS_LOG", "ptxas.log")

import jax

jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp
from jax import lax
from jax._src.pallas.triton import gpu_info

gpu_info.get_gpu_info = lambda: gpu_info._get_gpu_info_impl(gpu_info.GpuVersion.H200)

import recurrent_kernel as rk
from count_kernels import compile_for, h200

import jaxgru
from jaxgru.cells.marks import Marks, Mask
from jaxgru.layers.derived import derived

INSTRUCTIONS = (
    *("wgmma.mma_async", "mma.sync", "cp.async.c", "ldmatrix", "ld.shared", "st.shared"),
    *("ld.global", "st.global", "bar.sync", "atom.", "ld.volatile"),
)


def problem(spec):
    """Return the function to compile, and the shapes of its arguments."""
    kind, H, B, rows, programs, warps, precision, *more = spec.split(",")
    H, B, rows, programs, warps = map(int, (H, B, rows, programs, warps))
    T, dtype = 128, jnp.bfloat16 if precision == "bf16" else jnp.float32
    tf32, exact = lax.DotAlgorithmPreset.TF32_TF32_F32, lax.Precision.HIGHEST
    chunk = next((int(m[5:]) for m in more if m.startswith("chunk")), 128)
    of_floats = exact if precision == "fp32" else tf32
    plan = rk.Plan(rows, programs, warps, of_floats, "nostash" not in more, chunk)
    init = {"lstm": jaxgru.init_lstm, "rnn": jaxgru.init_rnn}.get(kind)
    if init is None:
        init = lambda *args: jaxgru.init_gru(*args, reset_gate=kind)
    p = init(jax.random.key(0), H, H)
    carry = jaxgru.initial_carry(p, B)
    recurrence, U = p.by_hand() or derived(p, carry, p.inputs(jnp.zeros((B, H))))
    U = tuple(u.astype(dtype) if u.ndim > 1 else u for u in U)
    a = jax.eval_shape(p.inputs, jax.ShapeDtypeStruct((T, B, H), jnp.float32))
    dy, one = jax.ShapeDtypeStruct((T, B, H), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    flags = lambda name, *shape: jax.ShapeDtypeStruct(shape, jnp.bool_) if name in more else None
    keep = flags("keep", T, B, H)
    marks = Marks(flags("reset", T, B), state=Mask(keep, None if keep is None else one))

    def both(U, carry, a, dy, marks):
        def value(U, carry, a):
            y, last = rk.over_time(recurrence, plan, False, U, carry, a, marks)
            return (y * dy).sum(), last

        return jax.value_and_grad(value, (0, 1, 2), has_aux=True)(U, carry, a)

    return both, (U, carry, a, dy, marks)


def in_a_step(ptx, name):
    """Return the instructions of the largest loop of a kernel: a step."""
    body = ptx[ptx.index(".entry " + name) :].splitlines()
    labels = {m[1]: i for i, line in enumerate(body) if (m := re.match(r"(\$\w+):", line.strip()))}
    jump = re.compile(r"bra\S*\s+(\$\w+)")
    jumps = [(i, m[1]) for i, line in enumerate(body) if (m := jump.search(line))]
    loops = [(i - labels[to], labels[to], i) for i, to in jumps if labels.get(to, i) < i]
    step = "\n".join(body[max(loops)[1] : max(loops)[2]])
    return {op: n for op in INSTRUCTIONS if (n := len(re.findall(re.escape(op), step)))}


def of_the_day():
    """Return the specs of gpu_day.py's plans, each once."""
    from gpu_day import cases

    specs = []
    for _, case, options, *_ in cases(argparse.Namespace(unroll=4)):
        for rows, programs, warps, *stash in options.get("plans") or [] if case == "layer" else []:
            words = [options["kind"], options["H"], options["B"], rows, programs, warps]
            words += [options.get("precision", "tf32")]
            words += ["reset"] * bool(options.get("resets")) + ["keep"] * bool(options.get("smoke"))
            specs.append(",".join(map(str, words + ["nostash"] * (stash == [False]))))
    return list(dict.fromkeys(specs))


def main():
    words = sys.argv[1:]
    specs = of_the_day() if "--day" in words else [word for word in words if word[0] != "-"]
    if "--lower" in words:
        for spec in specs:
            function, arguments = problem(spec)
            program = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
            print(f"{spec}: {program.as_text().count('xla.gpu.triton')} kernels", flush=True)
        return
    device = h200()
    for spec in specs:
        function, arguments = problem(spec)
        if os.path.exists(LOG):
            os.remove(LOG)
        shutil.rmtree(DUMP, ignore_errors=True)
        os.makedirs(DUMP)
        try:
            _, seconds = compile_for(device, function, *arguments)
        except Exception as error:
            print(spec, "FAILED", type(error).__name__, str(error)[:1500], flush=True)
            continue
        print(f"{spec}: compiled in {seconds:.0f} s", flush=True)
        report = open(LOG).read() if os.path.exists(LOG) else ""
        for name, info in re.findall(r"== (recurrent_\w+)\n(.*?)(?=== |\Z)", report, re.S):
            spilled = re.search(r"(\d+) bytes spill stores", info)[1]
            registers = re.search(r"Used (\d+) registers", info)[1]
            ptx = open(f"{os.path.dirname(os.path.abspath(LOG))}/{name}.ptx").read()
            ops = "  ".join(f"{op} {n}" for op, n in in_a_step(ptx, name).items())
            used = f"registers {registers:>3s}, {spilled} B spilled"
            print(f"    {name[10:]:9s} {used}; in a step: {ops}", flush=True)
        for line in open(glob.glob(DUMP + "/**/*thunk_sequence_after*", recursive=True)[0]):
            if "recurrent_" in line:
                print("      ", re.sub(r".*(recurrent_)", r"\1", line).strip()[:150])


if __name__ == "__main__":
    main()
