"""Characters and SentencePiece: the published counts, round trips, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgru.data.tokenizers import (
    CharacterTokenizer,
    SentencePieceTokenizer,
    TokenizerError,
    learn_tokenizer,
    load_tokenizer,
    save_tokenizer,
)

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

    def test_tokens_are_places_in_the_sorted_vocabulary(self):
        tokenizer = CharacterTokenizer.learn("cab\nb")
        assert tokenizer.encode("abc\n").tolist() == [1, 2, 3, 0]
        assert tokenizer.decode(np.array([3, 1, 2])) == "cab"

    @given(texts)
    def test_round_trip(self, text):
        tokenizer = CharacterTokenizer.learn(text)
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.vocab_size == len(set(text))
        assert len(tokens) == tokenizer.num_characters(tokens) == len(text)

    def test_unknown_characters_are_named(self):
        tokenizer = CharacterTokenizer.learn("abc")
        with pytest.raises(TokenizerError, match="vocabulary of 3 characters lacks 'x', 'é'"):
            tokenizer.encode("xaébx")

    def test_of_many_unknown_characters_ten_are_named(self):
        with pytest.raises(TokenizerError) as refusal:
            CharacterTokenizer.learn("abc").encode("abcdefghijklmnop")
        assert str(refusal.value).count("'") == 20
        assert "'d'" in str(refusal.value) and "…" in str(refusal.value)

    def test_no_text_gives_no_tokens(self):
        tokens = CharacterTokenizer.learn("abc").encode("")
        assert tokens.shape == (0,) and tokens.dtype == np.int32


@pytest.fixture(scope="session")
def scribe(shakespeare) -> SentencePieceTokenizer:
    return SentencePieceTokenizer.learn(shakespeare, 1000)


class TestSentencePiece:
    def test_counts_of_the_corpus_are_the_published_ones(self, scribe, shakespeare):
        tokens = scribe.encode(shakespeare)
        assert tokens.shape == (403_513,) and tokens.dtype == np.int32
        assert scribe.vocab_size == 1000
        assert len(set(tokens.tolist()) - {0, 1, 2}) == len(set(tokens.tolist()))
        validation = tokens[int(len(tokens) * 0.9) :]
        assert len(validation) == 40_352
        assert scribe.num_characters(validation) == 105_714
        assert scribe.num_characters(validation) == len(scribe.decode(validation))

    def test_special_pieces_are_where_the_study_has_them(self, scribe, tmp_path):
        from sentencepiece import SentencePieceProcessor

        save_tokenizer(scribe, tmp_path)
        theirs = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
        assert [theirs.id_to_piece(i) for i in range(3)] == ["<unk>", "<s>", "</s>"]
        assert (theirs.unk_id(), theirs.bos_id(), theirs.eos_id()) == (0, 1, 2)

    def test_learning_is_deterministic(self, tiny_text):
        text = tiny_text.read_text()
        one, two = (SentencePieceTokenizer.learn(text, 60).encode(text) for _ in range(2))
        np.testing.assert_array_equal(one, two)

    @given(st.text(ALPHABET, max_size=60))
    def test_round_trip_but_for_white_space(self, scribe, text):
        assert scribe.decode(scribe.encode(text)) == " ".join(text.split())

    def test_newlines_become_spaces(self, scribe):
        assert scribe.decode(scribe.encode("ROMEO:\nIs the day\n\nso young?")) == (
            "ROMEO: Is the day so young?"
        )

    def test_unknown_characters_are_named(self, scribe):
        with pytest.raises(TokenizerError, match="vocabulary of 1000 pieces lacks 'λ', 'π'"):
            scribe.encode("the π and the λ")

    @pytest.mark.parametrize("text", ["abc", "good night " * 20, "", "\n\n"])
    def test_a_text_too_small_for_the_vocabulary(self, capfd, text):
        with pytest.raises(TokenizerError, match="cannot make 1000 pieces") as refusal:
            SentencePieceTokenizer.learn(text, 1000)
        assert "\n" not in str(refusal.value)
        assert capfd.readouterr() == ("", "")  # the C++ library prints nothing of its own

    def test_a_vocabulary_too_small_for_the_characters(self):
        with pytest.raises(TokenizerError, match="cannot make 5 pieces") as refusal:
            SentencePieceTokenizer.learn("abcdefghijkl " * 30, 5)
        assert "\n" not in str(refusal.value)


class TestSaveAndLoad:
    @given(text=texts.filter(bool))
    def test_characters(self, tmp_path_factory, text):
        folder = tmp_path_factory.mktemp("tokenizer")
        save_tokenizer(CharacterTokenizer.learn(text), folder)
        loaded = load_tokenizer(folder)
        assert loaded.vocabulary == "".join(sorted(set(text)))
        assert loaded.decode(loaded.encode(text)) == text

    def test_characters_are_stored_readably(self, tmp_path):
        save_tokenizer(CharacterTokenizer.learn("né\n"), tmp_path)
        stored = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
        assert stored == {"characters": "\nné"}

    def test_sentencepiece(self, scribe, tmp_path):
        save_tokenizer(scribe, tmp_path)
        loaded = load_tokenizer(tmp_path)
        line = "Shall I compare thee to a summer's day?"
        assert loaded.vocab_size == 1000
        np.testing.assert_array_equal(loaded.encode(line), scribe.encode(line))
        assert loaded.decode(loaded.encode(line)) == line

    @pytest.mark.parametrize(
        "name, data",
        [
            ("tokenizer.json", b""),
            ("tokenizer.json", b"not JSON"),
            ("tokenizer.json", b'"abc"'),
            ("tokenizer.json", b"[1]"),
            ("tokenizer.json", b"{}"),
            ("tokenizer.json", b'{"characters": 3}'),
            ("tokenizer.json", b'{"characters": "aa"}'),
            ("tokenizer.json", b'{"characters": "a'),
            ("tokenizer.json", b'\xff{"characters": "a"}'),
            ("tokenizer.model", b"not a model"),
            ("tokenizer.model", b""),
        ],
    )
    def test_a_broken_file_is_refused_in_one_sentence(self, tmp_path, capfd, name, data):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(TokenizerError, match="cannot be read") as refusal:
            load_tokenizer(tmp_path)
        assert str(tmp_path) in str(refusal.value)
        assert "\n" not in str(refusal.value)
        assert capfd.readouterr() == ("", "")

    def test_half_a_sentencepiece_model_is_refused(self, scribe, tmp_path):
        save_tokenizer(scribe, tmp_path)
        model = tmp_path / "tokenizer.model"
        model.write_bytes(model.read_bytes()[: model.stat().st_size // 2])
        with pytest.raises(TokenizerError, match="cannot be read"):
            load_tokenizer(tmp_path)

    def test_none_at_all(self, tmp_path):
        with pytest.raises(TokenizerError, match="has no tokenizer"):
            load_tokenizer(tmp_path)

    def test_the_config_says_which_kind(self, tiny_text):
        text = tiny_text.read_text()
        assert learn_tokenizer("characters", text, 1000).vocab_size == len(set(text))
        assert learn_tokenizer("sentencepiece", text, 60).vocab_size == 60
