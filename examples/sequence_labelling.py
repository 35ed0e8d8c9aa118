"""Sort the digits of sequences with a bidirectional stack, and show that padding has no influence.

    python examples/sequence_labelling.py
    python examples/sequence_labelling.py --cell lstm --one-direction

A sequence consists of 1 to 16 digits. The label at its i-th place is its i-th smallest digit. A
label thus depends on digits to its left and to its right, and `jaxgru.bidirectional` reads in both
directions. All sequences of a batch are padded to 16 places, and `lengths` says how many of these
are real. The script verifies that padding has no influence: the outputs at the real places are the
same bit for bit, whatever the padding is, and the gradient of the padding is exactly zero.

After 500 steps, more than 99 % of the labels are right. With `--one-direction`, layers of twice the
size read from left to right only, and about 40 % of the labels are right. At the first place, for
example, these layers have not seen the smallest digit yet.

It needs Optax: `pip install optax`.
"""

import argparse
import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxgru

DIGITS = 10
INIT = {"gru": jaxgru.init_gru, "lstm": jaxgru.init_lstm, "rnn": jaxgru.init_rnn}


class Settings(NamedTuple):
    """The model's sizes, and how it is trained."""

    cell: str = "gru"
    one_direction: bool = False
    hidden_dim: int = 64
    num_layers: int = 2
    longest: int = 16
    steps: int = 500
    batch_size: int = 128
    learning_rate: float = 3e-3
    seed: int = 0


def batch(key: jax.Array, s: Settings) -> tuple[jax.Array, ...]:
    """Draw digits (B, T), their lengths (B,), and the sorted digits (B, T); padding is 0."""
    k_digits, k_lengths = jax.random.split(key)
    shape = s.batch_size, s.longest
    digits = jax.random.randint(k_digits, shape, 0, DIGITS)
    lengths = jax.random.randint(k_lengths, shape[:1], 1, s.longest + 1)
    is_real = real(lengths, s.longest)
    labels = jnp.sort(jnp.where(is_real, digits, DIGITS))  # padding is greater than any digit
    return jnp.where(is_real, digits, 0), lengths, jnp.where(is_real, labels, 0)


def real(lengths: jax.Array, T: int) -> jax.Array:
    """Return which places (B, T) are not padding."""
    return jnp.arange(T) < lengths[:, None]


def init(key: jax.Array, s: Settings) -> dict[str, Any]:
    """Draw the parameters: an embedding, layers for each direction, and a head."""
    keys = jax.random.split(key, 2 + 2 * s.num_layers)
    H = s.hidden_dim if not s.one_direction else 2 * s.hidden_dim
    inputs = [s.hidden_dim] + [2 * s.hidden_dim] * (s.num_layers - 1)
    layers = [INIT[s.cell](key, F, H) for key, F in zip(keys[2:], 2 * inputs, strict=True)]
    return {
        "embedding": jax.random.normal(keys[0], (DIGITS, s.hidden_dim)),
        "forward": layers[: s.num_layers],
        "backward": None if s.one_direction else layers[s.num_layers :],
        "head": jax.random.normal(keys[1], (2 * s.hidden_dim, DIGITS)) / s.hidden_dim**0.5,
    }


def scores(params: dict[str, Any], x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return a score for each label at each place (B, T, 10), from embedded digits (B, T, F)."""
    if params["backward"] is None:
        y, _ = jaxgru.unroll(params["forward"], x, lengths=lengths)
    else:
        y, _ = jaxgru.bidirectional(params["forward"], params["backward"], x, lengths=lengths)
    return y @ params["head"]


def loss_fn(params: dict[str, Any], x: jax.Array, lengths: jax.Array, labels: jax.Array):
    """Return the mean cross-entropy of the real places, and the share of correct labels there."""
    logits = scores(params, x, lengths)
    is_real = real(lengths, x.shape[1])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    right = logits.argmax(-1) == labels
    mean = partial(jnp.mean, where=is_real)
    return mean(loss), mean(right)


def train(s: Settings) -> tuple[dict[str, Any], jax.Array, jax.Array]:
    """Train; return the parameters, and the loss and the accuracy of each step."""
    init_key, key = jax.random.split(jax.random.key(s.seed))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adam(optax.cosine_decay_schedule(s.learning_rate, s.steps)),
    )
    params = init(init_key, s)

    def embedded_loss(params, digits, lengths, labels):
        return loss_fn(params, params["embedding"][digits], lengths, labels)

    def step(state: tuple, key: jax.Array) -> tuple[tuple, tuple]:
        params, opt_state = state
        results, gradient = jax.value_and_grad(embedded_loss, has_aux=True)(params, *batch(key, s))
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), results

    state = params, optimizer.init(params)
    keys = jax.random.split(key, s.steps)
    (params, _), (losses, accuracies) = jax.jit(partial(jax.lax.scan, step))(state, keys)
    return params, losses, accuracies


def padding_has_no_influence(params: dict[str, Any], s: Settings, key: jax.Array) -> bool:
    """Return whether NaN as padding changes no bit and gets a gradient of exactly zero."""
    digits, lengths, labels = batch(key, s)
    x = params["embedding"][digits]
    is_real = real(lengths, s.longest)[..., None]
    spoilt = jnp.where(is_real, x, jnp.nan)

    @jax.jit
    def results(x: jax.Array) -> tuple[jax.Array, ...]:
        gradients, _ = jax.grad(loss_fn, argnums=(0, 1), has_aux=True)(params, x, lengths, labels)
        return jnp.where(is_real, scores(params, x, lengths), 0), *gradients

    same = jax.tree.map(lambda a, b: (a == b).all(), results(x), results(spoilt))
    _, _, of_x = results(spoilt)
    return all(jax.tree.leaves(same)) and bool((jnp.where(is_real, 0, of_x) == 0).all())


def main() -> None:
    """Parse the arguments, train, and print what was learned."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in Settings()._asdict().items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(option, type=type(default), default=default,
                                choices=[*INIT] if name == "cell" else None,
                                help=f"default: {default}")  # fmt: skip
    s = Settings(**vars(parser.parse_args()))
    start = time.perf_counter()
    params, losses, accuracies = jax.block_until_ready(train(s))
    seconds = time.perf_counter() - start
    for part in range(0, s.steps, max(1, s.steps // 10)):
        print(f"step {part:>5}  loss {losses[part]:.4f}  accuracy {accuracies[part]:.1%}")
    test = s._replace(batch_size=1000)
    digits, lengths, labels = batch(jax.random.key(s.seed + 1), test)
    found = scores(params, params["embedding"][digits], lengths).argmax(-1)
    is_real = real(lengths, s.longest)
    right = (found == labels) | ~is_real
    print(
        f"trained in {seconds:.0f} s; of 1,000 new sequences, {right.mean(where=is_real):.2%} of "
        f"the labels and {right.all(1).mean():.1%} of the whole sequences are right."
    )
    for i in range(3):
        n = int(lengths[i])
        print(f"  {''.join(map(str, digits[i, :n]))} -> {''.join(map(str, found[i, :n]))}")
    ok = padding_has_no_influence(params, s, jax.random.key(2))
    print(f"padding has {'no' if ok else 'SOME'} influence on outputs and gradients.")


if __name__ == "__main__":
    main()
