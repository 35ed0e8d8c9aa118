"""Text to tokens and back: characters, or SentencePiece subwords. Knows no model."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxgru.errors import UserError
from jaxgru.files import read_bytes, write_bytes

BLOCK = 2**22  # characters that SentencePiece encodes at once, at most
MAX_BYTES = 2**26  # of a tokenizer's file: millions of pieces


class TokenizerError(UserError):
    """A text that a tokenizer cannot encode or learn from, or a tokenizer file that is none."""


class Tokenizer(Protocol):
    """What every tokenizer does. Tokens are int32, (N,)."""

    kind: str  # config.data.tokenizer
    file_name: str  # in a run folder
    vocab_size: int

    def encode(self, text: str) -> np.ndarray:
        """The text's tokens. Raises TokenizerError where it has characters that are unknown."""

    def decode(self, tokens: np.ndarray) -> str:
        """The tokens' text."""

    def num_characters(self, tokens: np.ndarray) -> int:
        """How many characters of text the tokens stand for."""

    def to_bytes(self) -> bytes:
        """The tokenizer as a file's content, for `tokenizer_from_bytes`."""

    def save(self, folder: Path) -> None:
        """Writes the tokenizer into a run folder, for `load_tokenizer`."""


class CharacterTokenizer:
    """One token a character; the vocabulary is a string of distinct characters, in token order."""

    kind = "characters"
    file_name = "tokenizer.json"

    def __init__(self, vocabulary: str) -> None:
        self.vocabulary = vocabulary
        self.vocab_size = len(vocabulary)
        self._token_of = {character: token for token, character in enumerate(vocabulary)}

    @classmethod
    def learn(cls, text: str) -> CharacterTokenizer:
        """The tokenizer of a text: the sorted set of its characters."""
        return cls("".join(sorted(set(text))))

    @classmethod
    def from_bytes(cls, data: bytes) -> CharacterTokenizer:
        """The inverse of `to_bytes`; ValueError where there is none."""
        content = json.loads(data)
        vocabulary = content.get("characters") if isinstance(content, dict) else None
        if not isinstance(vocabulary, str) or len(set(vocabulary)) != len(vocabulary):
            raise ValueError("its vocabulary is not a text of distinct characters")
        vocabulary.encode()  # JSON can hold half a surrogate pair, which no file or terminal takes
        return cls(vocabulary)

    def to_bytes(self) -> bytes:
        """JSON in UTF-8: {"characters": the vocabulary}."""
        return json.dumps({"characters": self.vocabulary}, ensure_ascii=False).encode()

    def encode(self, text: str) -> np.ndarray:
        """The text's tokens. Raises TokenizerError where it has characters that are unknown."""
        unknown = sorted(set(text) - set(self._token_of))
        if unknown:
            names = ", ".join(map(repr, unknown[:10])) + (", …" if len(unknown) > 10 else "")
            raise TokenizerError(f"the vocabulary of {self.vocab_size} characters lacks {names}.")
        return np.fromiter(map(self._token_of.__getitem__, text), np.int32, len(text))

    def decode(self, tokens: np.ndarray) -> str:
        """The tokens' text."""
        return "".join(self.vocabulary[token] for token in np.asarray(tokens).tolist())

    def num_characters(self, tokens: np.ndarray) -> int:
        """How many characters the tokens stand for: one each."""
        return len(tokens)

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json."""
        write_bytes(folder / self.file_name, self.to_bytes())


class SentencePieceTokenizer:
    """Byte-pair subwords by SentencePiece (Kudo & Richardson 2018, arXiv 1808.06226).

    Its normalisation turns every run of white space into one space, so newlines are lost.
    """

    kind = "sentencepiece"
    file_name = "tokenizer.model"

    def __init__(self, model: bytes) -> None:
        from sentencepiece import SentencePieceProcessor

        self._model = model
        self._processor = SentencePieceProcessor(model_proto=model)
        self.vocab_size = self._processor.vocab_size()
        pieces = map(self._processor.id_to_piece, range(self.vocab_size))
        self._lengths = np.array([len(piece) for piece in pieces])

    @classmethod
    def learn(cls, text: str, vocab_size: int) -> SentencePieceTokenizer:
        """Trains as the study does: BPE, every character covered, unk 0, bos 1, eos 2.

        Raises:
          TokenizerError: SentencePiece cannot make that many pieces of that text.
        """
        from sentencepiece import SentencePieceTrainer

        # SentencePiece skips lines of over 4,192 bytes, and so would miss their characters.
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
            # its message begins with a place in its own source; if it ends there, no text was found
            reason = re.sub(r"^INTERNAL: \S+ \[.*\] ?", "", " ".join(str(error).split()))
            reason = reason or "there are no words in it."
            raise TokenizerError(
                f"SentencePiece cannot make {vocab_size} pieces of this text: {reason}"
            ) from error
        return cls(model.getvalue())

    @classmethod
    def from_bytes(cls, data: bytes) -> SentencePieceTokenizer:
        """The inverse of `to_bytes`; ValueError or RuntimeError where there is none."""
        if not data:
            raise ValueError("it is empty")  # SentencePiece would take it, and complain at each use
        return cls(data)

    def to_bytes(self) -> bytes:
        """SentencePiece's own format."""
        return self._model

    def encode(self, text: str) -> np.ndarray:
        """The text's tokens. Raises TokenizerError where it has characters that are unknown."""
        unknown = sorted(c for c in set(text) if "\ud800" <= c <= "\udfff")  # not for C++
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

    def decode(self, tokens: np.ndarray) -> str:
        """The tokens' text, with single spaces for white space."""
        return self._processor.decode(np.asarray(tokens).tolist())

    def num_characters(self, tokens: np.ndarray) -> int:
        """The length of the tokens' pieces, a space being one character."""
        return int(self._lengths[tokens].sum())

    def save(self, folder: Path) -> None:
        """Writes tokenizer.model."""
        write_bytes(folder / self.file_name, self.to_bytes())


def _blocks(text: str) -> Iterator[str]:
    """The text in parts that begin with a word, where SentencePiece would begin a piece anyway.

    It takes 45 bytes a character while it encodes, so a long text must not be encoded at once.
    """
    start = 0
    while len(text) - start > BLOCK:
        cut = re.compile(r"\s(?=\w)").search(text, start + BLOCK // 2, start + BLOCK)
        if cut is None:
            raise TokenizerError(f"there is no new word in {BLOCK // 2:,} characters of the text.")
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def learn_tokenizer(kind: str, text: str, vocab_size: int) -> Tokenizer:
    """A tokenizer for the text; kind is config.data.tokenizer, the size is for sentencepiece."""
    if kind == "characters":
        return CharacterTokenizer.learn(text)
    return SentencePieceTokenizer.learn(text, vocab_size)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `save` wrote into the folder.

    Raises:
      TokenizerError: there is none, or it cannot be read.
    """
    for cls in TOKENIZERS:
        if (folder / cls.file_name).is_file():
            return read_tokenizer(folder / cls.file_name)
    raise TokenizerError(f"{folder} has no tokenizer.json or tokenizer.model.")


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a file; its suffix, .json or .model, says which kind it is.

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
    """The tokenizer of that kind whose `to_bytes` gave the data.

    Raises:
      TokenizerError: there is no such kind, or the data is none of it.
    """
    cls = {cls.kind: cls for cls in TOKENIZERS}.get(kind)
    if cls is None:
        raise TokenizerError(f"there is no kind of tokenizer {kind!r}.")
    try:
        return cls.from_bytes(data)
    except (ValueError, RuntimeError) as error:
        raise TokenizerError(f"the {kind} tokenizer is broken: {error}.") from error


TOKENIZERS = (CharacterTokenizer, SentencePieceTokenizer)
