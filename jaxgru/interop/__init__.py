"""Import and export of weights, one file per foreign format.

A module of a library's own layers imports that library; no other module of jaxgru does. What reads
and writes files imports its framework only when a function needs it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from jaxgru.errors import UserError

SUFFIXES = (".safetensors", ".onnx", ".pth")
"""The files that hold a whole model or its weights; `runs.load_run` reads them all."""


def model_suffix(path: str | Path) -> str:
    """Return which of SUFFIXES a model's file has; "" for other files, and for every folder."""
    suffix = Path(path).suffix
    return suffix if suffix in SUFFIXES and not os.path.isdir(path) else ""


class InteropError(UserError):
    """Weights, or a file of them, that cannot be read or written."""


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
