"""Compile jaxgru's layers and training steps for an H200 without a GPU, and count the kernels.

    python count_kernels.py --layers before after lstm --unroll 1 4 8
    python count_kernels.py --step astra_gamma --unroll 1 4 8 [--implementation wavefront]

Prints, for each: seconds to compile, kernels in loops (times their trips) and outside of them, and,
unless --quiet, the kernels of each loop's body. Needs no GPU, but the CUDA wheels (NOTES.md).
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from unittest import mock

H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 12 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  l2_cache_size: 62914560 memory_bandwidth: 4800000000000 device_memory_size: 150754820096
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}
"""
NO_KERNEL = {
    *("after-all", "bitcast", "constant", "get-tuple-element", "opt-barrier", "parameter", "tuple"),
    *("partition-id", "replica-id"),
}


def h200():
    """Return an H200 that programs can be compiled for."""
    from jax.experimental import topologies

    return topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1").devices[0]


def compile_for(device, function, *arguments):
    """Compile a function of arrays, or of their shapes, for a device; return it and the seconds."""
    import jax

    one = jax.sharding.SingleDeviceSharding(device)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), arguments)
    with mock.patch.object(jax, "default_backend", lambda: "gpu"):
        began = time.time()
        program = jax.jit(function).lower(*placed).compile()
    return program, time.time() - began


def computations(hlo):
    """Return the lines of each computation of a program, and the name of the one it starts with."""
    found, name, entry = {}, None, None
    for line in hlo.splitlines():
        if head := re.match(r"(ENTRY )?%([\w.\-]+) .*\{$", line):
            name = head[2]
            found[name] = []
            entry = name if head[1] else entry
        elif name and line.strip() != "}":
            found[name].append(line.strip())
    return found, entry


OPERATION = r"(?:ROOT )?%[\w.\-]+ = (.*?)\s([a-z][a-z0-9\-]*)\("


def launches(hlo, show):
    """Return {"loops": kernels in the bodies of loops times trips, "outside": …}."""
    of_name, entry = computations(hlo)
    total = Counter()

    def inner(line):
        called = re.search(r"calls=%([\w.\-]+)", line)
        lines = of_name.get(called[1], ()) if called else ()
        ops = Counter(m[2] for line in lines if (m := re.match(OPERATION, line)))
        return ", ".join(f"{op}×{n}" for op, n in ops.items() if op not in NO_KERNEL)

    def walk(name, times, kind, depth):
        for line in of_name[name]:
            if not (m := re.match(OPERATION, line)):
                continue
            shape, op = m[1], m[2]
            if op == "while":
                known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
                trips = int(known[1]) if known else 1
                before = total["loops"]
                walk(re.search(r"body=%([\w.\-]+)", line)[1], times * trips, "loops", depth + 1)
                each = (total["loops"] - before) / max(times * trips, 1)
                if show:
                    turns = trips if known else "?"
                    print(f"{'  ' * depth}loop of {turns} turns: {each:g} kernels a turn")
            elif op in ("call", "conditional", "async-start"):
                for other in re.findall(r"(?:to_apply|computation|calls)=%([\w.\-]+)", line):
                    walk(other, times, kind, depth)
            elif op not in NO_KERNEL and not op.endswith("-done"):
                total[kind] += times
                if show and depth:
                    target = re.search(r'custom_call_target="([^"]+)"', line)
                    what = f"{op} {target[1] if target else ''}"
                    shape = re.sub(r"{[^}]*}", "", shape)[:90]
                    print(f"{'  ' * depth}{what} → {shape}  [{inner(line)}]")

    walk(entry, 1, "outside", 0)
    return total


def layer(kind, H, B, T, dtype):
    """Return a layer's forward and backward pass, and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp

    import jaxgru
    from jaxgru.layers.implementations import unroll_layer

    init = {
        "lstm": jaxgru.init_lstm,
        "before": lambda *args: jaxgru.init_gru(*args, reset_gate="before"),
        "after": jaxgru.init_gru,
        "rnn": jaxgru.init_rnn,
    }[kind]
    params = jax.eval_shape(lambda key: init(key, H, H), jax.random.key(0))
    carry = jax.eval_shape(lambda params: jaxgru.initial_carry(params, B), params)
    x = jax.ShapeDtypeStruct((T, B, H), jnp.float32)

    def both(params, carry, x, dy):
        def value(params, carry, x):
            narrow = jax.tree.map(lambda w: w.astype(dtype) if w.ndim > 1 else w, params)
            y, last = unroll_layer(narrow, carry, x)
            return (y * dy).sum(), last

        return jax.value_and_grad(value, (0, 1, 2), has_aux=True)(params, carry, x)

    return both, (params, carry, x, x)


def step(config, implementation):
    """Return a config's training step, and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp

    from jaxgru.lm.config import load_config
    from jaxgru.lm.training.step import init_state, train_step

    c = load_config(config, {"training.implementation": implementation})
    state = jax.eval_shape(lambda: init_state(c.model, c.training))
    tokens = jax.ShapeDtypeStruct((100_000,), jnp.int32)
    return lambda state, tokens: train_step(c.training, state, tokens), (state, tokens)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--layers", nargs="*", default=[])
    add("--step")
    add("--implementation", default="scan")
    add("--unroll", type=int, nargs="*", default=[1])
    for name, default in (("H", 512), ("B", 64), ("T", 128)):
        add(f"--{name}", type=int, default=default)
    add("--dtype", default="float32")
    add("--quiet", action="store_true")
    o = parser.parse_args()
    import jax

    from jaxgru.layers import over_time

    jax.config.update("jax_platforms", "cpu")
    device = h200()
    todo = [(kind, layer(kind, o.H, o.B, o.T, o.dtype)) for kind in o.layers]
    todo += [(f"{o.step} {o.implementation}", step(o.step, o.implementation))] if o.step else []
    for name, (function, arguments) in todo:
        for unroll in o.unroll:
            over_time.UNROLL_ON_GPU = unroll
            jax.clear_caches()  # what was traced has the unrolling before
            program, seconds = compile_for(device, function, *arguments)
            counts = dict(launches(program.as_text(), not o.quiet))
            print(f"=== {name}, unroll {unroll}: {counts}, compiled in {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
