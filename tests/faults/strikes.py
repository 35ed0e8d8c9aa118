"""Strikes a process at the n-th change that it makes below a folder, wherever the call comes from.

`strike.c`, compiled here and preloaded into the process, counts the calls and does what it is told.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import functools
import mmap
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LAYOUT = struct.Struct("7q4096s4096s")  # `struct plan` of strike.c
ALWAYS = 2**62


class How(enum.IntEnum):
    """What the n-th call meets: nothing, an errno, or a signal before it, within it or after it."""

    COUNTED, FAILS, BEFORE, HALF, AFTER = range(5)  # HALF: of the bytes of a write, else AFTER


def compiled(folder: Path) -> Path | None:
    """The library, made in this folder; None: there is no compiler."""
    if not (compiler := shutil.which("cc") or shutil.which("gcc")):
        return None
    source, library = Path(__file__).with_name("strike.c"), folder / "strike.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    return library


@dataclass(frozen=True)
class Plan:
    """When to strike, and how. The default only counts."""

    nth: int = 0
    how: How = How.COUNTED
    number: int = 0  # of the signal or the errno
    times: int = 1  # so many calls on end
    reads: bool = False  # at openings to read, and not at changes

    def __str__(self) -> str:
        if self.how == How.FAILS:
            return f"{errno.errorcode[self.number]} at {self.nth}"
        return f"{signal.Signals(self.number).name} {self.how.name.lower()} {self.nth}"


class Strike:
    """A file shared with a process: the plan, and what came of it."""

    def __init__(self, path: Path, folder: Path, plan: Plan) -> None:
        self.path = path
        words = plan.reads, plan.nth, plan.times, plan.how, plan.number
        path.write_bytes(LAYOUT.pack(*words, 0, 0, b"", bytes(folder.resolve())))
        with open(path, "r+b") as file:
            self._seen = mmap.mmap(file.fileno(), LAYOUT.size)

    @property
    def prepare(self) -> Callable[[], None]:
        """Called in the process, arms it."""
        return functools.partial(arm, self.path)

    @property
    def counts(self) -> tuple[int, int]:
        """How many changes it has made, and how often it has opened something to read."""
        return LAYOUT.unpack(self._seen)[5:7]

    @property
    def struck(self) -> str:
        """The call and the path where it struck first; nothing: it did not come to it."""
        return LAYOUT.unpack(self._seen)[7].rstrip(b"\0").decode(errors="replace")


def arm(path: Path) -> None:
    """In a process with the library: counts from now on, and strikes as the file says."""
    if ctypes.CDLL(None).arm(bytes(path)) != 0:
        raise OSError(f"{path} cannot be shared")
