"""Tokens to batches, on the device: random crops or streams for training, windows to evaluate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from jaxgru.arguments import as_sequence
from jaxgru.arrays import AnyArray
from jaxgru.errors import UserError
from jaxgru.lm.config import TrainingConfig
from jaxgru.lm.data.tokenizers import Tokens
from jaxgru.printing import counted

__all__ = [
    "as_text",
    "document_starts",
    "random_crops",
    "stream_windows",
]


def random_crops(
    key: PRNGKeyArray, tokens: Tokens, batch_size: int, sequence_length: int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Draw inputs x[i : i+T] and targets x[i+1 : i+T+1], each i uniform in [0, N − T − 1).

    As in the study, the last possible crop is never drawn. N must be at least T + 2.
    """
    starts = jax.random.randint(key, (batch_size, 1), 0, tokens.shape[0] - sequence_length - 1)
    crops = tokens[starts + jnp.arange(sequence_length + 1)[None]]
    return crops[:, :-1], crops[:, 1:]


def stream_windows(
    tokens: Tokens,
    step: Int[Array, ""],
    batch_size: int,
    sequence_length: int,
    key: PRNGKeyArray | None = None,
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Bool[Array, ""]]:
    """Return window number `step` of B streams: the text cut into B equal parts, one per row.

    The windows of a row are contiguous, so the state after one is the state before the next. After
    the last whole window, the streams restart at the first. With a key, each such pass begins at a
    random token, and the text is a ring: its first token follows its last one.

    Returns inputs, targets, and whether these are the first windows of the streams.
    """
    N = tokens.shape[0]
    stream_length = (N - 1) // batch_size
    windows_per_pass = stream_length // sequence_length
    # `int` is the dtype of `arange`.
    window = step.astype(int) % windows_per_pass
    starts = stream_length * jnp.arange(batch_size)[:, None] + sequence_length * window
    indices = starts + jnp.arange(sequence_length + 1)[None]
    if key is not None:
        pass_key = jax.random.fold_in(key, step // windows_per_pass)
        # A sum, of up to N + N, may exceed 32 bits; a difference does not.
        indices = (indices - jax.random.randint(pass_key, (), 0, N)) % N
    parts = tokens[indices]
    return parts[:, :-1], parts[:, 1:], window == 0


def document_starts(
    inputs: Int[Array, "*n"], separator_token: int | None
) -> Bool[Array, "*n"] | None:
    """Return where the state is reset: before each separator token; None if there is none."""
    if separator_token is None:
        return None
    return inputs == separator_token


def check_length(num_tokens: int, training: TrainingConfig, batches: str, name: str) -> None:
    """Raise UserError if there are too few tokens for one batch of crops or streams."""
    T = training.sequence_length
    B = training.rows_per_step
    if batches == "streams":
        least = B * T + 1
        what = f"{B} streams of sequences of {T}"
    else:
        least = T + 2
        what = f"sequences of {T}"
    if num_tokens < least:
        raise UserError(
            f"{name} has {counted(num_tokens, 'token')}, but {what} need at least {least}; add "
            "text, or shorten the sequences."
        )


def as_text(tokens: Int[AnyArray, "N"], vocab_size: int) -> Int[AnyArray, "N"]:
    """Return a text's tokens.

    Raises:
      UserError: there are fewer than 2, or `as_sequence` does not take them.
    """
    tokens = as_sequence("tokens", tokens, vocab_size)
    if len(tokens) < 2:
        raise UserError(f"a loss needs at least 2 tokens, not {len(tokens)}.")
    return tokens


def windows(
    tokens: Tokens, window: int, batch_size: int
) -> tuple[Int[Array, "M B T"], Int[Array, "M B T"]]:
    """Cut all N − 1 predictions into windows of T = `window` inputs, `batch_size` per batch.

    Returns inputs and targets. Windows are in order, row by row and batch by batch, so the first
    N − 1 entries are the text's predictions in order, and the rest is padding with zeros.
    """
    num_predictions = tokens.shape[0] - 1
    num_batches = -(-num_predictions // (window * batch_size))
    shape = (num_batches, batch_size, window)
    pad = (0, num_batches * batch_size * window - num_predictions)
    inputs = jnp.pad(tokens[:-1], pad).reshape(shape)
    targets = jnp.pad(tokens[1:], pad).reshape(shape)
    return inputs, targets


def power_of_two(number: int) -> int:
    """Return the least power of two that is not below a number from 1."""
    return 1 << (number - 1).bit_length()
