"""Words: what is a word, what becomes <unk>, and what comes back."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgru.lm.data.tokenizers import WordTokenizer

VERSE = "The cat, the dog:\nthe cat's  tail.\n\tthe cat"
odd = st.sampled_from(
    ["the", " the", " cat", "<unk>", " <unk>", "\n", "  ", "\t", "don’t", "日本", "\u0301"]
)
texts = st.lists(odd | st.text(st.characters(exclude_categories=["Cs"]), max_size=9)).map("".join)


def test_by_hand():
    tokenizer = WordTokenizer.learn(VERSE, min_count=2)
    counts = Counter(
        ["The", " cat", ",", " the", " dog", ":", "\n", "the", " cat's", " ", " tail", ".", "\n",
         "\t", "the", " cat"]
    )  # fmt: skip
    frequent = {word for word, count in counts.items() if count > 1 or word.isspace()}
    assert tokenizer.pieces[0] == " <unk>" and set(tokenizer.pieces[1:]) == frequent
    assert tokenizer.decode(tokenizer.encode(VERSE)) == (
        " <unk> cat <unk> <unk> <unk> <unk>\nthe <unk>  <unk> <unk>\n\tthe cat"
    )


@pytest.mark.parametrize("text, expected", [
    ("தமிழ் மொழி, a", ["தமிழ்", " மொழி", ",", " a"]),
    ("क्\u200dष हिन्दी।", ["क्\u200dष", " हिन्दी", "।"]),
    ("می\u200cروم عَلَيْهِمْ שָׁלוֹם", ["می\u200cروم", " عَلَيْهِمْ", " שָׁלוֹם"]),
    ("น้ำดี cafe\u0301’s", ["น้ำดี", " cafe\u0301’s"]),
    ("co\u00adop und\u200bso", ["co\u00adop", " und", "\u200b", "so"]),
    ("I ❤\ufe0f!\n\u0301葛\U000e0100", ["I", " ❤\ufe0f", "!", "\n", "\u0301", "葛\U000e0100"]),
])  # fmt: skip
def test_marks_belong_to_their_letters(text, expected):
    """As by Unicode's UAX 29, but for Thai, whose words only a dictionary could part."""
    tokenizer = WordTokenizer.learn(text)
    assert [tokenizer.pieces[token] for token in tokenizer.encode(text)] == expected


@given(texts)
def test_a_text_of_known_words_comes_back(text):
    """All its words are known with a min_count of 1; its own <unk> is the unknown token."""
    tokenizer = WordTokenizer.learn(text)
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int32
    assert tokenizer.decode(tokens) == text.replace(" <unk>", "<unk>").replace("<unk>", " <unk>")
    counts = [tokenizer.num_characters(tokens[:n], text) for n in range(len(tokens) + 1)]
    assert counts[0] == 0 and counts[-1] == len(text) and counts == sorted(counts)
    assert "".join(tokenizer.continuation([tokens[:2], tokens[2:]])) == tokenizer.decode(tokens)


@given(texts, texts)
def test_any_text_is_encoded_and_known_words_stay(mine, other):
    tokenizer = WordTokenizer.learn(mine)
    tokens = tokenizer.encode(other)
    decoded = tokenizer.decode(tokens)
    assert tokenizer.num_characters(tokens, other) == len(other)
    assert 0 in tokens or decoded == other
    assert (tokens < tokenizer.vocab_size).all()


def test_the_most_frequent_words_come_first():
    """And in the order of their characters where they are as frequent."""
    found = WordTokenizer.learn("a a\nb b b").pieces
    assert found == [" <unk>", " b", "\n", " a", "a", "b", " "]


def test_a_space_at_the_end_of_a_prompt_belongs_to_the_next_word():
    tokenizer = WordTokenizer.learn(VERSE)
    end, mask = tokenizer.may_follow("the ")
    assert end == " "
    np.testing.assert_array_equal(mask, [piece.startswith(" ") for piece in tokenizer.pieces])
    assert tokenizer.may_follow("the\n") == tokenizer.may_follow("the") == ("", None)
