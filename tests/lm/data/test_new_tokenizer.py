"""A tokenizer of a user's own is one class: trained, resumed, sampled, saved and loaded."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from random_models import only_model, random_params

import jaxgru
from jaxgru.lm import Config, ModelConfig, load_config
from jaxgru.lm.config import DataConfig
from jaxgru.lm.data import tokenizers
from jaxgru.lm.data.tokenizers import TOKENIZERS, Tokenizer, TokenizerError, register_tokenizer
from jaxgru.lm.formats.safetensors import save_safetensors
from jaxgru.lm.generation import Options, stream_text
from jaxgru.lm.runs.lifecycle import resume_run, start_run

SMALL = {
    "training.epochs": 1, "training.steps_per_epoch": 2, "training.batch_size": 2,
    "training.sequence_length": 8, "model.hidden_dim": 8, "model.embedding_dim": 4,
}  # fmt: skip


class Nibbles(Tokenizer):
    """Each byte as two tokens of 4 bits."""

    kind = "nibbles"
    file_name = "nibbles.txt"
    about = "half bytes"
    vocab_size = 16
    pieces = list("0123456789abcdef")

    @classmethod
    def learn(cls, text, vocab_size=0, min_count=1):
        return cls()

    @classmethod
    def from_bytes(cls, data):
        if data != b"16":
            raise ValueError("it is not 16")
        return cls()

    def to_bytes(self):
        return b"16"

    def encode(self, text):
        data = np.frombuffer(text.encode(), np.uint8)
        return np.stack([data >> 4, data & 15], 1).ravel().astype(np.int32)

    def decode(self, tokens):
        high, low = np.asarray(tokens)[: len(tokens) // 2 * 2].reshape(-1, 2).T
        return bytes((16 * high + low).tolist()).decode(errors="replace")


@pytest.fixture
def registered():
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: TOKENIZERS.pop("nibbles", None))
        yield register_tokenizer(Nibbles)


@pytest.mark.slow
@pytest.mark.parametrize("kind, size", [
    ("nibbles", 16), ("subwords", 280), ("bytes", 256), ("words", 24),
])  # fmt: skip
def test_a_run_with_each_kind(registered, kind, size, tiny_text, tmp_path, capsys):
    options = SMALL | {"data.tokenizer": kind, "model.vocab_size": 280, "name": "x"}
    config = load_config("astra_alpha", options | {"data.corpus": str(tiny_text)})
    run = start_run(config, tmp_path)
    resume_run(run, {"training.epochs": 2})
    params, config, tokenizer = jaxgru.lm.load(run)
    assert (tokenizer.kind, config.data.tokenizer) == (kind, kind)
    assert tokenizer.vocab_size == config.model.vocab_size
    assert abs(tokenizer.vocab_size - size) < 12
    assert ("".join(stream_text(params, tokenizer, "ROMEO: ", Options(20)))).startswith("ROMEO: ")


@pytest.mark.parametrize("kind", ["nibbles", "subwords", "bytes", "words"])
def test_a_file_with_a_model_holds_each_kind(registered, kind, tiny_text, tmp_path):
    text = tiny_text.read_text()
    tokenizer = tokenizers.learn_tokenizer(kind, text, 280)
    model = only_model(ModelConfig(), vocab_size=tokenizer.vocab_size)
    config = Config("x", model, DataConfig(tokenizer=kind))
    save_safetensors(tmp_path / "x.safetensors", random_params(model), config, tokenizer)
    _, read, again = jaxgru.lm.load(tmp_path / "x.safetensors")
    assert read.data.tokenizer == again.kind == kind and type(again) is type(tokenizer)
    np.testing.assert_array_equal(again.encode(text), tokenizer.encode(text))


def test_a_kind_and_a_file_name_are_one_classes(registered):
    class Other(tokenizers.CharacterTokenizer):
        kind = "other"

    for cls in (Other, Nibbles):
        with pytest.raises(TokenizerError, match="cannot be registered: its kind"):
            register_tokenizer(cls)


@pytest.mark.slow
def test_a_vocabulary_that_is_lowered_is_said_in_one_sentence(tiny_text, tmp_path, capsys):
    options = SMALL | {"data.tokenizer": "subwords", "model.vocab_size": 5000, "name": "x"}
    run = start_run(load_config("astra_alpha", options | {"data.corpus": str(tiny_text)}), tmp_path)
    size = jaxgru.lm.load(run)[1].model.vocab_size
    assert 259 < size < 5000
    says = f"The text is long enough for {size} subwords, not for 5,000; model.vocab_size is lower"
    assert says in capsys.readouterr().out


def test_the_studys_configs_lose_nothing_of_another_text(tiny_text):
    text = {"data.corpus": str(tiny_text)}
    assert load_config("scribe_alpha").data.tokenizer == "sentencepiece"
    assert load_config("scribe_alpha", text).data.tokenizer == "subwords"
    kept = load_config("scribe_alpha", text | {"data.tokenizer": "sentencepiece"})
    assert kept.data.tokenizer == "sentencepiece"
