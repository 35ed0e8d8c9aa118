"""Structured and regularised cells against what others computed: PyTorch, and NumPy in float64.

`tests/layers` compares every way to compute them with the definition in `jaxgru/cells`.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from against import torch_gradients, value_and_gradients

import jaxgru
from jaxgru.libraries import InteropError
from jaxgru.libraries.torch_nn import from_torch, to_torch


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("B, T, E, H, p", [(3, 5, 3, 7, 4), (1, 1, 1, 2, 1)])
def test_an_lstm_with_a_projection_is_pytorchs(B, T, E, H, p):
    """Two layers: outputs, states, and every gradient."""
    torch.manual_seed(0)
    module = torch.nn.LSTM(E, H, 2, proj_size=p, batch_first=True, dtype=torch.float64)
    x, h, c = normal(B, T, E), normal(2, B, p, seed=2), normal(2, B, H, seed=3)
    leaves = [torch.tensor(a, requires_grad=True) for a in (x, h, c)]
    y, (h_end, c_end) = module(leaves[0], tuple(leaves[1:]))
    outputs = [y, h_end[0], c_end[0], h_end[1], c_end[1]]
    weight = lambda y: torch.cos(torch.arange(y.numel(), dtype=y.dtype)).reshape(y.shape)
    sum(torch.sum(y * weight(y)) for y in outputs).backward()

    layers, carry = from_torch(module), ((h[0], c[0]), (h[1], c[1]))
    seen, gradients = value_and_gradients(jaxgru.unroll, layers, jnp.asarray(x), carry)
    expected = [y.detach().numpy() for y in outputs]
    chex.assert_trees_all_close(jax.tree.leaves(seen), expected, rtol=1e-10, atol=1e-11)
    dx, dh, dc = (leaf.grad.numpy() for leaf in leaves)
    expected = torch_gradients(module), dx, ((dh[0], dc[0]), (dh[1], dc[1]))
    chex.assert_trees_all_close(gradients, expected, rtol=1e-10, atol=1e-11)
    chex.assert_trees_all_equal(from_torch(to_torch(layers)), layers)


def test_a_projection_without_biases_and_one_that_pytorch_has_not():
    module = torch.nn.LSTM(3, 4, proj_size=2, bias=False, bidirectional=True, dtype=torch.float64)
    x = normal(5, 2, 3)
    y, _ = jaxgru.bidirectional(*from_torch(module), jnp.asarray(x), time_major=True)
    np.testing.assert_allclose(y, module(torch.tensor(x))[0].detach(), rtol=1e-10)
    with pytest.raises(InteropError, match="has 4 units; in PyTorch it must have fewer than"):
        to_torch(jaxgru.init_lstm(jax.random.key(0), 3, 4, proj_size=4, dtype="float64"))
