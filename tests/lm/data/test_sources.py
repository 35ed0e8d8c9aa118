"""Where a text may be: files, folders, patterns, .gz, standard input, and other encodings."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import os
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgru.errors import UserError
from jaxgru.lm.config import from_dict, load_config, override, to_dict
from jaxgru.lm.data.dataset import load_dataset
from jaxgru.lm.data.sources import CorpusError, read_text
from jaxgru.lm.data.tokenizers import ByteTokenizer, SentencePieceTokenizer, save_tokenizer

READ_AS_NEWLINES = r"line ends as on Windows or old Macs, read as \n"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def folder(tmp_path):
    """Two texts and a compressed one in a folder below; hidden files and a pipe are left out."""
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfB\r\n")
    (tmp_path / "a.txt").write_bytes(b"no line end")
    (tmp_path / "sub" / "c.txt.gz").write_bytes(gzip.compress("é\n".encode()))
    (tmp_path / ".git" / "x.txt").write_text("hidden")
    (tmp_path / ".x.txt").write_text("hidden")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "again").symlink_to(tmp_path)
    return tmp_path


def test_a_folder_is_its_files_in_the_order_of_their_paths(folder):
    found = read_text(str(folder))
    parts = (b"no line end", b"\xef\xbb\xbfB\r\n", "é\n".encode())
    assert found.text == "no line end\nB\né\n"
    assert found.sha256 == sha256("".join(map(sha256, parts)).encode())
    assert found.source == f"the 3 files of {folder} ({READ_AS_NEWLINES})"
    assert read_text(str(folder), reads_bytes=True).text.encode() == b"".join(parts)


@pytest.mark.parametrize("pattern, text", [
    ("*.txt", "no line end\nB\n"), ("**/*.gz", "é\n"), ("?.txt", "no line end\nB\n"),
    ("sub/c.txt.gz", "é\n"), ("[red].md", "a file may be called like a pattern"),
])  # fmt: skip
def test_patterns(folder, pattern, text):
    (folder / "[red].md").write_text("a file may be called like a pattern")
    assert read_text(str(folder / pattern)).text == text


def test_a_compressed_file_has_the_sha256_of_what_is_in_it(tmp_path):
    for name, data in (("x.txt", b"light"), ("x.txt.gz", gzip.compress(b"light", mtime=0))):
        (tmp_path / name).write_bytes(data)
        found = read_text(str(tmp_path / name))
        assert (found.text, found.sha256) == ("light", sha256(b"light"))


@pytest.mark.parametrize("name, data, says", [
    ("x.gz", b"light", "cannot be read: it is not a whole gzip file"),
    ("x.gz", gzip.compress(b"light", mtime=0)[:-9], "cannot be read: it is not a whole gzip file"),
    ("x.gz", gzip.compress(b"light", mtime=0)[:15] + b"\xff" * 20, "cannot be read: it is not a"),
    ("x.gz", gzip.compress(b"", mtime=0), "is empty"),
    ("x.txt", gzip.compress(b"light", mtime=0), "compressed by gzip; .* a name that ends in .gz"),
    ("x.docx", b"PK\x03\x04\x14", "x.docx is a ZIP archive, .* save its text as plain text"),
    ("", None, "there is no file in .*; give the path"),
    ("*.md", None, r"there is no file .*\*\.md; give the path"),
    ("*.txt", b"\xff\xd8", r"is not a text in UTF-8: byte 1 .0xff., .* save it in that encoding"),
])  # fmt: skip
def test_what_is_no_text(tmp_path, name, data, says):
    if data is not None:
        (tmp_path / name.replace("*", "b")).write_bytes(data)
    with pytest.raises(CorpusError, match=says) as refusal:
        read_text(str(tmp_path / name))
    assert "\n" not in str(refusal.value) and name.replace("*", "") in str(refusal.value)


@pytest.fixture
def piped(monkeypatch):
    """Stands in for standard input."""

    def pipe(data: bytes, tty: bool = False) -> None:
        stream = type("Stream", (), {"buffer": io.BytesIO(data), "isatty": lambda _: tty})
        monkeypatch.setattr(sys, "stdin", stream())

    return pipe


def test_standard_input_can_be_read_again(piped):
    piped("né\n".encode())
    for _ in range(2):
        found = read_text("-")
        assert (found.text, found.source) == ("né\n", "standard input")
        assert found.sha256 == sha256("né\n".encode())


def test_standard_input_that_nothing_is_piped_into(piped):
    for terminal in (False, True):
        piped(b"", terminal)
        with pytest.raises(CorpusError, match="standard input is empty"):
            read_text("-")


@given(text=st.text("aé–日\n", min_size=1, max_size=20))
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "gb18030", "utf-7"])
def test_other_encodings(tmp_path_factory, encoding, text):
    path = tmp_path_factory.mktemp("text") / "x.txt"
    path.write_bytes(text.encode(encoding))
    corpus = read_text(str(path), encoding)
    assert corpus.text == text
    assert corpus.source == f"the file {path}" + f" ({encoding})" * (encoding != "utf-8")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_a_byte_order_mark_is_not_text(tmp_path, encoding):
    """As in a file that Notepad saves as "UTF-16 LE"."""
    path = tmp_path / "x.txt"
    path.write_bytes("\ufeffab".encode(encoding))
    assert read_text(str(path), encoding).text == "ab"


@pytest.mark.parametrize("encoding, data, says", [
    ("ascii", b"a\ncaf\xe9", "is not a text in ASCII: byte 6 .0xe9., in line 2, is not valid"),
    ("utf-16", b"abc", "is not a text in UTF-16: byte 3 .0x63., in line 1"),
    # codecs that say less, and those that give what UTF-8 cannot hold
    ("punycode", b"the cat", "is not a text in PUNYCODE: "),
    ("punycode", b"caf\xe9", "is not a text in PUNYCODE: "),
    ("idna", b"caf\xe9", "is not a text in IDNA: "),
    ("undefined", b"the cat", "is not a text in UNDEFINED: it cannot be decoded; "),
    ("unicode_escape", rb"a\n\ud83d", r"it has '\\ud83d' in line 2, half of a surrogate pair"),
    ("raw_unicode_escape", rb"a \udc80", "half of a surrogate pair"),
    ("utf-7", b"a +2D0- b", "half of a surrogate pair"),
    ("latin-1", gzip.compress(b"light", mtime=0), "is compressed by gzip"),
])  # fmt: skip
def test_a_text_of_another_encoding(tmp_path, encoding, data, says):
    (tmp_path / "x.txt").write_bytes(data)
    with pytest.raises(CorpusError, match=says):
        read_text(str(tmp_path / "x.txt"), encoding)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "cp1252"])
@pytest.mark.parametrize("text", ["one\r\n\r\ntwo\r\n", "one\r\rtwo\r", "one\n\r\ntwo\r"])
def test_line_ends_of_windows_and_old_macs(tmp_path, text, encoding):
    path = tmp_path / "x.txt"
    path.write_bytes(text.encode(encoding))
    found = read_text(str(path), encoding)
    assert (found.text, found.sha256) == ("one\n\ntwo\n", sha256(path.read_bytes()))
    assert found.source.endswith(f"{READ_AS_NEWLINES})")
    kept = read_text(str(path), encoding, newlines=False)
    assert (kept.text, kept.sha256) == (text, found.sha256)
    assert READ_AS_NEWLINES not in kept.source


# ---- a config's data: what is trained on and validated on


def config_of(corpus, **data):
    fields = {f"data.{name}": value for name, value in data.items()}
    small = {"training.sequence_length": 16}
    return load_config("astra_alpha", {"data.corpus": str(corpus), **small, **fields})


def test_a_text_to_validate_on(tiny_text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("Zounds! light\n")
    config, dataset = load_dataset(config_of(tiny_text, validation=str(other)))
    decode = dataset.tokenizer.decode
    assert decode(dataset.train) == tiny_text.read_text()
    assert decode(dataset.validation) == "Zounds! light\n"
    assert dataset.num_characters == len("Zounds! light\n") - 1
    fraction = config_of(tiny_text, validation_fraction=0.2)
    inherited = override(fraction, {"data.validation": str(other)})
    assert load_dataset(inherited)[1].train.tolist() == dataset.train.tolist()
    assert from_dict(to_dict(inherited)) == inherited  # such a run can be read
    assert dataset.sha256 == f"{sha256(tiny_text.read_bytes())} {sha256(other.read_bytes())}"
    assert config.data.validation == str(other)
    assert dataset.source == f"the file {tiny_text} and the file {other}"
    assert load_dataset(config, dataset.tokenizer, dataset.sha256)[1].sha256 == dataset.sha256

    other.write_text("Zounds! night\n")
    with pytest.raises(UserError, match="^.*other.txt has changed.*right one with --data.valid"):
        load_dataset(config, dataset.tokenizer, dataset.sha256)
    alone = load_dataset(config_of(tiny_text))[1].sha256
    with pytest.raises(UserError, match="validated on its own text; leave out --data.val"):
        load_dataset(config, dataset.tokenizer, alone)
    with pytest.raises(UserError, match="on another text; give it with --data.validation"):
        load_dataset(config_of(tiny_text), dataset.tokenizer, dataset.sha256)
    other.unlink()
    with pytest.raises(UserError, match="other.txt; give its place with --data.validation"):
        load_dataset(config, dataset.tokenizer, dataset.sha256)


def test_nothing_held_out(tiny_text):
    """What validates is the last tenth, as by default, and is trained on, too."""
    held_out = load_dataset(config_of(tiny_text))[1]
    dataset = load_dataset(config_of(tiny_text, validation_fraction=0.0))[1]
    assert dataset.tokenizer.decode(dataset.train) == tiny_text.read_text()
    np.testing.assert_array_equal(dataset.validation, held_out.validation)
    assert dataset.num_characters == held_out.num_characters


def test_a_tokenizer_that_exists(tiny_text, tmp_path):
    """Its kind and size are the config's from then on."""
    tokenizer = SentencePieceTokenizer.learn(tiny_text.read_text(), 50)
    save_tokenizer(tokenizer, tmp_path)
    path = (tmp_path / "tokenizer.model").rename(tmp_path / "mine.model")
    config, dataset = load_dataset(config_of(tiny_text, tokenizer_file=str(path)))
    assert dataset.tokenizer.to_bytes() == tokenizer.to_bytes()
    assert (config.data.tokenizer, config.model.vocab_size) == ("sentencepiece", 50)
    assert load_dataset(config)[0] == config  # which names its kind
    with pytest.raises(UserError, match="tokenizer is bytes, but .* of kind sentencepiece; set"):
        load_dataset(config_of(tiny_text, tokenizer="bytes", tokenizer_file=str(path)))
    scribe = {"data.corpus": str(tiny_text), "data.tokenizer_file": str(path)}
    assert load_dataset(load_config("scribe_beta", scribe))[0].data == config.data
    again = override(load_config("scribe_beta"), scribe)  # as --init does
    assert load_dataset(again)[0].data == config.data
    hugging_face = '{"version": "1.0", "pre_tokenizer": null, "model": {"vocab": {}}}'
    files = {"tokenizer.json": hugging_face, "mine.model": "damaged", "x.txt": "a text"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        says = f"{name} is damaged, or no tokenizer; .* a .model of SentenceP"
        with pytest.raises(UserError, match=says):
            load_dataset(config_of(tiny_text, tokenizer_file=str(tmp_path / name)))


WINDOWS = "to be or not to be\r\n" * 20


class TestLineEnds:
    @pytest.fixture
    def novel(self, tmp_path):
        path = tmp_path / "novel.txt"
        path.write_bytes(WINDOWS.encode())
        return path

    def test_they_are_newlines_unless_they_are_kept(self, novel):
        config, dataset = load_dataset(config_of(novel, validation_fraction=0.0))
        assert dataset.tokenizer.decode(dataset.train) == WINDOWS.replace("\r", "")
        assert "\r" not in dataset.tokenizer.pieces and READ_AS_NEWLINES in dataset.source
        again = load_dataset(config, dataset.tokenizer, dataset.sha256)[1]
        assert again.train.tolist() == dataset.train.tolist()
        kept = config_of(novel, validation_fraction=0.0, line_ends="unchanged")
        _, unchanged = load_dataset(kept)
        assert unchanged.tokenizer.decode(unchanged.train) == WINDOWS
        assert unchanged.sha256 == dataset.sha256

    @pytest.mark.parametrize("kind", ["characters", "words", "subwords"])
    def test_a_model_whose_vocabulary_has_them_reads_them(self, novel, kind):
        """As one does that was trained when no text was changed, and whose config says nothing."""
        size = {"tokenizer": kind, "validation_fraction": 0.0}
        config = override(config_of(novel, **size), {"model.vocab_size": 280})
        kept = override(config, {"data.line_ends": "unchanged"})
        _, then = load_dataset(kept)
        _, now = load_dataset(config, then.tokenizer, then.sha256)
        assert then.tokenizer.decode(now.train) == WINDOWS
        assert now.num_characters == then.num_characters

    def test_bytes_are_the_files(self, novel):
        _, dataset = load_dataset(config_of(novel, tokenizer="bytes", validation_fraction=0.0))
        assert np.uint8(dataset.train).tobytes() == WINDOWS.encode()

    def test_a_unit_that_they_end(self, tmp_path):
        (tmp_path / "x.txt").write_bytes(b"Ann\rBob\rEve\r" * 20)
        _, dataset = load_dataset(config_of(tmp_path / "x.txt", separator="\r"))
        assert dataset.tokenizer.decode(dataset.train[:9]).startswith("\r")


def test_bytes_of_a_file_that_is_no_text(tmp_path):
    data = np.random.default_rng(0).bytes(500)
    (tmp_path / "x.bin").write_bytes(data)
    _, dataset = load_dataset(config_of(tmp_path / "x.bin", tokenizer="bytes"))
    assert np.uint8(np.concatenate([dataset.train, dataset.validation])).tobytes() == data
    assert 0 < dataset.num_characters < 50 and dataset.sha256 == sha256(data)


def test_bytes_of_an_encoding_are_refused(tiny_text, tmp_path):
    save_tokenizer(ByteTokenizer(), tmp_path)
    for bytes_ in ({"tokenizer": "bytes"}, {"tokenizer_file": str(tmp_path / "bytes.json")}):
        with pytest.raises(UserError, match="encoding is cp1252; it must be utf-8, the default"):
            load_dataset(config_of(tiny_text, encoding="cp1252", **bytes_))


def test_standard_input_keeps_its_name(piped):
    piped(b"to be or not to be " * 20)
    config, dataset = load_dataset(config_of("-"))
    assert (config.data.corpus, config.name) == ("-", "astra_alpha-stdin")
    moved = dataclasses.replace(config.data, corpus="gone.txt")
    with pytest.raises(UserError, match="there is no text gone.txt"):
        load_dataset(dataclasses.replace(config, data=moved), sha256=dataset.sha256)


def test_a_folder_that_changed_is_another_text(folder):
    (folder / "a.txt").write_text("to be or not to be " * 20)
    config, dataset = load_dataset(config_of(folder))
    assert config.data.corpus == str(folder)
    load_dataset(config, dataset.tokenizer, dataset.sha256)
    (folder / "b.txt").rename(folder / "0.txt")  # the same files in another order
    with pytest.raises(UserError, match="has changed or is another text.*--data.corpus") as refusal:
        load_dataset(config, dataset.tokenizer, dataset.sha256)
    assert dataset.sha256 in str(refusal.value)
    assert read_text(str(folder)).sha256 in str(refusal.value)
