"""jaxgru's MLP against the same network of PyTorch's layers: windows, Linear, tanh, Linear.

Bengio et al. 2003 without the direct connections. PyTorch has no state: it gets each whole window.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import jaxgru
from jaxgru.lm.config import ModelConfig
from jaxgru.lm.model import token_nll
from parity_tests import bridge
from parity_tests.bridge import DTYPES, TOLERANCE, agree, to_torch

# V, E, H, K, B, T: the size of bengio_mlp, and each at its smallest
SIZES = [(65, 64, 160, 7, 4, 128), (2, 1, 1, 1, 1, 1), (2, 1, 3, 4, 2, 1), (5, 3, 2, 2, 3, 9)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V, E, H, K, B, T", SIZES)
def test_logits_loss_and_every_gradient(V, E, H, K, B, T, dtype):
    rng = np.random.default_rng(V + T)
    params = bridge.random_params(rng, ModelConfig("mlp", V, E, H, 1, context_length=K), dtype)
    tokens, targets = bridge.random_tokens(rng, V, B, T), bridge.random_tokens(rng, V, B, T)

    def loss(params):
        logits, _ = jaxgru.lm.apply(params, tokens)
        return token_nll(logits, targets).mean(), logits

    (value, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    theirs = jax.tree.map(lambda leaf: to_torch(leaf).requires_grad_(), params)
    (layer,), head = theirs.layers, theirs.head
    x = F.embedding(to_torch(tokens), theirs.embedding)
    x = F.pad(x, (0, 0, K - 1, 0))  # zeros before t = 0
    windows = x.unfold(1, K, 1).transpose(2, 3).reshape(B, T, K * E)
    h = torch.tanh(windows @ layer.W.reshape(K * E, H) + layer.b)
    their_logits = h @ head.Wo + head.bo
    their_loss = F.cross_entropy(their_logits.reshape(B * T, V), to_torch(targets).reshape(-1))
    their_loss.backward()

    agree("MLP logits", logits, their_logits, TOLERANCE[dtype], "torch layers")
    agree("MLP loss", value, their_loss, TOLERANCE[dtype], "torch layers")
    theirs = jax.tree.map(lambda leaf: leaf.grad, theirs)
    agree("MLP gradients", gradients, theirs, TOLERANCE[dtype], "torch layers")
