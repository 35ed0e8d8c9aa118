"""Models of exact subwords, spoilt: refused, or each text comes back or is refused."""

from __future__ import annotations

import random
from pathlib import Path

from fuzzing import Finding, Made
from kind_sentencepiece import SENTENCES, spoil, use

from jaxgru.lm.data.tokenizers import SubwordTokenizer, TokenizerError, read_tokenizer

VALID: list[bytes] = []
TEXT = "to be or not to be\n  that is the question\n"


def prepare(folder: Path) -> None:
    VALID[:] = [SubwordTokenizer.learn(TEXT * 9, 290).to_bytes()]


def make(rng: random.Random, folder: Path) -> Made:
    data = spoil(rng, VALID[0])
    (folder / "input").write_bytes(data)
    path = folder / "subwords.model"
    path.write_bytes(data)
    return Made(path, len(data))


def load(path: Path) -> None:
    tokenizer = read_tokenizer(path)
    use(tokenizer)
    for text in (*SENTENCES, TEXT, " ▁ \n\n"):
        try:
            decoded = tokenizer.decode(tokenizer.encode(text))
        except TokenizerError:
            continue
        if decoded != text:
            raise Finding(f"{text!r} comes back as {decoded!r}")
