"""The one error that is the user's to mend."""

import contextlib
import reprlib
import sys
from typing import Any

MAX_LENGTH = 1000  # characters of a message


class UserError(ValueError):
    """Something asked for cannot be done; the message is one sentence that says why.

    Scripts print it in one line and exit 2, without a traceback. It may quote a file or an
    argument, so what a terminal would not print is escaped, and the middle of what nobody would
    read is left out.
    """

    def __init__(self, message: str) -> None:
        message = printable(message)
        if len(message) > MAX_LENGTH:
            message = f"{message[: MAX_LENGTH // 2]} … {message[-MAX_LENGTH // 4 :]}"
        super().__init__(message)


def printable(text: str) -> str:
    """The text on one line, with what a terminal would obey escaped: "\\n", "\\x1b", "\\udcff"."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 200


def shown(value: Any) -> str:
    """`repr` for a message: cut short, and of any value at all."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python refuses to write out the digits of an endless number
        return "a number of thousands of digits"


def warn(sentence: str) -> None:
    """Print a sentence on stderr, escaped as in a `UserError`, if there still is one."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(printable(sentence), file=sys.stderr, flush=True)
