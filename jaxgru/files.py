"""Files written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


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
