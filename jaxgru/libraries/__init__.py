"""Layers to and from other libraries: one file each, which imports its library.

Each file converts weights both ways. Those of Flax, Equinox and dm-haiku also run the library's own
cells at jaxgru's speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from jaxgru.errors import UserError


class LibraryError(UserError):
    """A layer, a cell or weights of another library that cannot be converted, or not run."""


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


def check_shapes(
    where: str,
    have: Mapping[str, tuple[int, ...]],
    want: Mapping[str, tuple[int, ...]],
    error: type[UserError] = LibraryError,
) -> None:
    """Compare tensors' shapes by name, first the names.

    Raises:
      error: they differ; the message begins with `where`.
    """
    for name in sorted(have.keys() ^ want.keys()):
        if name in want:
            raise error(f"{where}: the tensor {name} is missing.")
        raise error(f"{where}: the tensor {name} does not belong there.")
    for name in sorted(want):
        if have[name] != want[name]:
            raise error(
                f"{where}: the tensor {name} has shape {have[name]}; it must be {want[name]}."
            )
