"""Layers at once against layers one after another: the same numbers, in fewer steps.

`test_options.py` has what the wavefront cannot do, which the scan does.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import randomized, value_and_gradients
from conftest import slow
from jax.extend.core import jaxprs_in_params
from random_models import INIT, random_params

import jaxgru
from jaxgru import Dropout
from jaxgru.cells.step_masks import StepMasks
from jaxgru.layers import wavefront
from jaxgru.lm import ModelConfig

pytestmark = pytest.mark.usefixtures("float64")

MODEL = ModelConfig("gru", vocab_size=5, embedding_dim=3, hidden_dim=4, num_layers=3)


@pytest.fixture(autouse=True)
def parts_of_two(monkeypatch, forget_traces):
    monkeypatch.setattr(wavefront, "PART", 2)


def stack_of(*kinds, dtype="float64"):
    """Random layers, the first of which takes 3 features."""

    def draw():
        in_features = [3, *[4] * (len(kinds) - 1)]
        return [
            INIT[kind](jax.random.key(0), E, 4, dtype=dtype)
            for kind, E in zip(kinds, in_features, strict=True)
        ]

    return randomized(jax.eval_shape(draw))


@pytest.mark.parametrize(
    "kind, L, B, T, site",
    [
        ("lstm, norm", 3, 2, 4, "state"),  # more layers than parts
        ("gru", 2, 1, 6, "between"),  # more parts than layers
        *slow(
            *((kind, 3, 2, 4, "state") for kind in ("gru", "gru, reset after", "lstm", "rnn")),
            *((kind, 3, 2, 4, "state") for kind in ("lstm, blocks", "lstm, projected")),
            ("gru", 2, 1, 6, "output"),
        ),
    ],
)
def test_every_recurrence(kind, L, B, T, site):
    """Outputs, carries and all gradients are those of the definition."""
    layers = stack_of(*[kind] * L)
    x = randomized(np.zeros((B, T, 3)), 1)
    carry = randomized(jaxgru.initial_carry(layers, B), 2)
    run = partial(jaxgru.unroll, dropout=Dropout(jax.random.key(1), 0.4, site))
    both = (
        value_and_gradients(partial(run, implementation=name), layers, x, carry)
        for name in ("wavefront", "autodiff")
    )
    chex.assert_trees_all_close(*both, rtol=1e-10, atol=1e-11)


def test_within_a_shard_map():
    """Which checks what varies over the devices: the gradient of the sum over all rows."""
    params = random_params(MODEL, dtype="float64")
    tokens = jnp.arange(8).reshape(2, 4) % 4
    P = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))

    def whole(params, tokens):
        logits, _ = jaxgru.lm.apply(params, tokens)
        return jnp.sin(logits).sum()

    def split(params, tokens):
        logits, _ = jaxgru.lm.apply(params, tokens, implementation="wavefront")
        return jax.lax.psum(jnp.sin(logits).sum(), "data")

    over_rows = jax.shard_map(split, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    both = [jax.jit(jax.grad(loss))(params, tokens) for loss in (over_rows, whole)]
    chex.assert_trees_all_close(*both, rtol=1e-10, atol=1e-11)


def sequential_steps(jaxpr):
    """How many bodies of a scan run one after another; inner scans run once a body."""
    steps = 0
    for equation in jaxpr.eqns:
        inner = sum(sequential_steps(sub) for sub in jaxprs_in_params(equation.params))
        if equation.primitive.name == "scan":
            steps += equation.params["length"] * max(inner, 1)
        else:
            steps += inner
    return steps


@pytest.mark.parametrize("choice, steps", [("scan", 3 * 8), ("wavefront", 8 + 2 * 2)])
def test_the_steps_that_wait_for_one_another(choice, steps):
    run = partial(jaxgru.unroll, stack_of("gru", "gru", "gru"), implementation=choice)
    assert sequential_steps(jax.make_jaxpr(run)(jnp.zeros((2, 8, 3))).jaxpr) == steps


def test_what_is_supported(monkeypatch):
    def supports(layers, T, dtype=None, **marks):
        recurrences = [layer.custom_gradient() for layer in layers]
        x = jnp.zeros((T, 2, 3))
        carry = [jnp.zeros((2, 4), dtype or layer.b.dtype) for layer in layers]
        return wavefront.supports(layers, recurrences, x, carry, [StepMasks(**marks)] * len(layers))

    grus = stack_of("gru", "gru")
    assert supports(grus, 4) and supports(stack_of("lstm", "lstm"), 6)
    assert not supports(grus, 4, jnp.float16)
    assert not supports(grus, 4, reset=jnp.zeros((4, 2), bool))
    assert not supports(grus[:1], 4)  # nothing to run beside it
    assert not supports(stack_of("gru", "lstm"), 4)
    assert not supports(stack_of("gru", "gru, reset after"), 4)
    assert [supports(grus, T) for T in (1, 2, 5)] == [False] * 3
    first, second = grus
    wider = INIT["gru"](jax.random.key(0), 4, 8, dtype="float64")
    assert not supports([first, wider], 4)
    assert not supports([first, stack_of("gru", "gru", dtype="float16")[1]], 4)
    assert not supports([first, second, first], 4)
    monkeypatch.setattr(wavefront, "PART", 16)
    lengths = [wavefront.part_length(T) for T in (1, 16, 17, 96, 100, 128)]
    assert lengths == [1, 16, 1, 16, 10, 16]
