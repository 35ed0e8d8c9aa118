"""Units of a text, such as lines: each is read from a zero state, and ends with one token.

The tokens of a text in units begin with that token, too, so that the first token of each unit is
predicted after it:

    ⏎ a n n a ⏎ b o b ⏎        the state is set to zero before each ⏎ is read

Line ends of Windows, \\r\\n, are read as \\n in every text in units, and in the separator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from jaxgru.errors import UserError
from jaxgru.lm.data.tokenizers import Tokenizer, TokenizerError
from jaxgru.printing import shown

RECORD_SEPARATOR = "\x1e"
"""ASCII's record separator, U+001E."""


def separator(unit: str) -> str:
    """Return what stands between two units of a text: that of a line is a line break."""
    if unit == "line":
        return "\n"
    return unit.replace("\r\n", "\n")


def end_of(unit: str) -> str:
    """Return the character that a model reads as the end of a unit, so that it is one token.

    It is the separator or, for one of several characters, U+001E.
    """
    between = separator(unit)
    return between if len(between) == 1 else RECORD_SEPARATOR


def end_token(tokenizer: Tokenizer, unit: str) -> int | None:
    """Return the token that ends a unit; None if the text is not read in units.

    Raises:
      TokenizerError: the tokenizer has no token for that end alone.
    """
    if not unit:
        return None
    end = end_of(unit)
    tokens = np.zeros(0, np.int32)
    with contextlib.suppress(TokenizerError):
        tokens = tokenizer.encode(end)
    if len(tokens) != 1 or tokenizer.decode(tokens) != end:
        raise TokenizerError(
            f"data.unit is {shown(unit)}, but a tokenizer of kind {tokenizer.kind} has no token "
            f"for {end!r} alone; choose another data.unit or data.tokenizer, or a lower "
            "data.min_count."
        )
    return int(tokens[0])


def units_of(text: str, unit: str) -> list[str]:
    """Return a text's units, without their ends; the last one, which may be "", has none.

    Raises:
      UserError: the text has the character that a model reads as the end of a unit.
    """
    if end_of(unit) != separator(unit) and RECORD_SEPARATOR in text:
        raise UserError(
            f"data.unit is {shown(unit)}, which a model reads as U+001E, but the text has that "
            "character, too; remove it, or choose a data.unit of one character."
        )
    return text.replace("\r\n", "\n").split(separator(unit))


def split_units(text: str, unit: str) -> list[str]:
    """Return the units of a whole text, without their ends; the last one need not have one."""
    units = units_of(text, unit)
    if units[-1] == "":
        return units[:-1]
    return units


def encode_units(
    tokenizer: Tokenizer, units: Sequence[str], unit: str
) -> tuple[Int[np.ndarray, "N"], int]:
    """Return the tokens of units, each encoded by itself, with the end-of-unit token around each.

    The number is of the characters of the text that all tokens but the first stand for.
    """
    ends = np.array([end_token(tokenizer, unit)], np.int32)
    parts = [ends]
    for text in units:
        parts += [tokenizer.encode(text), ends]
    num_characters = sum(map(len, units)) + len(units) * len(separator(unit))
    return np.concatenate(parts), num_characters


def encode_text(
    tokenizer: Tokenizer, text: str, unit: str = ""
) -> tuple[Int[np.ndarray, "N"], int]:
    """Return a text's tokens, and the number of characters that all but the first stand for.

    In units, it begins one and need not end one.
    """
    if unit:
        tokens, num_characters = encode_units(tokenizer, units_of(text, unit), unit)
        return tokens[:-1], num_characters - len(separator(unit))
    tokens = tokenizer.encode(text)
    return tokens, len(text) - tokenizer.num_characters(tokens[:1], text)


def held_out(number: int, fraction: float, seed: int) -> Bool[np.ndarray, "N"]:
    """Draw which of N units are for validation: that fraction of them, but at least one."""
    # A RandomState draws the same in all versions of NumPy.
    rng = np.random.RandomState(seed)
    num_held_out = max(1, round(fraction * number))
    mask = np.zeros(number, bool)
    mask[rng.permutation(number)[:num_held_out]] = True
    return mask
