"""UserError, and how values and warnings are printed."""

import contextlib
import reprlib
import sys
from typing import Any

MAX_LENGTH = 1000  # of a message, in characters


class UserError(ValueError):
    """What the user asked for cannot be done; the message is one sentence that says why.

    Commands print it in one line and exit 2, without a traceback. It may quote a file or an
    argument, so unprintable characters are escaped, and the middle of a long message is left out.
    """

    def __init__(self, message: str) -> None:
        message = printable(message)
        if len(message) > MAX_LENGTH:
            message = f"{message[: MAX_LENGTH // 2]} … {message[-MAX_LENGTH // 4 :]}"
        super().__init__(message)


def printable(text: str) -> str:
    """Return the text on one line, unprintable characters escaped: "\\n", "\\x1b", "\\udcff"."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 200


def shown(value: Any) -> str:
    """Return `repr(value)` for a message, shortened; it works for any value."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python refuses to convert a number of so many digits
        return "a number of thousands of digits"


def warn(sentence: str) -> None:
    """Print a sentence on stderr, escaped as in a `UserError`; do nothing if stderr is closed."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(printable(sentence), file=sys.stderr, flush=True)
