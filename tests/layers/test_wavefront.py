"""Layers at once against layers one after another: the same numbers, in fewer steps."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from random_models import random_params

import jaxgru
from jaxgru import Dropout
from jaxgru.cells.marks import Marks
from jaxgru.layers import wavefront
from jaxgru.lm import ModelConfig

SIZES = {"vocab_size": 5, "embedding_dim": 3, "hidden_dim": 4}
KINDS = {
    "gru": {"second_bias": True, "reset_gate": "before"},
    "gru, reset after": {},
    "lstm": {"cell": "lstm"},
    "lstm, blocks": {"cell": "lstm", "num_blocks": 2},
    "lstm, norm": {"cell": "layer_norm_lstm"},
    "lstm, projected": {"cell": "projected_lstm", "proj_size": 2},
    "rnn": {"cell": "rnn"},
}


@pytest.fixture(autouse=True)
def parts_of_two_in_float64(monkeypatch, forget_traces):
    monkeypatch.setattr(wavefront, "PART", 2)
    with jax.enable_x64(True):
        yield


def problem(config, B=2, T=4):
    """A model, tokens that repeat, and a state that is not zero."""
    rng = np.random.default_rng(0)
    normal = lambda like: jax.device_put(rng.normal(size=like.shape))
    params = random_params(config, dtype="float64")
    tokens = jnp.arange(B * T).reshape(B, T) % 4
    return params, tokens, jax.tree.map(normal, jaxgru.lm.initial_carry(params, B))


def both(config, dropout, **sizes):
    """(logits, carry) and all gradients, of layers at once and of the plain definition."""
    params, tokens, carry = problem(config, **sizes)

    def scalar(params, carry, implementation):
        outputs = jaxgru.lm.apply(params, tokens, carry, dropout, implementation)
        leaves = enumerate(jax.tree.leaves(outputs))
        return sum(jnp.sum(jnp.sin(leaf + i)) for i, leaf in leaves), outputs

    gradients = jax.jit(jax.grad(scalar, (0, 1), has_aux=True), static_argnums=2)
    return gradients(params, carry, "wavefront"), gradients(params, carry, "autodiff")


def assert_equal(pair):
    chex.assert_trees_all_close(*pair, rtol=1e-10, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_recurrence(kind):
    """More layers than parts, the first layer's input narrower; dropout inside the recurrence."""
    dropout = Dropout(jax.random.key(1), 0.4, "state")
    assert_equal(both(ModelConfig(**SIZES, num_layers=3, **KINDS[kind]), dropout))


@pytest.mark.slow
@pytest.mark.parametrize("site", ["between", "output"])
def test_dropout_on_a_layers_output(site):
    """More parts than layers, one row."""
    dropout = Dropout(jax.random.key(1), 0.4, site)
    assert_equal(both(ModelConfig(**SIZES, num_layers=2), dropout, B=1, T=6))


@pytest.mark.parametrize("option", ["reset", "lengths", "reverse", "return_carries"])
def test_what_it_cannot_do_is_done_by_the_scan(option):
    """None of the options is ignored: the numbers are those of the plain definition."""
    flags = jnp.zeros((2, 4), bool).at[0, 2].set(True)
    value = {"reset": flags, "lengths": jnp.array([3, 4])}.get(option, True)
    keys = jax.random.split(jax.random.key(0))
    layers = [jaxgru.init_gru(key, 4, 4, dtype="float64") for key in keys]
    x = jax.random.normal(jax.random.key(1), (2, 4, 4))
    seen, expected = (
        jaxgru.unroll(layers, x, implementation=name, **{option: value})
        for name in ("wavefront", "autodiff")
    )
    assert_equal((seen, expected))
    assert len(seen) == 2 + (option == "return_carries")
    without = jaxgru.unroll(layers, x)
    assert len(seen) == 3 or float(jnp.abs(seen[0] - without[0]).max()) > 1e-3


def test_within_a_shard_map():
    """Which checks what varies over the devices: the gradient of the sum over all rows."""
    params, tokens, _ = problem(ModelConfig(**SIZES, num_layers=3))
    P = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    whole = lambda params, tokens: jnp.sin(jaxgru.lm.apply(params, tokens)[0]).sum()

    def split(params, tokens):
        logits, _ = jaxgru.lm.apply(params, tokens, implementation="wavefront")
        return jax.lax.psum(jnp.sin(logits).sum(), "data")

    over_rows = jax.shard_map(split, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    assert_equal([jax.jit(jax.grad(loss))(params, tokens) for loss in (over_rows, whole)])


def test_a_wider_carry_falls_back():
    """bfloat16 layers, the carry float32: as the scan."""
    layers = [jaxgru.init_gru(jax.random.key(i), 4, 4, dtype=jnp.bfloat16) for i in range(2)]
    x, carry = jnp.ones((2, 4, 4), jnp.bfloat16), (jnp.ones((2, 4), jnp.float32),) * 2
    seen, expected = (
        jaxgru.unroll(layers, x, carry, implementation=name) for name in ("wavefront", "scan")
    )
    chex.assert_trees_all_equal(seen, expected)


def test_reads_backward():
    """As the plain scan, in float32 to rounding: output, carry and gradients."""
    layers = [jaxgru.init_gru(jax.random.key(i), 4, 4) for i in range(2)]
    x = jax.random.normal(jax.random.key(2), (3, 8, 4))

    def loss(layers, x, name):
        y, carry = jaxgru.unroll(layers, x, reverse=True, implementation=name)
        return jnp.sum(y * x), (y, carry)

    gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
    seen, expected = (gradients(layers, x, name) for name in ("wavefront", "autodiff"))
    chex.assert_trees_all_close(seen, expected, rtol=1e-5, atol=1e-6)


def sequential_steps(jaxpr):
    """How many bodies of a scan run one after another; inner scans run once a body."""
    steps = 0
    for equation in jaxpr.eqns:
        inner = [sequential_steps(sub) for sub in jaxprs_in_params(equation.params)]
        length = equation.params["length"] if equation.primitive.name == "scan" else 1
        steps += length * (sum(inner) or equation.primitive.name == "scan")
    return steps


@pytest.mark.parametrize("choice, steps", [("scan", 3 * 8), ("wavefront", 8 + 2 * 2)])
def test_the_steps_that_wait_for_one_another(choice, steps):
    params, tokens, carry = problem(ModelConfig(**SIZES, num_layers=3), T=8)
    traced = jax.make_jaxpr(lambda *x: jaxgru.lm.apply(*x, implementation=choice))(
        params, tokens, carry
    )
    assert sequential_steps(traced.jaxpr) == steps


def test_what_is_supported(monkeypatch):
    def layers(*kinds):
        configs = [ModelConfig(**SIZES, **KINDS[kind]) for kind in kinds]
        return [random_params(config).layers[0] for config in configs]

    gru, lstm = "gru", "lstm"

    def supports(layers, T, dtype=None, **marks):
        carry = [jnp.zeros((2, 4), dtype or layer.b.dtype) for layer in layers]
        by_hand, x = [layer.by_hand() for layer in layers], jnp.zeros((T, 2, 5))
        return wavefront.supports(layers, by_hand, x, carry, [Marks(**marks)] * len(layers))

    assert supports(layers(gru, gru), 4) and supports(layers(lstm, lstm), 6)
    assert not supports(layers(gru, gru), 4, jnp.float16)
    assert not supports(layers(gru, gru), 4, reset=jnp.zeros((4, 2), bool))
    assert not supports(layers(gru), 4)  # nothing to run beside it
    assert not supports(layers(gru, lstm), 4)
    assert not supports(layers(gru, "gru, reset after"), 4)
    assert [supports(layers(gru, gru), T) for T in (1, 2, 5)] == [False] * 3
    first, wide, wider, double = (
        jaxgru.init_gru(jax.random.key(0), *sizes, dtype=dtype)
        for *sizes, dtype in (
            (5, 4, np.float32), (4, 4, np.float32), (4, 8, np.float32), (4, 4, np.float16)
        )
    )  # fmt: skip
    assert supports([first, wide], 4)
    assert not supports([first, wider], 4)
    assert not supports([first, double], 4)
    assert not supports([first, wide, first], 4)
    monkeypatch.setattr(wavefront, "PART", 16)
    lengths = [wavefront.part_length(T) for T in (1, 16, 17, 96, 100, 128)]
    assert lengths == [1, 16, 1, 16, 10, 16]
