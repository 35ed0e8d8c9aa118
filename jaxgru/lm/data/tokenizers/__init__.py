"""Text to tokens and back. A kind of tokenizer is a file here, and an entry in TOKENIZERS.

Exact, so that `decode(encode(text)) == text`: characters, subwords, bytes. Not exact: the study's
sentencepiece, and words.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from jaxgru.files import damage_as, write_bytes
from jaxgru.lm.data.tokenizers.base import (
    Chunk,
    Start,
    Tokenizer,
    TokenizerError,
    Tokens,
    check_utf_8,
)
from jaxgru.lm.data.tokenizers.characters import CharacterTokenizer
from jaxgru.lm.data.tokenizers.raw_bytes import ByteTokenizer
from jaxgru.lm.data.tokenizers.sentencepiece import SPACE, SentencePieceTokenizer
from jaxgru.lm.data.tokenizers.subwords import SubwordTokenizer
from jaxgru.lm.data.tokenizers.words import WordTokenizer, combining_marks
from jaxgru.printing import type_name

__all__ = [
    "CORPUS_TOKENIZERS",
    "SPACE",
    "TOKENIZERS",
    "ByteTokenizer",
    "CharacterTokenizer",
    "Chunk",
    "SentencePieceTokenizer",
    "Start",
    "SubwordTokenizer",
    "Tokenizer",
    "TokenizerError",
    "Tokens",
    "WordTokenizer",
    "check_utf_8",
    "combining_marks",
    "learn_tokenizer",
    "load_tokenizer",
    "read_tokenizer",
    "register_tokenizer",
    "save_tokenizer",
    "saved_bytes",
    "tokenizer_from_bytes",
]

CLASSES = (
    CharacterTokenizer,
    SubwordTokenizer,
    SentencePieceTokenizer,
    ByteTokenizer,
    WordTokenizer,
)
TOKENIZERS: dict[str, type[Tokenizer]] = {cls.kind: cls for cls in CLASSES}
"""The class of each kind, by the name that `data.tokenizer` gives it."""

CORPUS_TOKENIZERS = {65: "characters", 1000: "sentencepiece"}
"""The study's two vocabulary sizes, and the kind of Tiny Shakespeare's tokenizer for each."""


def register_tokenizer(cls: type[Tokenizer]) -> type[Tokenizer]:
    """Make your own kind of tokenizer known; usable as a decorator of its class.

    In every process that registers it, configs may then name it, and files that hold it can be
    saved and loaded.

    Raises:
      TokenizerError: another class has this kind or this file name.
    """
    for other in TOKENIZERS.values():
        if cls.kind == other.kind or cls.file_name == other.file_name:
            raise TokenizerError(
                f"{cls.__name__} cannot be registered: its kind {cls.kind!r} and its file_name "
                f"{cls.file_name!r} must be its own, and {other.__name__} has {other.kind!r} and "
                f"{other.file_name!r}."
            )
    TOKENIZERS[cls.kind] = cls
    return cls


def learn_tokenizer(kind: str, text: str, vocab_size: int, min_count: int = 1) -> Tokenizer:
    """Learn a tokenizer of a text: `Tokenizer.learn` of one of TOKENIZERS.

    Raises:
      TokenizerError: the text cannot be learned from, or not with that vocab_size.
    """
    return TOKENIZERS[kind].learn(text, vocab_size, min_count)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer into a run folder.

    Raises:
      TokenizerError: as `saved_bytes`.
      OSError: the file cannot be written.
    """
    # What is no tokenizer has no file_name, either, so this comes first.
    data = saved_bytes(tokenizer)
    write_bytes(folder / tokenizer.file_name, data)


def saved_bytes(tokenizer: Tokenizer) -> bytes:
    """Return the bytes from which `tokenizer_from_bytes` makes the same tokenizer.

    Raises:
      TokenizerError: it could not, or the tokenizer's class is not registered.
    """
    if type(tokenizer) not in TOKENIZERS.values():
        classes = ", ".join(cls.__name__ for cls in TOKENIZERS.values())
        raise TokenizerError(
            f"the tokenizer is {type_name(tokenizer)}, which could not be loaded again; it must be "
            f"a {classes}, or of a class that register_tokenizer knows."
        )
    data = tokenizer.to_bytes()
    tokenizer_from_bytes(tokenizer.kind, data)
    return data


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a run folder.

    Raises:
      TokenizerError: there is none, or it cannot be read.
    """
    names = [cls.file_name for cls in TOKENIZERS.values()]
    for name in names:
        if (folder / name).is_file():
            return read_tokenizer(folder / name)
    raise TokenizerError(f"{folder} has no tokenizer: none of {', '.join(names)}.")


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer from a file, which may have another name than in a run folder.

    Such a file is tried as each kind with its suffix: a .model is read as subwords if it loses
    nothing, and otherwise as sentencepiece.

    Raises:
      TokenizerError: it cannot be read.
    """
    classes = [cls for cls in TOKENIZERS.values() if cls.file_name == path.name]
    if not classes:
        classes = [cls for cls in TOKENIZERS.values() if Path(cls.file_name).suffix == path.suffix]
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}.") from error
    for cls in classes:
        with contextlib.suppress(TokenizerError):
            return tokenizer_from_bytes(cls.kind, data)
    raise TokenizerError(
        f"{path} is damaged, or no tokenizer; it must be a .model of SentencePiece, or a file that "
        "jaxgru wrote."
    )


def tokenizer_from_bytes(kind: str, data: bytes) -> Tokenizer:
    """Return the tokenizer of this kind whose `to_bytes` returned the data.

    Raises:
      TokenizerError: there is no such kind, or the data is broken.
    """
    cls = TOKENIZERS.get(kind)
    if cls is None:
        raise TokenizerError(f"there is no kind of tokenizer {kind!r}.")
    with damage_as(TokenizerError, f"the {kind} tokenizer is broken"):
        tokenizer = cls.from_bytes(data)
        # This raises an error for half a surrogate pair, which is no text.
        "".join(tokenizer.pieces).encode()
    return tokenizer
