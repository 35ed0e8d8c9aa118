"""Weights in and out, one file a foreign format. Other frameworks are imported only when called."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from jaxgru.errors import UserError


class InteropError(UserError):
    """Weights, or a file of them, that cannot be read or written; the message says why."""


def import_torch() -> ModuleType:
    """PyTorch, imported now. Raises InteropError where it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise InteropError("PyTorch is needed but not installed: pip install torch.") from error
    return torch


def check_shapes(
    where: str, have: Mapping[str, tuple[int, ...]], want: Mapping[str, tuple[int, ...]]
) -> None:
    """Compares tensors' shapes by name.

    Raises:
      InteropError: `where` and the first tensor, by name, that is missing, extra or misshapen.
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
