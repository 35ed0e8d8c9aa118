"""Characters and SentencePiece: the published counts, round trips, and what is refused."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
import sentencepiece
from annotations import unchecked
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exact_tokenizers import model_with_bytes

from jaxgru.lm.data import tokenizers
from jaxgru.lm.data.tokenizers import CharacterTokenizer, SentencePieceTokenizer, TokenizerError

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)

# The reference's ASCII alphabet of the corpus, in token order.
ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class TestCharacters:
    def test_vocabulary_of_the_corpus(self, shakespeare):
        tokenizer = CharacterTokenizer.learn(shakespeare)
        assert tokenizer.vocabulary == ALPHABET
        assert tokenizer.vocab_size == 65
        tokens = tokenizer.encode(shakespeare)
        assert tokens.shape == (1_115_394,) and tokens.dtype == np.int32
        assert tokenizer.decode(tokens) == shakespeare

    @given(texts)
    def test_round_trip(self, text):
        tokenizer = CharacterTokenizer.learn(text)
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text and tokens.dtype == np.int32
        assert tokenizer.vocab_size == len(set(text))
        assert len(tokens) == tokenizer.num_characters(tokens, text) == len(text)

    @pytest.mark.parametrize("text, says", [
        ("xaébx", "vocabulary of 3 characters lacks 'x', 'é'; leave them out or replace them, or "
         "train with data.min_count 5 or data.tokenizer subwords.$"),
        ("abcdefghijklmnop", "lacks 'd', .*'m', …; "),  # of many, ten are named
    ])  # fmt: skip
    def test_unknown_characters_are_named(self, text, says):
        with pytest.raises(TokenizerError, match=says):
            CharacterTokenizer.learn("abc").encode(text)

    def test_rare_and_foreign_characters_are_one_token(self):
        """By hand: of "nana, b" only a and n come twice; U+FFFD is the unknown token's own."""
        tokenizer = CharacterTokenizer.learn("nana, b\ufffd\ufffd", min_count=2)
        assert (tokenizer.vocabulary, tokenizer.unknown) == ("\ufffdan", 0)
        tokens = tokenizer.encode("banné\ufffd\n")
        assert tokens.tolist() == [0, 1, 2, 2, 0, 0, 0] and tokens.dtype == np.int32
        assert tokenizer.decode(tokens) == "\ufffdann\ufffd\ufffd\ufffd"
        again = CharacterTokenizer.from_bytes(tokenizer.to_bytes())
        assert again.encode("né").tolist() == [2, 0]


@pytest.fixture(scope="session")
def scribe(shakespeare) -> SentencePieceTokenizer:
    return SentencePieceTokenizer.learn(shakespeare, 1000)


class TestSentencePiece:
    def test_counts_of_the_corpus_are_the_published_ones(self, scribe, shakespeare):
        tokens = scribe.encode(shakespeare)
        assert tokens.shape == (403_513,) and tokens.dtype == np.int32
        assert scribe.vocab_size == 1000
        assert len(set(tokens.tolist()) - {0, 1, 2}) == len(set(tokens.tolist()))
        assert len(tokens[int(len(tokens) * 0.9) :]) == 40_352

    def test_tokens_of_the_corpus_are_those_of_the_studys_own_call(self, scribe, shakespeare):
        """Without the names and required characters that other texts need."""
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(shakespeare.splitlines()), model_writer=model, model_type="bpe",
            vocab_size=1000, character_coverage=1.0, unk_id=0, bos_id=1, eos_id=2, minloglevel=2,
        )  # fmt: skip
        theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        assert scribe.pieces == [theirs.id_to_piece(i) for i in range(1000)]
        assert scribe.pieces[:3] == ["<unk>", "<s>", "</s>"]
        assert scribe.encode(shakespeare).tolist() == theirs.encode(shakespeare)

    @pytest.mark.parametrize("text", [
        "the <unk> of <unk> said <s> and </s>\n",
        "<s> <s></s>\n",
        "progress: ▅▅▁ 30 %\n▅\n",
        "cp1252\x85as Latin-1\n",
        "one\x0btwo\x0cthree\x1cfour\x1ffive\u2028six\n",
        "a\ufeffb c\u200bd\n",
        "ｆｕｌｌ ﬁ ﷺ e\u0301 ｶﾞ 각\n",
        "x" * 999 + "e\u0301",
        "日本語のテキスト。",
    ])  # fmt: skip
    def test_a_text_is_encoded_by_the_vocabulary_that_was_learned_from_it(self, text):
        self.check_text(text * 3)

    @settings(max_examples=30)
    @given(
        st.lists(
            st.sampled_from(["<unk>", "<s>", "</s>", "▅", "▁", "\x85", "\u0301", "ab", " ", "\n"])
            | st.text(
                st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9
            ),
            min_size=1,
        ).map("".join)
    )
    def test_any_text_is_encoded_by_the_vocabulary_that_was_learned_from_it(self, text):
        self.check_text(text)

    def check_text(self, text: str) -> None:
        """With the smallest vocabulary that a refusal names, and with the largest one."""
        normal = sentencepiece.SentencePieceNormalizer(
            rule_name="nmt_nfkc", remove_extra_whitespaces=True, escape_whitespaces=False,
            add_dummy_prefix=False,
        ).normalize(text)  # fmt: skip
        with pytest.raises(TokenizerError) as refusal:
            SentencePieceTokenizer.learn(text, 4)
        if not normal.strip(" ▅"):
            assert "does not say why" in str(refusal.value)
            return
        least = int(re.search(r" vs (\d+)\. Increase", str(refusal.value))[1])
        with pytest.raises(TokenizerError) as refusal:
            SentencePieceTokenizer.learn(text, 10**6)
        most = int(re.search(r"only (\d+); set model.vocab_size", str(refusal.value))[1])
        for vocab_size in (least, most):
            tokenizer = SentencePieceTokenizer.learn(text, vocab_size)
            tokens = tokenizer.encode(text)
            assert tokenizer.decode(tokens) == normal
            chunks = (tokens[i : i + 2] for i in range(0, len(tokens), 2))
            assert "".join(tokenizer.continuation(chunks)).strip(" ") == normal

    @pytest.mark.slow
    def test_a_character_among_millions_is_learned(self):
        """Its share is below what float32 resolves, in which SentencePiece computes coverage."""
        text = "ab ab ab\n" * 3_000_000 + "é\n"
        with pytest.raises(TokenizerError, match="vs 7"):
            SentencePieceTokenizer.learn(text, 4)
        assert "é" in SentencePieceTokenizer.learn(text, 7).pieces

    def words_begin(self, tokenizer, text: str) -> list[int]:
        """Where the tokens of words begin in the text, their white space with them."""
        tokens = tokenizer.encode(text)
        ends = [tokenizer.num_characters(tokens[:n], text) for n in range(len(tokens) + 1)]
        assert ends == sorted(ends) and ends[0] == 0 and ends[-1] == len(text)
        pieces = [tokenizer.pieces[token] for token in tokens]
        return [end for end, piece in zip(ends, pieces, strict=False) if piece.startswith("▁")]

    def test_characters_are_those_of_the_text(self):
        """By hand: all white space before a word is the word's; ﬁ is one character, é here two."""
        text = "so  be\n\nit \u00a0 ﬁnal e\u0301"
        tokenizer = SentencePieceTokenizer.learn(text * 4, 16)
        assert self.words_begin(tokenizer, text) == [0, 2, 6, 10, 17]

    def test_characters_of_bytes(self):
        tokenizer = SentencePieceTokenizer(model_with_bytes())
        text = "日é x"
        tokens = tokenizer.encode(text)
        counts = [tokenizer.num_characters(tokens[:n], text) for n in range(len(tokens) + 1)]
        assert counts == [0, 0, 1, 1, 1, 2, 2, 4]

    def test_long_texts_and_words_are_encoded_in_parts(self, scribe, monkeypatch):
        text = "Shall I compare  thee to a summer's day?\n" + "temperate" * 9 + "  Rough winds"
        begin = [0, 5, 7, 15, 21, 24, 26, 35, 40, 122, 129]
        assert self.words_begin(scribe, text) == begin
        monkeypatch.setattr(tokenizers.sentencepiece_model, "BLOCK", 16)
        assert scribe.decode(scribe.encode(text)) == " ".join(text.split())
        for whole, part in zip(begin, self.words_begin(scribe, text), strict=True):
            assert text[whole:part].strip() == ""  # at most white space is counted elsewhere
        with pytest.raises(TokenizerError, match="lacks 'ü'"):
            scribe.encode("ü" * 99)

    def test_bytes_wait_for_the_rest_of_their_character(self):
        tokenizer = SentencePieceTokenizer(model_with_bytes())
        text = "日本 é🎭" * 3
        tokens = tokenizer.encode(text)
        for size in (1, 2, 3, 5):
            chunks = [tokens[i : i + size] for i in range(0, len(tokens), size)]
            parts = list(tokenizer.continuation(chunks))
            assert "".join(parts) == " " + text and len(parts) == len(chunks)
        assert "".join(tokenizer.continuation([tokens[1:3]])) == "��"  # of three bytes

    @given(st.text(ALPHABET, max_size=60))
    def test_round_trip_but_for_white_space(self, scribe, text):
        assert scribe.decode(scribe.encode(text)) == " ".join(text.split())

    def test_unknown_characters_are_named(self, scribe):
        with pytest.raises(TokenizerError, match="vocabulary of 1,000 pieces lacks 'λ', 'π'"):
            scribe.encode("the π and the λ")

    @pytest.mark.parametrize("text, size", [
        ("abc", 1000), ("good night " * 20, 1000), ("", 1000), ("\n\n", 1000),
        ("abcdefghijkl " * 30, 5),
    ])  # fmt: skip
    def test_a_vocabulary_that_does_not_fit_the_text(self, capfd, text, size):
        with pytest.raises(TokenizerError, match=f"cannot make {size:,} pieces") as refusal:
            SentencePieceTokenizer.learn(text, size)
        assert "\n" not in str(refusal.value)
        assert capfd.readouterr() == ("", "")  # the C++ library prints nothing of its own


@pytest.fixture(scope="module", params=sorted(tokenizers.TOKENIZERS))
def tokenizer(request, tiny_text):
    size = 60 if request.param == "sentencepiece" else 300
    return tokenizers.learn_tokenizer(request.param, tiny_text.read_text(), size)


class TestTokensThatAreRefused:
    @pytest.mark.parametrize("tokens, says", [
        ([0, -1], "tokens contains -1; the vocabulary's tokens are 0 to"),
        ([99999], "tokens contains 99999; the vocabulary's tokens are 0 to"),
        ([0.5], "tokens is float32 (1,); it must be integers"),
        ([[0, 1]], "tokens is int32 (1, 2); it must be one sequence, (N,)"),
        ([[0], [1, 2]], "tokens is list; it must be an array"),
    ], ids=str)  # fmt: skip
    def test_wherever_they_are_decoded(self, tokenizer, tokens, says):
        for decode in (tokenizer.decode, lambda tokens: list(tokenizer.continuation([tokens]))):
            with unchecked(), pytest.raises(ValueError, match=re.escape(says)):
                decode(tokens)

    def test_no_tokens_are_no_text(self, tokenizer):
        with unchecked():
            assert tokenizer.decode([]) == ""


class TestSaveAndLoad:
    def test_of_every_kind(self, tokenizer, tiny_text, tmp_path):
        """In a run's folder, and from a file of another name; learning twice gives the same."""
        text = tiny_text.read_text()
        size = tokenizer.vocab_size
        tokenizers.save_tokenizer(tokenizer, tmp_path)
        place = tmp_path / tokenizer.file_name
        again = tokenizers.learn_tokenizer(tokenizer.kind, text, size)
        for loaded in (tokenizers.load_tokenizer(tmp_path), again):
            assert type(loaded) is type(tokenizer)
            assert loaded.pieces == tokenizer.pieces and len(set(loaded.pieces)) == size
            assert loaded.to_bytes() == tokenizer.to_bytes() == place.read_bytes()
            np.testing.assert_array_equal(loaded.encode(text), tokenizer.encode(text))
        other = place.rename(tmp_path / f"another{place.suffix}")
        assert type(tokenizers.read_tokenizer(other)) is type(tokenizer)

    def test_characters_are_stored_readably(self, tmp_path):
        tokenizers.save_tokenizer(CharacterTokenizer.learn("né\n"), tmp_path)
        stored = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
        assert stored == {"characters": "\nné"}

    @pytest.mark.parametrize("name, data", [
        ("tokenizer.json", b"not JSON"), ("tokenizer.json", b"[1]"),
        ("tokenizer.json", b'{"characters": "aa"}'),
        ("tokenizer.json", b'{"characters": "ab", "unknown": 2}'),
        ("tokenizer.json", b'{"characters": "ab", "unknown": 1.0}'),
        ("tokenizer.json", b'{"characters": "a\\ud800"}'),
        ("words.json", b'{"words": [" <unk>", "\\ud800"]}'),
        ("tokenizer.json", b'\xff{"characters": "a"}'),
        ("words.json", b'{"words": "abc"}'),
        ("words.json", b'{"words": [" <unk>", 1]}'),
        ("words.json", b'{"words": ["a", " <unk>"]}'),
        ("words.json", b'{"words": [" <unk>", "a", "a"]}'),
        ("bytes.json", b'{"bytes": 255}'), ("tokenizer.model", b"half a model"),
        ("tokenizer.model", b"not a model"), ("tokenizer.model", b""),
        ("subwords.model", b"not a model"), ("subwords.model", b""),
    ])  # fmt: skip
    def test_a_broken_file_is_refused_in_one_sentence(self, tmp_path, capfd, scribe, name, data):
        if data == b"half a model":
            data = scribe.to_bytes()[: len(scribe.to_bytes()) // 2]
        (tmp_path / name).write_bytes(data)
        says = f"{tmp_path}.* is damaged, or no token"
        with pytest.raises(TokenizerError, match=says) as refusal:
            tokenizers.load_tokenizer(tmp_path)
        assert "\n" not in str(refusal.value)
        assert capfd.readouterr() == ("", "")
