"""Negative log-likelihood of a text: the state kept in windows, over one stream, or thrown away.

The primitives give nats for every prediction; what is said about them is NumPy in float64, so no
rounding grows with the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import log

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxgru.data.batching import random_crops, windows
from jaxgru.data.tokenizers import Tokenizer
from jaxgru.errors import UserError
from jaxgru.model import Params, apply, initial_carry

TOKENS_AT_ONCE = 8192  # what one batch or one piece of a stream holds: bounds the memory of logits
RESETS = tuple(2**i for i in range(11))  # of the memory curve: 1, 2, 4, … 1024


def token_nll(logits: Float[Array, "... V"], targets: Int[Array, "..."]) -> Float[Array, "..."]:
    """Nats: −log softmax(logits)[target], the cross-entropy of one prediction.

    NaN for a target outside the vocabulary.
    """
    log_z = jax.nn.logsumexp(logits, axis=-1)
    nll = log_z - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.where(targets < 0, jnp.nan, nll)  # negative indices count from the end


def window_nll(params: Params, tokens: Int[Array, "N"], window: int) -> Float[np.ndarray, "N-1"]:
    """Nats of each prediction with the state put back to zeros every `window` tokens.

    All N − 1 predictions, in order; the last window may be shorter. `window` 1 is stateless.

    Raises:
      UserError: fewer than two tokens, or a window below 1.
    """
    _check_tokens(tokens)
    if window < 1:
        raise UserError(f"the window is {window}; it must be at least 1.")
    n = len(tokens) - 1
    window = min(window, n)
    batch_size = max(1, min(TOKENS_AT_ONCE, n) // window)
    nll = _nll(params, *windows(jnp.asarray(tokens), window, batch_size))
    return np.asarray(nll, np.float64).ravel()[:n]


def stream_nll(params: Params, tokens: Int[Array, "N"]) -> Float[np.ndarray, "N-1"]:
    """Nats of each prediction over one unbroken stream: the state is never put back.

    Raises:
      UserError: fewer than two tokens.
    """
    _check_tokens(tokens)
    n = len(tokens) - 1
    nll = _stream_nll(params, *windows(jnp.asarray(tokens), min(TOKENS_AT_ONCE, n), 1))
    return np.asarray(nll, np.float64).ravel()[:n]


def window_loss(params: Params, tokens: Int[Array, "N"], window: int) -> float:
    """The mean of `window_nll`, nats a token. Raises as it does."""
    return float(window_nll(params, tokens, window).mean())


def random_batch_losses(
    params: Params,
    tokens: Int[Array, "N"],
    window: int,
    key: PRNGKeyArray,
    num_batches: int = 200,
    batch_size: int = 64,
) -> Float[np.ndarray, "M"]:
    """Mean nats per token of each of M random batches, every window from the zero state.

    With 200 batches of 64 windows of 256 this is how nanoGPT evaluates (`estimate_loss`); its loss
    is the mean, whose standard error is the standard deviation / √M.

    Raises:
      UserError: the text is too short for a window.
    """
    if len(tokens) < window + 2:
        raise UserError(
            f"the text has {len(tokens)} tokens, but windows of {window} need {window + 2}."
        )
    keys = jax.random.split(key, num_batches)
    return np.asarray(_random_nll(params, jnp.asarray(tokens), keys, batch_size, window), float)


def stream_loss(params: Params, tokens: Int[Array, "N"]) -> float:
    """The mean of `stream_nll`, nats a token. Raises as it does."""
    return float(stream_nll(params, tokens).mean())


def memory_curve(
    params: Params, tokens: Int[Array, "N"], resets: Sequence[int] = RESETS
) -> dict[int, float]:
    """Mean nats a token by how many tokens pass before the state is put back to zeros.

    A reset every token is stateless; beyond the longest, see `stream_loss`: never.

    Raises:
      UserError: fewer than two tokens, or a reset below 1.
    """
    return {every: window_loss(params, tokens, every) for every in resets}


def recovery(
    params: Params,
    tokens: Int[Array, "N"],
    length: int = 256,
    stride: int = 64,
    stream: Float[np.ndarray, "N-1"] | None = None,
) -> Float[np.ndarray, "length"]:
    """What a reset still costs, nats, at the 1st, 2nd, … `length`-th prediction after it.

    The mean excess over `stream_nll` of the same tokens (which takes out how hard those tokens
    are), over resets `stride` tokens apart. A text shorter than `length` gives a shorter answer.

    Args:
      stream: `stream_nll` of these parameters and tokens, where it is at hand.

    Raises:
      UserError: fewer than two tokens, or a length or stride below 1.
    """
    _check_tokens(tokens)
    if length < 1 or stride < 1:
        raise UserError(f"length {length} and stride {stride} must both be at least 1.")
    if stream is None:
        stream = stream_nll(params, tokens)
    n = len(tokens) - 1
    length = min(length, n)
    at = np.arange(0, n - length + 1, stride)[:, None] + np.arange(length)
    batch_size = min(len(at), max(1, TOKENS_AT_ONCE // length))
    num_batches = -(-len(at) // batch_size)
    padded = np.pad(at, ((0, num_batches * batch_size - len(at)), (0, 0)), mode="edge")
    inputs = np.asarray(tokens)[padded.reshape(num_batches, batch_size, length)]
    targets = np.asarray(tokens)[padded.reshape(num_batches, batch_size, length) + 1]
    nll = np.asarray(_nll(params, inputs, targets), np.float64).reshape(-1, length)[: len(at)]
    return (nll - stream[at]).mean(axis=0)


@dataclass(frozen=True)
class Losses:
    """Mean nats a token under three treatments of the state, and what a token is worth."""

    windows: float
    stream: float
    stateless: float
    num_tokens: int
    num_characters: int

    @property
    def sensitivity(self) -> float:
        """What the lost state costs, nats a token: stateless less one stream."""
        return self.stateless - self.stream

    def in_units(self, nats_a_token: float) -> dict[str, float]:
        """See the function `in_units`."""
        return in_units(nats_a_token, self.num_tokens, self.num_characters)


def in_units(nats_a_token: float, num_tokens: int, num_characters: int) -> dict[str, float]:
    """A loss in nats and bits, a token and a character, so that tokenizers can be compared."""
    nats_a_character = nats_a_token * num_tokens / num_characters
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


@jax.jit
def _nll(
    params: Params, inputs: Int[Array, "M B T"], targets: Int[Array, "M B T"]
) -> Float[Array, "M B T"]:
    """Every row from zero state, batch by batch."""

    def batch_nll(batch: tuple[Array, Array]) -> Array:
        inputs, targets = batch
        return token_nll(apply(params, inputs)[0], targets)

    return jax.lax.map(batch_nll, (inputs, targets))


@partial(jax.jit, static_argnames=("batch_size", "window"))
def _random_nll(
    params: Params, tokens: Int[Array, "N"], keys: PRNGKeyArray, batch_size: int, window: int
) -> Float[Array, "M"]:
    def batch_loss(key: PRNGKeyArray) -> Array:
        inputs, targets = random_crops(key, tokens, batch_size, window)
        return token_nll(apply(params, inputs)[0], targets).mean()

    return jax.lax.map(batch_loss, keys)


@jax.jit
def _stream_nll(
    params: Params, inputs: Int[Array, "M 1 T"], targets: Int[Array, "M 1 T"]
) -> Float[Array, "M 1 T"]:
    """Piece by piece, each from the state that the one before it left."""

    def piece_nll(carry, piece):
        inputs, targets = piece
        logits, carry = apply(params, inputs, carry)
        return carry, token_nll(logits, targets)

    return jax.lax.scan(piece_nll, initial_carry(params, 1), (inputs, targets))[1]


def _check_tokens(tokens: Int[Array, "N"]) -> None:
    if len(tokens) < 2:
        raise UserError(f"a loss needs at least 2 tokens; these are {len(tokens)}.")
