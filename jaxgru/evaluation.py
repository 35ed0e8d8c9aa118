"""Negative log-likelihood of a text: the state kept in windows, over one stream, or thrown away."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import log

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxgru.batching import windows
from jaxgru.errors import UserError
from jaxgru.model import Params, apply, initial_carry
from jaxgru.tokenizers import Tokenizer

TOKENS_AT_ONCE = 8192  # what one batch or one piece of a stream holds: bounds the memory of logits


def token_nll(logits: Float[Array, "... V"], targets: Int[Array, "..."]) -> Float[Array, "..."]:
    """Nats: −log softmax(logits)[target], the cross-entropy of one prediction."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    return log_z - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]


def window_loss(params: Params, tokens: Int[Array, "N"], window: int) -> float:
    """Mean nats a token with the state put back to zeros every `window` tokens.

    All N − 1 predictions count; the last window may be shorter. `window` 1 is stateless.

    Raises:
      UserError: fewer than two tokens, or a window below 1.
    """
    _check_tokens(tokens)
    if window < 1:
        raise UserError(f"the window is {window}; it must be at least 1.")
    n = len(tokens) - 1
    batch_size = max(1, min(TOKENS_AT_ONCE, n) // window)
    return _mean(_window_sums(params, jnp.asarray(tokens), window, batch_size), n)


def stream_loss(params: Params, tokens: Int[Array, "N"]) -> float:
    """Mean nats a token over one unbroken stream: the state is never put back.

    Raises:
      UserError: fewer than two tokens.
    """
    _check_tokens(tokens)
    n = len(tokens) - 1
    return _mean(_stream_sums(params, jnp.asarray(tokens), min(TOKENS_AT_ONCE, n)), n)


@dataclass(frozen=True)
class Losses:
    """Mean nats a token under three treatments of the state, and what a token is worth."""

    windows: float
    stream: float
    stateless: float
    num_tokens: int
    num_characters: int

    def in_units(self, nats_a_token: float) -> dict[str, float]:
        """One loss in nats and bits, a token and a character."""
        nats_a_character = nats_a_token * self.num_tokens / self.num_characters
        return {
            "nats_per_token": nats_a_token,
            "bits_per_token": nats_a_token / log(2),
            "nats_per_character": nats_a_character,
            "bits_per_character": nats_a_character / log(2),
        }


def evaluate(
    params: Params, tokens: Int[Array, "N"], tokenizer: Tokenizer, window: int = 128
) -> Losses:
    """All three treatments over the whole of the tokens; targets are counted, not inputs."""
    return Losses(
        windows=window_loss(params, tokens, window),
        stream=stream_loss(params, tokens),
        stateless=window_loss(params, tokens, 1),
        num_tokens=len(tokens) - 1,
        num_characters=tokenizer.num_characters(np.asarray(tokens)[1:]),
    )


@partial(jax.jit, static_argnames=("window", "batch_size"))
def _window_sums(params: Params, tokens: Array, window: int, batch_size: int) -> Array:
    def batch_sum(batch: tuple[Array, Array, Array]) -> Array:
        inputs, targets, weights = batch
        logits, _ = apply(params, inputs)
        return jnp.sum(token_nll(logits, targets) * weights)

    return jax.lax.map(batch_sum, windows(tokens, window, batch_size))


@partial(jax.jit, static_argnames="piece")
def _stream_sums(params: Params, tokens: Array, piece: int) -> Array:
    def piece_sum(carry, batch):
        inputs, targets, weights = batch
        logits, carry = apply(params, inputs, carry)
        return carry, jnp.sum(token_nll(logits, targets) * weights)

    return jax.lax.scan(piece_sum, initial_carry(params, 1), windows(tokens, piece, 1))[1]


def _mean(sums: Array, n: int) -> float:
    """The batches' sums are added on the host in float64: no rounding grows with the text."""
    return float(np.asarray(sums, np.float64).sum() / n)


def _check_tokens(tokens: Int[Array, "N"]) -> None:
    if len(tokens) < 2:
        raise UserError(f"a loss needs at least 2 tokens; these are {len(tokens)}.")
