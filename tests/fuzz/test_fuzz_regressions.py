"""What fuzzing found, one test each; docs/reliability.md tells the story."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import jax
import pytest
from conftest import refuse_to_open
from fuzzing import check_message, time_limit
from rich.console import Console

import jaxgru
from jaxgru.analysis.state_cost import Chain, Cycle
from jaxgru.cli import evaluate
from jaxgru.errors import UserError
from jaxgru.libraries import InteropError
from jaxgru.lm import Config, ModelConfig
from jaxgru.lm.config import ConfigError, from_dict, load_config
from jaxgru.lm.data.corpus import CorpusError
from jaxgru.lm.data.dataset import load_dataset
from jaxgru.lm.data.tokenizers import (
    CharacterTokenizer,
    SentencePieceTokenizer,
    TokenizerError,
    read_tokenizer,
)
from jaxgru.lm.formats.onnx import load_onnx
from jaxgru.lm.formats.pickles import check_pickle
from jaxgru.lm.formats.pth import load_pth_model, save_pth
from jaxgru.lm.formats.safetensors import (
    load_safetensors,
    load_safetensors_config,
    save_safetensors,
)
from jaxgru.lm.runs.initial import config_from

ROOT = Path(__file__).resolve().parents[2]


def refusal(error: type[UserError], call, *arguments) -> str:
    """The message that a call is refused with, at once: one printable line."""
    with time_limit(30), pytest.raises(error) as refused:
        call(*arguments)
    check_message(refused.value)
    return str(refused.value)


@pytest.fixture
def pipe(tmp_path) -> Path:
    """A pipe that nobody writes to, under any name: opening it waits for ever."""
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.fixture(scope="module")
def pieces() -> SentencePieceTokenizer:
    return SentencePieceTokenizer.learn("to be or not to be that is the question\n" * 9, 30)


class TestMessages:
    def test_what_a_terminal_would_obey_is_escaped(self):
        error = UserError("a\nb\x1b[31m\u202e\ud800é")
        assert str(error) == r"a\nb\x1b[31m\u202e\ud800é"
        check_message(error)

    def test_the_middle_of_a_long_one_is_left_out(self):
        message = str(UserError(f"name is {'x' * 10**6}; it must be short."))
        assert len(message) < 1000 and message.startswith("name is x")
        assert message.endswith("x; it must be short.")

    def test_an_endless_number_has_no_digits(self):
        assert jaxgru.errors.shown(1 << 99_999) == "a number of thousands of digits"


class TestConfigs:
    @pytest.mark.parametrize("text", ["a = " + "[" * 9999, "a = " + "{a = " * 9999])
    def test_brackets_in_brackets(self, text, tmp_path):
        (tmp_path / "a.toml").write_text(text)
        says = refusal(ConfigError, load_config, tmp_path / "a.toml")
        assert "is not a TOML file" in says and "recursion" in says

    @pytest.mark.parametrize(
        "table",
        [
            {"name": 1 << 99_999},
            {"model": 1 << 99_999},
            {"model": {"cell": 1 << 99_999}},
            {"data": {"corpus": 1 << 99_999}},
        ],
    )
    def test_endless_numbers(self, table):
        """TOML may write them in hexadecimal; Python does not write them in decimal."""
        assert "a number of thousands of digits" in refusal(ConfigError, from_dict, table)

    def test_a_number_that_no_float_holds(self):
        table = {"training": {"learning_rate": 10**400}}
        says = "learning_rate is inf; it must be above 0 and finite"
        assert says in refusal(ConfigError, from_dict, table)

    def test_a_path_that_no_folder_takes(self):
        assert "File name too long" in refusal(ConfigError, load_config, "x" * 300 + ".toml")

    def test_a_name_that_no_folder_takes(self):
        assert "at most 200" in refusal(ConfigError, from_dict, {"name": "x" * 201})
        assert from_dict({"name": "x" * 200}).name == "x" * 200


class TestFilesThatAreNone:
    def test_a_corpus(self, pipe):
        for name, says in (
            (pipe, "it is a pipe or a device"),
            ("/dev/zero", "it is a pipe or a device"),
            ("a\0b", "no file can have that name"),
            ("\ud800", "is not UTF-8"),
            ("x" * 300, "File name too long"),
        ):
            options = {"data.corpus": str(name)}
            call = lambda options=options: load_dataset(load_config("astra_alpha", options))
            assert says in refusal(UserError, call)

    def test_a_corpus_whose_name_is_not_utf8(self, tmp_path):
        """It could be read, but neither printed nor kept in config.toml."""
        path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")
        Path(path).write_text("some text " * 99)
        assert "which is not UTF-8" in refusal(
            ConfigError, load_config, "astra_alpha", {"data.corpus": path}
        )

    def test_a_given_copy_of_the_corpus(self, pipe):
        assert "pipe" in refusal(CorpusError, lambda: jaxgru.lm.data.corpus.load_corpus(path=pipe))

    @pytest.mark.parametrize("suffix", [".json", ".model"])
    def test_a_tokenizer(self, pipe, tmp_path, suffix):
        link = tmp_path / f"x{suffix}"
        link.symlink_to(pipe)
        assert "it is a pipe or a device" in refusal(TokenizerError, read_tokenizer, link)

    def test_models(self, pipe, tmp_path, monkeypatch):
        for call, suffix in (
            (load_safetensors, ".safetensors"),
            (load_safetensors_config, ".safetensors"),
            (config_from, ".safetensors"),  # train --init
            (load_onnx, ".onnx"),
            (load_pth_model, ".pth"),
        ):
            link = tmp_path / f"pipe{suffix}"
            if not link.is_symlink():
                link.symlink_to(pipe)
            says = refusal(InteropError, call, str(link))
            assert says == f"{link} cannot be read: it is a pipe or a device, not a file."
            if call is config_from:  # which takes any name of a model
                continue
            says = refusal(InteropError, call, tmp_path / ("x" * 300 + suffix))
            assert "cannot be read: File name too long" in says
            assert "there is no file" in refusal(InteropError, call, tmp_path / f"none{suffix}")
            assert f"{tmp_path} cannot be read: Is a dir" in refusal(InteropError, call, tmp_path)
            (whole := tmp_path / f"whole{suffix}").touch()
            with monkeypatch.context() as patch:
                refuse_to_open(whole, patch)
                says = refusal(InteropError, call, whole)
            assert says == f"{whole} cannot be read: Permission denied."

    def test_a_config(self, pipe, tmp_path):
        (tmp_path / "x.toml").symlink_to(pipe)
        assert "it is a pipe or a device" in refusal(ConfigError, load_config, tmp_path / "x.toml")


class TestTokenizers:
    def test_half_a_surrogate_pair_in_a_vocabulary(self, tmp_path):
        (tmp_path / "tokenizer.json").write_text(r'{"characters": "a\ud800"}')
        says = refusal(TokenizerError, read_tokenizer, tmp_path / "tokenizer.json")
        assert "surrogates not allowed" in says

    def test_half_a_surrogate_pair_in_a_prompt(self, pieces):
        assert r"lacks '\udcff'" in refusal(TokenizerError, pieces.encode, "to be\udcff")


class TestSafetensors:
    MODEL = ModelConfig(vocab_size=3, embedding_dim=1, hidden_dim=1)

    def saved(self, path: Path, old: str, new: str) -> Path:
        """A file whose header has something else in place of `old`."""
        params = jaxgru.lm.init(jax.random.key(0), self.MODEL)
        save_safetensors(path, params, Config("x", self.MODEL), CharacterTokenizer("abc"))
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header["__metadata__"][old] = new
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        return path

    @pytest.mark.parametrize(
        "key, value, says",
        [
            ("config", "a = " + "[" * 9999, "recursion"),
            ("config", "[model]\ncell = 0x" + "f" * 9999, "thousands of digits"),
            ("tokenizer", "x" * 10**5, "no kind of tokenizer"),
            ("tokenizer_data", r'{"characters": "a\ud800c"}', "surrogates not allowed"),
        ],
    )
    def test_metadata(self, key, value, says, tmp_path):
        assert says in refusal(
            InteropError, load_safetensors, self.saved(tmp_path / "x.safetensors", key, value)
        )


class TestStudyCheckpoints:
    @pytest.fixture
    def path(self, tmp_path) -> Path:
        pytest.importorskip("torch")
        path = tmp_path / "x.pth"
        model = ModelConfig("gru", 3, 1, 1, second_bias=True, reset_gate="before")
        save_pth(path, jaxgru.lm.init(jax.random.key(0), model), Config("x", model))
        return path

    def pickle(self, path: Path, data: bytes) -> Path:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("x/data.pkl", data)
            file.writestr("x/version", "3\n")
        return path

    @pytest.mark.parametrize(
        "data",
        [
            b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x10\x85R.",  # 64 GB of zeros
            b"\x80\x02}K\x01\x85" + b"q\0h\0h\0\x86" * 60 + b"K\x01s.",  # a hash of 2**60 steps
            b"\x80\x02}K\x01" + b"\x85" * 10**5 + b"K\x01s.",  # more of them overflowed C's stack
            b"\x80\x02]" + b"\x96" + b"\xff" * 7 + b"\x0f.",  # a BYTEARRAY8 that is not there
            b"\x80\x02N" + b"2" * 99 + b"." + b"0" * 2**20,  # longer than any checkpoint's
        ],
    )
    def test_a_pickle_that_takes_all(self, data, path):
        with pytest.raises((ValueError, IndexError)):
            check_pickle(data)
        assert "nothing in it was run" in refusal(
            InteropError, load_pth_model, self.pickle(path, data)
        )

    def test_what_torch_writes_passes(self, path):
        with zipfile.ZipFile(path) as file:
            (name,) = (n for n in file.namelist() if n.endswith("data.pkl"))
            check_pickle(file.read(name))
        assert load_pth_model(path)[1].hidden_dim == 1

    def test_a_directory_of_one_member_many_times(self, path):
        """10 MB could be compared with its check sum 60,000 times."""
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("x/data/0", bytes(10**5))
            file.filelist *= 1000  # the directory that is written at the end
        assert "members claim to be larger than the file" in refusal(
            InteropError, load_pth_model, path
        )


def test_a_cycle_that_looks_like_markup():
    """Of a text with tags, evaluate.py's greedy cycles are such: Rich raised MarkupError."""
    console = Console(width=200, record=True, file=open(os.devnull, "w"))
    console.print(evaluate._markov_chain(Chain(0.1, 0.2, [Cycle("[/b]", 4, 1.0)])))
    assert "'[/b]'" in console.export_text()
