"""How files of measurements are read: each is checked against its types.

The types are in jaxgru, study/study_records.py and bench/benchmark_records.py.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import jax
import msgspec

from jaxgru.errors import UserError
from jaxgru.parallel.hardware import num_cores
from jaxgru.printing import counted

T = TypeVar("T")


def load(path: Path, kind: type[T]) -> T:
    """Read a JSON file that holds a `kind`.

    Raises:
      UserError: the file cannot be read, or holds something else.
    """
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


def describe_hardware() -> str:
    """Return the name of JAX's device (for a CPU, its cores and model) and JAX's version."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{device.device_kind}, JAX {jax.__version__}"
    return f"{counted(num_cores(), 'core')} of {_cpu_model()}, JAX {jax.__version__}"


def _cpu_model() -> str:
    """Return the name of this machine's CPU, which Linux knows more precisely than Python."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        match = re.search(r"model name\s*: (.*)", cpuinfo.read_text())
        if match:
            return match[1]
    return platform.processor() or platform.machine()


def is_finished(run: Path) -> bool:
    """Return whether a run is finished."""
    return (run / "samples.txt").exists()  # the last file that a run writes
