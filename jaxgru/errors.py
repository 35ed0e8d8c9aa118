"""UserError, packages that are not installed, and how values and warnings are printed."""

import contextlib
import difflib
import operator
import reprlib
import sys
from collections.abc import Generator, Iterable
from typing import Any

import numpy as np


class UserError(ValueError):
    """What the user asked for cannot be done; the message is one sentence that says why.

    Commands print the message on one line and exit with 2, without a traceback. It may quote a file
    or an argument, so unprintable characters are escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class MissingPackage(UserError, ImportError):
    """A package is not installed; the message names the command that installs it."""


@contextlib.contextmanager
def needs(extra: str) -> Generator[None]:
    """Raise MissingPackage, naming this extra, where an import in the block fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "jaxgru"):
            raise
        raise MissingPackage(
            f"{package} is needed but not installed; {how_to_install(extra)}."
        ) from error


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra, and where to run it: jaxgru is not on PyPI."""
    return f'run pip install -e ".[{extra}]" in a checkout of jaxgru'


def nearest(name: str, names: Iterable[str], otherwise: str) -> str:
    """Return "the nearest is …": a field of that name, or a similar name; `otherwise` if none."""
    plain = lambda name: name.strip("-").replace("-", "_")
    word, spelled = plain(name), {plain(each): each for each in names}
    alike = [each for each in spelled if each.rpartition(".")[2] == word]
    alike = alike or difflib.get_close_matches(word, spelled, n=1)
    return f"the nearest is {spelled[alike[0]]}" if alike else otherwise


def printable(text: str) -> str:
    """Return the text on one line, with unprintable characters escaped: "\\n", "\\x1b"."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def counted(number: int, noun: str) -> str:
    """Return "1 token", "2 tokens" or "12,000 tokens"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


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
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 200


def shown(value: Any) -> str:
    """Return `repr(value)` for a message, shortened, with arrays as their dtypes and shapes."""
    return _REPR.repr(value)


def type_name(value: object) -> str:
    """Return the name of a value's type, for a message."""
    return type(value).__name__


def check_whole(
    name: str, value: Any, most: int = 2**31 - 1, named: str = "", least: int = 1
) -> int:
    """Return a whole number from `least` to `most`, which the message may call `named`."""
    number = None
    with contextlib.suppress(TypeError):
        number = None if isinstance(value, bool) else operator.index(value)
    if number is None or not least <= number <= most:
        raise UserError(
            f"{name} is {shown(value)}; it must be a whole number from {least} to {named or most}."
        )
    return number


def check_one_of(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise UserError unless the value is one of the choices."""
    if value not in [*choices]:  # a list of values has no hash
        raise UserError(f"{name} is {shown(value)}; it must be one of {', '.join(choices)}.")


def check_flags(**flags: object) -> None:
    """Raise ValueError if an option is neither True nor False."""
    for name, value in flags.items():
        if type(value) not in (bool, np.bool_):
            raise ValueError(f"{name} is {type_name(value)}; it must be True or False.")


def warn(sentence: str) -> None:
    """Print a sentence on stderr, escaped as in a `UserError`, unless stderr is closed or full."""
    if sys.stderr is None:  # then `print` would take standard output
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(printable(sentence), file=sys.stderr, flush=True)
