"""Spoilt files, by hypothesis: a parser returns what can be used, or raises one printable line."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jaxgru
from jaxgru.errors import UserError
from jaxgru.lm import Config, ModelConfig
from jaxgru.lm.config import dotted_names, from_dict, load_config, override, parse_toml, to_dict
from jaxgru.lm.data import tokenizers
from jaxgru.lm.formats import FORMATS

TEXT = "to be or not to be\n  that is the question\n" * 9
ONE_OF_EACH = {
    tokenizer.file_name: tokenizer
    for tokenizer in (
        tokenizers.CharacterTokenizer.learn(TEXT),
        tokenizers.SubwordTokenizer.learn(TEXT, 290),
        tokenizers.SentencePieceTokenizer.learn(TEXT, 30),
        tokenizers.WordTokenizer.learn(TEXT, 0),
    )
}


def is_one_line(error: UserError) -> bool:
    return str(error).isprintable() and 0 < len(str(error)) < 2000


@st.composite
def spoilt(draw, whole: bytes) -> bytes:
    """The bytes with some changed, left out or put in, mostly near an end; or cut off."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)) | st.integers(0, min(len(data), 99)))
        width = draw(st.sampled_from([0, 1, 1, 8, len(data)]))
        data[at : at + width] = draw(st.binary(max_size=9))
    return bytes(data)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.just("x" * 300),
    st.sampled_from([2**31, 2**63, 10**400, "gru", "characters"]), st.lists(st.integers()),
)  # fmt: skip


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from(dotted_names()) | st.text(max_size=9), VALUES, max_size=3))
def test_values_in_a_config(values):
    """Those that are accepted are the same when written and read."""
    try:
        config = override(load_config("astra_alpha"), values)
    except UserError as error:
        assert is_one_line(error)
    else:
        again = from_dict(parse_toml(tomli_w.dumps(to_dict(config)).encode()))
        assert repr(again) == repr(config)


@given(spoilt(tomli_w.dumps(to_dict(load_config("astra_alpha"))).encode()))
def test_configs(data):
    try:
        config = from_dict(parse_toml(data))
    except UserError as error:
        assert is_one_line(error)
    else:
        assert repr(from_dict(to_dict(config))) == repr(config)


@pytest.mark.parametrize("file_name", ONE_OF_EACH)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_tokenizers(file_name, tmp_path, data):
    """What is read encodes and decodes, an exact one without loss, and is the same when saved."""
    whole = ONE_OF_EACH[file_name].to_bytes()
    (tmp_path / file_name).write_bytes(data.draw(spoilt(whole)))
    try:
        tokenizer = tokenizers.load_tokenizer(tmp_path)
    except UserError as error:
        assert is_one_line(error)
        return
    for text in (TEXT, tokenizer.decode(np.arange(tokenizer.vocab_size))):
        try:
            tokens = tokenizer.encode(text)
        except UserError as error:  # it lacks a character
            assert is_one_line(error)
            continue
        if file_name in ("tokenizer.json", "subwords.model"):
            assert tokenizer.decode(tokens) == text
        assert type(tokenizer).from_bytes(tokenizer.to_bytes()).encode(text).tolist() == [*tokens]


@pytest.fixture(scope="module", params=FORMATS)
def model_file(request, tmp_path_factory) -> Path:
    """A small model's file of each format."""
    path = tmp_path_factory.mktemp("fuzz") / f"whole{request.param}"
    model = ModelConfig("gru", 3, 1, 1, second_bias=True, reset_gate="before")
    params = jaxgru.lm.init(jax.random.key(0), model)
    jaxgru.lm.save(path, params, Config("x", model), tokenizers.CharacterTokenizer("abc"))
    return path


@settings(max_examples=60)
@given(st.data())
def test_models(model_file, data):
    path = model_file.with_stem("spoilt")
    path.write_bytes(data.draw(spoilt(model_file.read_bytes())))
    format = FORMATS[path.suffix]
    load = format.load if format.has_metadata else format.module().load_pth_model
    try:
        params = load(path)[0]
    except UserError as error:
        assert is_one_line(error) and str(path) in str(error)
    else:  # what was spoilt is not of the model, such as the time that an archive keeps
        jax.tree.map(np.testing.assert_array_equal, params, load(model_file)[0])
