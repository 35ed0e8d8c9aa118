"""Measures of generated text alone: its loop, its variety, its words."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from jaxgru.lm.data.tokenizers import combining_marks

MIN_TURNS = 3  # the fewest repetitions that count as a loop


class Loop(NamedTuple):
    """A text that repeats until its end: tokens[i] == tokens[i + period] for all i ≥ onset."""

    onset: int
    period: int


def find_loop(tokens: Int[np.ndarray, "N"] | Sequence[int]) -> Loop | None:
    """Return the loop at the end of a text (for example, greedily decoded), or None.

    A loop is a periodic end of the text of at least three periods: two can be chance, three rarely
    are. The last repetition may be incomplete. Of all such loops, the one with the earliest onset
    is returned, with its smallest period: "abcccabcccabccc" repeats abccc from its start, although
    it also ends with c three times.

    A loop longer than a third of the text is not found, and a text that happens to end with "ccc"
    has one: (N − onset) / period is the number of repetitions. O(N²), in NumPy.
    """
    tokens = np.asarray(tokens)
    earliest: Loop | None = None
    for period in range(1, len(tokens) // MIN_TURNS + 1):
        breaks = np.flatnonzero(tokens[:-period] != tokens[period:])
        onset = int(breaks[-1]) + 1 if len(breaks) else 0
        repeats = len(tokens) - onset >= MIN_TURNS * period
        if repeats and (earliest is None or onset < earliest.onset):
            earliest = Loop(onset, period)
    return earliest


def distinct_ngrams(items: Sequence[Hashable] | Shaped[np.ndarray, "N"], n: int) -> float:
    """Return the number of distinct n-grams over the number of n-grams; 1 if none is repeated.

    This is "distinct-n" of Li et al. 2016 (arXiv 1510.03055), who divide by the number of items.
    Longer texts have lower values, so compare texts of the same length only. There must be at least
    n items.
    """
    ngrams = list(zip(*(items[i:] for i in range(n)), strict=False))
    return len(set(ngrams)) / len(ngrams)


def words(text: str) -> list[str]:
    """Return the words of a text in order, in lower case: letters, with single apostrophes inside.

    Combining marks and joiners belong to their letters. "o'er" and "know'st" are words. An
    apostrophe at the edge of a word is dropped, because it may be a quotation mark: "'tis" is tis,
    "i' the" is i and the, "lovers'" is lovers. Every other character separates words: "well-known"
    is two words.
    """
    letter = r"[^\W\d_]"  # of any script
    letters = f"{letter}+(?:[{combining_marks()}]+{letter}*)*"
    return [word.lower() for word in re.findall(f"{letters}(?:'{letters})*", text)]
