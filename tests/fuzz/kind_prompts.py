"""Prompts: any text, any options, to models of characters and of pieces."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import jax
from fuzzing import Finding, Made
from kind_sentencepiece import learn_pieces
from mutations import text

import jaxgru
from jaxgru.lm import ModelConfig
from jaxgru.lm.data.tokenizers import CharacterTokenizer
from jaxgru.lm.generation import Options, stream_text

BOUNDS = {"seconds": 60.0}
"""Some cases are the first of their shape, and XLA compiles a program: seconds, on a busy core."""

MODELS: list = []
LETTERS = "to be or not\n\0é\u202e\U0001f3ad"


def prepare(folder: Path) -> None:
    MODELS.clear()
    for tokenizer in (CharacterTokenizer.learn(LETTERS), learn_pieces()):
        model = ModelConfig(vocab_size=tokenizer.vocab_size, embedding_dim=2, hidden_dim=3)
        MODELS.append((jaxgru.lm.init(jax.random.key(0), model), tokenizer))


def make(rng: random.Random, folder: Path) -> Made:
    prompt = rng.choice((
        lambda: text(rng),
        lambda: "".join(rng.choice("to be or not") for _ in range(rng.choice((1, 2, 2, 500)))),
        lambda: "".join(rng.choice(LETTERS) for _ in range(rng.choice((1, 2, 3, 1000)))),
        lambda: "to be" + rng.choice(("\udcff", "\ud83d", "\0", "\u0301", "\ufeff", "▁", "\x85")),
        lambda: rng.choice("abt \n") * rng.choice((1, 50, 5000)),
        lambda: "".join(chr(rng.randrange(0x110000)) for _ in range(rng.choice((1, 3, 2000)))),
    ))()  # fmt: skip
    options = Options(
        num_tokens=_option(rng, (1,), (0, -1)),
        temperature=_option(rng, (0.0, 0.8, 0.8, 1e-30, 1e30), (-1.0, float("nan"), float("inf"))),
        top_k=_option(rng, (None, 2), (0, -1, 10**9)),
        top_p=_option(rng, (None, None, 0.5, 1.0, 1e-30), (0.0, float("nan"), 2.0)),
        stateful=rng.random() < 0.8,
        last_token_only=rng.random() < 0.3,
        seed=_option(rng, (0, 1, 2**32 - 1), (2**32, -1, 10**30)),
    )
    return Made((rng.randrange(2), prompt, options), len(prompt.encode("utf-8", "replace")))


def _option(rng: random.Random, good: tuple, bad: tuple) -> object:
    return rng.choice(good if rng.random() < 0.95 else bad)


def load(made: tuple[int, str, Options]) -> None:
    which, prompt, options = made
    params, tokenizer = MODELS[which]
    text = stream_text(params, tokenizer, prompt, options)
    # each length of prompt is compiled anew, so that only the short ones go all the way
    short = len(tokenizer.encode(prompt)) <= 2 or options.last_token_only
    said = list(text) if short else list(itertools.islice(text, 1))
    "".join(said).encode()
    if said[0] != prompt:
        raise Finding("the prompt is not what was given")
