"""What every tokenizer does, and what those share whose tokens are bytes."""

from __future__ import annotations

import abc
import codecs
import re
from collections.abc import Iterable, Iterator
from typing import ClassVar, TypeAlias

import numpy as np
from jaxtyping import Array, Bool, Int

from jaxgru.errors import UserError
from jaxgru.lm.arguments import as_sequence

Tokens: TypeAlias = Int[np.ndarray, "N"] | Int[Array, "N"]
Chunk: TypeAlias = Int[np.ndarray, "_"] | Int[Array, "_"]  # each of another length
Start: TypeAlias = tuple[str, Bool[np.ndarray, "V"] | None]
HALF_A_PAIR = re.compile("[\ud800-\udfff]")  # a surrogate, which UTF-8 cannot hold


class TokenizerError(UserError):
    """A text that cannot be encoded or learned from, or a tokenizer that cannot be read."""


class Tokenizer(abc.ABC):
    """What every tokenizer does, also one of your own (`register_tokenizer`). Tokens are int32.

    Attributes:
      kind: its name in config.data.tokenizer.
      file_name: in a run folder; no two kinds share one.
      about: what it is and what it loses, for the help.
      is_text: `to_bytes` gives UTF-8, not any bytes.
      is_sized: `learn` is told by model.vocab_size how many tokens to make.
      reads_bytes: a file need not be text; what is not UTF-8 is escaped.
      min_count: what data.min_count is by default; 0: the kind has no unknown token.
      unknown: the token of whatever the vocabulary lacks; None: there is none.
      vocab_size: the number of tokens.
      pieces: of each token: what it stands for; no two are alike.
    """

    kind: ClassVar[str]
    file_name: ClassVar[str]
    about: ClassVar[str] = ""
    is_text: ClassVar[bool] = True
    is_sized: ClassVar[bool] = False
    reads_bytes: ClassVar[bool] = False
    min_count: ClassVar[int] = 0
    unknown: int | None = None
    vocab_size: int
    pieces: list[str]

    @property
    def unwritten(self) -> int | None:
        """The token that new texts leave out by default, as it stands for none: the unknown one."""
        return self.unknown

    @classmethod
    @abc.abstractmethod
    def learn(cls, text: str, vocab_size: int = 0, min_count: int = 1) -> Tokenizer:
        """Return the tokenizer of a text; the numbers are model.vocab_size and data.min_count."""

    @classmethod
    @abc.abstractmethod
    def from_bytes(cls, data: bytes) -> Tokenizer:
        """Invert `to_bytes`. Raises any error for other data, best a ValueError."""

    @abc.abstractmethod
    def to_bytes(self) -> bytes:
        """Return the tokenizer as the content of a file, for `from_bytes`."""

    @abc.abstractmethod
    def encode(self, text: str) -> Int[np.ndarray, "N"]:
        """Return the text's tokens. Raises TokenizerError for characters not in the vocabulary."""

    def decode(self, tokens: Tokens) -> str:
        """Return the tokens' text. Raises what `as_list` raises."""
        return "".join(self.pieces[token] for token in self.as_list(tokens))

    def as_list(self, tokens: Tokens) -> list[int]:
        """Return tokens as a list of Python's numbers. Raises what `as_sequence` raises."""
        return np.asarray(as_sequence("tokens", tokens, self.vocab_size), np.int64).tolist()

    def continuation(self, chunks: Iterable[Chunk]) -> Iterator[str]:
        """Decode the tokens that continue a text, chunk by chunk.

        Text that the tokens of a later chunk could change is held back until it is settled.
        """
        return map(self.decode, chunks)

    def may_follow(self, prompt: str) -> Start:
        """Return the end of the prompt that the next token has to begin with, and which tokens do.

        A word and the space before it are one token of subwords, so at the end of a prompt a space
        is no token of its own. By default "" and None: every token may follow any prompt.
        """
        return "", None

    def num_characters(self, tokens: Tokens, text: str) -> int:
        """Return how many characters of the text these tokens, its first ones, stand for."""
        return len(self.decode(tokens))


def begin_with_spaces(tokenizer: Tokenizer, prompt: str, texts: list[str]) -> Start:
    """Return `may_follow` of a tokenizer whose spaces belong to the word after them.

    If the prompt's last token is of spaces alone, the next token has to begin with them; `texts`
    are those of all tokens.
    """
    if not prompt.endswith(" ") or len(tokens := tokenizer.encode(prompt)) < 2:
        return "", None
    end = texts[tokens[-1]]
    begin = np.array([text.startswith(end) for text in texts])
    if end.strip(" ") or begin.sum() == 1:  # it goes on with no other token
        return "", None
    return end, begin


class ByteLevelTokenizer(Tokenizer):
    """A tokenizer whose tokens stand for some bytes each, those of a text in UTF-8."""

    bytes_of: list[bytes]

    def joined(self, tokens: Tokens) -> bytes:
        """Return the tokens' bytes."""
        return b"".join(map(self.bytes_of.__getitem__, self.as_list(tokens)))

    def decode(self, tokens: Tokens) -> str:
        """Return the tokens' text; U+FFFD stands for bytes that are no UTF-8."""
        return self.joined(tokens).decode(errors="replace")

    def continuation(self, chunks: Iterable[Chunk]) -> Iterator[str]:
        """Decode chunk by chunk; the first bytes of a character wait for its last ones."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for chunk in chunks:
            yield decoder.decode(self.joined(chunk))
        if rest := decoder.decode(b"", final=True):
            yield rest

    def num_characters(self, tokens: Tokens, text: str) -> int:
        """Return how many characters begin in these tokens, the first of the text.

        So a character whose first byte is the last of these tokens is not counted in what follows
        them, where the rest of its bytes are predicted: at most one character of a text.
        """
        number = len(self.joined(tokens))
        # `number` characters have that many bytes at least
        data = text[:number].encode(errors="surrogateescape")[:number]
        whole, read = codecs.utf_8_decode(data, "surrogateescape", False)
        return len(whole) + (read < len(data))


def lacks(vocabulary: str, characters: set[str]) -> TokenizerError:
    """Return the error for characters that a vocabulary does not have; at most ten are named."""
    names = ", ".join(map(repr, sorted(characters)[:10])) + ", …" * (len(characters) > 10)
    them = "them" if len(characters) > 1 else "it"
    return TokenizerError(
        f"the vocabulary of {vocabulary} lacks {names}; leave {them} out or replace {them}."
    )


def check_utf_8(text: str) -> None:
    """Raise TokenizerError for half a surrogate pair, which SentencePiece and files cannot take."""
    if halves := set(HALF_A_PAIR.findall(text)):
        raise lacks("UTF-8", halves)
