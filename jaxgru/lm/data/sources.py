"""Read a text from where it is: a file, several, a folder, compressed ones, or standard input."""

from __future__ import annotations

import functools
import glob
import gzip
import hashlib
import io
import os
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxgru.errors import UserError, counted
from jaxgru.lm.files import read_bytes, resolved

STDIN = "-"
MAX_FILES, MAX_BYTES = 100_000, 2**32
"""The most in a folder or a pattern: nobody means a larger one."""
MAX_UNPACKED = 2**30  # bytes of a .gz, whose few bytes may stand for any number

FIRST_BYTES = {
    b"\x1f\x8b": "is compressed by gzip; name it .gz or decompress it first",
    b"BZh": "is compressed by bzip2; decompress it first",
    b"\xfd7zXZ\0": "is compressed by xz; decompress it first",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd; decompress it first",
    b"PK\x03\x04": "is a ZIP archive, as .docx, .odt and .epub files are; save its text as UTF-8",
    b"%PDF-": "is a PDF file; save its text as UTF-8",
    b"\xff\xfe\0\0": "is UTF-32; save it as UTF-8, or train with data.encoding utf-32",
    b"\xff\xfe": "is UTF-16; save it as UTF-8, or train with data.encoding utf-16",
    b"\xfe\xff": "is UTF-16; save it as UTF-8, or train with data.encoding utf-16",
}
"""What a file that is not UTF-8 is, by its first bytes."""


class CorpusError(UserError):
    """A corpus that cannot be found, read or split."""


@dataclass(frozen=True)
class Corpus:
    """A text, where it came from, and a SHA-256 (hexadecimal) of the bytes that it was read from.

    For one file, those are its bytes, decompressed; for several, the hexadecimal SHA-256s of all of
    them, joined.
    """

    text: str = field(repr=False)
    source: str
    sha256: str


def read_text(place: str, encoding: str = "utf-8", reads_bytes: bool = False) -> Corpus:
    """Read a text, unchanged but for a byte order mark, which is left out.

    Where one of several files does not end with a line break, one is added, so that its last line
    is not joined with the next file's first.

    Args:
      place: a file; a folder, of which every file is read, the hidden ones left out; a pattern such
        as `src/**/*.py`; or "-", standard input. Several files are read in the order of their
        paths. A file whose name ends in .gz is decompressed.
      encoding: of all of them.
      reads_bytes: the files need not be text. What is not UTF-8 is escaped by `surrogateescape`,
        and nothing is left out or added.

    Raises:
      CorpusError: there is no such file; it cannot be read, is empty, is in another encoding or is
        not a text; or there are too many files.
    """
    if place == STDIN:
        return _corpus([("standard input", _standard_input())], "standard input", encoding,
                       reads_bytes)  # fmt: skip
    paths = find_files(place)
    if paths == [Path(place)]:
        return _corpus([(str(place), _file(paths[0]))], f"the file {place}", encoding, reads_bytes)
    _check_size(place, paths)
    parts = [(str(path), _file(path)) for path in paths]
    return _corpus(parts, f"the {counted(len(paths), 'file')} of {place}", encoding, reads_bytes)


def find_files(place: str) -> list[Path]:
    """Return the files of a folder or a pattern, sorted, or else the path itself.

    Raises:
      CorpusError: the folder or the pattern has no files, or too many.
    """
    path = Path(place)
    if os.path.isdir(path):
        try:
            found = _below(path)
        except OSError as error:
            raise CorpusError(f"{path} cannot be read: {error.strerror}.") from None
        if not found:
            raise CorpusError(f"the folder {path} contains no files to read.")
    elif glob.has_magic(place) and "\0" not in place and not os.path.lexists(path):
        found = _matching(path)
        if not found:
            raise CorpusError(f"there is no file that matches {place}.")
    else:
        return [path]
    if len(found) > MAX_FILES:
        raise CorpusError(
            f"{place} contains more than {MAX_FILES:,} files; give a smaller part of it."
        )
    return sorted(found)


def is_there(place: str) -> bool:
    """Return whether there is such a file, folder or match; for standard input, True."""
    try:
        return place == STDIN or any(os.path.exists(path) for path in find_files(place))
    except CorpusError:
        return os.path.exists(place)


def absolute(place: str) -> str:
    """Return the absolute path of a place; standard input stays "-"."""
    return place if place == STDIN else str(resolved(Path(place)))


def joined(hashes: list[str]) -> str:
    """Return the SHA-256 of several texts from their hexadecimal SHA-256s."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _below(folder: Path) -> list[Path]:
    """Return the files below a folder, but for hidden ones; links to folders are not followed."""

    def fail(error: OSError) -> None:
        raise error

    found = []
    for at, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(at, name) for name in names if not name.startswith(".")]
        found += [path for path in paths if path.is_file()]
        if len(found) > MAX_FILES:
            break
    return found


def _matching(pattern: Path) -> list[Path]:
    """Return the files that match a pattern, but for hidden ones; links are not followed by **."""
    given = set(pattern.parts)
    try:
        found = Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))
        files = [path for path in found if path.is_file()]
    except (OSError, ValueError) as error:
        raise CorpusError(f"{pattern} is not a pattern of files: {error}.") from None
    return [
        path for path in files if not any(part.startswith(".") for part in set(path.parts) - given)
    ]


def _check_size(place: str, paths: list[Path]) -> None:
    size = sum(os.stat(path).st_size for path in paths if os.path.exists(path))
    if size > MAX_BYTES:
        raise CorpusError(
            f"{place} contains {size:,} bytes in {counted(len(paths), 'file')}; at most "
            f"{MAX_BYTES:,} are read."
        )


def _file(path: Path) -> bytes:
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        raise CorpusError(
            f"there is no file {path}; a corpus is 'tiny_shakespeare', or the path of a text file, "
            "a folder or a pattern of several, or - for standard input."
        ) from None
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror}.") from None
    return _unpacked(path, data) if path.suffix == ".gz" else data


def _unpacked(path: Path, data: bytes) -> bytes:
    try:
        with gzip.open(io.BytesIO(data)) as file:
            unpacked = file.read(MAX_UNPACKED + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(f"{path} is damaged, or not compressed by gzip: {error}.") from None
    if len(unpacked) > MAX_UNPACKED:
        raise CorpusError(
            f"{path} has more than {MAX_UNPACKED:,} bytes when it is decompressed; decompress it "
            "first."
        )
    return unpacked


def _standard_input() -> bytes:
    data = b"" if sys.stdin is None or sys.stdin.isatty() else _read_all(sys.stdin)
    if not data:
        raise CorpusError(
            "the text is standard input (-), but nothing is piped into it; pipe a text, or give "
            "the path of one."
        )
    return data


@functools.cache  # a stream can be read once
def _read_all(stream: Any) -> bytes:
    return stream.buffer.read()


def _corpus(
    files: list[tuple[str, bytes]], source: str, encoding: str, reads_bytes: bool
) -> Corpus:
    if encoding != "utf-8" and not reads_bytes:
        source = f"{source} ({encoding})"
    hashes = [hashlib.sha256(data).hexdigest() for _, data in files]
    sha256 = hashes[0] if len(hashes) == 1 else joined(hashes)
    if reads_bytes:
        text = b"".join(data for _, data in files).decode(errors="surrogateescape")
    else:
        texts = [_decoded(name, data, encoding) for name, data in files]
        ended = [t if t.endswith("\n") or not t else f"{t}\n" for t in texts[:-1]]
        text = "".join([*ended, texts[-1]])
    if not text:
        name = files[0][0] if len(files) == 1 else source
        raise CorpusError(f"{name} is empty; a corpus needs some text.")
    return Corpus(text, source, sha256)


def _decoded(name: str, data: bytes, encoding: str) -> str:
    is_utf_8 = encoding == "utf-8"
    try:
        text = data.decode("utf-8-sig" if is_utf_8 else encoding)
    except UnicodeDecodeError as error:
        if is_utf_8 and (
            known := [w for first, w in FIRST_BYTES.items() if data.startswith(first)]
        ):
            raise CorpusError(f"{name} {known[0]}.") from None
        at = error.start
        seen = f"byte {at} is 0x{data[at]:02x} ({error.reason})" if at < len(data) else error.reason
        raise CorpusError(
            f"{name} is not {encoding.upper()}: {seen}; save it in that encoding, choose other "
            "files by a pattern, name its own encoding (data.encoding, or --encoding of evaluate), "
            "or train with data.tokenizer bytes."
        ) from None
    except UnicodeError as error:  # of UTF-16 without a mark
        raise CorpusError(f"{name} is not {encoding.upper()}: {error}.") from None
    if not is_utf_8 and any("\ud800" <= c <= "\udfff" for c in set(text)):
        raise CorpusError(f"{name} is not {encoding.upper()}: it decodes to half a surrogate pair.")
    if is_utf_8 and "\0" in text:
        nuls = abs(data[0::2].count(0) - data[1::2].count(0))
        raise CorpusError(
            f"{name} seems to be UTF-16, because every second byte is 0; save it as "
            "UTF-8, or train with data.encoding utf-16-le or utf-16-be."
            if nuls > len(data) / 4
            else f"{name} is not a text: byte {data.index(0)} is 0; save it as UTF-8, or "
            "train with data.tokenizer bytes."
        )
    return text
