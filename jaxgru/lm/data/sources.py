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

from jaxgru.errors import UserError, counted
from jaxgru.lm.files import reason, resolved

STDIN = "-"

FIRST_BYTES = {
    b"\x1f\x8b": "is compressed by gzip; name it .gz or decompress it first",
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
      CorpusError: there is no such file; or it cannot be read, is empty, is in another encoding or
        is not a text.
    """
    if place == STDIN:
        files, source = [("standard input", _standard_input())], "standard input"
    else:
        paths = find_files(place)
        files = [(str(path), _file(path)) for path in paths]
        is_one = paths == [Path(place)]
        source = f"the file {place}" if is_one else f"the {counted(len(files), 'file')} of {place}"
    if encoding != "utf-8" and not reads_bytes:
        source = f"{source} ({encoding})"
    hashes = [hashlib.sha256(data).hexdigest() for _, data in files]
    sha256 = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
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


def find_files(place: str) -> list[Path]:
    """Return the files of a folder or a pattern, sorted, or else the path itself.

    Raises:
      CorpusError: the folder or the pattern has no files.
    """
    path = Path(place)
    if os.path.isdir(path):
        found, none = _below(path), f"the folder {path} contains no files to read."
    elif glob.has_magic(place) and not os.path.lexists(path):
        found, none = _matching(path), f"there is no file that matches {place}."
    else:
        return [path]
    if not found:
        raise CorpusError(none)
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


def _below(folder: Path) -> list[Path]:
    """Return the files below a folder, but for hidden ones; links to folders are not followed."""

    def fail(error: OSError) -> None:
        raise CorpusError(f"{folder} cannot be read: {reason(error)}.") from None

    found = []
    for at, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(at, name) for name in names if not name.startswith(".")]
    return [path for path in found if path.is_file()]


def _matching(pattern: Path) -> list[Path]:
    """Return the files that match a pattern, but for hidden ones; links are not followed by **."""
    is_hidden = lambda part: part.startswith(".") and part not in pattern.parts
    try:
        found = list(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))
    except (OSError, ValueError) as error:  # a name may be too long
        raise CorpusError(f"{pattern} is not a pattern of files: {error}.") from None
    return [path for path in found if path.is_file() and not any(map(is_hidden, path.parts))]


def _file(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CorpusError(
            f"there is no file {path}; a corpus is 'tiny_shakespeare', or the path of a text file, "
            "a folder or a pattern of several, or - for standard input."
        ) from None
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror}.") from None
    if path.suffix != ".gz":
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(f"{path} is damaged, or not compressed by gzip: {error}.") from None


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
    if is_utf_8 and "\0" in text:
        raise CorpusError(
            f"{name} is not a text in UTF-8: byte {data.index(0)} is 0; train with data.encoding "
            "utf-16-le or utf-16-be if it is UTF-16 without a mark, or with data.tokenizer bytes."
        )
    return text
