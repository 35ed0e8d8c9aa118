"""How values, names and numbers are written in messages, and how a warning is printed."""

import contextlib
import difflib
import reprlib
import sys
from collections.abc import Iterable
from typing import Any


def nearest(name: str, names: Iterable[str], otherwise: str) -> str:
    """Return "the nearest is …": a field of that name, or a similar name; `otherwise` if none."""
    word = _without_dashes(name)
    spellings = {_without_dashes(each): each for each in names}
    similar = [plain for plain in spellings if plain.rpartition(".")[2] == word]
    if not similar:
        similar = difflib.get_close_matches(word, spellings, n=1)
    if not similar:
        return otherwise
    return f"the nearest is {spellings[similar[0]]}"


def _without_dashes(name: str) -> str:
    """Return the name of an option as it is in Python."""
    return name.strip("-").replace("-", "_")


def printable(text: str) -> str:
    """Return the text on one line, with unprintable characters escaped: "\\n", "\\x1b"."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def counted(number: int, noun: str) -> str:
    """Return "1 token", "2 tokens" or "12,000 tokens"."""
    plural = "" if number == 1 else "s"
    return f"{number:,} {noun}{plural}"


class _Repr(reprlib.Repr):
    """Shows arrays by their dtypes and shapes, also within containers."""

    def repr1(self, x: Any, level: int) -> str:
        if getattr(x, "shape", ()) and hasattr(x, "dtype"):
            return f"an array, {x.dtype} {x.shape}"
        if isinstance(x, tuple):  # also with names
            return self.repr_tuple(x, level)
        return super().repr1(x, level)

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # Python writes no more than some 4,300 digits
            return f"a whole number of {x.bit_length():,} bits"


_REPR = _Repr()
_REPR.maxstring = 200
_REPR.maxlong = 200
_REPR.maxother = 200


def shown(value: Any) -> str:
    """Return `repr(value)` for a message, shortened, with arrays as their dtypes and shapes."""
    return _REPR.repr(value)


def type_name(value: object) -> str:
    """Return the name of a value's type, for a message."""
    return type(value).__name__


def warn(sentence: str) -> None:
    """Print a sentence on stderr, escaped as in a `UserError`, unless stderr is closed or full."""
    if sys.stderr is None:  # then `print` would take standard output
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(printable(sentence), file=sys.stderr, flush=True)
