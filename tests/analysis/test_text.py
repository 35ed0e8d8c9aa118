"""Loops against brute force and texts made to loop; n-grams and words counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgru.analysis.text import Loop, distinct_ngrams, find_loop, words


def loop_of(text: str) -> Loop | None:
    return find_loop([ord(c) for c in text])


def brute_force_loop(tokens: list[int]) -> Loop | None:
    """The definition, read out: the first onset, then the smallest period, that holds."""
    n = len(tokens)
    for onset in range(n):
        for period in range(1, (n - onset) // 3 + 1):
            if all(tokens[i] == tokens[i + period] for i in range(onset, n - period)):
                return Loop(onset, period)
    return None


class TestFindLoop:
    @pytest.mark.parametrize(
        "text, loop",
        [
            ("xyabcabcabc", Loop(2, 3)),
            ("xcabcabcabc", Loop(1, 3)),  # the text enters the loop in the middle of a turn
            ("abcccabcccabccc", Loop(0, 5)),  # not the three c at its end
            ("xbcccabcccabccc", Loop(12, 1)),  # no third turn of the long one: only the short one
            ("babbabbabc", None),  # a loop that the text leaves again
            *((text, None) for text in ("", "a", "aa", "abab", "xabcabcab")),  # not three turns
        ],
    )
    def test_by_hand(self, text, loop):
        assert loop_of(text) == loop

    @given(
        prefix=st.lists(st.integers(0, 2), max_size=24),
        block=st.lists(st.integers(0, 2), min_size=1, max_size=6),
        length=st.just(0) | st.integers(0, 40),
    )
    def test_against_the_definition(self, prefix, block, length):
        """Also texts without a loop, or with one that is there by chance."""
        tokens = prefix + (block * 41)[:length]
        assert find_loop(tokens) == brute_force_loop(tokens)


@pytest.mark.parametrize("items, n, share", [
    ("abab", 1, 2 / 4), ("abab", 2, 2 / 3), ("abab", 3, 2 / 2), ("abab", 4, 1.0),
    ("aaaaa", 2, 1 / 4), ("aba", 2, 1.0),  # ab and ba are two
    (["to", "be", "or", "not", "to", "be"], 1, 4 / 6),
    (["to", "be", "or", "not", "to", "be"], 2, 4 / 5),
    (np.array([3, 1, 3, 1, 3]), 2, 2 / 4),
])  # fmt: skip
def test_distinct_ngrams(items, n, share):
    assert distinct_ngrams(items, n) == share


class TestWords:
    @pytest.mark.parametrize(
        "text, expected",
        [
            ("But, soft! what light", ["but", "soft", "what", "light"]),
            ("know'st thou o'er", ["know'st", "thou", "o'er"]),
            ("ne'er-lust-wearied", ["ne'er", "lust", "wearied"]),
            ("'tis i' the lovers' o'", ["tis", "i", "the", "lovers", "o"]),
            ("'Zounds!' he said", ["zounds", "he", "said"]),
            ("th'o'er'ta'en", ["th'o'er'ta'en"]),
            ("ROMEO:\n3 KING_HENRY8th", ["romeo", "king", "henry", "th"]),
            ("Café ÉTÉ", ["café", "été"]),
            ("E\u0301te\u0301's தமிழ் மொழி", ["e\u0301te\u0301's", "தமிழ்", "மொழி"]),
            ("می\u200cروم, שָׁלוֹם-عَلَيْهِمْ", ["می\u200cروم", "שָׁלוֹם", "عَلَيْهِمْ"]),
            (" '' -- 42.", []),
        ],
    )
    def test_by_hand(self, text, expected):
        assert words(text) == expected

    @given(st.text("aB'- \n.3"))
    def test_of_their_own_text_they_are_the_same(self, text):
        """Nothing is left in a word that a second reading would take away."""
        found = words(text)
        assert words(" ".join(found)) == found
        assert "".join(found).replace("'", "") == "".join(filter(str.isalpha, text)).lower()
