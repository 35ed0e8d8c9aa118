"""A whole model in one .safetensors file: read and written by hand here, damaged and refused."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import struct
import subprocess
import sys
import tomllib

import numpy as np
import pytest
import safetensors.numpy
import tomli_w
from annotations import unchecked
from conftest import slow
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import model_configs, only_model, random_bits, random_params, same_bits

import jaxgru
from jaxgru.errors import UserError
from jaxgru.libraries import InteropError
from jaxgru.lm import Config, ModelConfig, load_config
from jaxgru.lm.config import DataConfig, TrainingConfig, to_dict
from jaxgru.lm.data.corpus import TINY_SHAKESPEARE_SHA256
from jaxgru.lm.data.tokenizers import (
    CharacterTokenizer,
    SentencePieceTokenizer,
    TokenizerError,
    save_tokenizer,
)
from jaxgru.lm.formats import FORMATS
from jaxgru.lm.formats.safetensors import load_safetensors, save_safetensors
from jaxgru.lm.load import find_model

SMALL = ModelConfig(vocab_size=3, embedding_dim=2, hidden_dim=1, reset_gate="before")
TOKENIZER = CharacterTokenizer('a"é')
CONFIG = Config("small", SMALL)


class Words(CharacterTokenizer):
    """A user's own: "abc" is one word."""

    kind = "words"

    def encode(self, text):
        return np.zeros(len(text.split("abc")) - 1, np.int32)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def file_bytes(tensors, metadata) -> bytes:
    """The format by its specification: the header's length, the header in JSON, the data."""
    header, data = {"__metadata__": metadata}, b""
    for name, (dtype, shape, part) in tensors.items():
        offsets = [len(data), len(data) + len(part)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += part
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def parsed(data: bytes):
    """The inverse: tensors by name, and metadata."""
    (length,) = struct.unpack("<Q", data[:8])
    header, data = json.loads(data[8 : 8 + length]), data[8 + length :]
    metadata = header.pop("__metadata__")
    tensors = {
        name: (about["dtype"], about["shape"], data[slice(*about["data_offsets"])])
        for name, about in header.items()
    }
    return tensors, metadata


def with_hash(tensors, metadata):
    """The metadata with the SHA-256 that is documented."""
    others = {key: value for key, value in metadata.items() if key != "sha256"}
    data = b"".join(tensors[name][2] for name in sorted(tensors))
    data += json.dumps(others, sort_keys=True).encode()
    return others | {"sha256": hashlib.sha256(data).hexdigest()}


class TestRoundTrip:
    @settings(max_examples=25, deadline=None)
    @given(config=model_configs(), seed=st.integers(0, 99))
    def test_bit_for_bit(self, config, seed, tmp_path_factory):
        path = tmp_path_factory.mktemp("s") / "x.safetensors"
        whole = dataclasses.replace(load_config("leviathan"), name="x", model=config)
        params = random_bits(config, seed)
        tokenizer = CharacterTokenizer('\n"\\é🎭漢'[: config.vocab_size])
        save_safetensors(path, params, whole, tokenizer)
        again, config_again, tokenizer_again = load_safetensors(path)
        assert same_bits(again, params)
        assert config_again == whole
        assert tokenizer_again.vocabulary == tokenizer.vocabulary


class TestTheFile:
    def test_is_what_is_documented(self, path):
        model = ModelConfig("lstm", 3, 2, 4, 2, final_norm=True)
        params = random_params(model)
        save_safetensors(path, params, Config("deep", model), TOKENIZER)
        tensors, metadata = parsed(path.read_bytes())
        expected = {"embedding": params.embedding}
        for i, layer in enumerate(params.layers):
            for name in "WUb":
                expected[f"layers.{i}.{name}"] = getattr(layer, name)
        expected |= {"norm.scale": params.norm.scale, "norm.shift": params.norm.shift}
        expected |= {"head.Wo": params.head.Wo, "head.bo": params.head.bo}
        assert tensors.keys() == expected.keys()
        for name, (dtype, shape, data) in tensors.items():
            assert dtype == "F32"
            stored = np.frombuffer(data, "<f4").reshape(shape)
            np.testing.assert_array_equal(stored, expected[name])
        assert metadata["format"] == "jaxgru"
        assert tomllib.loads(metadata["config"])["model"]["hidden_dim"] == 4
        assert metadata["tokenizer"] == "characters"
        assert json.loads(metadata["tokenizer_data"]) == {"characters": 'a"é'}
        assert metadata == with_hash(tensors, metadata)

    def test_pieces_are_in_base64(self, path):
        pieces = SentencePieceTokenizer.learn("to be or not to be that is the question\n" * 9, 30)
        model = only_model(SMALL, vocab_size=30)
        save_safetensors(path, random_params(model), Config("x", model), pieces)
        _, metadata = parsed(path.read_bytes())
        assert metadata["tokenizer"] == "sentencepiece"
        assert base64.b64decode(metadata["tokenizer_data"]) == pieces.to_bytes()
        again = jaxgru.lm.load(path)[2]
        assert isinstance(again, SentencePieceTokenizer) and again.to_bytes() == pieces.to_bytes()
        assert again.decode(again.encode("not the question")) == "not the question"

    @pytest.mark.parametrize("corpus, stored", [
        ("tiny_shakespeare", "tiny_shakespeare"),
        ("/home/anna/novel/text.txt", "./text.txt"),
        ("/home/anna/tiny_shakespeare", "./tiny_shakespeare"),  # a path is never taken for the name
        ("../novel/text.txt", "./text.txt"),
        ("./text.txt", "./text.txt"),
        ("text.txt", "text.txt"),
    ])  # fmt: skip
    def test_tells_no_folder_of_its_author(self, path, corpus, stored):
        data = DataConfig(corpus=corpus)
        training = TrainingConfig(init=corpus.replace("tiny_shakespeare", "v1"))
        config = dataclasses.replace(CONFIG, data=data, training=training)
        save_safetensors(path, random_params(SMALL), config, TOKENIZER, "12ab")
        for word in (b"anna", b"novel"):
            assert word not in path.read_bytes()
        _, again, _ = load_safetensors(path)
        named = TINY_SHAKESPEARE_SHA256 if stored == "tiny_shakespeare" else "12ab"
        assert find_model(path).text_sha256() == named
        assert again.data == dataclasses.replace(data, corpus=stored)
        init = stored.replace("tiny_shakespeare", "v1")
        assert again.training == dataclasses.replace(training, init=init)

    @pytest.mark.parametrize("process", ["this one", *slow("another")])
    def test_the_same_model_gives_the_same_file(self, path, process):
        """In another process Python hashes in another order; in Rust, each map does."""
        names = [f"model{suffix}" for suffix in FORMATS]
        for name in names:
            jaxgru.lm.save(path.with_name(name), random_params(SMALL), CONFIG, TOKENIZER)
        code = (
            f"import jaxgru; model = jaxgru.lm.load({str(path)!r})\n"
            f"for name in {names}: jaxgru.lm.save({str(path.parent)!r} + '/again_' + name, *model)"
        )
        if process == "another":
            subprocess.run([sys.executable, "-c", code], check=True)
        else:
            exec(code, {})
        for name in names:
            again = path.with_name(f"again_{name}").read_bytes()
            assert again == path.with_name(name).read_bytes(), name

    @settings(max_examples=8, deadline=None)
    @given(config=model_configs(), seed=st.integers(0, 99))
    def test_is_what_the_library_writes_but_for_the_order(self, config, seed, tmp_path_factory):
        path = tmp_path_factory.mktemp("s") / "x.safetensors"
        tokenizer = CharacterTokenizer('\n"\\é🎭漢'[: config.vocab_size])
        save_safetensors(path, random_bits(config, seed), Config("x", config), tokenizer)
        data = path.read_bytes()
        tensors, metadata = parsed(data)
        arrays = {
            name: np.frombuffer(part, "<f4").reshape(shape)
            for name, (_, shape, part) in tensors.items()
        }
        library = safetensors.numpy.save(arrays, metadata)
        assert parsed(library) == (tensors, metadata)
        assert struct.unpack("<Q", data[:8])[0] % 8 == 0  # the data is aligned

    def test_written_by_hand(self, path):
        weights = {"embedding": [3, 2], "layers.0.W": [2, 1], "layers.0.U": [1, 1]}
        weights |= {"layers.0.b": [1], "head.Wo": [1, 3], "head.bo": [3]}
        tensors = {}
        for i, (name, shape) in enumerate(weights.items()):
            values = i + np.arange(np.prod(shape), dtype="<f4")
            tensors[name] = ("F32", shape, values.tobytes())
        config = Config("hand", ModelConfig("rnn", 3, 2, 1))
        metadata = {"format": "jaxgru", "config": tomli_w.dumps(to_dict(config))}
        metadata |= {"tokenizer": "characters", "tokenizer_data": '{"characters": "xyz"}'}
        metadata |= {"text_sha256": "12ab"}
        path.write_bytes(file_bytes(tensors, with_hash(tensors, metadata)))
        params, again, tokenizer = load_safetensors(path)
        assert params.layers[0].W.tolist() == [[1], [2]] and params.layers[0].b.tolist() == [3]
        assert params.head.Wo.tolist() == [[4, 5, 6]] and params.norm is None
        assert again == config and tokenizer.vocabulary == "xyz"
        assert find_model(path).text_sha256() == "12ab"

    def test_an_older_file_stays_whole(self, path, monkeypatch):
        save_safetensors(path, random_params(SMALL), CONFIG, TOKENIZER)
        before = path.read_bytes()

        def fail(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.replace", fail)
        with pytest.raises(OSError, match="No space"):
            save_safetensors(path, random_params(SMALL, seed=1), CONFIG, TOKENIZER)
        assert path.read_bytes() == before
        assert [file.name for file in path.parent.iterdir()] == [path.name]


def _tensor(name, shape):
    def change(tensors, metadata):
        dtype, _, data = tensors.get(name, ("F32", [1], b"\0\0\0\0"))
        tensors[name] = dtype, shape, data

    return change


def _config(old, new):
    def change(tensors, metadata):
        assert old in metadata["config"]
        metadata["config"] = metadata["config"].replace(old, new)

    return change


def _metadata(key, value):
    return lambda tensors, metadata: metadata.__setitem__(key, value)


REFUSED = {
    "missing tensor": (lambda t, m: t.pop("layers.0.b"), "layers.0.b is missing"),
    "extra tensor": (_tensor("layers.0.c", [1]), "the tensor layers.0.c does not belong"),
    "turned tensor": (_tensor("layers.0.W", [3, 2]), r"\(3, 2\); it must be \(2, 3\)"),
    "another's file": (lambda t, m: m.clear(), "not a model of this library"),
    "other format": (_metadata("format", "pt"), "not a model of this library"),
    "a config less": (lambda t, m: m.pop("config"), "not a model of this library"),
    "config not TOML": (_metadata("config", "name ="), "its config is broken"),
    "unknown field": (_config("hidden_dim", "hidden_dims"), "nearest is 'model.hidden_dim'"),
    "other hidden_dim": (_config("hidden_dim = 1", "hidden_dim = 7"), "it must be"),
    "a layer more": (_config("num_layers = 1", "num_layers = 2"), "layers.1.* is missing"),
    "a tokenizer of one's own": (_metadata("tokenizer", "runes"), "no kind of tokenizer 'runes'"),
    "a character twice": (
        _metadata("tokenizer_data", '{"characters": "aba"}'), "not a string of distinct characters",
    ),
    "another hash": (None, "it is damaged; its content does not match its SHA-256"),
}  # fmt: skip


class TestRefusals:
    @pytest.mark.parametrize("what", REFUSED)
    def test_contents(self, what, path):
        """The hash is made to agree, so that each is refused for itself."""
        change, says = REFUSED[what]
        save_safetensors(path, random_params(SMALL), CONFIG, TOKENIZER)
        tensors, metadata = parsed(path.read_bytes())
        if change is None:
            metadata["sha256"] = "0" * 64
        else:
            change(tensors, metadata)
            metadata = with_hash(tensors, metadata) if metadata else {}
        path.write_bytes(file_bytes(tensors, metadata))
        with pytest.raises(UserError, match=says):
            load_safetensors(path)

    def test_flipped_or_cut_anywhere(self, path):
        """The format has no check sum; ours covers all that it stores."""
        save_safetensors(path, random_params(SMALL), CONFIG, TOKENIZER)
        whole = path.read_bytes()
        data = [whole[:length] for length in range(0, len(whole), 99)]
        for place in range(0, len(whole), 23):  # the bits in turn
            flipped = bytearray(whole)
            flipped[place] ^= 1 << place % 8
            data.append(flipped)
        for damaged in data:
            path.write_bytes(damaged)
            with pytest.raises(InteropError, match="cannot be used"):
                load_safetensors(path)

    @pytest.mark.parametrize("suffix", FORMATS)
    def test_a_file_that_cannot_be_opened(self, tmp_path, suffix):
        path = tmp_path / f"x{suffix}"
        with pytest.raises(InteropError, match=f"there is no file {path}"):
            FORMATS[suffix].load(path)
        path.mkdir()
        with pytest.raises(InteropError, match=f"{path} cannot be read: Is a directory"):
            FORMATS[suffix].load(path)

    @pytest.mark.parametrize(
        "tokenizer, says",
        [
            (None, "the tokenizer is a NoneType, which could not be loaded again"),
            (Words("abc"), "the tokenizer is a Words, which could not be loaded again"),
            (CharacterTokenizer("aba"), "its vocabulary is not a string of distinct characters"),
            (CharacterTokenizer("ab\ud800"), "surrogates not allowed"),
        ],
    )
    def test_a_tokenizer_that_loading_would_not_know(self, path, tokenizer, says):
        """Refused by everything that writes one: files, and run folders."""
        save_file = lambda: save_safetensors(path, random_params(SMALL), CONFIG, tokenizer)
        for save in (save_file, lambda: save_tokenizer(tokenizer, path.parent)):
            with unchecked(), pytest.raises(TokenizerError, match=says):
                save()
        assert list(path.parent.iterdir()) == []

    def test_what_is_not_one_model(self, path):
        params, save = random_params(SMALL), save_safetensors
        half = params.replace(embedding=params.embedding.astype("float16"))
        with pytest.raises(InteropError, match="embedding is float16; it must be float32"):
            save(path, half, CONFIG, TOKENIZER)
        for change, name in ({"second_bias": True}, "c"), ({"reset_gate": "after"}, "cn"):
            with pytest.raises(InteropError, match=f"layers.0.{name} is missing"):
                save(path, params, Config("x", only_model(SMALL, **change)), TOKENIZER)
        with pytest.raises(InteropError, match="the tokenizer has 2 tokens, but the config has 3"):
            save(path, params, CONFIG, CharacterTokenizer("ab"))
        assert not path.exists()
