"""Tokens to batches, on the device: random crops or streams to train on, windows to evaluate on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from jaxgru.config import TrainingConfig
from jaxgru.errors import UserError


def random_crops(
    key: PRNGKeyArray, tokens: Int[Array, "N"], batch_size: int, sequence_length: int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Inputs x[i : i+T] and targets x[i+1 : i+T+1], each i uniform in [0, N − T − 1)."""
    starts = jax.random.randint(key, (batch_size, 1), 0, tokens.shape[0] - sequence_length - 1)
    crops = tokens[starts + jnp.arange(sequence_length + 1)]
    return crops[:, :-1], crops[:, 1:]


def stream_windows(
    tokens: Int[Array, "N"], step: Int[Array, ""], batch_size: int, sequence_length: int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Bool[Array, ""]]:
    """Window number `step` of B streams, which are the text cut into B equal parts, one a row.

    A row's windows follow one another, so that the state after one is the state before the next.
    After the streams' last whole window come their first ones again.

    Returns inputs, targets, and whether these are the streams' first windows.
    """
    length = (tokens.shape[0] - 1) // batch_size  # predictions in a stream
    window = step % (length // sequence_length)
    starts = length * jnp.arange(batch_size)[:, None] + sequence_length * window
    parts = tokens[starts + jnp.arange(sequence_length + 1)]
    return parts[:, :-1], parts[:, 1:], window == 0


def check_length(num_tokens: int, training: TrainingConfig, sampling: str, name: str) -> None:
    """Raises UserError unless that many tokens give `random_crops` or `stream_windows` a batch."""
    T = training.sequence_length
    B = training.rows_per_step
    least, what = {
        "crops": (T + 2, f"sequences of {T}"),
        "streams": (B * T + 1, f"{B} streams of sequences of {T}"),
    }[sampling]
    if num_tokens < least:
        raise UserError(f"{name} has {num_tokens} tokens, but {what} need at least {least}.")


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
