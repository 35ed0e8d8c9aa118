"""What every tokenizer does, and what those share whose tokens are bytes."""

from __future__ import annotations

import abc
import codecs
import re
from collections.abc import Iterable, Iterator
from typing import ClassVar, TypeAlias

import numpy as np
from jaxtyping import Array, Bool, Int

from jaxgru.arguments import as_sequence
from jaxgru.errors import UserError

Tokens: TypeAlias = Int[np.ndarray, "N"] | Int[Array, "N"]
"""The tokens of a text."""
Chunk: TypeAlias = Int[np.ndarray, "_"] | Int[Array, "_"]
"""Some of a text's tokens; each chunk is of another length."""
Start: TypeAlias = tuple[str, Bool[np.ndarray, "V"] | None]
"""The text that the next token has to begin with, and which tokens do; None: all."""

ANY_TOKEN: Start = ("", None)
"""What `may_follow` returns where every token may follow."""

HALF_A_PAIR = re.compile("[\ud800-\udfff]")
"""A surrogate, half of a pair, which UTF-8 cannot hold."""


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
        """Invert `to_bytes`.

        Raises:
          Exception: any error for other data, best a ValueError.
        """

    @abc.abstractmethod
    def to_bytes(self) -> bytes:
        """Return the tokenizer as the content of a file, for `from_bytes`."""

    @abc.abstractmethod
    def encode(self, text: str) -> Int[np.ndarray, "N"]:
        """Return the text's tokens.

        Raises:
          TokenizerError: characters are not in the vocabulary.
        """

    def decode(self, tokens: Tokens) -> str:
        """Return the tokens' text.

        Raises:
          UserError: as `as_list`.
        """
        return "".join(self.pieces[token] for token in self.as_list(tokens))

    def as_list(self, tokens: Tokens) -> list[int]:
        """Return tokens as a list of Python's numbers.

        Raises:
          UserError: they are no sequence of the vocabulary's tokens: see `as_sequence`.
        """
        sequence = as_sequence("tokens", tokens, self.vocab_size)
        return np.asarray(sequence, np.int64).tolist()

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
        return ANY_TOKEN

    def num_characters(self, tokens: Tokens, text: str) -> int:
        """Return how many characters of the text these tokens, its first ones, stand for."""
        return len(self.decode(tokens))


def begin_with_spaces(tokenizer: Tokenizer, prompt: str, texts: list[str]) -> Start:
    """Return `may_follow` of a tokenizer whose spaces belong to the word after them.

    If the prompt's last token is of spaces alone, the next token has to begin with them; `texts`
    are those of all tokens.
    """
    if not prompt.endswith(" "):
        return ANY_TOKEN
    tokens = tokenizer.encode(prompt)
    if len(tokens) < 2:
        return ANY_TOKEN
    end = texts[tokens[-1]]
    mask = np.array([text.startswith(end) for text in texts])
    is_of_spaces = not end.strip(" ")
    begins_others = mask.sum() > 1
    if is_of_spaces and begins_others:
        return end, mask
    return ANY_TOKEN


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
        rest = decoder.decode(b"", final=True)
        if rest:
            yield rest

    def num_characters(self, tokens: Tokens, text: str) -> int:
        """Return how many characters begin in these tokens, the first of the text.

        So a character whose first byte is the last of these tokens is not counted in what follows
        them, where the rest of its bytes are predicted: at most one character of a text.
        """
        num_bytes = len(self.joined(tokens))
        # As many characters have that many bytes at least.
        data = text[:num_bytes].encode(errors="surrogateescape")[:num_bytes]
        whole_characters, num_whole_bytes = codecs.utf_8_decode(data, "surrogateescape", False)
        last_is_cut = num_whole_bytes < len(data)
        return len(whole_characters) + last_is_cut


def lacks(vocabulary: str, characters: set[str], remedy: str = "") -> TokenizerError:
    """Return the error for characters that a vocabulary does not have; at most ten are named.

    Args:
      remedy: what one can do instead of changing the text.
    """
    names = ", ".join(map(repr, sorted(characters)[:10]))
    if len(characters) > 10:
        names += ", …"
    them = "them" if len(characters) > 1 else "it"
    return TokenizerError(
        f"the vocabulary of {vocabulary} lacks {names}; leave {them} out or replace {them}{remedy}."
    )


def check_utf_8(text: str) -> None:
    """Raise TokenizerError for half a surrogate pair, which SentencePiece and files cannot take."""
    halves = set(HALF_A_PAIR.findall(text))
    if halves:
        raise lacks("UTF-8", halves)
