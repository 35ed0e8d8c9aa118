"""A config's corpus as tokens: split, filled in, verified, refused."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from typing import Any

import numpy as np
import pytest

from jaxgru.errors import UserError
from jaxgru.lm.config import Config, load_config
from jaxgru.lm.data.dataset import load_dataset
from jaxgru.lm.data.tokenizers import CharacterTokenizer


def tiny_config(corpus: object, **overrides: Any) -> Config:
    fields = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_config("astra_alpha", {"data.corpus": str(corpus), **fields})


def test_tokens_are_the_text_split_nine_to_one(tiny_text):
    _, dataset = load_dataset(tiny_config(tiny_text))
    text = tiny_text.read_text()
    place = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = [place[character] for character in text]
    np.testing.assert_array_equal(dataset.train, tokens[:2700])
    np.testing.assert_array_equal(dataset.validation, tokens[2700:])
    assert dataset.train.dtype == dataset.validation.dtype == np.int32
    assert str(tiny_text) in dataset.source


def test_the_config_is_filled_in_and_changed_no_further(tiny_text, monkeypatch):
    monkeypatch.chdir(tiny_text.parent)
    given = tiny_config(tiny_text.name)
    config, dataset = load_dataset(given)
    assert dataset.sha256 == hashlib.sha256(tiny_text.read_bytes()).hexdigest()
    size = len(set(tiny_text.read_text()))
    assert config.model == dataclasses.replace(given.model, vocab_size=size)
    assert config.data == dataclasses.replace(given.data, corpus=str(tiny_text.resolve()))
    assert (config.name, config.training) == (given.name, given.training)


def test_a_given_tokenizer_is_used_and_none_learnt(tiny_text):
    """A run keeps its own vocabulary, here with more characters than the text has."""
    tokenizer = CharacterTokenizer.learn(tiny_text.read_text() + "0123456789")
    config, dataset = load_dataset(tiny_config(tiny_text), tokenizer)
    assert dataset.tokenizer is tokenizer
    assert config.model.vocab_size == len(set(tiny_text.read_text())) + 10
    assert tokenizer.decode(dataset.train) == tiny_text.read_text()[:2700]


@pytest.mark.parametrize("kind, given, unknown", [
    ("characters", {}, None), ("characters", {"data__min_count": 1}, None),
    ("characters", {"data__min_count": 2}, "xy"), ("words", {}, " xy"),
    ("words", {"data__min_count": 1}, ""),
])  # fmt: skip
def test_what_occurs_once_is_unknown_where_it_is_asked_for(tmp_path, kind, given, unknown):
    """Words ask for it by default; characters have no such token unless min_count is above 1."""
    (tmp_path / "rare.txt").write_text("to be or not to be\n" * 40 + "to xy")
    config = tiny_config(tmp_path / "rare.txt", data__tokenizer=kind, **given)
    tokenizer = load_dataset(config)[1].tokenizer
    if unknown is None:
        assert tokenizer.unknown is None and tokenizer.vocab_size == len("\n benortxy")
        return
    pieces = ["to", " be", " xy"] if kind == "words" else "to be xy"
    assert "".join(p for p in pieces if tokenizer.encode(p)[0] == tokenizer.unknown) == unknown


def test_a_corpus_that_was_moved_is_asked_for(tiny_text, tmp_path):
    """Of a text that was never there, no place is asked for."""
    gone = str(tmp_path / "gone.txt")
    with pytest.raises(UserError, match=f"^there is no text {gone}; .* with --data.corpus.$"):
        load_dataset(tiny_config(gone), sha256="0" * 64)
    with pytest.raises(UserError, match=f"^there is no file {gone}; give the path"):
        load_dataset(tiny_config(gone))


@pytest.mark.parametrize("text, options, says", [
    # sequences of 16 need 18 training tokens: 20 characters, of which the last 2 validate
    ("abcdefghijklmnopqrst", {"training__sequence_length": 16}, None),
    ("abcdefghijklmnopqrs", {"training__sequence_length": 16}, "has 17 tokens.*at least 18"),
    ("a" * 3000, {"data__validation_fraction": 0.0003}, "validation split has 1 token,"),
])  # fmt: skip
def test_the_shortest_text_that_will_do(tmp_path, text, options, says):
    path = tmp_path / "short.txt"
    path.write_text(text)
    refusal = pytest.raises(UserError, match=says) if says else contextlib.nullcontext()
    with refusal:
        load_dataset(tiny_config(path, **options))


def test_a_text_that_its_own_tokenizer_lacks_is_refused(tiny_text):
    with pytest.raises(UserError, match="lacks.*'R'"):
        load_dataset(tiny_config(tiny_text), CharacterTokenizer.learn("abc"))
