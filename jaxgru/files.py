"""Files written whole or not at all, and read only where there is an end to them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path


def read_bytes(path: Path) -> bytes:
    """A regular file's content. A pipe might never answer, a device never end.

    Raises:
      OSError: it cannot be read, or is no regular file.
    """
    try:
        mode = os.stat(path).st_mode
    except ValueError:  # a NUL or half a surrogate pair in the name
        raise OSError(errno.EINVAL, "no file can have that name") from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # to read a folder says what is wrong
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
    return path.read_bytes()


def write_bytes(path: Path, data: bytes) -> None:
    """Writes beside, then renames, so that a reader sees the old file or the new one, never half.

    Raises:
      OSError: the folder cannot be written; the old file is untouched.
    """
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, 0o644)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # an interrupt may come after the renaming
            os.unlink(beside)
        raise


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of the text as UTF-8, newlines as they stand."""
    write_bytes(path, text.encode())
