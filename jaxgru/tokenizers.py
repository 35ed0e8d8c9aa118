"""Text to tokens and back: characters, or SentencePiece subwords. Knows no model."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxgru.errors import UserError
from jaxgru.files import write_bytes


class TokenizerError(UserError):
    """A text that a tokenizer cannot encode or learn from, or a tokenizer file that is none."""


class Tokenizer(Protocol):
    """What every tokenizer does. Tokens are int32, (N,)."""

    vocab_size: int

    def encode(self, text: str) -> np.ndarray:
        """The text's tokens. Raises TokenizerError where it has characters that are unknown."""

    def decode(self, tokens: np.ndarray) -> str:
        """The tokens' text."""

    def num_characters(self, tokens: np.ndarray) -> int:
        """How many characters of text the tokens stand for."""

    def save(self, folder: Path) -> None:
        """Writes the tokenizer into a run folder, for `load_tokenizer`."""


class CharacterTokenizer:
    """One token a character; the vocabulary is a string of distinct characters, in token order."""

    file_name = "tokenizer.json"

    def __init__(self, vocabulary: str) -> None:
        self.vocabulary = vocabulary
        self.vocab_size = len(vocabulary)
        self._token_of = {character: token for token, character in enumerate(vocabulary)}

    @classmethod
    def learn(cls, text: str) -> CharacterTokenizer:
        """The tokenizer of a text: the sorted set of its characters."""
        return cls("".join(sorted(set(text))))

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
        """Writes tokenizer.json: {"characters": the vocabulary}."""
        text = json.dumps({"characters": self.vocabulary}, ensure_ascii=False)
        write_bytes(folder / self.file_name, text.encode())


class SentencePieceTokenizer:
    """Byte-pair subwords by SentencePiece (Kudo & Richardson 2018, arXiv 1808.06226).

    Its normalisation turns every run of white space into one space, so newlines are lost.
    """

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

        model = io.BytesIO()
        try:
            SentencePieceTrainer.train(
                sentence_iterator=iter(text.splitlines()),
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
            reason = " ".join(str(error).split())
            raise TokenizerError(
                f"SentencePiece cannot make {vocab_size} pieces of this text: {reason}"
            ) from error
        return cls(model.getvalue())

    def encode(self, text: str) -> np.ndarray:
        """The text's tokens. Raises TokenizerError where it has characters that are unknown."""
        tokens = np.array(self._processor.encode(text), np.int32)
        if (tokens == self._processor.unk_id()).any():
            unknown = [c for c in sorted(set(text)) if self._processor.unk_id() in self._processor.encode(c)]
            raise TokenizerError(
                f"the vocabulary of {self.vocab_size} pieces lacks "
                f"{', '.join(map(repr, unknown[:10]))}{', …' if len(unknown) > 10 else ''}."
            )
        return tokens

    def decode(self, tokens: np.ndarray) -> str:
        """The tokens' text, with single spaces for white space."""
        return self._processor.decode(np.asarray(tokens).tolist())

    def num_characters(self, tokens: np.ndarray) -> int:
        """The length of the tokens' pieces, a space being one character."""
        return int(self._lengths[tokens].sum())

    def save(self, folder: Path) -> None:
        """Writes tokenizer.model, SentencePiece's own format."""
        write_bytes(folder / self.file_name, self._model)


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
    characters = folder / CharacterTokenizer.file_name
    pieces = folder / SentencePieceTokenizer.file_name
    try:
        if characters.is_file():
            vocabulary = json.loads(characters.read_bytes())["characters"]
            if not isinstance(vocabulary, str) or len(set(vocabulary)) != len(vocabulary):
                raise ValueError("its vocabulary is not a text of distinct characters")
            return CharacterTokenizer(vocabulary)
        if pieces.is_file():
            return SentencePieceTokenizer(pieces.read_bytes())
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise TokenizerError(f"the tokenizer in {folder} cannot be read: {error}.") from error
    raise TokenizerError(f"{folder} has no tokenizer.json or tokenizer.model.")
