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

B, T, F, H = 26, 7, 3, 4  # no two products of these are alike
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
    return jnp.sin(run(layers, x, **options, dropout=dropout)[0]).sum()


@partial(jax.jit, static_argnums=4)
def gradient(layers, x, options, dropout, of):
    """The gradient with respect to the arguments `of`."""
    return jax.grad(loss, of)(layers, x, options, dropout)


def seen(layers, x, options, axes=AxisType.Auto, dropout=None, of=(0, 1), same=None):
    """What there is to see of the gradient; the options `same` mean the same on one device."""
    rows = NamedSharding(jax.make_mesh((2,), ("data",), (axes,)), P("data"))
    placed = layers, *jax.device_put((x, options), rows), dropout
    program = gradient.lower(*placed, of).compile()
    return report(program, placed, gradient(layers, x, same or options, dropout, of))


def report(program, arguments, expected):
    """What there is to see of a compiled gradient, called with these arguments."""
    text = program.as_text()
    shapes = re.findall(r"\b(?!u32)[a-z]+\d*\[([\d,]+)\]", text)  # without the rows' numbers
    sizes = {int(size) for shape in shapes for size in shape.split(",")}
    pairs = zip(*map(jax.tree.leaves, (program(*arguments), expected)), strict=True)
    return {
        "collectives": [name for name in COLLECTIVES if f" {name}(" in text],
        "rows": sorted(sizes & {B // 2, B, B // 2 * T, B * T}),
        "difference": max(float(jnp.abs(jax.device_get(a) - b).max()) for a, b in pairs),
    }


def in_shard_map(layers, x, options):
    """As `seen`, where each device computes the loss of its rows, with an `initial` state."""
    mesh, rows = jax.make_mesh((2,), ("data",), (AxisType.Auto,)), P("data")
    initial = jax.tree.map(lambda leaf: leaf[0] + 0.5, jaxgru.initial_carry(layers, 1))

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), rows, rows, P()), out_specs=P())
    def split(layers, x, options, initial):
        return jax.lax.psum(loss(layers, x, {**options, "initial": initial}), "data")

    def whole(layers, x, options, initial):
        return loss(layers, x, {**options, "initial": initial})

    sharded = NamedSharding(mesh, rows)
    placed = layers, *jax.device_put((x, options), sharded), initial
    program = jax.jit(jax.grad(split, (0, 1, 3))).lower(*placed).compile()
    expected = jax.jit(jax.grad(whole, (0, 1, 3)))(layers, x, options, initial)
    return report(program, placed, expected)


def batch_axes(x, axes, sharded):
    """As `seen`, of rows (E, A) in place of B, one axis sharded; with a table, resets and padding.

    The masks of dropout are those of the rows on one device.
    """
    E, A = 26, 3
    ids, reset = (jax.random.bits(jax.random.key(i), (E, A, T), "uint8") % 5 for i in (9, 10))
    lengths = jax.random.randint(jax.random.key(11), (E, A), 0, T + 1)
    options = ids, reset == 0, lengths
    if sharded:  # the second axis is
        options = jax.tree.map(lambda a: a.swapaxes(0, 1), options)
    spec = P(None, "data") if sharded else P("data")
    rows = NamedSharding(jax.make_mesh((2,), ("data",), (axes,)), spec)
    layers = [jaxgru.init_gru(jax.random.key(i), F, F, dtype="float64") for i in (1, 2)]
    dropout = jaxgru.Dropout(jax.random.key(7), 0.4, "state", "zoneout")

    def loss(layers, table, ids, reset, lengths):
        x = jaxgru.cells.Lookup(table, ids)
        options = dict(reset=reset, lengths=lengths, dropout=dropout)
        return jnp.sin(jaxgru.unroll(layers, x, **options)[0]).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    arguments = layers, x[0, :5]
    placed = *arguments, *jax.device_put(options, rows)
    return report(gradient.lower(*placed).compile(), placed, gradient(*arguments, *options))


def flax_rnn(x, axes):
    """As `seen`, of Flax's RNN in our place of it: the carries after the steps of each row."""
    rows = NamedSharding(jax.make_mesh((2,), ("data",), (axes,)), P("data"))
    layer = jaxgru.init_gru(jax.random.key(8), F, H, dtype="float64")
    lengths = jnp.arange(B) % (T + 1)

    def loss(layer, x, lengths):
        carry, _ = flax.rnn(layer, x, jnp.zeros((B, H)), lengths=lengths)
        return jnp.sin(carry).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    placed = layer, *jax.device_put((x, lengths), rows)
    return report(gradient.lower(*placed).compile(), placed, gradient(layer, x, lengths))


def main():
    x = jax.random.normal(jax.random.key(0), (B, T, F))
    flags = {
        "reset": jax.random.bernoulli(jax.random.key(1), 0.3, (B, T)),
        "lengths": jax.random.randint(jax.random.key(2), (B,), 0, T + 1),
    }
    none = {"reset": jnp.zeros_like(flags["reset"]), "lengths": jnp.full_like(flags["lengths"], T)}
    results, dropout = {}, jaxgru.Dropout(jax.random.key(7), 0.4, "state")
    kinds = sys.argv[1:]
    for kind, init in ((kind, KINDS[kind]) for kind in kinds if kind in KINDS):
        layers = [init(jax.random.key(3), F, H), init(jax.random.key(4), H, H)]
        layers = jax.tree.map(lambda leaf: leaf.astype("float64"), layers)
        results[kind] = {
            "all steps": seen(layers, x, {}, same=none),
            "resets, lengths, dropout": seen(layers, x, flags, AxisType.Auto, dropout),
            "explicit axes": seen(layers, x, flags, AxisType.Explicit, dropout),
            "shard_map": in_shard_map(layers, x, flags),
        }
    if "model" in kinds:
        params = jaxgru.lm.init(
            jax.random.key(5), jaxgru.lm.ModelConfig("lstm", 5, F, H, 2), "float64"
        )
        tokens = jax.random.randint(jax.random.key(6), (B, T), 0, 5)
        results["model"] = {
            str(axes): seen(params, tokens, {}, axes, dropout, of=0)
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
