"""Translate dates with attention; train with teacher forcing, and decode step by step.

    python examples/attention.py
    python examples/attention.py --cell lstm --hidden-dim 128

The model translates dates as people write them into ISO 8601, such as "November 3, 2024" into
"2024-11-03". An encoder reads the characters in both directions. A decoder writes the ten
characters of the result; each of its states attends to all outputs of the encoder (Luong et al.
2015, arXiv 1508.04025, "general").

In training, the decoder reads the correct characters, so `unroll` computes all places in one call.
In use, it reads what it wrote, and `step` computes one place after the other. Both are the same
function. The script verifies this: from the same characters, their scores are equal up to rounding.
Attention is computed from the decoder's outputs, so the same code serves one place or all ten.

After 600 training steps, more than 99 % of new dates are translated without a mistake.

It needs Optax: `pip install optax`.
"""

import argparse
import time
from calendar import month_abbr, month_name
from datetime import date, timedelta
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxgru

CHARACTERS = "\0 ,-0123456789" + "".join(sorted(set("".join(month_name) + "st")))  # "\0": the start
DATES = 10_000  # to train on
LONGEST = len("September 30, 2024")
PLACES = len("2024-09-30")


class Settings(NamedTuple):
    """The model's sizes, and how it is trained."""

    cell: str = "gru"
    hidden_dim: int = 64
    steps: int = 600
    batch_size: int = 64
    learning_rate: float = 5e-3
    seed: int = 0


def encode(text: str, length: int) -> list[int]:
    """Return the numbers of a text's characters, padded to a length."""
    return [CHARACTERS.index(c) for c in text.ljust(length, "\0")]


def decode(numbers: Any) -> str:
    """Return the text of these numbers."""
    return "".join(CHARACTERS[n] for n in numbers).rstrip("\0")


class Dates(NamedTuple):
    """Dates as people write them, and what they should become."""

    source: jax.Array  # characters (N, 18)
    lengths: jax.Array  # of the sources (N,)
    target: jax.Array  # characters (N, 10)


def dates(rng: np.random.Generator, number: int, new: bool = False) -> Dates:
    """Draw dates of 1900 to 2099.

    Every second day is new, that is, the model is not trained on it.
    """
    source = []
    lengths = []
    target = []
    for pair in rng.integers(0, 36_524, number):
        day = date(1900, 1, 1) + timedelta(2 * int(pair) + new)
        ways = [
            f"{day.day} {month_name[day.month]} {day.year}",
            f"{month_name[day.month]} {day.day}, {day.year}",
            f"{month_abbr[day.month]} {day.day} {day.year}",
        ]
        text = ways[rng.integers(3)]
        source.append(encode(text, LONGEST))
        lengths.append(len(text))
        target.append(encode(day.isoformat(), PLACES))
    return Dates(jnp.array(source), jnp.array(lengths), jnp.array(target))


def init(key: jax.Array, s: Settings) -> dict[str, Any]:
    """Draw the parameters: one embedding, the encoder's two directions, the decoder, the head."""
    keys = jax.random.split(key, 5)
    H = s.hidden_dim
    V = len(CHARACTERS)
    normal = jax.nn.initializers.lecun_normal()
    return {
        "embedding": jax.random.normal(keys[0], (V, H)),
        "encoder": jaxgru.init_stack(s.cell, keys[1], H, H, bidirectional=True),
        "decoder": jaxgru.init_stack(s.cell, keys[2], H, 2 * H),
        "attention": normal(keys[3], (2 * H, 2 * H)),
        "head": normal(keys[4], (4 * H, V)),
    }


def read(params: dict[str, Any], source: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return the encoder's outputs (B, S, 2H)."""
    x = params["embedding"][source]
    memory, _ = jaxgru.bidirectional(*params["encoder"], x, lengths=lengths)
    return memory


def scores(params: dict[str, Any], y: jax.Array, memory: jax.Array, lengths: jax.Array):
    """Attend to the memory (B, S, 2H) from the decoder's outputs (B, T, 2H) → scores (B, T, V)."""
    similarity = jnp.einsum("bth,hk,bsk->bts", y, params["attention"], memory)
    is_real = jnp.arange(memory.shape[1]) < lengths[:, None]
    weights = jax.nn.softmax(jnp.where(is_real[:, None], similarity, -jnp.inf))
    context = jnp.einsum("bts,bsh->bth", weights, memory)
    return jnp.concatenate([y, context], axis=-1) @ params["head"]


def forced(params: dict[str, Any], source: jax.Array, lengths: jax.Array, target: jax.Array):
    """Return the scores of all places (B, T, V), each given the right characters before it."""
    memory = read(params, source, lengths)
    before = jnp.pad(target, ((0, 0), (1, 0)))[:, :-1]
    y, _ = jaxgru.unroll(params["decoder"], params["embedding"][before])
    return scores(params, y, memory, lengths)


@jax.jit
def translate(params: dict[str, Any], source: jax.Array, lengths: jax.Array):
    """Write one place after the other; return the characters (B, T) and their scores (B, T, V)."""
    memory = read(params, source, lengths)

    def place(state: tuple, _: None) -> tuple[tuple, tuple]:
        before, carry = state
        y, carry = jaxgru.step(params["decoder"], params["embedding"][before], carry)
        logits = scores(params, y[:, None], memory, lengths)[:, 0]
        character = logits.argmax(-1)
        return (character, carry), (character, logits)

    B = len(source)
    start = jnp.zeros(B, int), jaxgru.initial_carry(params["decoder"], B)
    _, (characters, logits) = jax.lax.scan(place, start, length=PLACES)
    return characters.T, logits.swapaxes(0, 1)


def train(s: Settings) -> tuple[dict[str, Any], jax.Array]:
    """Train on random batches of the dates; return the parameters and each step's loss."""
    init_key, key = jax.random.split(jax.random.key(s.seed))
    data = dates(np.random.default_rng(s.seed), DATES)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adam(optax.cosine_decay_schedule(s.learning_rate, s.steps)),
    )

    def loss(params: dict[str, Any], batch: Dates) -> jax.Array:
        logits = forced(params, *batch)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.target).mean()

    def step(state: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
        params, moments = state
        rows = jax.random.randint(key, (s.batch_size,), 0, DATES)
        batch = jax.tree.map(lambda a: a[rows], data)
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = init(init_key, s)
    state = params, optimizer.init(params)
    keys = jax.random.split(key, s.steps)
    (params, _), losses = jax.jit(partial(jax.lax.scan, step))(state, keys)
    return params, losses


OPTIONS = {
    "hidden_dim": "size of an embedding and of each state",
    "steps": "training steps",
    "batch_size": "dates in a step",
    "learning_rate": "Adam's learning rate, which falls to 0",
    "seed": "seed of the dates, the weights and the batches",
}


def main() -> None:
    """Parse the arguments, train, translate new dates, and compare the two ways."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cell", choices=["gru", "lstm"], default="gru", help="recurrence (gru)")
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
    print(f"training on {DATES:,} dates, {s.steps:,} steps", flush=True)
    start = time.perf_counter()
    params, losses = jax.block_until_ready(train(s))
    seconds = time.perf_counter() - start
    print(f"trained in {seconds:.0f} s; loss {losses[0]:.3f} → {losses[-1]:.3f}")

    source, lengths, target = dates(np.random.default_rng(s.seed + 1), 1000, new=True)
    result, logits = translate(params, source, lengths)
    print("new dates:")
    for i in range(3):
        print(f"  {decode(source[i])} → {decode(result[i])}")
    gap = abs(forced(params, source, lengths, result) - logits).max()
    print(f"scores of unroll and of step differ by at most {gap:.0e}")
    result_before, _ = translate(init(jax.random.key(s.seed), s), source, lengths)
    before = (result_before == target).all(1).mean()
    after = (result == target).all(1).mean()
    print(f"right, of 1,000 new dates: {before:.1%} before training, {after:.1%} after")


if __name__ == "__main__":
    main()
