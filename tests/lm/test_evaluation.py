"""Losses and scores of texts and lines against NumPy in float64, and against counts by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked
from conftest import numpy_gru_losses
from random_models import random_params

import jaxgru
from jaxgru.analysis.ngrams import pair_frequencies
from jaxgru.errors import UserError
from jaxgru.lm import dynamic, evaluation, score, score_lines
from jaxgru.lm.config import ModelConfig
from jaxgru.lm.data.documents import separator_character, separator_text
from jaxgru.lm.data.tokenizers import ByteTokenizer, CharacterTokenizer, SentencePieceTokenizer
from jaxgru.lm.dynamic import Dynamic, choose_dynamic, dynamic_nll, mean_squares
from jaxgru.lm.evaluation import in_units, stream_nll, window_loss, window_nll
from jaxgru.lm.model import token_nll

V = 7
MODEL = ModelConfig("gru", V, 3, 5, num_layers=2, second_bias=True, reset_gate="before")
N = 59  # 58 predictions


@pytest.fixture(scope="module")
def params() -> jaxgru.lm.Params:
    """Large weights: a model whose state matters, so that a state that is lost would be seen."""
    return random_params(MODEL)


def stream_loss(*text, **options) -> float:
    return float(stream_nll(*text, **options).mean())


def dynamic_loss(params: jaxgru.lm.Params, tokens: np.ndarray, every: int = 8) -> float:
    squares = jax.tree.map(jnp.ones_like, params)
    return float(dynamic_nll(params, tokens, Dynamic(squares, 1e-3, every=every)).mean())


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, V, N).astype(np.int32)


class TestAgainstNumPy:
    @pytest.mark.parametrize("window, at_once", [
        (1, 99), (13, 99), (200, 99), (1, 8), (7, 20), (None, 20), (None, 57), (None, 8192),
    ])  # fmt: skip
    def test_losses_in_one_batch_or_many(self, params, tokens, window, at_once, monkeypatch):
        """A window of None is one stream."""
        monkeypatch.setattr(evaluation, "TOKENS_AT_ONCE", at_once)
        expected = numpy_gru_losses(params, tokens, window or N).mean()
        loss = window_loss(params, tokens, window) if window else stream_loss(params, tokens)
        assert loss == pytest.approx(expected, rel=1e-5)

    def test_the_treatments_of_the_state_differ(self, params, tokens):
        """Without this, the agreement above might hold for a model that has no state."""
        losses = [numpy_gru_losses(params, tokens, w).mean() for w in (1, 2, 13, N)]
        assert np.abs(np.subtract.outer(losses, losses))[np.triu_indices(4, 1)].min() > 1e-3

    def test_two_tokens_are_one_prediction(self, params):
        text = np.array([3, 5])
        losses = stream_loss(params, text), window_loss(params, text, 1)
        (expected,) = numpy_gru_losses(params, text, 1)
        assert (*losses, window_loss(params, text, 128)) == pytest.approx([expected] * 3, rel=1e-5)

    def test_token_nll(self):
        logits = np.random.default_rng(2).normal(0, 3, (4, 6, V))
        targets = np.random.default_rng(3).integers(0, V, (4, 6))
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        expected = -np.log(np.take_along_axis(p, targets[..., None], -1)[..., 0])
        seen = jax.jit(token_nll)(logits.astype(np.float32), targets)
        np.testing.assert_allclose(seen, expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("logits, targets, expected", [
        # outside the vocabulary: no guess
        (jnp.log(jnp.array([[0.25, 0.75]] * 4)), [-1, 0, 1, 2],
         [np.nan, np.log(4), np.log(4 / 3), np.nan]),
        (jnp.array([[1e4, 0.0], [-1e4, 0.0]]), [1, 1], [1e4, 0.0]),
        # ln 1000, which bfloat16 would round to 6.90625
        (jnp.full((1, 1000), 3, jnp.bfloat16), [7], [np.log(1000)]),
    ])  # fmt: skip
    def test_token_nll_by_hand(self, logits, targets, expected):
        nll = jax.jit(token_nll)(logits, jnp.array(targets))
        np.testing.assert_allclose(nll, expected, rtol=1e-6)


@pytest.mark.parametrize("window", [1, 4, 13, N])
def test_units_are_texts_of_their_own(params, tokens, window):
    """Token 2 ends a document: the state is zero before it, and at the start of each window."""
    resets = [t for t in range(N - 1) if t % window == 0 or tokens[t] == 2]
    assert (tokens[:-1] == 2).sum() > 3
    expected = np.concatenate([
        numpy_gru_losses(params, tokens[begin : end + 1], N)
        for begin, end in itertools.pairwise([*resets, N - 1])
    ])  # fmt: skip
    found = [window_nll(params, tokens, window, separator_token=2)]
    found += [stream_nll(params, tokens, separator_token=2)] if window == N else []
    for nll in found:
        np.testing.assert_allclose(nll, expected, rtol=2e-5)


def test_long_texts_lose_no_precision():
    """300,000 equal terms: a float32 sum of them would be off in the 5th digit."""
    params = random_params(ModelConfig("rnn", V, 1, 1, 1))
    params = params.replace(head=jax.tree.map(jnp.zeros_like, params.head))
    assert window_loss(params, np.zeros(300_001, np.int32), 128) == pytest.approx(
        math.log(V), rel=1e-6
    )


def test_units():
    """1 bit a token, and 3 tokens for every 8 characters; a perplexity that no float can hold."""
    seen = in_units(math.log(2), num_tokens=300, num_characters=800)
    expected = [0.693147180559945, 2.0, 0.259930192709979, 0.375]
    names = ["nats_per_token", "perplexity", "nats_per_character", "bits_per_character"]
    assert seen == pytest.approx(dict(zip(names, expected, strict=True)), rel=1e-12)
    perplexity = lambda nats: in_units(nats, 1, 1)["perplexity"]
    assert perplexity(710.0) == math.inf and perplexity(708.9) == math.exp(708.9)
    assert math.isnan(perplexity(math.nan))


def test_the_chosen_dynamic_has_the_lowest_loss(params, tokens, monkeypatch):
    """The first learning rate is so large that the loss is NaN, which is not the lowest."""
    rates = (1e38, 1e-3, 0.1)
    decays = (0.0, 0.5)
    monkeypatch.setattr(dynamic, "LEARNING_RATES", rates)
    monkeypatch.setattr(dynamic, "DECAYS", decays)
    chosen = choose_dynamic(params, tokens, every=8)
    squares = mean_squares(params, tokens, 8)
    loss = {
        pair: dynamic_nll(params, tokens, Dynamic(squares, *pair, every=8)).mean()
        for pair in itertools.product(rates, decays)
    }
    assert math.isnan(loss[1e38, 0.0])
    found = loss[chosen.learning_rate, chosen.decay]
    assert found == min(value for value in loss.values() if not math.isnan(value))


class TestScore:
    """Of a text: the first token is read, all others are scored."""

    @pytest.mark.parametrize("window", [None, 3])
    def test_of_characters_is_numpys(self, params, window):
        tokenizer = CharacterTokenizer('\nabc,"日')
        text = 'ab,c\n"日"\nca'
        nll = stream_nll if window is None else partial(window_nll, window=window)
        scores = score(params, tokenizer, text, nll)
        expected = numpy_gru_losses(params, tokenizer.encode(text), window or N)
        np.testing.assert_allclose(scores.nats, expected, rtol=1e-4, atol=1e-5)
        assert scores.pieces == list(text[1:])
        assert (scores.num_tokens, scores.num_characters) == (len(text) - 1, len(text) - 1)
        loss = expected.mean()
        assert scores.loss == pytest.approx(loss, rel=1e-5)
        assert scores.perplexity == pytest.approx(np.exp(loss), rel=1e-5)
        assert scores.bits_per_character == pytest.approx(loss / np.log(2), rel=1e-5)

    def test_of_subwords_is_per_character_of_the_text_as_it_is(self, tiny_text):
        """SentencePiece reads the white space as one; the text has it all, and so is divided by."""
        tokenizer = SentencePieceTokenizer.learn(tiny_text.read_text(), 60)
        params = random_params(dataclasses.replace(MODEL, vocab_size=60))
        text = "what   light\n\nthrough yonder"
        scores = score(params, tokenizer, text)
        tokens = tokenizer.encode(text)
        assert scores.pieces == [tokenizer.pieces[token] for token in tokens[1:]]
        first = len(tokenizer.pieces[tokens[0]]) - 1  # its "▁" stands for no character here
        assert scores.num_characters == len(text) - first
        bits = numpy_gru_losses(params, tokens, N).sum() / np.log(2)
        assert scores.bits_per_character == pytest.approx(bits / scores.num_characters, rel=1e-5)


class TestScoreLines:
    """Each line from zero state, its first token scored after a newline."""

    TOKENIZER = CharacterTokenizer("\nabcde日")

    def lines(self, lengths) -> list[str]:
        rng = np.random.default_rng(6)
        return ["".join(rng.choice(self.TOKENIZER.pieces, n)) for n in lengths]

    def test_are_numpys_and_those_of_each_line_alone(self, params, monkeypatch):
        """In groups of 4 lines and batches of 20 tokens; one line is longer than that."""
        monkeypatch.setattr(evaluation, "LINES_AT_ONCE", 4)
        monkeypatch.setattr(evaluation, "TOKENS_AT_ONCE", 20)
        monkeypatch.setattr(evaluation, "SHORTEST", 4)
        lines = self.lines([1, 9, 0, 3, 2, 50, 4, 5])

        def given():
            yield from lines
            raise AssertionError("a group was read too early")

        scores = score_lines(params, self.TOKENIZER, given())
        for line, seen in zip(lines, scores, strict=False):
            tokens = self.TOKENIZER.encode("\n" + line)
            expected = numpy_gru_losses(params, tokens, N)
            np.testing.assert_allclose(seen.nats, expected, rtol=1e-4, atol=1e-5)
            assert seen.pieces == list(line) and seen.num_characters == len(line)
            if line:
                alone = score(params, self.TOKENIZER, "\n" + line)
                np.testing.assert_allclose(seen.nats, alone.nats, rtol=1e-5, atol=1e-6)

    def test_few_programs_compute_many_lengths(self, params, compilations, monkeypatch):
        """Batches of 4 × 64, 8 × 32 and 16 × 16 tokens."""
        monkeypatch.setattr(evaluation, "TOKENS_AT_ONCE", 256)
        scores = score_lines(params, self.TOKENIZER, self.lines(range(61)))
        assert [each.num_tokens for each in scores] == [*range(61)]
        assert len(compilations) == 3

    def test_are_what_is_counted_by_hand(self):
        """A bigram of three names: after a newline, a twice and b once; the end is certain."""
        tokenizer = CharacterTokenizer("\nab")
        pairs = pair_frequencies(tokenizer.encode("\nab\nab\nb\n"), 3)

        def nll(pairs, tokens):
            return -np.log((pairs / pairs.sum(1, keepdims=True))[tokens[:-1], tokens[1:]])

        seen = score_lines(pairs, tokenizer, ["ab", "", "b\n"], nll)
        expected = [[np.log(3 / 2), 0], [], [np.log(3), 0]]
        for each, nats in zip(seen, expected, strict=True):
            np.testing.assert_allclose(each.nats, nats, rtol=1e-12)

    @pytest.mark.parametrize("kind", ["characters", "sentencepiece"])
    def test_without_a_newline_the_first_token_is_only_read(self, kind, tiny_text):
        tokenizer = CharacterTokenizer("abcdefg")
        line = "abc"
        if kind == "sentencepiece":
            tokenizer = SentencePieceTokenizer.learn(tiny_text.read_text(), 60)
            line = "what light"
        params = random_params(dataclasses.replace(MODEL, vocab_size=tokenizer.vocab_size))
        seen, empty = score_lines(params, tokenizer, [line, ""])
        alone = score(params, tokenizer, line)
        np.testing.assert_allclose(seen.nats, alone.nats, rtol=1e-5, atol=1e-6)
        assert (seen.pieces, seen.num_characters) == (alone.pieces, alone.num_characters)
        assert empty.num_tokens == empty.num_characters == 0

    @pytest.mark.parametrize("unit", ["line", ";", ";;", "\n\n", "\r\n\r\n"])
    @pytest.mark.parametrize("most", [8192, 3])
    def test_of_a_model_of_units(self, monkeypatch, unit, most):
        """What ends a document in a line is one token, from which on the state is a new one."""
        monkeypatch.setattr(evaluation, "TOKENS_AT_ONCE", most)
        tokenizer = CharacterTokenizer("\n\x1e;abc")
        params = random_params(dataclasses.replace(MODEL, vocab_size=6))
        end = separator_character(unit)
        between = separator_text(unit)
        [seen] = score_lines(
            params, tokenizer, [f"ab{between}c".replace("\n", "\r\n")], separator=unit
        )
        assert (seen.pieces, seen.num_characters) == (["a", "b", end, "c"], 3 + len(between))
        units = [score(params, tokenizer, text).nats for text in (f"{end}ab{end}", f"{end}c")]
        np.testing.assert_allclose(seen.nats, np.concatenate(units), rtol=1e-5)

    def test_nothing_is_scored_as_nan(self, params):
        """Without a warning: of an empty line, and of a text whose second byte begins none."""
        with warnings.catch_warnings(action="error"):
            [empty] = score_lines(params, self.TOKENIZER, [""])
            assert np.isnan([empty.loss, empty.perplexity, empty.bits_per_character]).all()
            half = score(None, ByteTokenizer(), "é", lambda _, tokens: np.ones(len(tokens) - 1))
            assert half.loss == 1 and np.isnan(half.bits_per_character)

    @pytest.mark.parametrize("lines, says", [
        ("ab", r"^lines is one string; give a list of lines, such as text.splitlines\(\)\.$"),
        (["ab", float("nan")], "^line 2 is nan; it must be a string.$"),
        (["ab", "", "xy"], "^line 3 cannot be encoded: the vocabulary .* lacks 'x', 'y'; leave"),
    ])  # fmt: skip
    def test_what_is_no_line(self, params, lines, says):
        with unchecked(), pytest.raises(UserError, match=says):
            list(score_lines(params, self.TOKENIZER, lines))


class TestRefusals:
    def test_settings_of_another_model(self, params, tokens):
        smaller = dataclasses.replace(params, embedding=params.embedding[:, :-1])
        with unchecked(), pytest.raises(UserError, match="not this model's"):
            dynamic_nll(params, tokens, Dynamic(smaller, 1e-3))

    @pytest.mark.parametrize("loss", [stream_loss, dynamic_loss])
    @pytest.mark.parametrize(
        "tokens, says",
        [
            (np.zeros((2, 5), np.int32), "tokens is int32 (2, 5); it must be one sequence, (N,)"),
            (np.int32(3), "tokens is int32 (); it must be one sequence, (N,)"),
            (np.zeros(5, np.float32), "tokens is float32 (5,); it must be integers"),
            ([0, V], f"tokens contains {V}; the vocabulary's tokens are 0 to {V - 1}"),
            ([0, -1], f"tokens contains -1; the vocabulary's tokens are 0 to {V - 1}"),
            ([3], "at least 2 tokens, not 1"),
            (np.zeros(0, np.int32), "at least 2 tokens, not 0"),
        ],
        ids=str,
    )
    def test_what_is_no_text(self, params, loss, tokens, says):
        with unchecked(), pytest.raises(ValueError, match=re.escape(says)):
            loss(params, tokens)

    @pytest.mark.parametrize("call, says", [
        (lambda *text: window_loss(*text, 0), "window is 0; it must be a whole number from 1"),
        (lambda *text: window_loss(*text, True), "window is True"),
        (lambda *text: dynamic_loss(*text, every=0), "every is 0"),
        (lambda *_: Dynamic(*_[:1], -1.0), "learning_rate is -1.0; it must be finite, 0 or more"),
        (lambda *_: Dynamic(*_[:1], float("nan")), "learning_rate is nan"),
        (lambda *_: Dynamic(*_[:1], 1e-3, decay=float("inf")), "decay is inf"),
        (lambda *_: Dynamic(*_[:1], 1e-3, epsilon=0.0), "epsilon is 0.0; it must be finite, above"),
    ])  # fmt: skip
    def test_numbers_out_of_range(self, params, tokens, call, says, monkeypatch):
        monkeypatch.delattr(evaluation, "batches_nll")
        with pytest.raises(UserError, match=says):
            call(params, tokens)

    @pytest.mark.parametrize("targets", [np.zeros((2, 3), int), np.zeros((2, 1), int)])
    def test_targets_that_are_not_one_for_each_prediction(self, targets):
        with unchecked(), pytest.raises(ValueError, match=r"targets is .*; it must be \(3, 1\)."):
            token_nll(np.zeros((3, 1, V), np.float32), targets)
