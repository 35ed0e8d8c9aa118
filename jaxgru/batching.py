"""Tokens to batches, on the device: random crops to train on, windows to evaluate on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from jaxgru.errors import UserError


def random_crops(
    key: PRNGKeyArray, tokens: Int[Array, "N"], batch_size: int, sequence_length: int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Inputs x[i : i+T] and targets x[i+1 : i+T+1], each i uniform in [0, N − T − 1)."""
    starts = jax.random.randint(key, (batch_size, 1), 0, tokens.shape[0] - sequence_length - 1)
    crops = tokens[starts + jnp.arange(sequence_length + 1)]
    return crops[:, :-1], crops[:, 1:]


def check_length(num_tokens: int, sequence_length: int, name: str) -> None:
    """Raises UserError unless `random_crops` has a crop to draw from that many tokens."""
    if num_tokens < sequence_length + 2:
        raise UserError(
            f"{name} has {num_tokens} tokens, but sequences of {sequence_length} need "
            f"at least {sequence_length + 2}."
        )


def windows(
    tokens: Int[Array, "N"], window: int, batch_size: int
) -> tuple[Int[Array, "M B T"], Int[Array, "M B T"]]:
    """All N − 1 predictions, cut into windows of T = `window` inputs, `batch_size` a batch.

    Returns inputs and targets. Windows follow one another, row by row, batch by batch, so that the
    first N − 1 entries are the text's predictions in order, and the rest pads with zeros.
    """
    n = tokens.shape[0] - 1
    num_batches = -(-n // (window * batch_size))
    pad = (0, num_batches * batch_size * window - n)
    shape = (num_batches, batch_size, window)
    return jnp.pad(tokens[:-1], pad).reshape(shape), jnp.pad(tokens[1:], pad).reshape(shape)
