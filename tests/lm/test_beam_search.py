"""Beam search, against all texts that there are and against a plain loop over `lm.step`."""

from __future__ import annotations

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from random_models import random_params

import jaxgru
from jaxgru.lm import ModelConfig, beam_search, generate, initial_carry, step

PROMPT = np.array([[1, 0, 2], [2, 2, 0]])


def model(cell, V=3):
    memory = {"context_length": 2} if cell == "mlp" else {}
    return random_params(ModelConfig(cell, V, 4, 6, num_layers=2, **memory), scale=0.8)


def by_hand(params, prompt, num_tokens, num_beams, stop=()):
    """One row: the list of (score, tokens, carry); NumPy in float64 but for `step`."""
    carry = initial_carry(params, 1)
    for token in prompt[:-1]:
        _, carry = step(params, jnp.array([token]), carry)
    beams = [(0.0, [prompt[-1]], carry, False)]
    for _ in range(num_tokens):
        longer = []
        for score, text, carry, done in beams:
            if done:
                longer.append((score, [*text, text[-1]], carry, True))
                continue
            logits, after = step(params, jnp.array([text[-1]]), carry)
            logits = np.array(logits[0], np.float64)
            logp = logits - np.log(np.sum(np.exp(logits - logits.max()))) - logits.max()
            longer += [(score + logp[v], [*text, v], after, v in stop) for v in range(len(logp))]
        beams = sorted(longer, key=lambda beam: -beam[0])[:num_beams]
    return [(score, text[1:], carry) for score, text, carry, _ in beams]


@pytest.mark.parametrize(
    "cell, num_beams, stop",
    [("gru", 3, [1]), *slow(("gru", 3, []), ("lstm", 4, [0, 2]), ("mlp", 2, [1]), ("rnn", 1, []))],
)
def test_keeps_what_a_plain_loop_keeps(cell, num_beams, stop):
    """5 tokens of 2 rows; a text that has ended stays, with its score and its state."""
    params = model(cell, V=4)
    tokens, scores, carry = beam_search(params, PROMPT, 5, num_beams, stop=stop)
    expected = [by_hand(params, row, 5, num_beams, stop) for row in PROMPT]
    np.testing.assert_array_equal(tokens, [[text for _, text, _ in row] for row in expected])
    np.testing.assert_allclose(scores, [[s for s, _, _ in row] for row in expected], rtol=1e-5)
    carries = [carry for row in expected for _, _, carry in row]
    expected = jax.tree.map(lambda *rows: np.concatenate(rows), *carries)
    chex.assert_trees_all_close(carry, expected, rtol=1e-4, atol=1e-5)


def test_with_enough_beams_it_finds_the_likeliest_of_all_texts():
    """27 beams of 3 tokens: all that 4 tokens can begin with. Each text's log p by `score`."""
    params = model("gru")
    tokens, scores, _ = beam_search(params, PROMPT[:1], 4, 27)
    texts = np.array(list(itertools.product(range(3), repeat=4)))
    whole = np.concatenate([np.broadcast_to(PROMPT[:1], (81, 3)), texts], axis=1)
    logits, _ = jaxgru.lm.apply(params, whole[:, :-1])
    logp = np.array(jax.nn.log_softmax(logits), np.float64)[:, 2:]
    exact = np.take_along_axis(logp, texts[:, :, None], axis=2).sum(axis=(1, 2))
    order = np.argsort(-exact)[:27]
    np.testing.assert_array_equal(tokens[0], texts[order])
    np.testing.assert_allclose(scores[0], exact[order], rtol=1e-5)


def test_one_beam_is_greedy_and_goes_on_exactly():
    params = model("lstm")
    carry = random_carry(model("lstm"))
    whole, _, end = beam_search(params, PROMPT, 6, 1, carry)
    greedy, _, _ = generate(params, jax.random.key(0), PROMPT, 6, carry, temperature=0)
    np.testing.assert_array_equal(whole[:, 0], greedy)
    first, _, carry = beam_search(params, PROMPT, 2, 1, carry)
    rest, _, _ = beam_search(params, first[:, 0, -1:], 4, 1, carry)
    np.testing.assert_array_equal(np.concatenate([first, rest], axis=2), whole)


def random_carry(params):
    rng = np.random.default_rng(1)

    def draw(leaf):
        return jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree.map(draw, initial_carry(params, len(PROMPT)))


def test_more_beams_than_texts():
    """A vocabulary of 2, one token: two texts, and two beams of probability 0."""
    _, scores, _ = beam_search(model("rnn", V=2), np.array([[0]]), 1, 4)
    assert np.exp(scores[0, :2]).sum() == pytest.approx(1, rel=1e-6)
    assert np.all(scores[0, 2:] == -np.inf)


@pytest.mark.parametrize("change, says", [
    ({"num_beams": 0}, "num_beams is 0; it must be a whole number from 1 to 2147483647"),
    ({"num_tokens": 0}, "num_tokens is 0"),
    ({"prompt": np.array([[0, 3]])}, "the prompt contains 3; the vocabulary's tokens are 0 to 2"),
    ({"stop": [7]}, "stop contains 7"),
])  # fmt: skip
def test_refused(change, says):
    given = {"prompt": PROMPT, "num_tokens": 2, "num_beams": 2} | change
    with pytest.raises(jaxgru.UserError, match=says):
        beam_search(model("gru"), **given)
