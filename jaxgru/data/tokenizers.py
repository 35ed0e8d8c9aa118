"""Text to tokens and back: characters, or SentencePiece subwords."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Int

from jaxgru.errors import MissingPackage, UserError, needs
from jaxgru.files import read_bytes, write_bytes

BLOCK = 2**22  # characters that SentencePiece encodes at once, at most
MAX_BYTES = 2**26  # in a tokenizer's file: millions of pieces


Kind = Literal["characters", "sentencepiece"]
Tokens = Int[np.ndarray, "N"] | Int[Array, "N"]


class TokenizerError(UserError):
    """A text that cannot be encoded or learned from, or a tokenizer that cannot be read."""


@runtime_checkable
class Tokenizer(Protocol):
    """What every tokenizer does. Tokens are int32."""

    kind: Kind  # config.data.tokenizer
    file_name: str  # in a run folder
    vocab_size: int
    pieces: list[str]  # of each token: what it stands for; no two are alike

    def encode(self, text: str) -> Int[np.ndarray, "N"]:
        """Return the text's tokens. Raises TokenizerError for characters not in the vocabulary."""
        ...

    def decode(self, tokens: Tokens) -> str:
        """Return the tokens' text."""
        ...

    def num_characters(self, tokens: Tokens) -> int:
        """Return the number of characters that the tokens stand for."""
        ...

    def to_bytes(self) -> bytes:
        """Return the tokenizer as the content of a file, for `tokenizer_from_bytes`."""
        ...


class CharacterTokenizer:
    """One token per character; the vocabulary is the distinct characters, in token order."""

    kind: Kind = "characters"
    file_name = "tokenizer.json"

    def __init__(self, vocabulary: str) -> None:
        self.vocabulary = vocabulary
        self.pieces = list(vocabulary)
        self.vocab_size = len(vocabulary)
        self._token_of = {character: token for token, character in enumerate(vocabulary)}

    @classmethod
    def learn(cls, text: str) -> CharacterTokenizer:
        """Return the tokenizer of a text: the sorted set of its characters."""
        return cls("".join(sorted(set(text))))

    @classmethod
    def from_bytes(cls, data: bytes) -> CharacterTokenizer:
        """Invert `to_bytes`. Raises ValueError for other data."""
        content = json.loads(data)
        vocabulary = content.get("characters") if isinstance(content, dict) else None
        if not isinstance(vocabulary, str) or len(set(vocabulary)) != len(vocabulary):
            raise ValueError("its vocabulary is not a string of distinct characters")
        vocabulary.encode()  # refuse half a surrogate pair, which no file or terminal accepts
        return cls(vocabulary)

    def to_bytes(self) -> bytes:
        """Return JSON in UTF-8: {"characters": the vocabulary}."""
        return json.dumps({"characters": self.vocabulary}, ensure_ascii=False).encode()

    def encode(self, text: str) -> Int[np.ndarray, "N"]:
        """Return the text's tokens. Raises TokenizerError for characters not in the vocabulary."""
        unknown = sorted(set(text) - set(self._token_of))
        if unknown:
            names = ", ".join(map(repr, unknown[:10])) + (", …" if len(unknown) > 10 else "")
            raise TokenizerError(f"the vocabulary of {self.vocab_size} characters lacks {names}.")
        return np.fromiter(map(self._token_of.__getitem__, text), np.int32, len(text))

    def decode(self, tokens: Tokens) -> str:
        """Return the tokens' text."""
        return "".join(self.vocabulary[token] for token in np.asarray(tokens).tolist())

    def num_characters(self, tokens: Tokens) -> int:
        """Return the number of characters: one per token."""
        return len(tokens)


class SentencePieceTokenizer:
    """Byte-pair subwords by SentencePiece (Kudo & Richardson 2018, arXiv 1808.06226).

    SentencePiece replaces white space of any length by one space, so newlines are lost.
    """

    kind: Kind = "sentencepiece"
    file_name = "tokenizer.model"

    def __init__(self, model: bytes) -> None:
        with needs("train"):
            from sentencepiece import SentencePieceProcessor

        self._model = model
        self._processor = SentencePieceProcessor(model_proto=model)
        self.vocab_size = self._processor.vocab_size()
        self.pieces = [self._processor.id_to_piece(token) for token in range(self.vocab_size)]
        self._lengths = np.array([len(piece) for piece in self.pieces])

    @classmethod
    def learn(cls, text: str, vocab_size: int) -> SentencePieceTokenizer:
        """Train as the study does: BPE, every character covered, unk 0, bos 1, eos 2.

        Raises:
          TokenizerError: SentencePiece cannot make that many pieces of that text.
        """
        with needs("train"):
            from sentencepiece import SentencePieceTrainer

        # SentencePiece skips lines of more than 4,192 bytes, with their characters.
        step = 1000
        lines = (l[i : i + step] for l in text.splitlines() for i in range(0, len(l), step))
        model = io.BytesIO()
        try:
            SentencePieceTrainer.train(
                sentence_iterator=lines,
                model_writer=model,
                model_type="bpe",
                vocab_size=vocab_size,
                character_coverage=1.0,
                unk_id=0,
                bos_id=1,
                eos_id=2,
                minloglevel=2,
            )
        except (RuntimeError, OSError) as error:
            # the message begins with a place in SentencePiece's source, and may end there
            reason = re.sub(r"^INTERNAL: \S+ \[.*\] ?", "", " ".join(str(error).split()))
            reason = reason or "it has no words."
            raise TokenizerError(
                f"SentencePiece cannot make {vocab_size} pieces of this text: {reason}"
            ) from error
        return cls(model.getvalue())

    @classmethod
    def from_bytes(cls, data: bytes) -> SentencePieceTokenizer:
        """Invert `to_bytes`. Raises ValueError or RuntimeError for other data."""
        if not data:
            raise ValueError("it is empty")  # SentencePiece would accept it, and fail when used
        return cls(data)

    def to_bytes(self) -> bytes:
        """Return the model in SentencePiece's own format."""
        return self._model

    def encode(self, text: str) -> Int[np.ndarray, "N"]:
        """Return the text's tokens. Raises TokenizerError for characters not in the vocabulary."""
        unknown = sorted(c for c in set(text) if "\ud800" <= c <= "\udfff")  # C++ cannot take them
        if not unknown:
            parts = map(self._processor.encode, _blocks(text))
            tokens = np.concatenate([np.array(part, np.int32) for part in parts])
            if (tokens != self._processor.unk_id()).all():
                return tokens
            pieces = {c: self._processor.encode(c) for c in sorted(set(text))}
            unknown = [c for c in pieces if self._processor.unk_id() in pieces[c]]
        raise TokenizerError(
            f"the vocabulary of {self.vocab_size} pieces lacks "
            f"{', '.join(map(repr, unknown[:10]))}{', …' if len(unknown) > 10 else ''}."
        )

    def decode(self, tokens: Tokens) -> str:
        """Return the tokens' text, with single spaces for white space."""
        return self._processor.decode(np.asarray(tokens).tolist())

    def num_characters(self, tokens: Tokens) -> int:
        """Return the total length of the tokens' pieces; a space is one character."""
        return int(self._lengths[tokens].sum())


def _blocks(text: str) -> Iterator[str]:
    """Cut a text in front of words, where SentencePiece begins a new piece in any case.

    Encoding needs 45 bytes per character, so a long text is not encoded at once.
    """
    start = 0
    while len(text) - start > BLOCK:
        cut = re.compile(r"\s(?=\w)").search(text, start + BLOCK // 2, start + BLOCK)
        if cut is None:
            raise TokenizerError(f"no word begins in {BLOCK // 2:,} characters of the text.")
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def learn_tokenizer(kind: str, text: str, vocab_size: int) -> Tokenizer:
    """Learn a tokenizer of a text; kind is config.data.tokenizer, vocab_size for sentencepiece."""
    if kind == "characters":
        return CharacterTokenizer.learn(text)
    return SentencePieceTokenizer.learn(text, vocab_size)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer into a run folder.

    Raises:
      TokenizerError: as `saved_bytes`.
      OSError: the folder cannot be written.
    """
    write_bytes(folder / tokenizer.file_name, saved_bytes(tokenizer))


def saved_bytes(tokenizer: Tokenizer) -> bytes:
    """Return what `tokenizer_from_bytes` makes the same tokenizer of.

    Raises:
      TokenizerError: it would make none of it, or one of another class.
    """
    if type(tokenizer) not in TOKENIZERS:
        known = " or ".join(cls.__name__ for cls in TOKENIZERS)
        raise TokenizerError(
            f"the tokenizer is a {type(tokenizer).__name__}, which could not be loaded again; it "
            f"must be a {known}."
        )
    try:
        data = tokenizer.to_bytes()
    except UnicodeEncodeError as error:
        raise TokenizerError(f"the {tokenizer.kind} tokenizer is broken: {error}.") from error
    tokenizer_from_bytes(tokenizer.kind, data)
    return data


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer that `save_tokenizer` wrote into the folder.

    Raises:
      TokenizerError: there is none, or it cannot be read.
    """
    for cls in TOKENIZERS:
        if (folder / cls.file_name).is_file():
            return read_tokenizer(folder / cls.file_name)
    raise TokenizerError(f"{folder} has no tokenizer.json or tokenizer.model.")


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer from a file, .json (characters) or .model (SentencePiece).

    Raises:
      TokenizerError: it cannot be read.
    """
    kind = CharacterTokenizer.kind if path.suffix == ".json" else SentencePieceTokenizer.kind
    try:
        return tokenizer_from_bytes(kind, read_bytes(path, at_most=MAX_BYTES))
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}.") from error
    except TokenizerError as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error


def tokenizer_from_bytes(kind: str, data: bytes) -> Tokenizer:
    """Return the tokenizer of a kind whose `to_bytes` gave the data.

    Raises:
      TokenizerError: the kind is unknown, or the data is not one.
      MissingPackage: SentencePiece is needed and not installed.
    """
    cls = {cls.kind: cls for cls in TOKENIZERS}.get(kind)
    if cls is None:
        raise TokenizerError(f"there is no kind of tokenizer {kind!r}.")
    try:
        return cls.from_bytes(data)
    except MissingPackage:
        raise
    except (ValueError, RuntimeError) as error:
        raise TokenizerError(f"the {kind} tokenizer is broken: {error}.") from error


TOKENIZERS = (CharacterTokenizer, SentencePieceTokenizer)
