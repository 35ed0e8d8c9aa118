"""Words: one token per word, mark or line break; rare words are one unknown token."""

from __future__ import annotations

import functools
import itertools
import json
import re
import unicodedata
from collections import Counter

import numpy as np
from jaxtyping import Int

from jaxgru.lm.data.tokenizers.base import Start, Tokenizer, Tokens, begin_with_spaces

UNKNOWN = " <unk>"

# Unicode's format characters, joiners and those marks that `marks` does not look for. U+200B, the
# zero-width space, is none of them: it separates words.
FORMAT = "\u00ad\u061c\u180e\u200c-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
FORMAT += "\U000e0001-\U000e01ef"


@functools.cache
def combining_marks() -> str:
    """Return, as ranges for a set of `re`, what belongs to the character before it.

    Those are combining marks, joiners and format characters: rule WB4 of Unicode's UAX 29.
    """
    # A category has two letters. Higher planes have only the marks in FORMAT.
    categories = "".join(map(unicodedata.category, map(chr, range(0x20000))))
    runs = re.finditer("(?:M[nce])+", categories)
    ranges = [f"{chr(run.start() // 2)}-{chr(run.end() // 2 - 1)}" for run in runs]
    return FORMAT + "".join(ranges)


@functools.cache
def _token() -> re.Pattern[str]:
    word = rf"\w[\w{combining_marks()}]*"
    return re.compile(rf" ?<unk>| ?{word}(?:['’]{word})*| ?[^\w\s][{combining_marks()}]*|\s")


class WordTokenizer(Tokenizer):
    """Words, with the space before them; other characters are one token each.

    A word is made of letters, digits and underscores, with apostrophes inside it. Combining marks
    and joiners belong to the character before them. A space before a word or a punctuation mark
    belongs to it, so "The" after a line break and " The" within a line are different tokens. Other
    white space is one token per character. A text is decoded as it was, except that each word
    outside the vocabulary becomes " <unk>". For languages written without spaces, such as Chinese
    and Thai, use subwords.
    """

    kind = "words"
    file_name = "words.json"
    min_count = 2
    unknown = 0
    about = "words and punctuation; those rarer than data.min_count become <unk>"

    def __init__(self, words: list[str]) -> None:
        self.pieces = words
        self.vocab_size = len(words)
        self._token_of = {word: token for token, word in enumerate(words)}
        self._token_of["<unk>"] = 0

    @classmethod
    def learn(cls, text: str, vocab_size: int = 0, min_count: int = 1) -> WordTokenizer:
        """Return the tokenizer of the words that occur `min_count` times, and of white space.

        Token 0 is " <unk>"; the others come in the order of their frequency.
        """
        counts = Counter(_token().findall(text))
        for word in (UNKNOWN, "<unk>"):
            counts.pop(word, None)
        counts.update({" ": 0, "\n": 0})
        words = [word for word, count in counts.items() if count >= min_count or word.isspace()]
        words.sort(key=lambda word: (-counts[word], word))
        return cls([UNKNOWN, *words])

    @classmethod
    def from_bytes(cls, data: bytes) -> WordTokenizer:
        words = json.loads(data)["words"]
        if len(set(words)) != len(words) or words[:1] != [UNKNOWN]:
            raise ValueError(f"its words are not distinct, or {UNKNOWN!r} is not the first")
        return cls(words)

    def to_bytes(self) -> bytes:
        """Return JSON in UTF-8: {"words": the vocabulary in token order}."""
        return json.dumps({"words": self.pieces}, ensure_ascii=False).encode()

    def encode(self, text: str) -> Int[np.ndarray, "N"]:
        tokens = (self._token_of.get(match[0], 0) for match in _token().finditer(text))
        return np.fromiter(tokens, np.int32)

    def may_follow(self, prompt: str) -> Start:
        """Return the space at the prompt's end: it belongs to the word after it."""
        return begin_with_spaces(self, prompt, self.pieces)

    def num_characters(self, tokens: Tokens, text: str) -> int:
        """Return how many characters these first tokens of the text stand for."""
        matches = itertools.islice(_token().finditer(text), len(tokens))
        return max((match.end() for match in matches), default=0)
