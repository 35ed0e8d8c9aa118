"""tokenizer.json: a vocabulary of characters, spoilt, nested, doubled, or no text at all."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
from fuzzing import Finding, Made
from mutations import mutate, text

from jaxgru.lm.data.tokenizers import CharacterTokenizer, load_tokenizer, read_tokenizer

VALID = [
    CharacterTokenizer.learn(sample).to_bytes()
    for sample in ("abc\n", 'né\0"\\\u202e', "\U0001f3ad漢\ufeff")
]


def prepare(folder: Path) -> None:
    pass


def make(rng: random.Random, folder: Path) -> Made:
    n = rng.choice((1, 100, 10_000, 300_000))
    odd = (
        b"[" * n, b'{"characters": ' + b"[" * n, b'{"a":' * n, b"9" * n, b'"' + b"x" * n + b'"',
        b'{"characters": "\\ud800"}', b'{"characters": "\\udcff\\ud83c"}', b'{"characters": ""}',
        b'{"characters": "a", "characters": "b"}', b'{"characters": null}', b'{"characters": NaN}',
        json.dumps({"characters": text(rng)}).encode(),
        json.dumps({"characters": text(rng)}).encode(rng.choice(("utf-16", "utf-32", "utf-8-sig"))),
        json.dumps({"characters": "".join(map(chr, range(32, 32 + min(n, 50_000))))}).encode(),
        json.dumps({text(rng): text(rng), "characters": {text(rng): 1}}).encode(),
        b'{"characters": "' + b"\\u0061" * n + b'"}', b"\0" * n, b" " * n, b"-", b'{"a":1e999}',
    )  # fmt: skip
    data = rng.choice(odd) if rng.random() < 0.5 else mutate(rng, rng.choice(VALID))
    (folder / "input").write_bytes(data)
    (folder / "tokenizer.json").write_bytes(data)
    return Made(folder / rng.choice(("tokenizer.json", ".")), len(data))


def load(path: Path) -> None:
    tokenizer = read_tokenizer(path) if path.suffix else load_tokenizer(path)
    decoded = tokenizer.decode(np.arange(tokenizer.vocab_size))
    decoded.encode()  # a terminal takes it
    if tokenizer.encode(decoded).tolist() != list(range(tokenizer.vocab_size)):
        raise Finding("encode is not the inverse of decode")
    again = CharacterTokenizer.from_bytes(tokenizer.to_bytes())
    if again.vocabulary != tokenizer.vocabulary:
        raise Finding("another vocabulary when written and read")
