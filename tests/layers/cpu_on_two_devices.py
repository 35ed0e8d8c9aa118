"""Runs the kernel for CPUs with two devices, and with several numbers of threads.

test_cpu.py runs it. It prints one line of JSON: for each way to split a batch and each cell, what
the compiled gradient has (see on_two_devices.py); and a hash of all outputs and gradients for each
number of threads.
"""

import hashlib
import json
import os
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_num_cpu_devices", 2)

from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jaxgru  # noqa: E402

B, T, F, H = 26, 7, 3, 33
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
KINDS = {"gru": partial(jaxgru.init_gru, second_bias=True), "lstm": jaxgru.init_lstm}
rng = np.random.default_rng(0)
x = rng.normal(size=(B, T, F)).astype(np.float32)
flags = {"reset": rng.random((B, T)) < 0.3, "lengths": rng.integers(0, T + 1, B)}


def loss(implementation, layer, x, flags):
    outputs = jaxgru.unroll(layer, x, implementation=implementation, **flags)
    return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(outputs))


def seen(function, layer, mesh):
    """What there is to see of the gradient of a batch that is sharded."""
    placed = layer, *jax.device_put((x, flags), NamedSharding(mesh, P("data")))
    program = jax.jit(jax.grad(function, (0, 1))).lower(*placed).compile()
    text, results = program.as_text(), program(*placed)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (layer, x))
        exact = jax.grad(partial(loss, "scan"), (0, 1))(*wide, flags)
    pairs = zip(*map(jax.tree.leaves, (results, exact)), strict=True)
    sizes = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", text)
    return {
        "calls": text.count('custom_call_target="jaxgru_'),
        "collectives": [name for name in COLLECTIVES if f" {name}(" in text],
        "rows": sorted({int(n) for shape in sizes for n in shape.split(",")} & {B // 2, B}),
        "sharded": results[1].sharding.shard_shape(x.shape) == (B // 2, T, F),
        "difference": max(float(np.abs(jax.device_get(a) - b).max()) for a, b in pairs),
    }


def in_shard_map(mesh):
    rows = P("data")
    part = lambda *a: jax.lax.psum(loss("cpu", *a), "data")
    return jax.shard_map(part, mesh=mesh, in_specs=(P(), rows, rows), out_specs=P())


def bits(rows, threads):
    """A hash of all outputs and gradients, with so many threads for each of two devices."""
    os.cpu_count = lambda: 2 * threads
    jax.clear_caches()
    hashed = hashlib.sha256()
    for init in KINDS.values():
        layer = init(jax.random.key(1), F, 150)
        x = jax.random.normal(jax.random.key(2), (rows, T, F))
        function = jax.value_and_grad(partial(loss, "cpu"), (0, 1))
        for leaf in jax.tree.leaves(jax.jit(function)(layer, x, {})):
            hashed.update(np.asarray(leaf).tobytes())
    return hashed.hexdigest()


def main():
    auto, explicit = (
        jax.make_mesh((2,), ("data",), (axes,)) for axes in (AxisType.Auto, AxisType.Explicit)
    )
    ways = {
        "auto": (partial(loss, "cpu"), auto),
        "explicit": (partial(loss, "cpu"), explicit),
        "shard_map": (in_shard_map(auto), auto),
    }
    layers = {kind: init(jax.random.key(0), F, H) for kind, init in KINDS.items()}
    results = {
        name: {kind: seen(function, layer, mesh) for kind, layer in layers.items()}
        for name, (function, mesh) in ways.items()
    }
    threads = {rows: {n: bits(rows, n) for n in (1, 2, 5)} for rows in (3, 70)}
    print(json.dumps({**results, "threads": threads}))


if __name__ == "__main__":
    main()
