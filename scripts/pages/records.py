"""How files of measurements are read: each is checked against its types.

A damaged file is refused with one sentence. A page can be made of any data that its types allow.
The types are in jaxgru, study/records.py and bench/records.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from jaxgru.errors import UserError
from jaxgru.lm.files import read_bytes, write_text

MAX_BYTES = 2**23
"""Size limit of a file; 40,000 epochs fit."""


class RecordError(UserError):
    """A file of measurements cannot be read; the message says which and why."""


T = TypeVar("T")


def load(path: Path, kind: type[T]) -> T:
    """Read a JSON file that holds a `kind`.

    Raises:
      RecordError: it cannot be read, or holds something else.
    """
    return _decode(path, msgspec.json.Decoder(kind).decode)


def load_or(default: T, path: Path, kind: type[T]) -> T:
    """Read a JSON file as `load` does, or return the default if there is none."""
    return load(path, kind) if path.exists() else default


def load_lines(path: Path, kind: type[T]) -> list[T]:
    """Read a file with a record on each line. Raises as `load` does, also if there is none."""
    records = _decode(path, msgspec.json.Decoder(kind).decode_lines)
    if not records:
        raise RecordError(f"{path} is empty.")
    return records


def dumps(record: Any, indent: int | None = None) -> str:
    """Return the record as JSON, in the form of the files in docs/."""
    return json.dumps(msgspec.to_builtins(record), indent=indent)


def add_to(path: Path, record: T, key: Callable[[T], Any]) -> None:
    """Add a record to a JSON file of a list, which is sorted; it replaces one with the same key.

    Raises:
      RecordError: the file cannot be read, or holds something else.
      OSError: it cannot be written.
    """
    records = {key(other): other for other in load_or([], path, list[type(record)])}
    records[key(record)] = record
    lines = ",\n".join(dumps(records[k]) for k in sorted(records))
    write_text(path, f"[\n{lines}\n]\n")


def grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> dict[Any, list[T]]:
    """Return lists of items by key, in the order in which the keys first occur."""
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _decode(path: Path, decode: Any) -> Any:
    try:
        data = read_bytes(path, at_most=MAX_BYTES)
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        return decode(data)
    except (ValueError, RecursionError) as error:
        why = str(error).replace(". - at", " - at").removesuffix(".")
        raise RecordError(f"{path} is not a file of measurements: {why}.") from error
