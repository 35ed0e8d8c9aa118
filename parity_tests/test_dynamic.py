"""Dynamic evaluation against a plain PyTorch loop over torchref's models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from jaxgru.errors import UserError
from jaxgru.lm.config import ModelConfig
from jaxgru.lm.dynamic import Dynamic, dynamic_nll, mean_squares
from parity_tests.conversion import agree, from_state_dict, model_keys, random_params, torch_model

V = 5
EVERY = 4
MODELS = {
    "gru": ModelConfig("gru", V, 3, 6, num_layers=2, second_bias=True, reset_gate="before"),
    "lstm": ModelConfig("lstm", V, 3, 6, final_norm=True),
}
TOKENS = np.random.default_rng(3).integers(0, V, 4 * EVERY + 3)  # the last segment has 2 tokens


def segments(tokens):
    for start in range(0, len(tokens) - 1, EVERY):
        whole = torch.tensor(tokens[start : start + EVERY + 1])
        yield whole[:-1], whole[1:]


def segment_gradient(model, inputs, targets, carry):
    """The mean loss's gradient, each token's loss, and the state after; read token by token."""
    losses = []
    for token, target in zip(inputs, targets, strict=True):
        logits, carry = model(token[None, None], carry)
        losses.append(cross_entropy(logits[0], target[None]))
    gradients = torch.autograd.grad(sum(losses) / len(losses), list(model.parameters()))
    carry = [tuple(part.detach() for part in state) for state in carry]
    return gradients, [loss.item() for loss in losses], carry


def torch_mean_squares(model, tokens):
    carry = None
    total = [torch.zeros_like(p) for p in model.parameters()]
    n = 0
    for inputs, targets in segments(tokens):
        if len(inputs) == EVERY:
            gradients, _, carry = segment_gradient(model, inputs, targets, carry)
            total = [t + g**2 for t, g in zip(total, gradients, strict=True)]
            n = n + 1
    return [t / n for t in total]


def torch_dynamic_nll(model, tokens, squares, rate, decay, epsilon):
    trained = [p.detach().clone() for p in model.parameters()]
    roots = [m.sqrt() for m in squares]
    mean = torch.cat([root.flatten() for root in roots]).mean()
    carry = None
    nll = []
    for inputs, targets in segments(tokens):
        gradients, losses, carry = segment_gradient(model, inputs, targets, carry)
        nll += losses
        with torch.no_grad():
            for p, p0, g, root in zip(model.parameters(), trained, gradients, roots, strict=True):
                pull = (decay * root / mean).clamp(max=1)
                p += -rate * g / (root + epsilon) + pull * (p0 - p)
    return np.array(nll)


@pytest.mark.parametrize("dtype", ["float64"])
@pytest.mark.parametrize("kind", ["lstm", pytest.param("gru", marks=pytest.mark.slow)])
def test_equals_a_loop_in_pytorch(kind, dtype):
    """Each token's loss after five updates so large that the losses change by a tenth and more."""
    params = random_params(np.random.default_rng(5), MODELS[kind], dtype)
    model = torch_model(params)
    keys = model_keys(params)
    theirs = torch_mean_squares(model, TOKENS)
    ours = mean_squares(params, TOKENS, EVERY)
    names = [name for name, _ in model.named_parameters()]
    agree(
        "dynamic evaluation, mean squares",
        ours,
        from_state_dict(keys, dict(zip(names, theirs, strict=True))),
        1e-10,
    )

    rate = 0.05
    decay = 0.1
    epsilon = 0.01
    dynamic = Dynamic(ours, rate, decay, epsilon, EVERY)
    nll = dynamic_nll(params, TOKENS, dynamic)
    static = dynamic_nll(params, TOKENS, Dynamic(ours, 0.0, every=EVERY))
    assert np.abs(nll - static)[EVERY:].max() > 0.1 and (nll[:EVERY] == static[:EVERY]).all()
    agree(
        "dynamic evaluation, nats",
        nll,
        torch_dynamic_nll(model, TOKENS, theirs, rate, decay, epsilon),
        1e-10,
    )


def test_a_long_text_in_half_precision():
    """Sums over a thousand segments, and a thousand small updates: as with wide weights."""
    tokens = np.random.default_rng(0).integers(0, V, 1025).astype(np.int32)
    params = random_params(np.random.default_rng(5), ModelConfig("rnn", V, 3, 6), "float32")
    narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), narrow)
    losses = []
    for model in (narrow, wide):
        squares = mean_squares(model, tokens, 1)
        assert {leaf.dtype for leaf in jax.tree.leaves(squares)} == {jnp.dtype("float32")}
        losses.append(dynamic_nll(model, tokens, Dynamic(squares, 1e-3, every=1))[-512:].mean())
    np.testing.assert_allclose(*losses, rtol=5e-4)  # 4e-5; with narrow sums or updates, 3e-3


def test_a_text_shorter_than_a_segment():
    params = random_params(np.random.default_rng(5), MODELS["lstm"], "float32")
    with pytest.raises(UserError, match="the text has 4 tokens; a segment of 4 needs 5"):
        mean_squares(params, TOKENS[:4], EVERY)
