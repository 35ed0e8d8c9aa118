"""Text from a model: the prompt and the sampler's tokens, whatever pieces they come in."""

from __future__ import annotations

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked
from random_models import random_params

import jaxgru
from jaxgru.analysis.ngrams import count_ngrams
from jaxgru.errors import UserError
from jaxgru.lm import generation, samplers
from jaxgru.lm.config import ModelConfig
from jaxgru.lm.data.corpus import TINY_SHAKESPEARE_SHA256
from jaxgru.lm.data.tokenizers import CharacterTokenizer, SentencePieceTokenizer, learn_tokenizer
from jaxgru.lm.generation import Options, _until, default_prompt, generate_texts, stream_text
from jaxgru.lm.processors import MinP, RepetitionPenalty

TOKENIZER = CharacterTokenizer.learn("abcdefghijklm \n")


N = 10  # tokens; prompts have 5: the same few shapes everywhere, for each takes long to compile


def wild(vocab_size: int, cell: str = "gru", num_layers: int = 1) -> jaxgru.lm.Params:
    """Large weights: sharp distributions that depend on the state."""
    return random_params(ModelConfig(cell, vocab_size, 6, 10, num_layers))


@pytest.fixture(scope="module")
def params() -> jaxgru.lm.Params:
    return wild(TOKENIZER.vocab_size)


def text_of(params, prompt="a bad", tokenizer=TOKENIZER, sample=0, num_tokens=N, **options) -> str:
    options = Options(num_tokens=num_tokens, **options)
    return "".join(stream_text(params, tokenizer, prompt, options, sample))


def generated(params, prompt, *, seed=0, sample=0, temperature=0.8, **options) -> str:
    """The text that one call of `generate` adds to the prompt."""
    key = jax.random.fold_in(jax.random.key(seed), sample)
    tokens = jnp.asarray(TOKENIZER.encode(prompt))[None]
    new, _, _ = jaxgru.lm.generate(params, key, tokens, N, temperature=temperature, **options)
    return TOKENIZER.decode(new[0])


class TestChunks:
    @pytest.mark.parametrize("options", [
        {"temperature": 0.0}, {"stateful": False},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "seed": 5, "sample": 2},
    ], ids=str)  # fmt: skip
    @pytest.mark.parametrize("chunk", [5, 1000])
    def test_are_the_prompt_and_one_generation(self, params, monkeypatch, chunk, options):
        """The state, the key and the last token are handed from chunk to chunk."""
        monkeypatch.setattr(samplers, "CHUNK", chunk)
        text = text_of(params, **options)
        assert text == "a bad" + generated(params, "a bad", **options)
        assert len(text) == 5 + N

    def test_an_lstm_of_two_layers_hands_on_all_of_its_state(self, monkeypatch):
        params = wild(TOKENIZER.vocab_size, "lstm", 2)
        monkeypatch.setattr(samplers, "CHUNK", 5)
        assert text_of(params) == "a bad" + generated(params, "a bad")

    def test_a_model_with_nan_in_it_is_an_error_and_no_text(self, params):
        damaged = params.replace(embedding=params.embedding.at[:, 0].set(jnp.nan))
        with pytest.raises(UserError, match="^the model's logits are NaN"):
            text_of(damaged)

    def test_appear_as_they_are_generated(self, params, monkeypatch):
        asked = []

        def generate(params, key, tokens, num_tokens, *args, **kwargs):
            asked.append(num_tokens)
            return jnp.zeros((1, num_tokens), jnp.int32), None, key

        monkeypatch.setattr(samplers, "CHUNK", 4)
        monkeypatch.setattr(samplers, "generate", generate)
        text = stream_text(params, TOKENIZER, "a bad", Options(num_tokens=10))
        assert next(text) == "a bad" and asked == []
        for chunk in (1, 2):
            assert [len(next(text)) for _ in range(4)] == [1] * 4 and asked == [4] * chunk
        assert [len(piece) for piece in text] == [1, 1] and asked == [4, 4, 4]

    def test_the_state_matters_to_this_model(self, params):
        """Without this, agreement might come from a model that has no use for its state."""
        assert text_of(params) != text_of(params, stateful=False)

    def test_last_token_only_reads_no_more_of_the_prompt(self, params):
        """The study's way: another prompt with the same end is the same to it."""
        text = text_of(params, "a bad", last_token_only=True)
        assert text == "a bad" + generated(params, "d")
        other = text_of(params, "cccd", last_token_only=True)
        assert other.removeprefix("cccd") == text.removeprefix("a bad")
        assert text != text_of(params, "a bad")

    @pytest.mark.parametrize("sampled", ["the model's", "every token there is"])
    def test_subwords_join_into_the_text_of_all_tokens(self, tiny_text, monkeypatch, sampled):
        """A piece that begins with a space keeps it; special tokens too print as `decode` has them.

        One token a piece. The sampler is a stand-in: the text is what is looked at here.
        """
        tokenizer = SentencePieceTokenizer.learn(tiny_text.read_text(), 60)
        order = np.random.default_rng(0).permutation(60)
        if sampled == "the model's":  # which would write no special tokens
            order = tokenizer.encode("window breaks, it is the east\nROMEO: and Juliet")
        left = list(order)

        def generate(params, key, tokens, num_tokens, carry, **options):
            return jnp.array([[left.pop(0)]]), carry, key

        monkeypatch.setattr(samplers, "CHUNK", 1)
        monkeypatch.setattr(samplers, "generate", generate)
        text = text_of(wild(60), "ROMEO: what light", tokenizer, num_tokens=len(order))
        prompt = tokenizer.encode("ROMEO: what light")
        assert text == tokenizer.decode(np.concatenate([prompt, order]))
        assert text.startswith("ROMEO: what light") and " " in text[18:] and left == []


class TestCarry:
    @pytest.mark.parametrize("num_tokens", [0, 1, 4, 9])
    def test_another_text_goes_on_from_it(self, params, monkeypatch, num_tokens):
        """After any number of tokens, within a chunk and at its end: as of one long prompt."""
        monkeypatch.setattr(samplers, "CHUNK", 4)
        options = Options(num_tokens=12, temperature=0)
        story = stream_text(params, TOKENIZER, "a bad", options)
        before = "".join(next(story) for _ in range(num_tokens + 1))
        assert len(before) == 5 + num_tokens
        more = stream_text(params, TOKENIZER, " bee", options, carry=story.carry)
        whole = stream_text(params, TOKENIZER, before + " bee", options)
        assert before + "".join(more) == "".join(whole)
        seen = more.carry
        expected = whole.carry
        chex.assert_trees_all_close(seen, expected, rtol=1e-4, atol=1e-5)
        alone = stream_text(params, TOKENIZER, " bee", options).carry
        assert np.abs(seen[0] - alone[0]).max() > 0.1  # or this would show nothing

    def test_there_is_none_without_a_state(self, params):
        text = stream_text(params, TOKENIZER, "a bad", Options(num_tokens=3, stateful=False))
        assert "".join(text) and text.carry is None
        model = count_ngrams(TOKENIZER.encode("a bad cab"), TOKENIZER.vocab_size, 2)
        assert stream_text(model, TOKENIZER, "a", Options()).carry is None
        with pytest.raises(UserError, match="an n-gram model has no carry"):
            stream_text(model, TOKENIZER, "a", Options(), carry=jaxgru.lm.initial_carry(params, 1))
        with pytest.raises(UserError, match="no logits to process"):
            stream_text(model, TOKENIZER, "a", Options(logits_processor=MinP(0.1)))


class TestManyPrompts:
    """The text after each is that of a call of its own, of the same index."""

    @pytest.mark.parametrize("options", [
        {"temperature": 0.0}, {"stop": ("a", "bc"), "seed": 5, "last_token_only": True},
        {"stateful": False, "top_k": 9, "top_p": 0.9},
        {"logits_processor": (RepetitionPenalty(20), MinP(0.01))},
    ], ids=str)  # fmt: skip
    def test_are_those_of_single_calls(self, params, monkeypatch, options):
        """Two batches of three rows, one of them without a prompt; chunks of four tokens."""
        monkeypatch.setattr(generation, "PROMPTS_AT_ONCE", 3)
        monkeypatch.setattr(samplers, "CHUNK", 4)
        prompts = ["a bad", "c", "a bad", "\nkill him", "jab"]
        texts = generate_texts(params, TOKENIZER, prompts, Options(num_tokens=N, **options))
        expected = [text_of(params, p, sample=i, **options) for i, p in enumerate(prompts)]
        assert [p + text for p, text in zip(prompts, texts, strict=True)] == expected
        assert expected[0] != expected[2] or options.get("temperature") == 0

    def test_few_programs_serve_all_batches(self, params, monkeypatch, compilations):
        monkeypatch.setattr(generation, "PROMPTS_AT_ONCE", 3)
        prompts = ["a bad", "bad", "mad", "a", "abba", "him", "hide"]
        texts = generate_texts(params, TOKENIZER, prompts, Options(num_tokens=N))
        first = next(texts), next(texts), next(texts)
        compilations.clear()
        assert len([*first, *texts]) == 7 and compilations == []

    def test_spaces_at_the_end_of_some_begin_a_word_there(self, tokenizer):
        params = wild(60)
        prompts = ["what ", "what", "ROMEO: light ", "wh"]
        texts = generate_texts(params, tokenizer, prompts, Options(num_tokens=N))
        expected = [text_of(params, p, tokenizer, i) for i, p in enumerate(prompts)]
        assert [p + text for p, text in zip(prompts, texts, strict=True)] == expected

    def test_of_a_counted_model(self):
        model = count_ngrams(TOKENIZER.encode("a bad cab had a lid"), TOKENIZER.vocab_size, 2)
        texts = list(generate_texts(model, TOKENIZER, ["ca", "ca"], Options(num_tokens=N)))
        assert ["ca" + text for text in texts] == [text_of(model, "ca", sample=i) for i in (0, 1)]

    def test_neither_more_prompts_nor_more_samples_change_one(self, params):
        options = Options(num_tokens=N, temperature=2)

        def texts(*prompts, n):
            return [*generate_texts(params, TOKENIZER, prompts, options, n)]

        more = texts("a", "b", "a", n=3)
        assert texts("a", "b", n=2) == [*more[:2], *more[3:5]] and len(set(more)) == 9

    @pytest.mark.parametrize("prompts, says", [
        ("a bad", "^prompts is one string; give a list of prompts.$"),
        (["a", "aX"], "^prompt 2: the vocabulary of 15 characters lacks 'X'; leave it out"),
        (["a", ""], "^prompt 2: the prompt '' gives no token"),
    ])  # fmt: skip
    def test_refusals(self, params, prompts, says):
        with unchecked(), pytest.raises(UserError, match=says):
            generate_texts(params, TOKENIZER, prompts, Options())


class TestStops:
    @pytest.mark.parametrize("text, stop, expected", [
        ("abcabd", ("abd",), "abc"), ("abcabd", ("bd", "abd"), "abc"), ("aaab", ("aab",), "a"),
        ("abab", ("abc", "ba"), "a"), ("abcab", ("abd",), "abcab"), ("ab", ("ab",), ""),
    ])  # fmt: skip
    @pytest.mark.parametrize("size", [1, 2, 6])
    def test_are_found_whatever_the_pieces(self, text, stop, expected, size):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert "".join(_until(stop, pieces)) == expected

    def test_only_what_may_begin_a_stop_waits(self):
        assert list(_until(("ab\n",), "xxab.")) == ["x", "x", "", "", "ab.", ""]

    def test_the_text_ends_before_the_first_one_and_the_carry_after_it(self, params):
        """The prompt may have it. What is generated is the text without stops, up to there."""
        free = text_of(params, "a bad", num_tokens=40)
        new = free[5:]
        stop = new[10:12]
        end = new.index(stop)
        options = Options(num_tokens=40, stop=(stop, "never"))
        text = stream_text(params, TOKENIZER, "a bad", options)
        assert "".join(text) == "a bad" + new[:end]
        read = TOKENIZER.encode("a bad" + new[: end + 2])[None]
        chex.assert_trees_all_close(text.carry, jaxgru.lm.apply(params, read)[1], atol=1e-5)

    def test_processors_count_over_chunks(self, params, monkeypatch):
        """As one call of `generate` does."""
        monkeypatch.setattr(samplers, "CHUNK", 3)
        processor = (RepetitionPenalty(20), MinP(0.01))
        text = text_of(params, "a bad", logits_processor=processor)
        assert text == "a bad" + generated(params, "a bad", logits_processor=processor)
        assert text != text_of(params, "a bad")

    def test_a_processor_that_excludes_every_token(self, params):
        with pytest.raises(UserError, match="^the processor excludes every token, or the model's"):
            text_of(params, logits_processor=lambda logits, counts: logits - jnp.inf)


@pytest.fixture(scope="module")
def tokenizer(tiny_text) -> SentencePieceTokenizer:
    return SentencePieceTokenizer.learn(tiny_text.read_text(), 60)


def test_each_token_is_decoded_once(tokenizer, monkeypatch):
    """The whole text was decoded for every chunk, so that time grew with its square."""
    decoded = []
    decode = tokenizer._processor.decode
    N = 64 * samplers.CHUNK

    def decode_and_count(tokens):
        decoded.append(len(tokens))
        return decode(tokens)

    monkeypatch.setattr(tokenizer._processor, "decode", decode_and_count)

    def generate_ones(params, key, prompt, num_tokens, *_, **__):
        return jnp.ones((1, num_tokens), int), None, key

    monkeypatch.setattr(samplers, "generate", generate_ones)
    assert text_of(wild(60), "a", tokenizer, num_tokens=N)
    assert sum(decoded) <= 2 * N + 1  # SentencePiece needs one before it


class TestPromptsOfSubwords:
    """SentencePiece reads "in " as "in", so "clined" could follow."""

    @pytest.mark.parametrize("prompt", ["ROMEO: what ", "what\n", " light\u3000"])
    @pytest.mark.parametrize("stateful", [True, False])
    def test_after_white_space_a_word_begins(self, tokenizer, prompt, stateful):
        """The likeliest token of those that begin with a space, then the likeliest of all."""
        params = wild(60)
        known = tokenizer.encode(prompt)
        logits, _ = jaxgru.lm.apply(
            params, jnp.array(known)[None] if stateful else known[None, -1:]
        )
        begin = [piece.startswith("▁") for piece in tokenizer.pieces]
        first = np.where(begin, logits[0, -1], -np.inf).argmax()
        assert first != logits[0, -1].argmax()  # or this would show nothing
        read = np.array([[*known, first]])
        options = dict(temperature=0, stateful=stateful)
        rest, _, _ = jaxgru.lm.generate(params, jax.random.key(0), read, N - 1, **options)
        expected = tokenizer.decode(np.concatenate([known, [first], rest[0]]))
        text = text_of(params, prompt, tokenizer, temperature=0.0, stateful=stateful)
        assert text == prompt + expected[len(tokenizer.decode(known)) + 1 :]

    @pytest.mark.parametrize("kind", ["subwords", "words"])
    def test_exact_tokens_begin_with_the_prompts_space(self, kind, tiny_text):
        """That space is part of the likeliest token that begins so, and not printed twice."""
        tokenizer = learn_tokenizer(kind, tiny_text.read_text(), 280)
        params = wild(tokenizer.vocab_size)
        known = tokenizer.encode("ROMEO: what")
        logits, _ = jaxgru.lm.apply(params, jnp.array(known)[None])
        texts = [tokenizer.decode(np.array([token])) for token in range(tokenizer.vocab_size)]
        first = max((t for t in range(len(texts)) if texts[t].startswith(" ")),
                    key=lambda token: logits[0, -1, token])  # fmt: skip
        read = np.array([[*known, first]])
        rest, _, _ = jaxgru.lm.generate(params, jax.random.key(0), read, N - 1, temperature=0)
        expected = tokenizer.decode(np.concatenate([known, [first], rest[0]]))
        assert text_of(params, "ROMEO: what ", tokenizer, temperature=0.0) == expected

    def test_a_counted_model_begins_a_word_too(self, tokenizer, tiny_text):
        model = count_ngrams(tokenizer.encode(tiny_text.read_text()), 60, 2)
        begin = np.array([piece.startswith("▁") for piece in tokenizer.pieces])
        known = tokenizer.encode("wh")
        for temperature in (0.0, 3.0):
            options = dict(temperature=temperature, allowed=begin)
            rng = np.random.default_rng(0)
            assert begin[model.generate(rng, known, 20, **options)].all()
            text = text_of(model, "wh ", tokenizer, temperature=temperature)
            assert text.startswith("wh ") and text[3] != " "


class TestUnknown:
    """The token of all words that the vocabulary lacks."""

    TOKENIZER = learn_tokenizer("words", "the sun the sea the sun the moon the moon", 0, 2)

    @pytest.mark.parametrize("prompt", ["the stars", "the "])
    def test_is_in_no_text_that_a_model_writes(self, prompt):
        """It may be in the prompt, and in the text if that is asked for."""
        params = wild(self.TOKENIZER.vocab_size)
        exclude = lambda logits, counts: logits.at[:, 0].set(-jnp.inf)
        text = partial(text_of, params, prompt, self.TOKENIZER, num_tokens=100, temperature=2.0)
        assert text() == text(unknown=True, logits_processor=exclude)
        assert "<unk>" not in text() and "<unk>" in text(unknown=True)

    def test_of_subwords_is_in_no_text(self, tokenizer):
        """A piece of SentencePiece's own, which no text is encoded as."""
        write = partial(text_of, wild(60), "what", tokenizer, num_tokens=200, temperature=9.0)
        assert "⁇" not in write() and "⁇" in write(unknown=True)

    def test_is_in_no_text_of_a_counted_model(self):
        text = "the stars, the sky the sun the clouds"
        model = count_ngrams(self.TOKENIZER.encode(text), self.TOKENIZER.vocab_size, 2)
        write = partial(text_of, model, "the ", self.TOKENIZER, num_tokens=100)
        assert "<unk>" not in write() and "<unk>" in write(unknown=True)


class TestUnits:
    """A line begins after a line break, from the zero state, and ends before the next."""

    def test_text_is_one_document(self, params):
        free = {prompt: generated(params, f"\n{prompt}") for prompt in ("", "bad")}
        assert any("\n" in text for text in free.values())
        for prompt, text in free.items():
            assert text_of(params, prompt, separator="line") == prompt + text.partition("\n")[0]
        stop = free["bad"][1]
        text = text_of(params, "bad", separator="line", stop=[stop])
        assert text == "bad" + free["bad"].partition("\n")[0].partition(stop)[0]

    @pytest.mark.parametrize("last_token_only", [False, True])
    @pytest.mark.parametrize("prompt", ["", "bad"])
    def test_counts_are_those_of_the_text(self, params, prompt, last_token_only):
        """Not of the end that is read before it, which would be penalised from the start."""
        options = dict(logits_processor=RepetitionPenalty(20), temperature=3.0)
        counts = np.bincount(TOKENIZER.encode(prompt), minlength=TOKENIZER.vocab_size)[None]
        read = f"\n{prompt}"[-1:] if last_token_only else f"\n{prompt}"
        expected = prompt + generated(params, read, counts=counts, **options).partition("\n")[0]
        assert generated(params, read, **options) != generated(
            params, read, counts=counts, **options
        )
        options["last_token_only"] = last_token_only
        for before in ("", "a\n", "a\r\n\r\n"):
            text = text_of(params, before + prompt, separator="line", **options)
            assert text == before + expected

    def test_after_the_end_another_begins_from_zero(self, params):
        """The end may be in a prompt that goes on, or have been generated."""
        options = Options(num_tokens=100, temperature=1.5, separator="line")
        story = stream_text(params, TOKENIZER, "a", options)
        assert len("".join(story)) < 100  # so it has ended
        ended = jaxgru.lm.apply(params, TOKENIZER.encode("\n")[None])[1]
        chex.assert_trees_all_close(story.carry, ended, rtol=1e-4, atol=1e-5)
        within = stream_text(params, TOKENIZER, "a kid", options).carry
        alone = "".join(stream_text(params, TOKENIZER, "b", options))
        for carry, begun in ((story.carry, ""), (within, "kid\n"), (within, "\n")):
            more = stream_text(params, TOKENIZER, f"{begun}b", options, carry=carry)
            assert "".join(more) == begun + alone
        assert "".join(stream_text(params, TOKENIZER, "b", options, carry=within)) != alone

    def test_a_carry_goes_on_within_the_document(self, params):
        options = Options(num_tokens=3, temperature=0, separator="line")
        story = stream_text(params, TOKENIZER, "a", options)
        next(story)
        more = stream_text(params, TOKENIZER, "bad", options, carry=story.carry)
        whole = "".join(stream_text(params, TOKENIZER, "abad", options))
        assert "a" + "".join(more) == whole
        with pytest.raises(UserError, match="the prompt '' gives no token"):
            stream_text(params, TOKENIZER, "", options, carry=more.carry)

    def test_of_a_separator_that_the_tokenizer_lacks(self, params):
        says = (
            "data.separator is ';', but a tokenizer of kind characters has no token for ';' alone"
        )
        with pytest.raises(UserError, match=says):
            text_of(params, separator=";")


class TestDefaultPrompt:
    def test_is_the_studys_for_its_text_only(self):
        tokenizer = CharacterTokenizer.learn("ROMEO: 日本\n")
        assert default_prompt(TINY_SHAKESPEARE_SHA256, tokenizer) == "ROMEO: "
        own = "0" * 64
        assert default_prompt(own, tokenizer) == "\n"
        assert default_prompt(own, CharacterTokenizer.learn("日本 ROMEO:")) == " "
        assert default_prompt(own, CharacterTokenizer.learn("acgt")) == "a"
        acgt = CharacterTokenizer.learn("acgt")
        assert default_prompt(TINY_SHAKESPEARE_SHA256, acgt) == "a"

    def test_of_subwords_is_a_word(self, tokenizer, tiny_text):
        prompt = default_prompt("", tokenizer)
        assert len(prompt) > 1 and prompt in tiny_text.read_text()
        for empty, says in ((" \n ", r"' \\n ' gives no token"), ("\ud800", "UTF-8 lacks")):
            with pytest.raises(UserError, match=says):
                stream_text(wild(60), tokenizer, empty, Options())


def test_a_tokenizer_of_another_model(params, tokenizer):
    with pytest.raises(UserError, match="the tokenizer has 60 tokens, but the model has 15"):
        text_of(params, "what", tokenizer)


@pytest.mark.parametrize("prompt, options, says", [
    (1.5, {}, "^the prompt is 1.5; it must be a string.$"),
    ("a", {"separator": ["\n"]}, r"^separator is \['\\n'\]; it must be a string.$"),
    ("a", {"logits_processor": [MinP(0.1)]}, "^logits_processor is .*; it must be a function or a"),
    ("a", {"temperature": float("inf")}, "temperature is inf"),
    ("a", {"num_tokens": 0}, "num_tokens is 0"),
    ("a", {"seed": 2**64}, "seed is 18446744073709551616"),
    ("a", {"sample": -1}, "sample is -1; it must be a whole number from 0"),
    ("a", {"stop": ("a", "")}, r"stop is \('a', ''\); .* strings of at least one character"),
    ("a", {"stop": "ac"}, "stop is 'ac'; it must be a tuple or list of strings"),
    ("", {}, "the prompt '' gives no token; give at least one word"),
    ("aXéa", {}, "lacks 'X', 'é'"),
])  # fmt: skip
def test_refusals(params, prompt, options, says):
    """Before anything is generated: `stream_text` itself raises, not its first chunk."""
    options = dict(options)
    sample = options.pop("sample", 0)
    with unchecked(), pytest.raises(UserError, match=says):
        stream_text(params, TOKENIZER, prompt, Options(**options), sample)
