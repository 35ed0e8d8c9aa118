"""The stateless chain against the model it describes: its logits, its losses, its text."""

from __future__ import annotations

import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import numpy_gru_losses
from random_models import random_params

import jaxgru
from jaxgru.analysis.markov import bigram_divergence, greedy_cycles, transition_matrix
from jaxgru.analysis.text import Loop, find_loop
from jaxgru.lm import ModelConfig

V = 12


def model(seed: int, cell: str, vocab_size: int, num_layers: int, **options) -> jaxgru.lm.Params:
    """Large weights, so that the rows of the chain differ."""
    return random_params(ModelConfig(cell, vocab_size, 3, 5, num_layers, **options), seed)


@pytest.fixture(scope="module")
def params() -> jaxgru.lm.Params:
    return model(0, "gru", V, 2, second_bias=True, reset_gate="before")


@pytest.fixture(scope="module")
def P(params) -> np.ndarray:
    return transition_matrix(params)


def random_chain(V: int, concentration: float = 0.3) -> np.ndarray:
    """Rows from a sparse Dirichlet: some transitions are likely, many nearly impossible."""
    P = np.random.default_rng(V).dirichlet(np.full(V, concentration), V) + 1e-9
    return P / P.sum(axis=1, keepdims=True)


class TestTransitionMatrix:
    def test_rows_are_numpys(self, params, P):
        """The equations in float64, written without jaxgru's cells; two layers of GRU."""
        nll = [[numpy_gru_losses(params, np.array([v, w]), 1)[0] for w in range(V)] for v in (0, 3)]
        np.testing.assert_allclose(P[[0, 3]], np.exp(-np.array(nll)), rtol=1e-4)
        assert np.abs(P[0] - P[3]).max() > 0.1  # or any row would do
        np.testing.assert_allclose(P.sum(axis=1), 1, rtol=0, atol=1e-14)

    def test_of_huge_logits(self):
        """A head of ±10,000: certain, and neither 0/0 nor infinite."""
        params = model(0, "rnn", 2, 2)
        params = params.replace(head=params.head.replace(bo=np.float32([1e4, -1e4])))
        np.testing.assert_array_equal(transition_matrix(params), [[1, 0], [1, 0]])


class TestBigramDivergence:
    def test_by_hand(self):
        """Row 0: 1 · ln(1 / ½). Row 1: ½ ln(½ / ¼) + ½ ln(½ / ¾) = ½ ln(4/3)."""
        P = np.array([[0.5, 0.5], [0.25, 0.75]])
        bigram = np.array([[1, 0], [0.5, 0.5]])
        weights = np.array([[0.25], [0.75]])
        expected = 0.25 * math.log(2) + 0.75 * 0.5 * math.log(4 / 3)
        assert bigram_divergence(P, weights * bigram) == pytest.approx(expected, rel=1e-14)
        assert bigram_divergence(P, weights * P) == 0
        assert bigram_divergence(random_chain(6), random_chain(6, 2.0) / 6) > 0.1

    def test_of_what_the_chain_rules_out_is_infinite(self):
        P = np.array([[1.0, 0], [0.5, 0.5]])
        pairs = np.full((2, 2), 0.25)
        assert bigram_divergence(P, pairs) == math.inf
        assert bigram_divergence(P, np.array([[0, 0], [0.5, 0.5]])) == 0  # not where no one looks
        assert math.isnan(bigram_divergence(P * np.nan, pairs))


class TestGreedyCycles:
    @pytest.mark.parametrize("successor, cycles", [
        ([0], [((0,), 1)]),
        ([1, 0], [((0, 1), 2)]),
        ([0, 1], [((0,), 1), ((1,), 1)]),
        ([1, 1], [((1,), 2)]),
        # 5 → 4 → 3 → 2 → 4: the loop is 4 3 2, written from its smallest token
        ([0, 0, 4, 2, 3, 4], [((2, 4, 3), 4), ((0,), 2)]),
        # every way into one loop is long: V − 1 steps from token 6
        ([0, 0, 1, 2, 3, 4, 5], [((0,), 7)]),
    ])  # fmt: skip
    def test_by_hand(self, successor, cycles):
        V = len(successor)
        assert greedy_cycles((np.eye(V)[successor] + 0.1) / (1 + 0.1 * V)) == cycles
        assert greedy_cycles(np.full((V, V), 1 / V)) == [((0,), V)]  # of equals the first

    def test_all_greedy_stateless_text_ends_in_one(self):
        """From every token: the loop at the text's end is a cycle, and basins count who gets there.

        No text needs more than V − 1 tokens to come into its cycle, so 4V show three turns of it.
        """
        V = 60
        params = model(3, "rnn", V, 1)
        cycles = greedy_cycles(transition_matrix(params))
        assert len(cycles) > 1 and max(len(tokens) for tokens, _ in cycles) > 2  # or too easy
        prompt = jnp.arange(V)[:, None]
        texts, _, _ = jaxgru.lm.generate(
            params, jax.random.key(0), prompt, 4 * V, temperature=0, stateful=False
        )
        seen: Counter[tuple[int, ...]] = Counter()
        for text in np.concatenate([prompt, texts], axis=1).tolist():
            loop = find_loop(text)
            assert isinstance(loop, Loop) and loop.onset < V
            turn = text[loop.onset : loop.onset + loop.period]
            start = turn.index(min(turn))
            seen[tuple(turn[start:] + turn[:start])] += 1
        assert seen == dict(cycles)
        assert [basin for _, basin in cycles] == sorted(seen.values(), reverse=True)
