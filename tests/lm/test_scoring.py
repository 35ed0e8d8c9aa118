"""Scores of texts and lines against NumPy in float64, and against counts by hand."""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial

import numpy as np
import pytest
from annotations import unchecked
from conftest import numpy_gru_losses
from random_models import random_params

from jaxgru.analysis.ngrams import pair_frequencies
from jaxgru.errors import UserError
from jaxgru.lm import Params, evaluation, score, score_lines
from jaxgru.lm.config import ModelConfig
from jaxgru.lm.data.tokenizers import ByteTokenizer, CharacterTokenizer, SentencePieceTokenizer
from jaxgru.lm.data.units import end_of, separator
from jaxgru.lm.evaluation import stream_nll, window_nll

V = 7
MODEL = ModelConfig("gru", V, 3, 5, num_layers=2, second_bias=True, reset_gate="before")
N = 59  # 58 predictions


@pytest.fixture(scope="module")
def params() -> Params:
    """Large weights: a model whose state matters, so that a state that is lost would be seen."""
    return random_params(MODEL)


class TestScore:
    """Of a text: the first token is read, all others are scored."""

    @pytest.mark.parametrize("window", [None, 3])
    def test_of_characters_is_numpys(self, params, window):
        tokenizer, text = CharacterTokenizer('\nabc,"日'), 'ab,c\n"日"\nca'
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
        tokenizer, line = CharacterTokenizer("abcdefg"), "abc"
        if kind == "sentencepiece":
            tokenizer, line = SentencePieceTokenizer.learn(tiny_text.read_text(), 60), "what light"
        params = random_params(dataclasses.replace(MODEL, vocab_size=tokenizer.vocab_size))
        seen, empty = score_lines(params, tokenizer, [line, ""])
        alone = score(params, tokenizer, line)
        np.testing.assert_allclose(seen.nats, alone.nats, rtol=1e-5, atol=1e-6)
        assert (seen.pieces, seen.num_characters) == (alone.pieces, alone.num_characters)
        assert empty.num_tokens == empty.num_characters == 0

    @pytest.mark.parametrize("unit", ["line", ";", ";;", "\n\n", "\r\n\r\n"])
    @pytest.mark.parametrize("most", [8192, 3])
    def test_of_a_model_of_units(self, monkeypatch, unit, most):
        """What ends a unit in a line is one token, from which on the state is a new one."""
        monkeypatch.setattr(evaluation, "TOKENS_AT_ONCE", most)
        tokenizer = CharacterTokenizer("\n\x1e;abc")
        params = random_params(dataclasses.replace(MODEL, vocab_size=6))
        end, between = end_of(unit), separator(unit)
        [seen] = score_lines(params, tokenizer, [f"ab{between}c".replace("\n", "\r\n")], unit=unit)
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
