"""Import and export of weights, one file per foreign format.

A module of a library's own layers imports that library; no other module of jaxgru does. What reads
and writes files imports its framework only when a function needs it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from jaxgru.errors import UserError
from jaxgru.files import open_regular

SUFFIXES = (".safetensors", ".onnx", ".pth")
"""The files that hold a whole model or its weights; `runs.load_run` reads them all."""


def model_suffix(path: str | Path) -> str:
    """Return which of SUFFIXES a model's file has; "" for other files, and for every folder."""
    suffix = Path(path).suffix
    return suffix if suffix in SUFFIXES and not os.path.isdir(path) else ""


class InteropError(UserError):
    """Weights, or a file of them, that cannot be read or written."""


@contextlib.contextmanager
def open_model(path: str | Path, at_most: int | None = None) -> Iterator[BinaryIO]:
    """Open a model's file: a regular one, of `at_most` so many bytes.

    Raises:
      InteropError: there is none, or it cannot be read, for the reason that the system gives.
    """
    try:
        with open_regular(Path(path), at_most) as file:
            yield file
    except FileNotFoundError:
        raise InteropError(f"there is no file {path}.") from None
    except OSError as error:
        raise InteropError(f"{path} cannot be read: {error.strerror or error}.") from error


def import_torch() -> ModuleType:
    """Import and return PyTorch. Raises InteropError where it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise InteropError("PyTorch is needed but not installed: pip install torch.") from error
    return torch


def check_shapes(
    where: str, have: Mapping[str, tuple[int, ...]], want: Mapping[str, tuple[int, ...]]
) -> None:
    """Compare tensors' shapes by name; `where` begins the message.

    Raises:
      InteropError: a tensor is missing, extra or of another shape; the first by name is named.
    """
    for name in sorted(have.keys() | want.keys()):
        if name not in have:
            raise InteropError(f"{where}: the tensor {name} is missing.")
        if name not in want:
            raise InteropError(f"{where}: there is a tensor {name} that does not belong there.")
        if have[name] != want[name]:
            raise InteropError(
                f"{where}: the tensor {name} has shape {have[name]}; it must be {want[name]}."
            )
