"""What tests against other computations share: random layers, equal outputs, refusals."""

from __future__ import annotations

import copy
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked

from jaxgru.cells import init_gru, init_lstm, init_rnn

# Both sides sum the same ≤ 15 terms per value, over ≤ 5 steps, in different orders: each gradient
# is off by some roundings (6e-8 in float32, 1e-16 in float64) of values of about 30.
TOLERANCE = {"float64": 1e-10, "float32": 3e-5}

LAYERS = {
    "gru": partial(init_gru, reset_gate="before"),
    "gru, second bias": partial(init_gru, second_bias=True, reset_gate="before"),
    "gru after": init_gru,
    "gru after, second bias": partial(init_gru, second_bias=True),
    "gru after, relu": partial(init_gru, activation="relu"),
    "lstm, clip": partial(init_lstm, clip=0.5),
    "lstm": init_lstm,
    "lstm, relu": partial(init_lstm, activation="relu"),
    "rnn": init_rnn,
    "rnn, relu": partial(init_rnn, activation="relu"),
}


def precision(dtype):
    """JAX's 64-bit types for float64, and no others."""
    return jax.enable_x64(np.dtype(dtype) == np.float64)


def alike_under_strict_promotion(run):
    """What many set for their own code: no axis is added and no dtype converted unasked."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        strict = run()
    jax.tree.map(close, strict, run())


def layer(kind, E=4, H=6, dtype=np.float32, seed=0):
    """A layer whose every weight and bias is random."""
    like = jax.eval_shape(lambda: LAYERS[kind](jax.random.key(0), E, H, dtype=dtype))
    return randomized(like, seed)


def randomized(tree, seed=0):
    """The tree with normal values in place of its floats."""
    rng = np.random.default_rng(seed)

    def normal(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jax.device_put(rng.standard_normal(leaf.shape).astype(leaf.dtype))

    return jax.tree.map(normal, tree)


def nnx_cell(name, E=4, H=6, dtype=np.float32, **options):
    """A cell of flax.nnx whose every weight and bias is random."""
    from flax import nnx

    if name == "SimpleCell":
        options = dict(dtype=dtype) | options
    options["param_dtype"] = dtype
    make = getattr(nnx, name)
    cell = nnx.eval_shape(lambda: make(E, H, **options, rngs=nnx.Rngs(0)))  # draws nothing
    nnx.update(cell, randomized(nnx.state(cell)))
    return cell


def equinox_cell(name, E=4, H=6, dtype=np.float32, **options):
    """A cell of Equinox whose every weight and bias is random."""
    import equinox as eqx

    options |= dict(dtype=dtype, key=jax.random.key(0))
    return randomized(eqx.filter_eval_shape(getattr(eqx.nn, name), E, H, **options))


def keras_drawn(layer, E=4):
    """A Keras layer, built, whose every weight and bias is random."""
    layer.build((None, None, E))
    weights = [normal(*w.shape, dtype=w.dtype, seed=i) for i, w in enumerate(layer.get_weights())]
    layer.set_weights(weights)
    return layer


def normal(*shape, dtype=np.float64, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def carry_of(B, H, dtype, pair):
    """A random h, or the two states of an LSTM."""
    h = normal(B, H, dtype=dtype, seed=3)
    if not pair:
        return h
    return h, normal(B, H, dtype=dtype, seed=4)


def scanned(step, first, carry, xs, reset, **options):
    """A user's scan of a cell, step(carry, x), where an episode begins from another carry."""

    def one_step(carry, inputs):
        x, reset = inputs
        carry = jax.tree.map(lambda a, b: jnp.where(reset[..., None], a, b), first, carry)
        return step(carry, x)

    return jax.lax.scan(one_step, carry, (xs, reset), **options)


def resets(*shape):
    """Where a row starts anew: at the first step, at none, at several."""
    return np.random.default_rng(2).random(shape) < 0.4


def gradients(function, *args):
    """The outputs, and the gradients of a scalar in which each has its own weights."""

    def scalar(*args):
        outputs = function(*args)
        leaves = [y for y in jax.tree.leaves(outputs) if jnp.issubdtype(y.dtype, jnp.floating)]
        weighted = [jnp.sum(y * w) for y, w in zip(leaves, weights_of(leaves), strict=True)]
        return sum(weighted), outputs

    all_args = tuple(range(len(args)))
    gradients, outputs = jax.grad(scalar, all_args, has_aux=True, allow_int=True)(*args)
    return outputs, gradients


def weights_of(outputs, dtype=None):
    """Those of outputs in the scalar that `gradients` differentiates."""
    weights = []
    for i, y in enumerate(outputs):
        w = np.cos(np.arange(math.prod(y.shape)) + i).reshape(y.shape)
        weights.append(w.astype(dtype or y.dtype))
    return weights


def value_and_gradients(function, *args):
    """`gradients`, in one compiled program."""
    return jax.jit(partial(gradients, function))(*args)


def same_numbers(ours, theirs, *args):
    """Compare two functions of the same arguments: outputs and every gradient."""
    ours = value_and_gradients(ours, *args)
    theirs = value_and_gradients(theirs, *args)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(close, ours, theirs)


def torch_gradients(module):
    """The gradients of a torch.nn module in the structure of our layers: conversion is linear."""
    from jaxgru.libraries.torch_nn import from_torch

    gradient = copy.deepcopy(module)
    has_two_biases = type(module).__name__ == "GRU"  # elsewhere, the second acts only in a sum
    for (name, p), q in zip(module.named_parameters(), gradient.parameters(), strict=True):
        q.data = p.grad
        if "bias_hh" in name and not has_two_biases:
            q.data = p.grad * 0
    return from_torch(gradient)


def refused(*rows):
    """A test of calls, each with a part of the sentence that refuses it."""

    @pytest.mark.parametrize("call, says", rows)
    def test(call, says):
        with unchecked(), pytest.raises((ValueError, RuntimeError), match=says):
            call()

    return test


def close(a, b):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    if a.dtype != jax.dtypes.float0 and jnp.issubdtype(a.dtype, jnp.floating):
        tolerance = TOLERANCE[a.dtype.name]
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
