"""Whole models against torchref: logits, carry, loss, every gradient, dropout at each site."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jaxgru
from jaxgru.layers.dropout import Dropout
from jaxgru.layers.masks import dropout_masks
from jaxgru.lm.config import ModelConfig, config_dir
from jaxgru.lm.model import Params, token_nll
from parity_tests import conversion
from parity_tests.conversion import DTYPES, REPEATED, TOLERANCE, VARIANTS, agree, to_torch

PUBLISHED = sorted(path.stem for path in (config_dir() / "published").glob("*.toml"))
SMALL = ("astra_alpha", "scribe_alpha")
SLOW = pytest.mark.slow
LARGER = {cell: ModelConfig(cell, 11, 6, 13, 2, **VARIANTS[cell]) for cell in VARIANTS}


def fast_key(seed: int) -> jax.Array:
    """Return a key whose generator compiles faster than the default; any masks will do here."""
    return jax.random.key(seed, impl="rbg")


def compare(
    name: str,
    params: Params,
    tokens: jax.Array,
    targets: jax.Array,
    carry: tuple,
    dropout: Dropout | None = None,
) -> None:
    """Logits, final carry, loss, and the gradient of every parameter and of the initial carry.

    The gradient is that of the loss plus a linear function of the final carry: truncated
    backpropagation from one window into the next needs both.
    """
    dtype = str(params.embedding.dtype)
    rng = np.random.default_rng(1)
    weights = conversion.random_carry(rng, params, tokens.shape[0], dtype)

    def value(params, carry):
        logits, carry = jaxgru.lm.apply(params, tokens, carry, dropout)
        loss = token_nll(logits, targets).mean()
        of_carry = sum(map(jnp.vdot, jax.tree.leaves(weights), jax.tree.leaves(carry)))
        return loss + of_carry, (loss, logits, carry)

    (_, ours), gradients = jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True))(params, carry)

    masks = None
    if dropout is not None:
        masks = conversion.masks_to_torch(dropout_masks(params.layers, dropout, *tokens.shape))
    model = conversion.torch_model(params, site=dropout.site if dropout else "state")
    theirs_in = conversion.carry_to_torch(carry)
    for tensor in jax.tree.leaves(theirs_in):
        tensor.requires_grad_()
    logits, theirs_out = model(to_torch(tokens), theirs_in, masks)
    loss = F.cross_entropy(logits.flatten(0, 1), to_torch(targets).flatten())
    pairs = zip(jax.tree.leaves(weights), jax.tree.leaves(theirs_out), strict=True)
    (loss + sum((to_torch(w) * c).sum() for w, c in pairs)).backward()

    named = {key: p.grad for key, p in model.named_parameters()}
    theirs = {
        "loss": loss,
        "logits": logits,
        "final carry": theirs_out,
        "gradient of every parameter": conversion.from_state_dict(
            conversion.model_keys(params), named
        ),
        "gradient of the initial carry": [tensor.grad for tensor in jax.tree.leaves(theirs_in)],
    }
    for a, (quantity, b) in zip((*ours, *gradients), theirs.items(), strict=True):
        agree(f"{name}: {quantity}", a, b, TOLERANCE[dtype])


@pytest.mark.parametrize(
    "name, dtype",
    [
        pytest.param(name, dtype, marks=() if name in SMALL else SLOW)
        for name in PUBLISHED
        for dtype in DTYPES
    ],
)
def test_published_sizes(name, dtype):
    """All seven configs at full size, from a random carry."""
    config = jaxgru.lm.load_config(name).model
    rng = np.random.default_rng(0)
    params = conversion.random_params(rng, config, dtype)
    tokens, targets = (conversion.random_tokens(rng, config.vocab_size, 2, 5) for _ in range(2))
    compare(name, params, tokens, targets, conversion.random_carry(rng, params, 2, dtype))


@pytest.mark.parametrize("dtype", REPEATED)
@settings(conversion.same_every_run, max_examples=1)
@example(fields=vars(LARGER["gru"]), site="between", B=3, T=9, seed=0)
@example(fields=vars(LARGER["lstm"]), site="state", B=3, T=9, seed=0)
@example(fields=vars(LARGER["lstm"]), site="output", B=3, T=9, seed=0)
@example(fields=vars(LARGER["rnn"]), site="state", B=3, T=9, seed=0)
@example(fields=vars(conversion.SMALLEST["gru"]), site="state", B=1, T=1, seed=0)
@example(fields=vars(conversion.SMALLEST["rnn"]), site=None, B=1, T=1, seed=0)
@given(
    fields=conversion.model_fields(),
    site=st.sampled_from([None, "state", "between", "output"]),
    B=st.integers(1, 4),
    T=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_odd_sizes(dtype, fields, site, B, T, seed):
    """Sizes chosen by hypothesis, down to 1 in every dimension; dropout with the same masks.

    On the last output it acts before the LayerNorm.
    """
    config = ModelConfig(**fields)
    rng = np.random.default_rng(seed)
    params = conversion.random_params(rng, config, dtype)
    tokens, targets = (conversion.random_tokens(rng, config.vocab_size, B, T) for _ in range(2))
    carry = conversion.random_carry(rng, params, B, dtype)
    dropout = site and Dropout(fast_key(seed), 0.3, site)
    compare(f"{config.cell}, odd sizes", params, tokens, targets, carry, dropout)


@pytest.mark.parametrize("site", ["state", "between", "output"])
def test_masks_are_fresh_and_sized(site):
    """Masks differ between steps, rows, layers and keys, and keep the right share of units.

    The comparison above uses jaxgru's own masks, so it cannot notice a mask that is used twice. Two
    masks of n units with rate p agree on about n(1 − 2p(1 − p)) units, a copy on n.
    """
    rate = 0.25
    H = 400
    B = 3
    T = 5
    config = ModelConfig("gru", 3, 2, H, 3)
    params = jax.eval_shape(lambda: jaxgru.lm.init(jax.random.key(0), config))
    drawn = [
        mask
        for key in (1, 2)
        for pair in dropout_masks(params.layers, Dropout(jax.random.key(key), rate, site), B, T)
        for mask in (pair.hidden, pair.output)
        if mask.keep is not None
    ]
    assert len(drawn) == 2 * {"state": 3, "between": 2, "output": 1}[site]
    assert all(mask.scale == 1 / (1 - rate) for mask in drawn)
    rows = np.stack([np.asarray(mask.keep) for mask in drawn]).reshape(-1, H)
    assert len(rows) == len(drawn) * T * B

    deviation = np.sqrt(rate * (1 - rate) / rows.size)
    assert abs(rows.mean() - (1 - rate)) < 4 * deviation
    shared = (rows[:, None] == rows[None]).mean(-1)[np.triu_indices(len(rows), 1)]
    expected = 1 - 2 * rate * (1 - rate)
    assert np.abs(shared - expected).max() < 5 * np.sqrt(expected * (1 - expected) / H)


# V, E, H, K, B, T: the size of bengio_mlp, and each at its smallest
MLP_SIZES = [(65, 64, 160, 7, 4, 128), (2, 1, 1, 1, 1, 1), (2, 1, 3, 4, 2, 1), (5, 3, 2, 2, 3, 9)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V, E, H, K, B, T", MLP_SIZES)
def test_an_mlp(V, E, H, K, B, T, dtype):
    """Against the same network of PyTorch's layers, which has no state: it gets whole windows.

    It is that of Bengio et al. 2003 without the direct connections.
    """
    rng = np.random.default_rng(V + T)
    params = conversion.random_params(rng, ModelConfig("mlp", V, E, H, 1, context_length=K), dtype)
    tokens = conversion.random_tokens(rng, V, B, T)
    targets = conversion.random_tokens(rng, V, B, T)

    def loss(params):
        logits, _ = jaxgru.lm.apply(params, tokens)
        return token_nll(logits, targets).mean(), logits

    (value, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    theirs = jax.tree.map(lambda leaf: to_torch(leaf).requires_grad_(), params)
    (layer,) = theirs.layers
    head = theirs.head
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
