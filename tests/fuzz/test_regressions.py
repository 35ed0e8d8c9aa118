"""What fuzzing found that happens to people, one test each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rich.console import Console

from jaxgru.analysis.measures import Chain, Cycle
from jaxgru.cli import evaluate
from jaxgru.errors import UserError
from jaxgru.lm.config import ConfigError, load_config
from jaxgru.lm.data.tokenizers import SentencePieceTokenizer, TokenizerError


def test_what_a_terminal_would_obey_is_escaped():
    error = UserError("a\nb\x1b[31m\u202e\ud800é")
    assert str(error) == r"a\nb\x1b[31m\u202e\ud800é"


def test_a_corpus_whose_name_is_not_utf8(tmp_path):
    """It could be read, but neither printed nor kept in config.toml."""
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")
    Path(path).write_text("some text " * 99)
    with pytest.raises(ConfigError, match="which is not UTF-8"):
        load_config("astra_alpha", {"data.corpus": path})


def test_a_prompt_that_is_not_utf8():
    """Python passes a byte of an argument that is none as half a surrogate pair."""
    pieces = SentencePieceTokenizer.learn("to be or not to be that is the question\n" * 9, 30)
    with pytest.raises(TokenizerError, match=r"lacks '\\udcff'"):
        pieces.encode("to be\udcff")


def test_a_cycle_that_looks_like_markup():
    """Of a text with tags, `jaxgru evaluate`'s greedy cycles are such: Rich raised MarkupError."""
    console = Console(width=200, record=True, file=open(os.devnull, "w"))
    console.print(evaluate.chain_table(Chain(0.1, [Cycle("[/b]", 4, 1.0)])))
    assert "'[/b]'" in console.export_text()
