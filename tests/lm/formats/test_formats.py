"""What holds for a model's file of every format."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from conftest import slow
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_models import model_configs, random_bits, random_params, same_bits

import jaxgru
from jaxgru.files import ModelFileError
from jaxgru.lm import Config, ModelConfig, load_config
from jaxgru.lm.data.tokenizers import CharacterTokenizer
from jaxgru.lm.formats import FORMATS
from jaxgru.lm.formats.pth import load_pth_model

pytest.importorskip("torch")
pytest.importorskip("onnx")

SMALL = ModelConfig("gru", 3, 2, 1, second_bias=True, reset_gate="before")
CONFIG = Config("small", SMALL)
TOKENIZER = CharacterTokenizer('a"é')


@pytest.mark.parametrize("suffix", FORMATS)
@settings(max_examples=3)
@given(config=model_configs(), seed=st.integers(0, 99))
@example(config=ModelConfig("mlp", 5, 3, 4, num_layers=2, context_length=3), seed=0)
@example(config=ModelConfig("mlp", 5, 3, 4, context_length=1), seed=0)
@example(config=ModelConfig("mogrifier_gru", 5, 3, 4, num_layers=2, rank=2), seed=0)
@example(config=ModelConfig("gru", 5, 3, 4, num_blocks=2, layer_norm=True), seed=0)
@example(config=ModelConfig("gru", 5, 3, 4, activation="relu"), seed=0)
@example(config=ModelConfig("gru", 5, 4, 4, tied_embedding=True), seed=0)
def test_bit_for_bit(suffix, config, seed, tmp_path_factory):
    """Also −0, NaN and infinity; of a .pth the models that the study has."""
    path = tmp_path_factory.mktemp("models") / f"x{suffix}"
    if suffix == ".pth":
        lstm = config.cell == "lstm"
        sizes = (5, config.embedding_dim, config.hidden_dim)
        has = dict(final_norm=True) if lstm else dict(second_bias=True, reset_gate="before")
        has["init_scheme"] = "pytorch"
        config = ModelConfig("lstm" if lstm else "gru", *sizes, config.num_layers, **has)
    whole = dataclasses.replace(load_config("leviathan"), name="x", model=config)
    params = random_bits(config, seed)
    tokenizer = CharacterTokenizer('\n"\\é🎭漢'[: config.vocab_size])
    jaxgru.lm.save(path, params, whole, tokenizer)
    if suffix == ".pth":
        again, model = load_pth_model(path)
        assert same_bits(again, params) and model == config
    else:
        again, config_again, tokenizer_again = jaxgru.lm.load(path)
        assert same_bits(again, params) and config_again == whole
        assert tokenizer_again.vocabulary == tokenizer.vocabulary


@pytest.mark.parametrize("process", ["this one", *slow("another")])
def test_the_same_model_gives_the_same_file(tmp_path, process):
    """In another process Python hashes in another order; in Rust, each map does."""
    names = [f"model{suffix}" for suffix in FORMATS]
    for name in names:
        jaxgru.lm.save(tmp_path / name, random_params(SMALL), CONFIG, TOKENIZER)
    code = (
        f"import jaxgru; model = jaxgru.lm.load({str(tmp_path / names[0])!r})\n"
        f"for name in {names}: jaxgru.lm.save({str(tmp_path)!r} + '/again_' + name, *model)"
    )
    if process == "another":
        subprocess.run([sys.executable, "-c", code], check=True)
    else:
        exec(code, {})
    for name in names:
        again = (tmp_path / f"again_{name}").read_bytes()
        assert again == (tmp_path / name).read_bytes(), name


@pytest.mark.parametrize("suffix", FORMATS)
def test_an_older_file_stays_whole(tmp_path, monkeypatch, suffix):
    path = tmp_path / f"x{suffix}"
    jaxgru.lm.save(path, random_params(SMALL), CONFIG, TOKENIZER)
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="No space"):
        jaxgru.lm.save(path, random_params(SMALL, seed=1), CONFIG, TOKENIZER)
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_file_that_cannot_be_opened(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    with pytest.raises(ModelFileError, match=f"there is no file {path}"):
        FORMATS[suffix].load(path)
    path.mkdir()
    with pytest.raises(ModelFileError, match=f"{path} cannot be read: Is a directory"):
        FORMATS[suffix].load(path)
