"""Generation against torchref: greedy tokens, the distributions, and the samples drawn."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jaxgru
import torchref
from jaxgru.lm.config import ModelConfig
from jaxgru.lm.model import Params
from jaxgru.lm.sampling import filter_logits
from parity_tests import conversion
from parity_tests.conversion import DTYPES, REPEATED, TOLERANCE, VARIANTS, agree, to_torch

MODELS = {cell: ModelConfig(cell, 40, 12, 48, 2, **VARIANTS[cell]) for cell in VARIANTS}

GAIN = {"gru": 4, "lstm": 4, "rnn": 2}

# Of 500 steps. Rounding errors do not add up, because the tokens agree and these states forget; the
# largest seen are 2e-15 and 2e-6.
GREEDY_CARRY = {"float64": 1e-12, "float32": 1e-3}
MARGIN = {"float64": 1e-9, "float32": 2e-5}  # of the largest logit; differences are far below


def lively_params(cell: str, dtype: str) -> Params:
    """Return random weights so large that greedy text varies instead of repeating one token."""
    params = conversion.random_params(np.random.default_rng(0), MODELS[cell], dtype)
    return jax.tree.map(lambda leaf: GAIN[cell] * leaf, params)


@pytest.mark.parametrize("dtype", REPEATED)
@pytest.mark.parametrize("stateful", [True, False])
@pytest.mark.parametrize("cell", ["gru", "lstm", "rnn"])
def test_greedy(cell, stateful, dtype):
    """500 identical tokens after a prompt of 7 tokens and a random carry, and the final carry.

    At every step the most likely token leads by far more than rounding (this is checked), so the
    identical text is no coincidence.
    """
    params = lively_params(cell, dtype)
    rng = np.random.default_rng(1)
    prompt = conversion.random_tokens(rng, 40, 3, 7)
    carry = conversion.random_carry(rng, params, 3, dtype)
    ours, ours_carry, _ = jaxgru.lm.generate(
        params, jax.random.key(0), prompt, 500, carry, temperature=0, stateful=stateful
    )
    model = conversion.torch_model(params).eval()
    theirs, theirs_carry = torchref.generate(
        model,
        to_torch(prompt),
        500,
        conversion.carry_to_torch(carry),
        temperature=0,
        stateful=stateful,
    )
    name = f"{cell}: 500 greedy tokens, {'stateful' if stateful else 'stateless'}"
    agree(name, np.asarray(ours, np.int64), theirs, 0)
    agree(f"{name}, final carry", ours_carry, theirs_carry, GREEDY_CARRY[dtype])

    if stateful:
        text = torch.cat([to_torch(prompt), theirs], dim=1)
        with torch.no_grad():
            logits = model(text[:, :-1], conversion.carry_to_torch(carry))[0][:, -500:]
        margin = logits.topk(2).values.diff().abs().min() / logits.abs().max()
        assert margin > MARGIN[dtype]
        assert len(np.unique(theirs)) > 7, "a text of few tokens would show little"


def test_the_published_stateful_scribe_is_stateless():
    """Its logits are bit-identical with and without a state; its greedy text is our stateless text.

    The same weights write another text if the state is passed on.
    """
    params = lively_params("gru", "float32")
    rng = np.random.default_rng(1)
    prompt = conversion.random_tokens(rng, 40, 3, 7)
    carry = conversion.random_carry(rng, params, 3, "float32")
    right = conversion.torch_model(params).eval()
    model = torchref.ScribeAsPublished(40, 12, 48, 2).eval()
    model.load_state_dict(right.state_dict())
    with torch.no_grad():
        logits = [
            model(to_torch(prompt), state)[0] for state in (None, conversion.carry_to_torch(carry))
        ]
    assert torch.equal(*logits)
    theirs, _ = torchref.generate(
        model, to_torch(prompt), 100, temperature=0, stateful=True, whole_prompt=False
    )
    key = jax.random.key(0)
    ours, _, _ = jaxgru.lm.generate(params, key, prompt, 100, temperature=0, stateful=False)
    agree("Scribe as published: 100 greedy tokens", np.asarray(ours, np.int64), theirs, 0)
    mended, _ = torchref.generate(
        right, to_torch(prompt), 100, temperature=0, stateful=True, whole_prompt=False
    )
    assert not torch.equal(theirs, mended)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_only_the_last_token_of_the_prompt(cell):
    """The study's sampler is ours with the prompt's last token, not with the whole prompt."""
    params = lively_params(cell, "float32")
    prompt = conversion.random_tokens(np.random.default_rng(1), 40, 2, 9)
    model = conversion.torch_model(params).eval()
    study, _ = torchref.generate(model, to_torch(prompt), 50, temperature=0, whole_prompt=False)
    key = jax.random.key(0)
    last, _, _ = jaxgru.lm.generate(params, key, prompt[:, -1:], 50, temperature=0)
    whole, _, _ = jaxgru.lm.generate(params, key, prompt, 50, temperature=0)
    agree(f"{cell}: 50 greedy tokens, the prompt's last only", np.asarray(last, int), study, 0)
    assert (np.asarray(whole) != study.numpy()).any()


@pytest.mark.parametrize("dtype", DTYPES)
@conversion.same_every_run
@given(
    V=st.integers(2, 50),
    temperature=st.sampled_from([0.1, 0.8, 1.0, 2.0]),
    k=st.none() | st.integers(1, 50),
    top_p=st.none() | st.floats(0.05, 0.99),
    seed=st.integers(0, 2**32 - 1),
)
def test_distributions(dtype, V, temperature, k, top_p, seed):
    """The probabilities after temperature, top-k and top-p, alone and together."""
    logits = jnp.asarray(3 * np.random.default_rng(seed).standard_normal((4, V)), dtype)
    k = k and min(k, V)

    def distribution(*options):
        return jax.nn.softmax(filter_logits(*options), axis=-1)

    ours = jax.jit(distribution, static_argnums=2)(logits, temperature, k, top_p)
    theirs = torchref.distribution(to_torch(logits), temperature, k, top_p)
    used = [w for w, on in [("top-k", k is not None), ("top-p", top_p is not None)] if on]
    name = "distribution with " + ", ".join(["temperature", *used])
    agree(name, ours, theirs, TOLERANCE[dtype])


@pytest.mark.parametrize("cell, options", [
    pytest.param("gru", {"temperature": 1.0}, marks=pytest.mark.slow),
    pytest.param("lstm", {"temperature": 1.0}, marks=pytest.mark.slow),
    ("gru", {"temperature": 0.7, "top_k": 3}),
    pytest.param("gru", {"temperature": 1.3, "top_p": 0.8}, marks=pytest.mark.slow),
    ("gru", {"temperature": 1.0, "stateful": False}),
], ids=str)  # fmt: skip
def test_frequencies(cell, options):
    """How often each text of three tokens is drawn, against its probability by torchref.

    Only the joint distribution of several tokens shows that each is drawn independently, given the
    text so far, and that the state is passed on.
    """
    V = 4
    B = 100_000
    config = ModelConfig(cell, V, 3, 5, 2, **VARIANTS[cell])
    params = conversion.random_params(np.random.default_rng(3), config, "float32")
    params = params.replace(head=jax.tree.map(lambda leaf: 2 * leaf, params.head))
    prompt = jnp.tile(jnp.array([[1, 3, 0]], jnp.int32), (B, 1))
    tokens, _, _ = jaxgru.lm.generate(params, jax.random.key(11), prompt, 3, **options)
    seen = np.bincount(np.asarray(tokens) @ [V * V, V, 1], minlength=V**3)

    texts = torch.cartesian_prod(*[torch.arange(V)] * 3)
    model = conversion.torch_model(params).eval()
    inputs = torch.cat([to_torch(prompt[:1]).expand(V**3, -1), texts], dim=1)[:, :-1]
    sampling = {name: value for name, value in options.items() if name != "stateful"}
    with torch.no_grad():
        if options.get("stateful", True):
            logits = model(inputs)[0]
        else:  # each token alone
            logits = torch.stack([model(inputs[:, t : t + 1])[0][:, 0] for t in range(5)], dim=1)
    probability = torch.ones(V**3, dtype=torch.float64)
    for t in range(3):
        p = torchref.distribution(logits[:, 2 + t].double(), **sampling)
        probability *= p.gather(1, texts[:, t : t + 1])[:, 0]
    expected = B * probability.numpy()
    assert abs(expected.sum() - B) < 1e-6 * B
    assert seen[expected == 0].sum() == 0, "a token was drawn that top-k or top-p leaves out"
    p_value = conversion.chi_squared(seen[None], expected[None])
    described = ", ".join(f"{name} {value}" for name, value in options.items())
    conversion.agree_in_distribution(f"{cell}: sampled texts, {described}", p_value, B)
