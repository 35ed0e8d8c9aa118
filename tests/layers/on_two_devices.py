"""Compiles the gradients of `unroll` for a batch that is sharded over two devices.

test_unroll.py runs it with the kinds as arguments. It prints one line of JSON: for each, which
collectives the program has, which of the batch's sizes (26 rows, 13 per device, times 7 steps) its
arrays have, and how far its gradients are from those of one device.
"""

import json
import re
import sys
from functools import partial

import jax
import jax.numpy as jnp

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_enable_x64", True)

from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jaxgru  # noqa: E402
from jaxgru.layers import blocks  # noqa: E402
from jaxgru.libraries import flax_rnn as flax  # noqa: E402

blocks.ROWS_AT_ONCE = 104  # blocks of 4 steps

# No two products of these are alike
B = 26
T = 7
F = 3
H = 4
ROWS = P("data")
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
KINDS = {
    "gru": partial(jaxgru.init_gru, second_bias=True, reset_gate="before"),
    "gru, reset after": partial(jaxgru.init_gru, second_bias=True),
    "lstm": jaxgru.init_lstm,
    "gru, norm": partial(jaxgru.init_gru, layer_norm=True, num_blocks=2),
    "lstm, projected": lambda key, E, H: jaxgru.init_lstm(key, E, H + 2, proj_size=H),
    "rnn": jaxgru.init_rnn,
}


def loss(layers, x, options, dropout=None):
    """The sum of a function of the outputs, of `apply` if x is tokens."""
    run = jaxgru.unroll if jnp.issubdtype(x.dtype, jnp.floating) else jaxgru.lm.apply
    y, _ = run(layers, x, **options, dropout=dropout)
    return jnp.sin(y).sum()


@partial(jax.jit, static_argnums=4)
def gradient(layers, x, options, dropout, of):
    """The gradient with respect to the arguments `of`."""
    return jax.grad(loss, of)(layers, x, options, dropout)


def over_rows(axes, spec=ROWS):
    """A sharding over both devices, of the first axis if there is no other `spec`."""
    return NamedSharding(jax.make_mesh((2,), ("data",), (axes,)), spec)


def of_gradient(layers, x, options, axes=AxisType.Auto, dropout=None, of=(0, 1), same=None):
    """The report on the gradient; the options `same` mean the same on one device."""
    x_of_rows, options_of_rows = jax.device_put((x, options), over_rows(axes))
    arguments = layers, x_of_rows, options_of_rows, dropout
    program = gradient.lower(*arguments, of).compile()
    return report(program, arguments, gradient(layers, x, same or options, dropout, of))


def report(program, arguments, expected):
    """What a compiled gradient has, and how far its results are from the expected ones."""
    text = program.as_text()
    shapes = re.findall(r"\b(?!u32)[a-z]+\d*\[([\d,]+)\]", text)  # without the rows' numbers
    sizes = {int(size) for shape in shapes for size in shape.split(",")}
    leaves = jax.tree.leaves(program(*arguments))
    pairs = zip(leaves, jax.tree.leaves(expected), strict=True)
    return {
        "collectives": [name for name in COLLECTIVES if f" {name}(" in text],
        "rows": sorted(sizes & {B // 2, B, B // 2 * T, B * T}),
        "difference": max(float(jnp.abs(jax.device_get(a) - b).max()) for a, b in pairs),
    }


def in_shard_map(layers, x, options):
    """The report where each device computes the loss of its rows, with an `initial` state."""
    sharding = over_rows(AxisType.Auto)
    initial = jax.tree.map(lambda leaf: leaf[0] + 0.5, jaxgru.initial_carry(layers, 1))

    @partial(jax.shard_map, mesh=sharding.mesh, in_specs=(P(), ROWS, ROWS, P()), out_specs=P())
    def split(layers, x, options, initial):
        return jax.lax.psum(loss(layers, x, {**options, "reset_carry": initial}), "data")

    def whole(layers, x, options, initial):
        return loss(layers, x, {**options, "reset_carry": initial})

    arguments = layers, *jax.device_put((x, options), sharding), initial
    program = jax.jit(jax.grad(split, (0, 1, 3))).lower(*arguments).compile()
    expected = jax.jit(jax.grad(whole, (0, 1, 3)))(layers, x, options, initial)
    return report(program, arguments, expected)


def batch_axes(x, axes, sharded):
    """The report on rows (E, A), not B, one axis sharded; with a table, resets and padding.

    The masks of dropout are those of the rows on one device.
    """
    E = 26
    A = 3
    ids = jax.random.bits(jax.random.key(9), (E, A, T), "uint8") % 5
    reset = jax.random.bits(jax.random.key(10), (E, A, T), "uint8") % 5 == 0
    lengths = jax.random.randint(jax.random.key(11), (E, A), 0, T + 1)
    options = ids, reset, lengths
    spec = ROWS
    if sharded:  # the second axis is
        options = jax.tree.map(lambda a: a.swapaxes(0, 1), options)
        spec = P(None, "data")
    layers = [jaxgru.init_gru(jax.random.key(i), F, F, dtype="float64") for i in (1, 2)]
    dropout = jaxgru.Dropout(jax.random.key(7), 0.4, "state", "zoneout")

    def loss(layers, table, ids, reset, lengths):
        x = jaxgru.cells.Lookup(table, ids)
        y, _ = jaxgru.unroll(layers, x, reset=reset, lengths=lengths, dropout=dropout)
        return jnp.sin(y).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    table = x[0, :5]
    arguments = layers, table, *jax.device_put(options, over_rows(axes, spec))
    program = gradient.lower(*arguments).compile()
    return report(program, arguments, gradient(layers, table, *options))


def flax_rnn(x, axes):
    """The report on Flax's RNN in our place of it: the carries after the steps of each row."""
    layer = jaxgru.init_gru(jax.random.key(8), F, H, dtype="float64")
    lengths = jnp.arange(B) % (T + 1)

    def loss(layer, x, lengths):
        carry, _ = flax.rnn(layer, x, jnp.zeros((B, H)), lengths=lengths)
        return jnp.sin(carry).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    arguments = layer, *jax.device_put((x, lengths), over_rows(axes))
    program = gradient.lower(*arguments).compile()
    return report(program, arguments, gradient(layer, x, lengths))


def of_two_layers(init, x, flags, dropout):
    """The reports on a stack: without flags, with them, and on each kind of mesh."""
    layers = [init(jax.random.key(3), F, H), init(jax.random.key(4), H, H)]
    layers = jax.tree.map(lambda leaf: leaf.astype("float64"), layers)
    no_flags = {
        "reset": jnp.zeros_like(flags["reset"]),
        "lengths": jnp.full_like(flags["lengths"], T),
    }
    return {
        "all steps": of_gradient(layers, x, {}, same=no_flags),
        "resets, lengths, dropout": of_gradient(layers, x, flags, AxisType.Auto, dropout),
        "explicit axes": of_gradient(layers, x, flags, AxisType.Explicit, dropout),
        "shard_map": in_shard_map(layers, x, flags),
    }


def main():
    x = jax.random.normal(jax.random.key(0), (B, T, F))
    flags = {
        "reset": jax.random.bernoulli(jax.random.key(1), 0.3, (B, T)),
        "lengths": jax.random.randint(jax.random.key(2), (B,), 0, T + 1),
    }
    dropout = jaxgru.Dropout(jax.random.key(7), 0.4, "state")
    results = {}
    kinds = sys.argv[1:]
    for kind in [kind for kind in kinds if kind in KINDS]:
        results[kind] = of_two_layers(KINDS[kind], x, flags, dropout)
    if "model" in kinds:
        config = jaxgru.lm.ModelConfig("lstm", 5, F, H, 2)
        params = jaxgru.lm.init(jax.random.key(5), config, "float64")
        tokens = jax.random.randint(jax.random.key(6), (B, T), 0, 5)
        results["model"] = {
            str(axes): of_gradient(params, tokens, {}, axes, dropout, of=0)
            for axes in (AxisType.Auto, AxisType.Explicit)
        }
    if "batch axes" in kinds:
        results["batch axes"] = {
            f"{axes}, {sharded}": batch_axes(x, axes, sharded)
            for axes in (AxisType.Auto, AxisType.Explicit)
            for sharded in (0, 1)
        }
    if "flax" in kinds:
        results["flax"] = {
            str(axes): flax_rnn(x, axes) for axes in (AxisType.Auto, AxisType.Explicit)
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
