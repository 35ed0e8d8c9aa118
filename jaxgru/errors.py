"""UserError, packages that are not installed, and checks of single arguments."""

import contextlib
import operator
from collections.abc import Generator, Iterable
from types import ModuleType
from typing import Any

import numpy as np

from jaxgru.printing import printable, shown, type_name


class UserError(ValueError):
    """What the user asked for cannot be done; the message is one sentence that says why.

    Commands print the message on one line and exit with 2, without a traceback. It may quote a file
    or an argument, so unprintable characters are escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class MissingPackage(UserError, ImportError):
    """A package is not installed; the message names the command that installs it."""


class LibraryError(UserError):
    """A layer, a cell or weights of another library that cannot be converted, or not run."""


@contextlib.contextmanager
def needs(extra: str) -> Generator[None]:
    """Name an extra where an import in the block fails.

    Raises:
      MissingPackage: a package other than jaxgru cannot be imported.
    """
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


HOW_TO_INSTALL_MODELS = "run pip install ./models in a checkout of jaxgru"
"""The command that installs the larger trained models, and where: they are not on PyPI, either."""


def import_torch() -> ModuleType:
    """Import and return PyTorch.

    Raises:
      LibraryError: it is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise LibraryError("PyTorch is needed but not installed; run pip install torch.") from error
    return torch


@contextlib.contextmanager
def forward_mode_explained() -> Generator[None]:
    """Let JAX's error about forward mode through jaxgru's gradient say what would work."""
    try:
        yield
    except TypeError as error:
        if not {"forward-mode", "custom_vjp"} <= set(str(error).split()):
            raise
        raise TypeError(
            "forward mode (jvp, jacfwd) cannot pass a layer's own gradient; it needs "
            'implementation="autodiff".'
        ) from None


def check_whole(
    name: str, value: Any, most: int = 2**31 - 1, named: str = "", least: int = 1
) -> int:
    """Return a whole number from `least` to `most`, which the message may call `named`.

    Raises:
      UserError: the value is no whole number, or out of this range.
    """
    number = _whole_number(value)
    if number is None or not least <= number <= most:
        raise UserError(
            f"{name} is {shown(value)}; it must be a whole number from {least} to {named or most}."
        )
    return number


def _whole_number(value: Any) -> int | None:
    """Return a value as an int; None if it is of another kind, such as a bool."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_one_of(name: str, value: Any, choices: Iterable[str]) -> None:
    """Check that a value is one of the choices.

    Raises:
      UserError: it is none of them.
    """
    if value not in [*choices]:  # a list of values has no hash
        raise UserError(f"{name} is {shown(value)}; it must be one of {', '.join(choices)}.")


def check_flags(**flags: object) -> None:
    """Check that each option is True or False.

    Raises:
      ValueError: one is neither.
    """
    for name, value in flags.items():
        if type(value) not in (bool, np.bool_):
            raise ValueError(f"{name} is {type_name(value)}; it must be True or False.")
