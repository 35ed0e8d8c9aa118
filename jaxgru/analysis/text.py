"""What generated text alone can tell: its loop, its variety, its words. Knows no model."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from jaxgru.errors import UserError

MIN_TURNS = 3  # how often a loop must have gone round before it is called one


@dataclass(frozen=True)
class Loop:
    """A text that repeats to its end: tokens[i] == tokens[i + period] from `onset` on.

    onset: how many tokens come before the loop. period: the tokens of one turn.
    """

    onset: int
    period: int


def find_loop(tokens: Int[np.ndarray, "N"] | Sequence[int]) -> Loop | None:
    """The loop that a text (greedily decoded, say) ends in; None where it ends in none.

    A loop is an end of the text that is periodic and at least three periods long: a second turn can
    be chance, and a third is seldom. The last turn may be broken off. Of all such loops the one
    that begins first is taken, with its smallest period: "abcccabcccabccc" goes round abccc from
    its start, though it also ends in c three times.

    A loop longer than a third of the text cannot be seen, and a text cut at a chance "ccc" shows
    one: (N − onset) / period says how many turns the claim rests on. O(N²), in NumPy.

    Raises:
      UserError: the tokens are not one sequence, (N,).
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 1:
        raise UserError(f"a loop is looked for in one sequence, (N,); this is {tokens.shape}.")
    found: Loop | None = None
    for period in range(1, len(tokens) // MIN_TURNS + 1):
        breaks = np.flatnonzero(tokens[:-period] != tokens[period:])
        onset = int(breaks[-1]) + 1 if len(breaks) else 0
        seen = len(tokens) - onset
        if seen >= MIN_TURNS * period and (found is None or onset < found.onset):
            found = Loop(onset, period)
    return found


def distinct_ngrams(items: Sequence[Hashable], n: int) -> float:
    """Distinct n-grams over all n-grams, in (0, 1]: 1 where none comes twice.

    The "distinct-n" of Li et al. 2016 (arXiv 1510.03055), but over the number of n-grams, n − 1
    fewer than the items that they divide by, so that 1 can be reached. It falls as a text grows
    (there are only so many n-grams): compare texts of one length only.

    Args:
      items: of whatever is counted: tokens, words, or a string's characters.
      n: at least 1.

    Raises:
      UserError: n is below 1, or there are fewer than n items, which have no n-gram.
    """
    if n < 1:
        raise UserError(f"n is {n}; an n-gram has at least 1 item.")
    if len(items) < n:
        raise UserError(f"there is no {n}-gram in {len(items)} items; at least {n} are needed.")
    ngrams = list(zip(*(items[i:] for i in range(n)), strict=False))
    return len(set(ngrams)) / len(ngrams)


_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")  # [^\W\d_] is a letter of any script


def words(text: str) -> list[str]:
    """The text's words in order, lower-cased: runs of letters, with single apostrophes inside.

    "o'er" and "know'st" are words. An apostrophe at a word's edge is left out, because there it may
    as well be a quotation mark: "'tis" is tis, "i' the" is i and the, "lovers'" is lovers. All else
    separates: "well-known" is two words.
    """
    return [word.lower() for word in _WORD.findall(text)]


def known_word_share(text: str, vocabulary: AbstractSet[str]) -> float:
    """The share of the text's words (each time that they occur) that are in the vocabulary.

    A text that ends in a letter, or in a letter and an apostrophe, may have been cut inside its
    last word, which is therefore left out. Its first word counts: begin the text where a word does.

    Args:
      text: a sample.
      vocabulary: `set(words(text))` of the text that the model was trained on.

    Raises:
      UserError: the text has no whole word.
    """
    found = words(text)
    if _WORD.match(text.removesuffix("'")[-1:]):
        found.pop()
    if not found:
        raise UserError(f"there is no whole word in {text[:40]!r}.")
    return sum(word in vocabulary for word in found) / len(found)
