"""Subwords that lose nothing: whatever the text, it is decoded as it was."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import numpy as np
from jaxtyping import Int

from jaxgru.lm.data.tokenizers import base, sentencepiece_model
from jaxgru.lm.data.tokenizers.base import Start, TokenizerError
from jaxgru.lm.data.tokenizers.sentencepiece_model import RESERVED, SPACE, blocks, cut

END = "\n|[^ ](?= )"
"""The end of a line, or of a word before a space, where no piece goes on."""

COVERAGE = 0.9995
"""The share of a text whose characters get a token each, if there is room."""

LEAST = 256 + 3
"""Tokens for the bytes, line break and space, and SentencePiece's unknown one, never used."""


class SubwordTokenizer(sentencepiece_model.SentencePieceModel, base.ByteLevelTokenizer):
    """Byte-pair subwords, exact.

    No character is normalised. A space belongs to the word after it, and runs of spaces, as in
    indented code, have tokens of their own; a line break is always one token. Characters that are
    too rare for a token become the bytes of their UTF-8.
    """

    kind = "subwords"
    file_name = "subwords.model"
    about = "SentencePiece's, from which any text is restored exactly"

    def __init__(self, model: bytes) -> None:
        super().__init__(model)
        # "▁" is a space; the character "▁" itself is written as bytes.
        self.bytes_of = [piece.replace(SPACE, " ").encode() for piece in self.pieces]
        for token in range(self.vocab_size):
            if self._processor.is_unknown(token) or self._processor.is_control(token):
                self.bytes_of[token] = b""
        for token, byte in self._byte_of.items():
            self.bytes_of[token] = bytes([byte])
        self._token_of_byte = {byte: token for token, byte in self._byte_of.items()}
        if len(self._token_of_byte) < 256:
            raise ValueError("it does not have a piece for each byte")
        self.encode(" a  b\n\n\tﬁ e\u0301\x85 ")

    @classmethod
    def learn(cls, text: str, vocab_size: int = 0, min_count: int = 1) -> SubwordTokenizer:
        """Learn `vocab_size` subwords, or as many as the text is long enough for.

        The most frequent characters have a token each, up to 99.95 % of the text or half of the
        tokens; the others are bytes.

        Raises:
          TokenizerError: there are fewer tokens than bytes.
        """
        if vocab_size < LEAST:
            raise TokenizerError(
                f"a vocabulary of {vocab_size} is too small for subwords: 256 bytes, spaces and "
                f"line breaks need {LEAST}; set model.vocab_size to 1000, for example."
            )
        breaks = ["\n"]
        if "\r" in text and vocab_size >= LEAST + 2:
            breaks += ["\r", "\r\n"]
        counts = Counter(text)
        # These have a token anyway, or never.
        for other in ("\n", "\r", " ", "\0", SPACE, RESERVED):
            counts.pop(other, None)
        num_others = LEAST - 1 + len(breaks)
        frequent = _frequent(counts, (vocab_size - num_others) // 2)
        # All characters but the most frequent one, which may be a space, are required.
        if text.count(" ") > counts[frequent[:1]]:
            required = frequent
        else:
            required = frequent[1:] + SPACE
        options = dict(
            required_chars=required,
            user_defined_symbols=breaks,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            bos_id=-1,
            eos_id=-1,
        )
        lines = _lines_of(text, frequent)
        try:
            return cls(sentencepiece_model.train(lines, vocab_size, **options))
        except sentencepiece_model.TooManyPieces as error:
            return cls(sentencepiece_model.train(lines, error.most, **options))

    def encode(self, text: str) -> Int[np.ndarray, "N"]:
        base.check_utf_8(text)
        return np.concatenate([self._encode(block) for block in blocks(text, END)])

    def _encode(self, block: str) -> Int[np.ndarray, "N"]:
        # The character "▁", which SentencePiece would read as a space, is written as bytes.
        bytes_of_character = [self._token_of_byte[byte] for byte in SPACE.encode()]
        first, *others = block.split(SPACE)
        tokens = self._processor.encode(first)
        for part in others:
            tokens += bytes_of_character + self._processor.encode(part)
        tokens = np.array(tokens, np.int32)
        if self.joined(tokens) != block.encode():
            raise TokenizerError("the subwords are damaged: they do not give the text back.")
        return tokens

    def may_follow(self, prompt: str) -> Start:
        """Return the spaces at the prompt's end: they belong to the word after them."""
        texts = [data.decode(errors="replace") for data in self.bytes_of]
        return base.begin_with_spaces(self, prompt, texts)


def _frequent(counts: Counter[str], most: int) -> str:
    """Return the most frequent characters up to COVERAGE of the text, at most that many."""
    ordered = sorted(counts, key=lambda character: (-counts[character], character))
    numbers_before = itertools.accumulate((counts[c] for c in ordered), initial=0)
    enough = COVERAGE * counts.total()
    frequent = [
        character
        for character, number_before in zip(ordered, numbers_before, strict=False)
        if number_before < enough
    ]
    return "".join(frequent[:most])


def _lines_of(text: str, characters: str) -> list[str]:
    """Return what the trainer is shown of a text: these characters, and a space in any case.

    The trainer does not count the characters of names of its own, and older ones end the process
    where that leaves none. So these names are cut.
    """
    without_names = re.sub("<(?=0x[0-9A-F]{2}>|unk>)", "<\n", text)
    parts = re.findall(f"[ {re.escape(characters)}]+", without_names)
    return cut([*parts, " "])
