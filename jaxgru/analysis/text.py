"""Measures of generated text alone: its loop, its variety, its words."""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from jaxgru.errors import UserError
from jaxgru.lm.data.tokenizers.words import marks

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
    found: Loop | None = None
    for period in range(1, len(tokens) // MIN_TURNS + 1):
        breaks = np.flatnonzero(tokens[:-period] != tokens[period:])
        onset = int(breaks[-1]) + 1 if len(breaks) else 0
        seen = len(tokens) - onset
        if seen >= MIN_TURNS * period and (found is None or onset < found.onset):
            found = Loop(onset, period)
    return found


def distinct_ngrams(items: Sequence[Hashable] | Shaped[np.ndarray, "N"], n: int) -> float:
    """Return the number of distinct n-grams over the number of n-grams; 1 if none is repeated.

    This is "distinct-n" of Li et al. 2016 (arXiv 1510.03055), who divide by the number of items.
    Longer texts have lower values, so compare texts of the same length only.

    Args:
      items: at least n tokens, words, or characters of a string.
    """
    ngrams = list(zip(*(items[i:] for i in range(n)), strict=False))
    return len(set(ngrams)) / len(ngrams)


@functools.cache
def _word() -> re.Pattern[str]:
    letter = r"[^\W\d_]"  # of any script
    letters = f"{letter}+(?:[{marks()}]+{letter}*)*"
    return re.compile(f"{letters}(?:'{letters})*")


def words(text: str) -> list[str]:
    """Return the words of a text in order, in lower case: letters, with single apostrophes inside.

    Combining marks and joiners belong to their letters. "o'er" and "know'st" are words. An
    apostrophe at the edge of a word is dropped, because it may be a quotation mark: "'tis" is tis,
    "i' the" is i and the, "lovers'" is lovers. Every other character separates words: "well-known"
    is two words.
    """
    return [word.lower() for word in _word().findall(text)]


def known_word_share(text: str, vocabulary: AbstractSet[str]) -> float:
    """Return the share of a text's words, counted with repeats, that are in the vocabulary.

    A text that ends with a letter, or a letter and an apostrophe, may be cut inside its last word,
    so that word is left out. The first word counts, so the text should begin with a whole word.

    Args:
      text: a sample.
      vocabulary: `set(words(text))` of the text that the model was trained on.

    Raises:
      UserError: the text has no whole word.
    """
    found = list(_word().finditer(text))
    if found and found[-1].end() >= len(text.removesuffix("'")):
        found.pop()
    if not found:
        raise UserError(f"{text[:40]!r} contains no whole word.")
    return sum(match[0].lower() in vocabulary for match in found) / len(found)
