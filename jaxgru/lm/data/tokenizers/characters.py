"""One token per character."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
from jaxtyping import Int

from jaxgru.errors import check_whole
from jaxgru.lm.data.tokenizers.base import Tokenizer, Tokens, lacks
from jaxgru.printing import counted

UNKNOWN = "\ufffd"
"""Unicode's replacement character."""


class CharacterTokenizer(Tokenizer):
    """One token per character; the vocabulary is the distinct characters, in token order.

    With an unknown token, each character outside the vocabulary is encoded as that token, and
    decoded as what it stands for.
    """

    kind = "characters"
    file_name = "tokenizer.json"
    min_count = 1
    about = "one token for each that occurs in the text"

    def __init__(self, vocabulary: str, unknown: int | None = None) -> None:
        self.vocabulary = vocabulary
        self.unknown = unknown
        self.pieces = list(vocabulary)
        self.vocab_size = len(vocabulary)
        self._token_of = {character: token for token, character in enumerate(vocabulary)}

    @classmethod
    def learn(cls, text: str, vocab_size: int = 0, min_count: int = 1) -> CharacterTokenizer:
        """Return the tokenizer of a text: the sorted set of its characters.

        With a `min_count` above 1, of those that occur that often; token 0 is the unknown, U+FFFD.
        """
        if min_count <= 1:
            return cls("".join(sorted(set(text))))
        counts = Counter(text)
        del counts[UNKNOWN]
        frequent = [character for character, count in counts.items() if count >= min_count]
        return cls("".join([UNKNOWN, *sorted(frequent)]), unknown=0)

    @classmethod
    def from_bytes(cls, data: bytes) -> CharacterTokenizer:
        content = json.loads(data)
        vocabulary = content["characters"]
        unknown = content.get("unknown")
        if not isinstance(vocabulary, str) or len(set(vocabulary)) != len(vocabulary):
            raise ValueError("its vocabulary is not a string of distinct characters")
        if unknown is not None:
            check_whole("its unknown token", unknown, len(vocabulary) - 1, least=0)
        return cls(vocabulary, unknown)

    def to_bytes(self) -> bytes:
        """Return JSON in UTF-8: {"characters": the vocabulary}, and "unknown": a token, if any."""
        content: dict[str, str | int] = {"characters": self.vocabulary}
        if self.unknown is not None:
            content["unknown"] = self.unknown
        return json.dumps(content, ensure_ascii=False).encode()

    def encode(self, text: str) -> Int[np.ndarray, "N"]:
        token_of = self._token_of
        # `difference` looks up the text's characters only, so this is fast for a short text, too.
        others = set(text).difference(token_of)
        if others:
            if self.unknown is None:
                remedy = ", or train with data.min_count 5 or data.tokenizer subwords"
                raise lacks(counted(self.vocab_size, "character"), others, remedy)
            token_of = token_of | dict.fromkeys(others, self.unknown)
        return np.fromiter(map(token_of.__getitem__, text), np.int32, len(text))

    def num_characters(self, tokens: Tokens, text: str) -> int:
        return len(tokens)
