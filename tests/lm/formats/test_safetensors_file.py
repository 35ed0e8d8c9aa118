"""A whole model in one .safetensors file: read and written by hand here, damaged and refused."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import tomllib

import numpy as np
import pytest
import safetensors
from annotations import unchecked
from random_models import only_model, random_params
from safetensors.numpy import save_file

import jaxgru
from jaxgru.errors import UserError
from jaxgru.files import ModelFileError
from jaxgru.lm import Config, ModelConfig
from jaxgru.lm.config import DataConfig, TrainingConfig
from jaxgru.lm.data import tokenizers
from jaxgru.lm.data.corpus import TINY_SHAKESPEARE_SHA256
from jaxgru.lm.data.tokenizers import CharacterTokenizer, SentencePieceTokenizer
from jaxgru.lm.formats.safetensors import load_safetensors, save_safetensors
from jaxgru.lm.load import find_model

SMALL = ModelConfig(vocab_size=3, embedding_dim=2, hidden_dim=1, reset_gate="before")
TOKENIZER = CharacterTokenizer('a"é')
CONFIG = Config("small", SMALL)
WORDS = type("Words", (CharacterTokenizer,), {"kind": "words"})  # a user's own


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def read(path):
    """Tensors by name, and metadata, as the library reads them."""
    with safetensors.safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()


def with_hash(tensors, metadata):
    """The metadata with the SHA-256 that is documented."""
    others = {key: value for key, value in metadata.items() if key != "sha256"}
    data = b"".join(tensors[name].tobytes() for name in sorted(tensors))
    data += json.dumps(others, sort_keys=True).encode()
    return others | {"sha256": hashlib.sha256(data).hexdigest()}


class TestTheFile:
    def test_is_what_is_documented(self, path):
        model = ModelConfig("lstm", 3, 2, 4, 2, final_norm=True)
        params = random_params(model)
        save_safetensors(path, params, Config("deep", model), TOKENIZER)
        tensors, metadata = read(path)
        expected = {"embedding": params.embedding}
        for i, layer in enumerate(params.layers):
            for name in "WUb":
                expected[f"layers.{i}.{name}"] = getattr(layer, name)
        expected |= {"norm.scale": params.norm.scale, "norm.shift": params.norm.shift}
        expected |= {"head.Wo": params.head.Wo, "head.bo": params.head.bo}
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == np.float32
            np.testing.assert_array_equal(tensor, expected[name])
        assert metadata["format"] == "jaxgru"
        assert tomllib.loads(metadata["config"])["model"]["hidden_dim"] == 4
        assert metadata["tokenizer"] == "characters"
        assert json.loads(metadata["tokenizer_data"]) == {"characters": 'a"é'}
        assert metadata == with_hash(tensors, metadata)
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0  # the data is aligned

    def test_pieces_are_in_base64(self, path):
        pieces = SentencePieceTokenizer.learn("to be or not to be that is the question\n" * 9, 30)
        model = only_model(SMALL, vocab_size=30)
        save_safetensors(path, random_params(model), Config("x", model), pieces)
        _, metadata = read(path)
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
        training = TrainingConfig(init_from=corpus.replace("tiny_shakespeare", "v1"))
        config = dataclasses.replace(CONFIG, data=data, training=training)
        save_safetensors(path, random_params(SMALL), config, TOKENIZER, "12ab")
        for word in (b"anna", b"novel"):
            assert word not in path.read_bytes()
        _, again, _ = load_safetensors(path)
        named = TINY_SHAKESPEARE_SHA256 if stored == "tiny_shakespeare" else "12ab"
        assert find_model(path).text_sha256() == named
        assert again.data == dataclasses.replace(data, corpus=stored)
        init = stored.replace("tiny_shakespeare", "v1")
        assert again.training == dataclasses.replace(training, init_from=init)


def _config(old, new):
    return lambda tensors, metadata: metadata.update(config=metadata["config"].replace(old, new))


def _tokenizer(data, kind="characters"):
    return lambda tensors, metadata: metadata.update(tokenizer=kind, tokenizer_data=data)


REFUSED = {
    "missing tensor": (lambda t, m: t.pop("layers.0.b"), "layers.0.b is missing"),
    "extra tensor": (
        lambda t, m: t.update({"layers.0.c": t["head.bo"]}), "layers.0.c does not belong",
    ),
    "turned tensor": (
        lambda t, m: t.update({"layers.0.W": t["layers.0.W"].reshape(3, 2)}),
        r"\(3, 2\); it must be \(2, 3\)",
    ),
    "another's file": (lambda t, m: m.clear(), "not a model of this library"),
    "other format": (lambda t, m: m.update(format="pt"), "not a model of this library"),
    "a newer format": (
        lambda t, m: (m.update(format_number="2"), m.pop("config")),
        "format_number is '2', and .* reads no newer one than 1; update jaxgru",
    ),
    "config not TOML": (_config("[", ""), "its config is broken"),
    "unknown field": (_config("hidden_dim", "hidden_dims"), "no field 'model.hidden_dims'"),
    "a layer more": (_config("num_layers = 1", "num_layers = 2"), "layers.1.* is missing"),
    "one's own tokenizer": (
        lambda t, m: m.update(tokenizer="runes"), "there is no kind of tokenizer 'runes'",
    ),
    "no base64": (_tokenizer("a", "subwords"), "Invalid base64"),
    "a tokenizer of another size": (
        _tokenizer('{"characters": "ab"}'), "has 2 tokens, but the model has 3 tokens",
    ),
    "an unknown token": (
        _tokenizer('{"characters": "abc", "unknown": true}'), "its unknown token is True",
    ),
    "another hash": (None, "it is damaged; its content does not match its SHA-256"),
}  # fmt: skip


class TestRefusals:
    @pytest.mark.parametrize("what", REFUSED)
    def test_contents(self, what, path):
        """The hash is made to agree, so that each is refused for itself."""
        change, says = REFUSED[what]
        save_safetensors(path, random_params(SMALL), CONFIG, TOKENIZER)
        tensors, metadata = read(path)
        if change is None:
            metadata["sha256"] = "0" * 64
        else:
            change(tensors, metadata)
            metadata = with_hash(tensors, metadata)
        save_file(tensors, path, metadata)
        with pytest.raises(UserError, match=f"^{path} cannot be used: .*{says}"):
            load_safetensors(path)

    @pytest.mark.parametrize("dtype, bits", [("F16", 16), ("F8_E4M3", 8)])  # NumPy lacks one
    def test_other_dtypes(self, path, dtype, bits):
        save_safetensors(path, random_params(SMALL), CONFIG, TOKENIZER)
        tensor = {"dtype": dtype, "shape": [8], "data_offsets": [0, bits]}
        header = json.dumps({"__metadata__": read(path)[1], "embedding": tensor}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(bits))
        with pytest.raises(ModelFileError, match=f"embedding is {dtype}; it must be F32, float32"):
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
            with pytest.raises(ModelFileError, match="cannot be used"):
                load_safetensors(path)

    @pytest.mark.parametrize(
        "tokenizer, says",
        [
            (None, "the tokenizer is NoneType, which could not be loaded again"),
            (WORDS("abc"), "the tokenizer is Words, which could not be loaded again"),
            (CharacterTokenizer("aba"), "its vocabulary is not a string of distinct characters"),
        ],
    )
    def test_a_tokenizer_that_loading_would_not_know(self, path, tokenizer, says):
        """Refused by everything that writes one: files, and run folders."""

        def save_file():
            return save_safetensors(path, random_params(SMALL), CONFIG, tokenizer)

        for save in (save_file, lambda: tokenizers.save_tokenizer(tokenizer, path.parent)):
            with unchecked(), pytest.raises(tokenizers.TokenizerError, match=says):
                save()
        assert list(path.parent.iterdir()) == []

    def test_what_is_not_one_model(self, path):
        params = random_params(SMALL)
        save = save_safetensors
        half = params.replace(embedding=params.embedding.astype("float16"))
        with pytest.raises(ModelFileError, match="embedding is float16; it must be float32"):
            save(path, half, CONFIG, TOKENIZER)
        for change, name in ({"second_bias": True}, "c"), ({"reset_gate": "after"}, "cn"):
            with pytest.raises(ModelFileError, match=f"layers.0.{name} is missing"):
                save(path, params, Config("x", only_model(SMALL, **change)), TOKENIZER)
        rnn = ModelConfig("rnn", 3, 2, 1)
        relu = only_model(rnn, activation="relu")
        with pytest.raises(
            ModelFileError,
            match=r"layer 0 .*='relu'\); the config says RNNCell\(in 2, hidden 1, float32\)\.$",
        ):
            save(path, random_params(relu), Config("x", rnn), TOKENIZER)
        with pytest.raises(ModelFileError, match="the tokenizer has 2 tokens, but the model has 3"):
            save(path, params, CONFIG, CharacterTokenizer("ab"))
        assert not path.exists()
