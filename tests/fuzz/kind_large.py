"""The largest inputs, one of each: python tests/fuzz/campaign.py --kinds large --cases 10."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from fuzzing import Made

import jaxgru
from jaxgru.libraries import import_torch
from jaxgru.lm.config import load_config
from jaxgru.lm.data.dataset import load_dataset
from jaxgru.lm.data.tokenizers import read_tokenizer
from jaxgru.lm.formats.pth import load_pth_model
from jaxgru.lm.formats.safetensors import load_safetensors
from jaxgru.lm.generation import Options, stream_text

BOUNDS = {"seconds": 300.0, "factor": 64, "constant": 512 * 2**20}
"""A state of astra_alpha is 4 MB for 8,192 tokens, and compiled programs are the most of it."""

LINE = b"but soft what light through yonder window breaks "
MB = 10**6


def prepare(folder: Path) -> None:
    import_torch()  # it loads libraries when it is first imported


def _corpus(tokenizer: str) -> Callable[[Path], None]:
    options = {"data.tokenizer": tokenizer, "model.vocab_size": 40}
    return lambda path: load_dataset(
        load_config("astra_alpha", {"data.corpus": str(path), **options})
    )


def _prompt(name: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        params, _, tokenizer = jaxgru.lm.load(name)
        text = "".join(stream_text(params, tokenizer, path.read_text(), Options(num_tokens=32)))
        assert len(text) == 10**6 + 32

    return write


CASES: list[tuple[str, Callable[[], bytes], Callable[[Path], object]]] = [
    ("small.toml", lambda: b"name = 'x'", load_config),  # the first of a process warms up
    ("line.txt", lambda: LINE * (100 * MB // len(LINE)), _corpus("characters")),
    ("word.txt", lambda: b"ab" * (50 * MB), _corpus("characters")),
    ("line.txt", lambda: LINE * (100 * MB // len(LINE)), _corpus("sentencepiece")),
    ("prompt", lambda: b"To be or n" * (MB // 10), _prompt("astra_alpha")),
    ("config.toml", lambda: b"#" * (100 * MB), load_config),
    ("tokenizer.json", lambda: json.dumps({"characters": "ab" * (50 * MB)}).encode(),
     read_tokenizer),
    ("tokenizer.model", lambda: b"\x0a\x03\x0a\x01a" * (20 * MB), read_tokenizer),
    ("model.safetensors", lambda: b"\xff" * (100 * MB), load_safetensors),
    ("model.pth", lambda: b"PK\5\6" * (25 * MB), load_pth_model),
]  # fmt: skip


def make(rng: random.Random, folder: Path) -> Made:
    name, content, load = CASES[rng.number % len(CASES)]
    data = content()
    for old in folder.iterdir():
        old.unlink()
    (folder / name).write_bytes(data)
    return Made((load, folder / name), len(data))


def load(made: tuple) -> None:
    load, path = made
    load(path)
