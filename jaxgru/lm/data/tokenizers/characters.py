"""One token per character."""

from __future__ import annotations

import json

import numpy as np
from jaxtyping import Int

from jaxgru.errors import counted
from jaxgru.lm.data.tokenizers.base import Tokenizer, lacks


class CharacterTokenizer(Tokenizer):
    """One token per character; the vocabulary is the distinct characters, in token order."""

    kind = "characters"
    file_name = "tokenizer.json"
    about = "one token for each that occurs in the text"

    def __init__(self, vocabulary: str) -> None:
        self.vocabulary = vocabulary
        self.pieces = list(vocabulary)
        self.vocab_size = len(vocabulary)
        self._token_of = {character: token for token, character in enumerate(vocabulary)}

    @classmethod
    def learn(cls, text: str, vocab_size: int = 0, min_count: int = 1) -> CharacterTokenizer:
        """Return the tokenizer of a text: the sorted set of its characters."""
        return cls("".join(sorted(set(text))))

    @classmethod
    def from_bytes(cls, data: bytes) -> CharacterTokenizer:
        content = json.loads(data)
        vocabulary = content.get("characters") if isinstance(content, dict) else None
        if not isinstance(vocabulary, str) or len(set(vocabulary)) != len(vocabulary):
            raise ValueError("its vocabulary is not a string of distinct characters")
        return cls(vocabulary)

    def to_bytes(self) -> bytes:
        """Return JSON in UTF-8: {"characters": the vocabulary}."""
        return json.dumps({"characters": self.vocabulary}, ensure_ascii=False).encode()

    def encode(self, text: str) -> Int[np.ndarray, "N"]:
        if unknown := set(text) - set(self._token_of):
            raise lacks(counted(self.vocab_size, "character"), unknown)
        return np.fromiter(map(self._token_of.__getitem__, text), np.int32, len(text))
