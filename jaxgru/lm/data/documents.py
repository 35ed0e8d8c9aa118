"""Documents of a text, such as lines: each is read from a zero state, and ends with one token.

The tokens of a text in documents begin with that token, too, so that the first token of each
document is predicted after it:

    ⏎ a n n a ⏎ b o b ⏎        the state is set to zero before each ⏎ is read

Line ends of Windows, \\r\\n, are read as \\n in every text in documents, and in the separator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from jaxgru.errors import UserError
from jaxgru.lm.data.tokenizers import Tokenizer, TokenizerError
from jaxgru.printing import shown

__all__ = [
    "encode_documents",
    "encode_text",
    "separator_token_of",
    "split_documents",
]

RECORD_SEPARATOR = "\x1e"
"""ASCII's record separator, U+001E."""


def separator_text(separator: str) -> str:
    """Return what stands between two documents: that of a line is a line break."""
    if separator == "line":
        return "\n"
    return separator.replace("\r\n", "\n")


def separator_character(separator: str) -> str:
    """Return the character that a model reads as the end of a document, so that it is one token.

    It is the separator or, for one of several characters, U+001E.
    """
    text = separator_text(separator)
    return text if len(text) == 1 else RECORD_SEPARATOR


def separator_token_of(tokenizer: Tokenizer, separator: str) -> int | None:
    """Return the token that ends a document; None if the text is not read in documents.

    Raises:
      TokenizerError: the tokenizer has no token for the separator alone.
    """
    if not separator:
        return None
    character = separator_character(separator)
    tokens = np.zeros(0, np.int32)
    with contextlib.suppress(TokenizerError):
        tokens = tokenizer.encode(character)
    if len(tokens) != 1 or tokenizer.decode(tokens) != character:
        raise TokenizerError(
            f"data.separator is {shown(separator)}, but a tokenizer of kind {tokenizer.kind} has "
            f"no token for {character!r} alone; choose another data.separator or data.tokenizer, "
            "or a lower data.min_count."
        )
    return int(tokens[0])


def documents_of(text: str, separator: str) -> list[str]:
    """Return a text's documents, without their ends; the last one, which may be "", has none.

    Raises:
      UserError: the text has the character that a model reads as the end of a document.
    """
    if separator_character(separator) != separator_text(separator) and RECORD_SEPARATOR in text:
        raise UserError(
            f"data.separator is {shown(separator)}, which a model reads as U+001E, but the text "
            "has that character, too; remove it, or choose a data.separator of one character."
        )
    return text.replace("\r\n", "\n").split(separator_text(separator))


def split_documents(text: str, separator: str) -> list[str]:
    """Return the documents of a whole text, without their ends; the last one need not have one."""
    documents = documents_of(text, separator)
    if documents[-1] == "":
        return documents[:-1]
    return documents


def encode_documents(
    tokenizer: Tokenizer, documents: Sequence[str], separator: str
) -> tuple[Int[np.ndarray, "N"], int]:
    """Return the tokens of documents, each encoded by itself, with the separator token around each.

    The number is of the characters of the text that all tokens but the first stand for.
    """
    separator_tokens = np.array([separator_token_of(tokenizer, separator)], np.int32)
    parts = [separator_tokens]
    for text in documents:
        parts += [tokenizer.encode(text), separator_tokens]
    num_characters = sum(map(len, documents)) + len(documents) * len(separator_text(separator))
    return np.concatenate(parts), num_characters


def encode_text(
    tokenizer: Tokenizer, text: str, separator: str = ""
) -> tuple[Int[np.ndarray, "N"], int]:
    """Return a text's tokens, and the number of characters that all but the first stand for.

    In documents, it begins one and need not end one.
    """
    if separator:
        tokens, num_characters = encode_documents(
            tokenizer, documents_of(text, separator), separator
        )
        return tokens[:-1], num_characters - len(separator_text(separator))
    tokens = tokenizer.encode(text)
    return tokens, len(text) - tokenizer.num_characters(tokens[:1], text)


def held_out(number: int, fraction: float, seed: int) -> Bool[np.ndarray, "N"]:
    """Draw which of N documents are for validation: that fraction of them, but at least one."""
    # A RandomState draws the same in all versions of NumPy.
    rng = np.random.RandomState(seed)
    num_held_out = max(1, round(fraction * number))
    mask = np.zeros(number, bool)
    mask[rng.permutation(number)[:num_held_out]] = True
    return mask
