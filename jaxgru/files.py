"""Files written whole or not at all, told from spoilt ones, locked, read if they have an end."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

PART = ".part"  # ends the name of a file that is being written


def read_bytes(path: Path, at_most: int | None = None) -> bytes:
    """A regular file's content. A pipe might never answer, a device never end.

    at_most: how many bytes there may be; a file of holes can have any number.

    Raises:
      OSError: it cannot be read, is no regular file, or is larger.
    """
    try:
        status = os.stat(path)
    except ValueError:  # a NUL or half a surrogate pair in the name
        raise OSError(errno.EINVAL, "no file can have that name") from None
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
    if at_most is not None and status.st_size > at_most:
        what = f"it has {status.st_size:,} bytes; there may be {at_most:,}"
        raise OSError(errno.EFBIG, what)
    return path.read_bytes()  # of a folder: to read it says what is wrong


def write_bytes(path: Path, data: bytes) -> None:
    """Writes beside, then renames, so that a reader sees the old file or the new one, never half.

    Raises:
      OSError: the folder cannot be written; the old file is untouched.
    """
    beside = path.parent / f".{path.name}.{secrets.token_hex(4)}{PART}"
    try:
        with open(beside, "xb") as file:  # not by tempfile, which heeds no umask
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):  # it may never have been made, or be renamed already
            os.unlink(beside)
        raise


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of the text as UTF-8, newlines as they stand."""
    write_bytes(path, text.encode())


def remove_parts(path: Path) -> None:
    """Removes what a process that was killed inside `write_bytes(path, …)` left beside the file."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[^.]+{re.escape(PART)}")
    for part in path.parent.glob(f".*{PART}"):
        if name.fullmatch(part.name):
            part.unlink(missing_ok=True)


def files_below(folder: Path) -> dict[str, int]:
    """The size of every file below a folder, by its path in there ("/" between names).

    A link may lead outside, a pipe never answer, a device never end.

    Raises:
      OSError: a folder cannot be read, or holds a link, a pipe or a device.
    """

    def fail(error: OSError) -> None:
        raise error

    sizes = {}
    for at, folders, files in os.walk(folder, onerror=fail):
        for name in (*folders, *files):
            path = Path(at, name)
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                sizes[path.relative_to(folder).as_posix()] = status.st_size
            elif not stat.S_ISDIR(status.st_mode):
                what = f"{path.relative_to(folder).as_posix()} is a link, a pipe or a device"
                raise OSError(errno.EINVAL, what)
    return sizes


def hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder, by its path in there ("/" between names).

    Raises:
      OSError: a file cannot be read, or there is a link, a pipe or a device.
    """
    return {name: file_hash(folder / name) for name in sorted(files_below(folder))}


def file_hash(path: Path) -> str:
    """A file's SHA-256 in hexadecimal. Raises OSError where it cannot be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_writable(folder: Path) -> None:
    """Makes a file without a name in a folder: permission bits say nothing to root, or of mounts.

    Raises:
      OSError: no file can be made there.
    """
    with tempfile.TemporaryFile(dir=folder):
        pass


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold a lock on a file, which is made if need be; yield False where another process holds it.

    The lock is flock's, so the kernel drops it when the process ends, however that comes about. It
    is on the file and not on its name: nobody may edit, rename or delete the file. Where there are
    no such locks (Windows, some network folders), everyone gets it.

    Raises:
      OSError: the file cannot be made or opened.
    """
    try:
        import fcntl
    except ImportError:
        yield True
        return
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)  # NFS locks for writers
    try:
        ours = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            ours = False
        except OSError:
            pass
        yield ours
    finally:
        os.close(handle)
