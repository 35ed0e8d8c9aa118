"""N-grams against probabilities worked out by hand, and the equations over again with dicts."""

from __future__ import annotations

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgru.analysis.ngrams import NGram, count_ngrams, pair_frequencies
from jaxgru.errors import UserError
from jaxgru.lm.data.corpus import split
from jaxgru.lm.data.tokenizers import CharacterTokenizer
from jaxgru.lm.sampling import filter_logits

TEXT = np.array([0, 1, 0, 1, 2, 1])


class BruteForce:
    """Interpolated modified Kneser–Ney from Chen & Goodman's equations: tuples, sets and loops.

    In documents, a separator token is the first or the last token of a k-gram, or not in it.
    """

    def __init__(
        self, array: np.ndarray, vocab_size: int, order: int, separator_token: int = -1
    ) -> None:
        text = tuple(array.tolist())
        self.V = vocab_size
        self.n = order
        self.c: dict[tuple[int, ...], int] = Counter()
        for k in range(1, order + 1):
            before: dict[tuple[int, ...], set[int]] = {}
            for i in range(len(text) - k + 1):
                gram = text[i : i + k]
                if separator_token in gram[1:-1]:
                    continue
                if k == order or (k > 1 and gram[0] == separator_token):
                    self.c[gram] += 1
                elif i > 0:
                    before.setdefault(gram, set()).add(text[i - 1])
            for gram, tokens in before.items():
                self.c[gram] = len(tokens)
        self.D = {k: self.discounts(k) for k in range(1, order + 1)}

    def discounts(self, k: int) -> list[float]:
        n = Counter(count for gram, count in self.c.items() if len(gram) == k)
        if n[1] > 0 and n[2] > 0 and n[3] > 0:
            Y = n[1] / (n[1] + 2 * n[2])
            D1 = 1 - 2 * Y * n[2] / n[1]
            D2 = 2 - 3 * Y * n[3] / n[2]
            D3 = 3 - 4 * Y * n[4] / n[3]
            if min(D1, D2, D3) > 0:
                return [D1, D2, D3]
        return [0.5, 1.0, 1.5]

    def p(self, w: int, h: tuple[int, ...]) -> float:
        h = h[len(h) - min(len(h), self.n - 1) :]
        lower = self.p(w, h[1:]) if h else 1 / self.V
        counts = [self.c.get((*h, v), 0) for v in range(self.V)]
        if sum(counts) == 0:
            return lower
        D = self.D[len(h) + 1]
        N1 = counts.count(1)
        N2 = counts.count(2)
        N3 = sum(count >= 3 for count in counts)
        gamma = (D[0] * N1 + D[1] * N2 + D[2] * N3) / sum(counts)
        c = counts[w]
        return (c - (D[min(c, 3) - 1] if c else 0)) / sum(counts) + gamma * lower


def markov_text(vocab_size: int, length: int, seed: int) -> np.ndarray:
    """Random tokens of which few are likely after each other: many k-grams come again."""
    rng = np.random.default_rng(seed)
    transitions = rng.dirichlet(np.full(vocab_size, 0.3), vocab_size)
    text = [0]
    for _ in range(length - 1):
        text.append(rng.choice(vocab_size, p=transitions[text[-1]]))
    return np.array(text, np.int32)


class TestByHand:
    def test_unigrams_with_discounts_from_the_counts_of_counts(self):
        """Tokens 0–3 occur once, 4 and 5 twice, 6 three times, 7 four times, 8 and 9 never.

        n_1, n_2, n_3, n_4 = 4, 2, 1, 1, so that Y = 4/(4 + 2·2) = 1/2, and
        D(1) = 1 − 2·½·2/4 = 1/2, D(2) = 2 − 3·½·1/2 = 5/4, D(3) = 3 − 4·½·1/1 = 1;
        γ = (4·½ + 2·5/4 + 1 + 1)/15 = 6.5/15, and each of the 10 tokens gets a tenth of it.
        """
        text = np.array([7, 0, 4, 6, 7, 5, 1, 6, 7, 2, 4, 5, 6, 3, 7])
        expected = np.array([0.5] * 4 + [0.75] * 2 + [2.0, 3.0, 0.0, 0.0]) + 0.65
        p = count_ngrams(text, 10, 1).probabilities(np.array([], int))
        np.testing.assert_allclose(p, expected / 15, rtol=1e-14)

    @pytest.mark.parametrize("context, expected", [
        # After how many different tokens? 0: after 1. 1: after 0 and 2. 2: after 1. 3: none.
        # n_1, n_2, n_3 = 2, 1, 0: without a token of count 3, D = 1/2, 1, 3/2, for want of better.
        # γ = (½ + 1 + ½)/4 = 1/2, a quarter of it each, is 1/8.
        ([], [0.5 / 4 + 1 / 8, 1 / 4 + 1 / 8, 0.5 / 4 + 1 / 8, 1 / 8]),
        # n_1, n_2, n_3 = 3, 1, 0. Twice followed by 1: (2 − 1)/2, and γ = 1/2 of the above.
        ([0], [1 / 8, 1 / 2 + 3 / 16, 1 / 8, 1 / 16]),
        # Once by 0, once by 2: (1 − ½)/2 each, and γ = 1/2.
        ([1], [1 / 4 + 1 / 8, 3 / 16, 1 / 4 + 1 / 8, 1 / 16]),
        # Once by 1: (1 − ½)/1, and γ = 1/2.
        ([2], [1 / 8, 1 / 2 + 3 / 16, 1 / 8, 1 / 16]),
        # Never seen: the first line.
        ([3], [1 / 4, 3 / 8, 1 / 4, 1 / 8]),
    ])  # fmt: skip
    def test_bigrams(self, context, expected):
        model = count_ngrams(TEXT, 4, 2)
        np.testing.assert_allclose(model.probabilities(np.array(context, int)), expected)
        if context:  # whatever is further back
            np.testing.assert_allclose(model.probabilities(np.array([3, 1, *context])), expected)

    def test_nats(self):
        """0 | 1 1 0 2 0: the factors of the lines above, the first token being no prediction."""
        nll = count_ngrams(TEXT, 4, 2).token_nll(np.array([0, 1, 1, 0, 2, 0]))
        np.testing.assert_allclose(nll, -np.log([11 / 16, 3 / 16, 3 / 8, 1 / 8, 1 / 8]))

    def test_pairs(self):
        """Of 5 pairs, 0 is followed by 1 twice; 1 by 0 and by 2; 2 by 1; nothing follows 3."""
        expected = np.array([[0, 2, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0], [0] * 4]) / 5
        np.testing.assert_array_equal(pair_frequencies(TEXT, 4), expected)


class TestAgainstBruteForce:
    @pytest.mark.parametrize("order", [1, 2, 3, 4])
    @pytest.mark.parametrize("vocab_size, seed, units", [
        (3, 0, {}), (6, 1, {}), (6, 1, {"separator_token": 2}),
    ])  # fmt: skip
    def test_every_context(self, order, vocab_size, seed, units):
        """Contexts seen and unseen, of every length up to one token more than the model reads."""
        text = markov_text(vocab_size, 400, seed)
        model = count_ngrams(text, vocab_size, order, **units)
        reference = BruteForce(text, vocab_size, order, **units)
        rng = np.random.default_rng(2)
        for length in range(order + 1):
            for context in rng.integers(0, vocab_size, (12, length)):
                expected = [reference.p(w, tuple(context.tolist())) for w in range(vocab_size)]
                np.testing.assert_allclose(model.probabilities(context), expected, rtol=1e-12)

    @pytest.mark.parametrize("order", [1, 2, 3, 4])
    def test_token_nll(self, order):
        text = markov_text(6, 400, 1)
        other = np.random.default_rng(3).integers(0, 6, 100)
        reference = BruteForce(text, 6, order)
        for tokens in (text[:100], other):
            history = tuple(tokens.tolist())
            expected = [-math.log(reference.p(history[t], history[:t])) for t in range(1, 100)]
            seen = count_ngrams(text, 6, order).token_nll(tokens)
            np.testing.assert_allclose(seen, expected, rtol=1e-12)

    def test_the_discounts_are_not_all_fallbacks(self):
        """Without this, the agreement above might hold for a model that estimates none."""
        for k, D in BruteForce(markov_text(6, 400, 1), 6, 4).D.items():
            assert (D != [0.5, 1.0, 1.5]) == (k > 2)

    def test_large_tokens_and_a_high_order(self):
        """1000^8 is above 2^63: keys made of all eight tokens would run over, and collide."""
        text = 990 + markov_text(10, 300, 4)
        reference = BruteForce(text, 1000, 8)
        history = tuple(text.tolist())
        expected = [-math.log(reference.p(history[t], history[:t])) for t in range(1, 20)]
        seen = count_ngrams(text, 1000, 8).token_nll(text)[:19]
        np.testing.assert_allclose(seen, expected, rtol=1e-12)


texts = st.integers(1, 5).flatmap(lambda vocab_size: st.tuples(
    st.just(vocab_size),
    st.integers(1, 8),
    st.lists(st.integers(0, vocab_size - 1), min_size=8, max_size=60),
    st.lists(st.integers(0, vocab_size - 1), min_size=2, max_size=12),
    st.sampled_from([None, 0]),
))  # fmt: skip


@settings(max_examples=30)
@given(texts)
def test_distributions(example):
    """Positive, of sum 1, and the very ones whose logarithms are the losses.

    In units, those of each unit alone, also where all are shorter than the order.
    """
    vocab_size, order, text, tokens, end = example
    model = count_ngrams(np.array(text), vocab_size, order, end)
    for evaluated in (np.array(text), np.array(tokens)):
        nll = model.token_nll(evaluated)
        assert nll.shape == (len(evaluated) - 1,)
        for t in range(1, len(evaluated)):
            p = model.probabilities(evaluated[:t])
            assert p.shape == (vocab_size,)
            assert p.min() > 0
            assert p.sum() == pytest.approx(1, abs=1e-13)
            assert nll[t - 1] == pytest.approx(-math.log(p[evaluated[t]]), abs=1e-13)
            start = max(np.flatnonzero(evaluated[:t] == end), default=0)
            np.testing.assert_array_equal(model.probabilities(evaluated[start:t]), p)


def test_a_text_of_1_token():
    """c = 1, no n_2: D(1) = ½, so half of it, and half of the half of the rest."""
    p = count_ngrams(np.array([1]), 2, 1).probabilities(np.array([], int))
    np.testing.assert_allclose(p, [1 / 4, 3 / 4])


class Recorder(np.random.Generator):
    """A generator of random numbers that keeps the distribution it is asked to sample from."""

    def __init__(self):
        super().__init__(np.random.PCG64())

    def choice(self, n: int, p: np.ndarray) -> int:
        self.p = p
        return int(p.argmax())


class TestGenerate:
    @pytest.fixture
    def model(self) -> NGram:
        return count_ngrams(markov_text(6, 400, 1), 6, 3)

    @pytest.mark.parametrize("temperature", [0.3, 2.5])
    @pytest.mark.parametrize("top_k", [None, 3])
    @pytest.mark.parametrize("top_p", [None, 0.01, 0.7, 1.0])
    def test_samples_what_the_networks_sampler_would(self, model, temperature, top_k, top_p):
        for context in ([2, 4], []):
            logits = jnp.log(model.probabilities(np.array(context, int)))[None]
            expected = jax.nn.softmax(filter_logits(logits, temperature, top_k, top_p))[0]
            options = dict(temperature=temperature, top_k=top_k, top_p=top_p)
            rng = Recorder()
            model.generate(rng, np.array(context, int), 1, **options)
            np.testing.assert_allclose(rng.p, expected, rtol=1e-5, atol=1e-7)
            np.testing.assert_array_equal(rng.p > 0, expected > 0)

    def test_equally_likely_tokens_stay_together(self):
        """After 0, the tokens 1 and 3 are the likeliest, and neither is the first."""
        model = count_ngrams(np.array([0, 1, 0, 3, 0, 1, 0, 3, 2]), 4, 2)
        for options in (dict(top_k=1), dict(top_p=0.1)):
            rng = Recorder()
            model.generate(rng, np.array([0]), 1, **options)
            np.testing.assert_allclose(rng.p, [0, 1 / 2, 0, 1 / 2])

    def test_a_top_p_of_1_leaves_out_no_token(self):
        """However rare: 1 and 2 have about 1e-20, and 1 − 1e-20 rounds to 1."""
        model = count_ngrams(np.array([0] * 10_000 + [1, 2]), 3, 1)
        rng = Recorder()
        model.generate(rng, np.array([0]), 1, temperature=0.2, top_p=1.0)
        assert 0 < rng.p[1:].max() < 1e-17

    def test_greedy_is_the_argmax_after_everything_before(self, model):
        """And so is a temperature near 0."""
        prompt = np.array([5, 2], np.int32)
        for temperature in (0, 1e-4, 5e-324):
            rng = np.random.default_rng(0)
            tokens = model.generate(rng, prompt, 20, temperature=temperature)
            text = np.concatenate([prompt, tokens])
            assert text[2:].tolist() == [
                model.probabilities(text[:t]).argmax() for t in range(2, 22)
            ]
            assert tokens.dtype == np.int32

    def test_going_on_with_the_text_and_the_same_rng_is_exact(self, model):
        options = dict(temperature=0.8, top_k=5, top_p=0.9)
        prompt = np.array([1, 3])
        whole = model.generate(np.random.default_rng(7), prompt, 40, **options)
        rng = np.random.default_rng(7)
        first = model.generate(rng, prompt, 15, **options)
        rest = model.generate(rng, np.concatenate([prompt, first]), 25, **options)
        np.testing.assert_array_equal(np.concatenate([first, rest]), whole)
        other = model.generate(np.random.default_rng(8), prompt, 40, **options)
        assert (other != whole).any()


def test_losses_on_tiny_shakespeare(shakespeare):
    """These are the numbers to beat, nats a character; longer contexts help up to order 7."""
    train, validation = split(CharacterTokenizer.learn(shakespeare).encode(shakespeare))
    for order, loss in ((2, 2.4835), (7, 1.5165)):
        nll = count_ngrams(train, 65, order).token_nll(validation)
        assert nll.mean() == pytest.approx(loss, abs=1e-4)


MODEL = count_ngrams(TEXT, 4, 3)


@pytest.mark.parametrize("tokens, says", [
    ([0, 1, -1], "contains -1; the vocabulary's tokens are 0 to 3"),
    ([0, 1, 4], "contains 4; the vocabulary's tokens are 0 to 3"),
    ([0.5, 1.5], "(2,); it must be integers"),
    ([[0, 1], [2, 1]], "(2, 2); it must be one sequence, (N,)"),
])  # fmt: skip
def test_tokens_that_are_no_text(tokens, says):
    """Every function that reads tokens of a text, for a vocabulary of 4."""
    for call in (
        lambda: count_ngrams(tokens, 4, 2), lambda: pair_frequencies(tokens, 4),
        lambda: MODEL.token_nll(tokens), lambda: MODEL.probabilities(tokens),
        lambda: MODEL.generate(np.random.default_rng(0), tokens, 1),
    ):  # fmt: skip
        with unchecked(), pytest.raises(ValueError, match=re.escape(says)):
            call()


@pytest.mark.parametrize("call, says", [
    (lambda: count_ngrams(TEXT, 4, 0), "^order is 0; it .* number from 1 to 8.$"),
    (lambda: count_ngrams(TEXT, 4, 9), "^order is 9; it .* number from 1 to 8.$"),
    (lambda: count_ngrams(TEXT[:0], 4, 1), "order of 1 needs at least 1 tokens, not 0.$"),
    (lambda: count_ngrams(TEXT[:4], 4, 5), "order of 5 needs at least 5 tokens, not 4.$"),
    (lambda: MODEL.token_nll(TEXT[:1]), "^a loss needs at least 2 tokens, not 1.$"),
    (lambda: pair_frequencies(TEXT[:1], 4), "^a loss needs at least 2 tokens, not 1.$"),
    (lambda: generated(num_tokens=0), "num_tokens is 0"),
    (lambda: generated(temperature=-0.1), "temperature is -0.1"),
    (lambda: generated(top_k=5), "top_k is 5"),
    (lambda: generated(top_p=0), "top_p is 0"),
])  # fmt: skip
def test_refusals(call, says):
    with pytest.raises(UserError, match=says):
        call()


def generated(num_tokens=3, **options):
    return MODEL.generate(np.random.default_rng(0), np.array([0]), num_tokens, **options)
