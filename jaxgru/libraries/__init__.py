"""Layers to and from other libraries: one file each, which imports its library.

Each file converts weights both ways. Those of Flax, Equinox and dm-haiku also run the library's own
cells at jaxgru's speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from jaxgru.errors import UserError


class InteropError(UserError):
    """A layer, a cell or weights that cannot be converted or run, or a file that cannot be read."""


def import_torch() -> ModuleType:
    """Import and return PyTorch.

    Raises:
      InteropError: it is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise InteropError("PyTorch is needed but not installed; run pip install torch.") from error
    return torch


def check_shapes(
    where: str, have: Mapping[str, tuple[int, ...]], want: Mapping[str, tuple[int, ...]]
) -> None:
    """Compare tensors' shapes by name, first the names; `where` begins the message."""
    for name in sorted(have.keys() ^ want.keys()):
        if name in want:
            raise InteropError(f"{where}: the tensor {name} is missing.")
        raise InteropError(f"{where}: the tensor {name} does not belong there.")
    for name in sorted(want):
        if have[name] != want[name]:
            raise InteropError(
                f"{where}: the tensor {name} has shape {have[name]}; it must be {want[name]}."
            )
