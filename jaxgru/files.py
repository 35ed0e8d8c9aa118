"""Files written whole or not at all, what damage of one becomes, SHA-256, and locks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Generator
from pathlib import Path

from jaxgru.errors import MissingPackage, UserError, needs

CHECKSUMS = "checksums.json"


class ModelFileError(UserError):
    """A file of a model that cannot be read or written."""


def reason(error: OSError) -> str:
    """Return the system's message, and in brackets the file that it names but a temporary one."""
    message = error.strerror or str(error)
    name = os.path.basename(os.fsdecode(error.filename2 or error.filename or ""))
    if not name or name.startswith(".jaxgru-"):
        return message
    return f"{message} ({name})"


def write_bytes(path: Path, data: bytes) -> None:
    """Write a temporary file beside `path` and rename it: readers see the old file or the new one.

    Raises:
      OSError: the folder cannot be written; the old file is then untouched.
    """
    part = path.parent / f".jaxgru-{secrets.token_hex(8)}.part"  # short, unlike `path` perhaps
    try:
        with open(part, "xb") as file:  # tempfile ignores the umask
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """Write text as `write_bytes` does, in UTF-8, newlines unchanged."""
    write_bytes(path, text.encode())


@contextlib.contextmanager
def damage_as(kind: type[UserError], where: object) -> Generator[None]:
    """Raise `kind`, whose message `where` begins, for whatever a parser raises in the block.

    Damage can make a parser raise anything; a package that is not installed is no damage.
    """
    try:
        yield
    except MissingPackage:
        raise
    except Exception as error:
        why = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise kind(f"{where}: {' '.join(str(why).split()).rstrip('.')}.") from error


def regular(path: Path) -> Path:
    """Return the path. Raises OSError where a link, a pipe, a device or nothing is there."""
    if path.is_symlink() or not path.is_file():
        raise OSError(f"{path} is missing, or not a regular file")
    return path


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of all files below a folder, which must be `regular`, by relative path."""
    sums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            with open(regular(path), "rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            sums[path.relative_to(folder).as_posix()] = sha256
    return sums


def write_checksums(folder: Path) -> None:
    """Write `checksums.json` into a folder: what `hashes` returns. Raises as `write_bytes`."""
    write_text(folder / CHECKSUMS, json.dumps(hashes(folder), indent=1))


def damage(folder: Path) -> str | None:
    """Return what is not as a folder's checksums say; None: nothing, or it has none."""
    with needs("train"):
        import msgspec
    try:
        actual = hashes(folder)
        if actual.pop(CHECKSUMS, None) is None and not (folder / CHECKSUMS).exists():
            return None
        written = msgspec.json.decode((folder / CHECKSUMS).read_bytes(), type=dict[str, str])
    except OSError as error:
        return reason(error)
    except ValueError as error:
        return f"{CHECKSUMS} is damaged: {error}"
    differences = sorted(name for name, _ in actual.items() ^ written.items())
    if not differences:
        return None
    name = differences[0]
    if name in actual:
        return f"{name} differs from what was written"
    return f"{name} is missing"


@contextlib.contextmanager
def locked(path: Path) -> Generator[bool]:
    """Hold a lock on a file, created if missing; yield False where another process holds it.

    It is an flock, which the kernel releases when the process ends for any reason. It belongs to
    the file and not to its name, so nobody may edit, rename or delete the file. Where there are no
    such locks (some network folders), every process gets it.
    """
    import fcntl  # Windows has none, where training is not supported

    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)  # NFS locks for writers
    try:
        ours = True
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                ours = False
        yield ours
    finally:
        os.close(handle)
