"""Read a text from where it is: a file, several, a folder, compressed ones, or standard input."""

from __future__ import annotations

import codecs
import functools
import glob
import gzip
import hashlib
import os
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxgru.errors import UserError
from jaxgru.lm.data.tokenizers.base import HALF_A_PAIR
from jaxgru.printing import counted

__all__ = [
    "Corpus",
    "CorpusError",
    "read_text",
    "with_newlines",
]

STDIN = "-"
GZIP = b"\x1f\x8b\x08"
"""How a file begins that gzip has compressed."""

ZIP = b"PK\x03\x04"
"""How a ZIP archive begins."""


class CorpusError(UserError):
    """A corpus that cannot be found, read or split."""


@dataclass(frozen=True)
class Corpus:
    """A text, where it came from, and the SHA-256 (hexadecimal) of its file, decompressed.

    For several files, it is that of their hexadecimal SHA-256s, joined.
    """

    text: str = field(repr=False)
    source: str
    sha256: str


def read_text(
    place: str, encoding: str = "utf-8", reads_bytes: bool = False, newlines: bool = True
) -> Corpus:
    """Read a text, without a byte order mark.

    Where one of several files does not end with a line break, one is added, so that its last line
    is not joined with the next file's first.

    Args:
      place: a file; a folder, of which every file is read, the hidden ones left out; a pattern such
        as `src/**/*.py`; or "-", standard input. Several files are read in the order of their
        paths. A file whose name ends in .gz is decompressed.
      encoding: of all of them.
      reads_bytes: the files need not be text. What is not UTF-8 is escaped by `surrogateescape`,
        and nothing is left out, added or changed.
      newlines: read the line ends of Windows and old Macs as \\n, as `with_newlines` does. The
        corpus's `source` says so where there are any.

    Raises:
      CorpusError: there is no file, one cannot be read, or it is no text, which includes that UTF-8
        cannot hold what the encoding gives, half a surrogate pair.
    """
    is_utf_8 = codecs.lookup(encoding).name == "utf-8"
    if is_utf_8:  # by another of its names
        encoding = "utf-8"
    if reads_bytes and not is_utf_8:
        raise CorpusError(
            f"the encoding is {encoding}; it must be utf-8, the default: the tokenizer takes the "
            "bytes of a file as they are."
        )
    files, source = _files_at(place)
    notes = []
    if not is_utf_8:
        notes.append(encoding)
    if reads_bytes:
        text = b"".join(file.data for file in files).decode(errors="surrogateescape")
    else:
        texts = [_decoded(file, encoding) for file in files]
        if newlines and any("\r" in text for text in texts):
            texts = [with_newlines(text) for text in texts]
            notes.append("line ends as on Windows or old Macs, read as \\n")
        text = _joined(texts)
    if not text:
        raise CorpusError(f"{source} is empty; it must have some text.")
    if notes:
        source = f"{source} ({'; '.join(notes)})"
    return Corpus(text, source, _sha256(files))


class _File(NamedTuple):
    """A file: how messages call it, and its bytes, decompressed."""

    name: str
    data: bytes


def _files_at(place: str) -> tuple[list[_File], str]:
    """Return the files at a place, and what messages call all of them."""
    if place == STDIN:
        return [_File("standard input", _piped(sys.stdin))], "standard input"
    paths = find_files(place)
    if not paths:
        where = f"in {place}" if os.path.isdir(place) else place
        raise CorpusError(
            f"there is no file {where}; give the path of a text file, a folder or a pattern of "
            "several, or - for standard input."
        )
    files = [_File(str(path), _file_bytes(path)) for path in paths]
    if paths == [Path(place)]:
        return files, f"the file {place}"
    return files, f"the {counted(len(files), 'file')} of {place}"


def _sha256(files: list[_File]) -> str:
    """Return the SHA-256 that a `Corpus` of these files has."""
    hashes = [hashlib.sha256(file.data).hexdigest() for file in files]
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _joined(texts: list[str]) -> str:
    """Return the texts of files as one, where no line is of two files."""
    *others, last = texts
    return "".join([*map(_with_end, others), last])


def _with_end(text: str) -> str:
    """Return the text of a file with a line break at its end, unless it is empty."""
    if not text or text.endswith("\n"):
        return text
    return f"{text}\n"


def with_newlines(text: str) -> str:
    """Return a text with the line ends of Windows, \\r\\n, and of old Macs, \\r, as \\n.

    So does Python's `open`.
    """
    return text.replace("\r\n", "\n").replace("\r", "\n")


def find_files(place: str) -> list[Path]:
    """Return the file at a place, or those of a folder or a pattern, sorted; none if none is there.

    Hidden files are left out, and `**` follows no links.

    Raises:
      CorpusError: a folder cannot be read, or Python takes no such pattern.
    """
    path = Path(place)
    if os.path.isdir(path):
        return _matches(place, path, "**/*")
    if os.path.exists(path):
        return [path]
    if not glob.has_magic(place):
        return []
    top = Path(path.anchor)
    return _matches(place, top, str(path.relative_to(top)))


def _matches(place: str, top: Path, pattern: str) -> list[Path]:
    """Return the files below `top` that match a pattern, sorted, but for the hidden ones."""
    try:
        paths = list(top.glob(pattern))
    except ValueError as error:
        raise CorpusError(f"{place} is not a pattern of files: {error}.") from None
    for folder in paths:
        # `glob` leaves out what is in such a folder.
        if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
            raise CorpusError(f"the folder {folder} cannot be read: permission denied.")
    return sorted(path for path in paths if path.is_file() and not _is_hidden(path, place))


def _is_hidden(path: Path, place: str) -> bool:
    """Return whether a file, or a folder that it is in, is hidden and not named by the place."""
    place_parts = Path(place).parts
    return any(part.startswith(".") and part not in place_parts for part in path.parts)


def _file_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or "it is not a whole gzip file"
        raise CorpusError(f"{path} cannot be read: {why}.") from None
    return data


# A stream can be read once.
@functools.cache
def _piped(stream: Any) -> bytes:
    if stream is None or stream.isatty():
        return b""
    return stream.buffer.read()


def _decoded(file: _File, encoding: str) -> str:
    # Some encodings would take it for a text.
    if file.data.startswith(GZIP):
        raise CorpusError(
            f"{file.name} is compressed by gzip; decompress it, or give it a name that ends in .gz."
        )
    if file.data.startswith(ZIP):
        raise CorpusError(
            f"{file.name} is a ZIP archive, as documents of Word are; save its text as plain "
            "text in UTF-8."
        )
    codec = "utf-8-sig" if encoding == "utf-8" else encoding
    try:
        # A codec that names the byte order, such as utf-16-le, leaves the mark in.
        text = file.data.decode(codec).removeprefix("\ufeff")
        why = _why_no_text(text, encoding)
    except UnicodeError as error:
        text = ""
        why = _why_not_decoded(error, file.data, encoding)
    if why:
        raise CorpusError(
            f"{file.name} is not a text in {encoding.upper()}: {why}; save it in that encoding, "
            "name its own (data.encoding, or for evaluate and sample --encoding), or train with "
            "data.tokenizer bytes."
        )
    return text


def _why_no_text(text: str, encoding: str) -> str:
    """Return what shows that bytes were decoded by the wrong encoding; "" if nothing does."""
    if encoding == "utf-8":
        has_nul = "\0" in text
        return "it has NUL characters, as UTF-16 has" if has_nul else ""
    half = HALF_A_PAIR.search(text)
    if half is None:
        return ""
    line = text.count("\n", 0, half.start()) + 1
    return f"it has {half[0]!r} in line {line}, half of a surrogate pair"


def _why_not_decoded(error: UnicodeError, data: bytes, encoding: str) -> str:
    """Return where bytes cannot be decoded, if the codec says it."""
    cannot = "it cannot be decoded"
    if not isinstance(error, UnicodeDecodeError):
        return cannot
    # The error counts from after a byte order mark.
    start = len(data) - len(error.object) + error.start
    try:
        line = data[:start].decode(encoding, "replace").count("\n") + 1
    except UnicodeError:
        # This codec does not take a part of a text.
        return cannot
    return f"byte {start + 1} (0x{data[start]:02x}), in line {line}, is not valid"
