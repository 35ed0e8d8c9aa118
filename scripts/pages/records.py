"""How files of measurements are read: each is checked against its types.

The types are in jaxgru, study/records.py and bench/records.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from jaxgru.errors import UserError

T = TypeVar("T")


def load(path: Path, kind: type[T]) -> T:
    """Read a JSON file that holds a `kind`. Raises UserError where it holds something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a file of measurements: {error}.") from error


def load_or(default: T, path: Path, kind: type[T]) -> T:
    """Read a JSON file as `load` does, or return the default if there is none."""
    return load(path, kind) if path.exists() else default


def dumps(record: Any, indent: int | None = None) -> str:
    """Return the record as JSON, in the form of the files in docs/."""
    return json.dumps(msgspec.to_builtins(record), indent=indent)


def grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> dict[Any, list[T]]:
    """Return lists of items by key, in the order in which the keys first occur."""
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
