"""What test_scaling.py looks at: runs on 1, 2 and 8 virtual devices. Prints one line of JSON.

Arguments: a folder, and "the rest" for what is slow.
A process of its own, for the number of a CPU's devices is chosen before JAX starts.
"""

import dataclasses
import json
import re
import sys
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jaxgru.lm import evaluation, training  # noqa: E402
from jaxgru.lm.config import Config, DataConfig, ModelConfig, TrainingConfig  # noqa: E402
from jaxgru.lm.evaluation import window_loss, window_nll  # noqa: E402
from jaxgru.lm.model import init  # noqa: E402
from jaxgru.lm.runs.checkpoints import open_checkpoints, restore, save  # noqa: E402
from jaxgru.lm.sampling import generate  # noqa: E402
from jaxgru.parallel.sharding import ROWS, shard_rows, shardings  # noqa: E402

MODEL = ModelConfig("gru", 64, 24, 16, 2)  # every axis divides by 8
RECIPE = TrainingConfig(batch_size=8, sequence_length=11, steps_per_epoch=10, state_dropout=0.3)
TOKENS = np.random.default_rng(0).integers(0, 64, 500).astype(np.int32)


def mesh_of(devices):
    return Mesh(np.array(jax.devices()[:devices]), (ROWS,))


def start(recipe, devices, dtype, batches="crops", end=None):
    """A fresh state on so many devices, and a compiled `train_steps` for it."""
    mesh = mesh_of(devices)
    state = training.init_state(MODEL, recipe, batches)
    params, carry = (
        jax.tree.map(lambda leaf: leaf.astype(dtype), tree) for tree in (state.params, state.carry)
    )
    state = state.replace(
        params=params, opt_state=training.optimizer(recipe).init(params), carry=carry
    )
    state = jax.device_put(state, training.state_shardings(state, mesh, recipe))
    tokens = jax.device_put(TOKENS, NamedSharding(mesh, P()))
    steps = training.train_steps.lower(recipe, state, tokens, np.int32(1), mesh, end).compile()

    def run(state, num_steps):
        state, losses, _ = steps(state, tokens, np.int32(num_steps))
        return state, np.asarray(losses)[:num_steps]

    return state, run, steps.memory_analysis().temp_size_in_bytes


def numbers(state):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves((state.params, state.ema))])


def bits(state):
    state = state.replace(key=jax.random.key_data(state.key))
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state))


def bytes_held(state):
    """Bytes of parameters and moments: of the whole, and the most that one device has."""
    leaves = [x for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim]
    on_each = {device: 0 for device in leaves[0].sharding.device_set}
    for leaf in leaves:
        for piece in leaf.addressable_shards:
            on_each[piece.device] += piece.data.nbytes
    return sum(leaf.nbytes for leaf in leaves), max(on_each.values())


def difference(a, b):
    """The largest relative difference of two runs' losses, and absolute of their parameters."""
    a, a_losses = a
    b, b_losses = b
    losses = float(np.abs(a_losses / b_losses - 1).max())
    return [losses, float(np.abs(numbers(a) - numbers(b)).max())]


def of_devices_and_parts():
    """12 float64 steps: one device and one batch, against more devices and the batch in parts."""
    part = dataclasses.replace(RECIPE, gradient_accumulation=3)
    recipes = {
        "one": (dataclasses.replace(RECIPE, batch_size=24), 1),
        "three parts": (part, 1),
        "eight devices": (dataclasses.replace(RECIPE, batch_size=24), 8),
        "three parts, eight devices, sharded": (
            dataclasses.replace(part, shard_parameters=True),
            8,
        ),
    }
    results = {}
    memory = {}
    for name, (recipe, devices) in recipes.items():
        state, run, memory[name] = start(recipe, devices, jnp.float64)
        results[name] = run(state, 12)
    one = results.pop("one")
    return {
        "differences": {name: difference(result, one) for name, result in results.items()},
        "memory": memory,
    }


def of_streams(folder):
    """Streams, their carry on 1 device and on 8: 10 steps, and 4 and a checkpoint and 6.

    With every regularizer, and in units that token 7 ends.
    """
    recipe = dataclasses.replace(
        RECIPE, input_dropout=0.1, between_dropout=0.2, output_dropout=0.3, weight_drop=0.2,
        ema_decay=0.5, random_offset=True, reset_probability=0.3, decay_biases=False,
    )  # fmt: skip
    ends = {}
    for devices in (1, 8):
        state, run, _ = start(recipe, devices, jnp.float32, "streams", 7)
        state, first = run(state, 4)
        with open_checkpoints(folder / f"streams {devices}") as manager:
            save(manager, state, None, training.Progress())
        state, last = run(state, 6)
        ends[devices] = state, np.concatenate([first, last])
    config = Config("tiny", MODEL, DataConfig(batches="streams"), recipe)
    with open_checkpoints(folder / "streams 1") as manager:
        state, _, _ = restore(manager, folder / "streams 1", config, mesh_of(8))
    resumed = run(state, 6)
    on_one_device, losses = ends[1]
    return {
        "differences": difference(ends[8], ends[1]),
        "resumed": difference(resumed, (on_one_device, losses[4:])),
        "carry a device": resumed[0].carry[0].addressable_shards[0].data.shape,
    }


def of_checkpoints(folder):
    """20 float32 steps on n devices, and 8 there, a checkpoint, and 12 on m devices."""
    ways = [("1", "8 sharded"), ("8 sharded", "1"), ("8 sharded", "8 sharded")]
    kinds = {"1": (1, False), "8 sharded": (8, True)}
    recipes = {k: dataclasses.replace(RECIPE, shard_parameters=s) for k, (_, s) in kinds.items()}
    results = {}
    held = {}
    programs = {}
    for kind, (devices, _) in kinds.items():
        state, run, _ = start(recipes[kind], devices, jnp.float32)
        held[kind] = bytes_held(state)
        programs[kind] = run
        state, first = run(state, 8)
        with open_checkpoints(folder / kind) as manager:
            save(manager, state, None, training.Progress())
        before = bits(state)
        state, last = run(state, 12)
        results[kind] = (before, state, np.concatenate([first, last]))

    resumed = {}
    for source, target in ways:
        config = Config("tiny", MODEL, training=recipes[target])
        devices, _ = kinds[target]
        with open_checkpoints(folder / source) as manager:
            state, _, _ = restore(manager, folder / source, config, mesh_of(devices))
        before, expected, losses = results[source]
        same = bits(state) == before
        state, last = programs[target](state, 12)
        apart = difference((state, last), (expected, losses[8:]))
        resumed[f"{source} -> {target}"] = [same, bits(state) == bits(expected), *apart]
    one = results["1"][1:]
    return {
        "differences": {kind: difference(result[1:], one) for kind, result in results.items()},
        "bytes": held,
        "resumed": resumed,
    }


def of_sampling():
    """24 rows on 1 device and on 8: the tokens, and the devices' messages to one another."""
    params = init(jax.random.key(0), MODEL, jnp.float64)
    key = jax.random.key(1)
    prompt = TOKENS[:48].reshape(24, 2)
    one, _, _ = generate(params, key, prompt, 20, top_k=5)
    mesh = mesh_of(8)
    rows = shard_rows(prompt)
    sample = jax.jit(lambda *x: generate(*x, 20, top_k=5)[0])
    placed = *jax.device_put((params, key), NamedSharding(mesh, P())), rows
    program = sample.lower(*placed).compile()
    eight = program(*placed)
    sent = re.findall(r"all-\w+|collective-\w+|reduce-scatter", program.as_text())
    return {"same": bool((one == eight).all()), "sent": sent}


def of_validation():
    """46 windows in 10 batches, spread over the devices; the batches that one device has."""
    evaluation.TOKENS_AT_ONCE = 64
    params = init(jax.random.key(0), MODEL)
    same = {}
    one = window_nll(params, TOKENS, 11)
    units = window_nll(params, TOKENS, 11, separator_token=7)
    for devices, sharded in [(1, False), (2, False), (8, False), (8, True)]:
        mesh = mesh_of(devices)
        placed = jax.device_put(params, shardings(params, mesh, sharded))
        nll, loss = (f(placed, TOKENS, 11, mesh) for f in (window_nll, window_loss))
        in_units = window_nll(placed, TOKENS, 11, mesh, 7)
        name = f"{devices}{' sharded' * sharded}"
        same[name] = bool(nll.tobytes() == one.tobytes() and loss == one.mean())
        same[name] &= in_units.tobytes() == units.tobytes() != one.tobytes()
    batches = jax.device_put(np.zeros((16, 5, 11), np.int32), NamedSharding(mesh, P(ROWS)))
    program = evaluation._nll_on_mesh.lower(mesh, placed, batches, batches).compile().as_text()
    on_each = max(map(int, re.findall(r"s32\[(\d+),5,11\]", program)))
    return {"same": same, "predictions": len(one), "batches per device": on_each}


folder = Path(sys.argv[1])
what = sys.argv[2]
if what == "the rest":
    seen = of_devices_and_parts() | {"streams": of_streams(folder)}
else:
    seen = {"float32": of_checkpoints(folder)}
    seen |= {"sampling": of_sampling(), "validation": of_validation()}
print(json.dumps(seen))
