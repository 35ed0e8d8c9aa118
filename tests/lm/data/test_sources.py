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
    found, parts = read_text(str(folder)), (b"no line end", b"\xef\xbb\xbfB\r\n", "é\n".encode())
    assert found.text == "no line end\nB\r\né\n"
    assert found.sha256 == sha256("".join(map(sha256, parts)).encode())
    assert found.source == f"the 3 files of {folder}"
    assert read_text(str(folder), reads_bytes=True).text.encode() == b"".join(parts)


@pytest.mark.parametrize("pattern, text", [
    ("*.txt", "no line end\nB\r\n"), ("**/*.gz", "é\n"), ("?.txt", "no line end\nB\r\n"),
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


@pytest.mark.parametrize("encoding, data, says", [
    ("ascii", b"a\ncaf\xe9", "is not a text in ASCII: byte 6 .0xe9., in line 2, is not valid"),
    ("utf-16", b"abc", "is not a text in UTF-16: byte 3 .0x63., in line 1"),
])  # fmt: skip
def test_a_text_of_another_encoding(tmp_path, encoding, data, says):
    (tmp_path / "x.txt").write_bytes(data)
    with pytest.raises(CorpusError, match=says):
        read_text(str(tmp_path / "x.txt"), encoding)


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
