"""Read a text from where it is: a file, several, a folder, compressed ones, or standard input."""

from __future__ import annotations

import functools
import glob
import gzip
import hashlib
import os
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxgru.errors import UserError
from jaxgru.lm.data.tokenizers.base import HALF_A_PAIR
from jaxgru.printing import counted

STDIN = "-"
GZIP = b"\x1f\x8b\x08"  # how a file begins that gzip has compressed


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
    is not joined with the next file's first. Raises CorpusError for what is no text, also where
    UTF-8 cannot hold what the encoding gives, which is half a surrogate pair.

    Args:
      place: a file; a folder, of which every file is read, the hidden ones left out; a pattern such
        as `src/**/*.py`; or "-", standard input. Several files are read in the order of their
        paths. A file whose name ends in .gz is decompressed.
      encoding: of all of them.
      reads_bytes: the files need not be text. What is not UTF-8 is escaped by `surrogateescape`,
        and nothing is left out, added or changed.
      newlines: read the line ends of Windows and old Macs as \\n, as `with_newlines` does. The
        corpus's `source` says so where there are any.
    """
    is_utf_8 = encoding == "utf-8"
    if reads_bytes and not is_utf_8:
        raise CorpusError(
            f"the encoding is {encoding}; it must be utf-8, the default: the tokenizer takes the "
            "bytes of a file as they are."
        )
    if place == STDIN:
        files, source = [("standard input", _piped(sys.stdin))], "standard input"
    else:
        paths = find_files(place)
        if not paths:
            where = f"in {place}" if os.path.isdir(place) else place
            raise CorpusError(
                f"there is no file {where}; give the path of a text file, a folder or a pattern of "
                "several, or - for standard input."
            )
        files = [(str(path), _file(path)) for path in paths]
        is_one = paths == [Path(place)]
        source = f"the file {place}" if is_one else f"the {counted(len(files), 'file')} of {place}"
    hashes = [hashlib.sha256(data).hexdigest() for _, data in files]
    sha256 = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    notes = [] if is_utf_8 else [encoding]
    if reads_bytes:
        text = b"".join(data for _, data in files).decode(errors="surrogateescape")
    else:
        texts = [_decoded(name, data, encoding) for name, data in files]
        if newlines and any("\r" in text for text in texts):
            texts = list(map(with_newlines, texts))
            notes.append("line ends as on Windows or old Macs, read as \\n")
        ended = [t if t.endswith("\n") or not t else f"{t}\n" for t in texts[:-1]]
        text = "".join([*ended, texts[-1]])
    if not text:
        raise CorpusError(f"{source} is empty; it must have some text.")
    return Corpus(text, f"{source} ({'; '.join(notes)})" if notes else source, sha256)


def with_newlines(text: str) -> str:
    """Return a text with the line ends of Windows, \\r\\n, and of old Macs, \\r, as \\n.

    So does Python's `open`.
    """
    return text.replace("\r\n", "\n").replace("\r", "\n")


def find_files(place: str) -> list[Path]:
    """Return the file at a place, or those of a folder or a pattern, sorted; none if none is there.

    Hidden files are left out, and `**` follows no links.
    """
    path = Path(place)
    if os.path.isdir(path):
        top, pattern = path, "**/*"
    elif os.path.exists(path) or not glob.has_magic(place):
        return [path] if os.path.exists(path) else []
    else:
        top, pattern = Path(path.anchor), str(path.relative_to(path.anchor))
    is_hidden = lambda part: part.startswith(".") and part not in path.parts
    try:
        paths = list(top.glob(pattern))
    except ValueError as error:
        raise CorpusError(f"{place} is not a pattern of files: {error}.") from None
    for folder in paths:
        if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):  # `glob` leaves it out
            raise CorpusError(f"the folder {folder} cannot be read: permission denied.")
    return sorted(p for p in paths if p.is_file() and not any(map(is_hidden, p.parts)))


def _file(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or "it is not a whole gzip file"
        raise CorpusError(f"{path} cannot be read: {why}.") from None


@functools.cache  # a stream can be read once
def _piped(stream: Any) -> bytes:
    return b"" if stream is None or stream.isatty() else stream.buffer.read()


def _decoded(name: str, data: bytes, encoding: str) -> str:
    if data.startswith(GZIP):  # which other encodings would take for a text
        raise CorpusError(
            f"{name} is compressed by gzip; decompress it, or give it a name that ends in .gz."
        )
    try:
        text = data.decode("utf-8-sig" if encoding == "utf-8" else encoding)
        why = _why_no_text(text, encoding)
    except UnicodeError as error:
        text = ""
        why = _why_not_decoded(error, data, encoding)
    if why:
        raise CorpusError(
            f"{name} is not a text in {encoding.upper()}: {why}; save it in that encoding, name "
            "its own (data.encoding, or for evaluate and sample --encoding), or train with "
            "data.tokenizer bytes."
        )
    return text


def _why_no_text(text: str, encoding: str) -> str:
    """Return what shows that bytes were decoded by the wrong encoding; "" if nothing does."""
    if encoding == "utf-8":
        return "it has NUL characters, as UTF-16 has" if "\0" in text else ""
    if half := HALF_A_PAIR.search(text):
        line = text.count("\n", 0, half.start()) + 1
        return f"it has {half[0]!r} in line {line}, half of a surrogate pair"
    return ""


def _why_not_decoded(error: UnicodeError, data: bytes, encoding: str) -> str:
    """Return where bytes cannot be decoded, if the codec says it."""
    cannot = "it cannot be decoded"
    if not isinstance(error, UnicodeDecodeError):
        return cannot
    start = len(data) - len(error.object) + error.start  # a byte order mark is left out
    try:
        line = data[:start].decode(encoding, "replace").count("\n") + 1
    except UnicodeError:  # of a codec that does not take a part of a text
        return cannot
    return f"byte {start + 1} (0x{data[start]:02x}), in line {line}, is not valid"
