"""Negative log-likelihood of a text, with the state kept in windows, in one stream, or not at all.

Functions whose names end in `_nll` return nats for each prediction. NumPy averages them in float64,
so rounding errors do not grow with the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import exp, log, nan

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from jaxgru.cells.base import AnyArray
from jaxgru.errors import UserError, check_whole, counted
from jaxgru.lm.arguments import as_sequence
from jaxgru.lm.data.batching import as_text, power_of_two, random_crops, unit_starts, windows
from jaxgru.lm.data.tokenizers import Chunk
from jaxgru.lm.model import Params, apply, initial_carry, on_device, token_nll
from jaxgru.parallel.sharding import ROWS, one_copy, shard

TOKENS_AT_ONCE = 8192  # in one batch or one piece of a stream: bounds the memory of the logits
SHORTEST = 16  # tokens to which lines are padded; longer ones to a power of two
RESETS = tuple(2**i for i in range(11))  # tokens between resets, of the memory curve: 1, 2, … 1024


def window_nll(
    params: Params,
    tokens: Int[AnyArray, "N"],
    window: int,
    mesh: Mesh | None = None,
    end: int | None = None,
) -> Float[np.ndarray, "N-1"]:
    """Compute the nats of each prediction, with the state reset to zero every `window` tokens.

    The result has all N − 1 predictions in order. A window of 1 is stateless.

    Args:
      mesh: the devices that share the batches; the parameters must be on it. One device computes
        each batch, so the result is bit-identical to that of a single device. None: one device
        computes all batches.
      end: of a text in units, the end-of-unit token: the state is also reset before each of these;
        None: the text is one.

    Raises:
      UserError: the tokens are fewer than two, or not one sequence; one is outside the vocabulary;
        or the window is below 1.
      ValueError: the tokens are not integers.
    """
    tokens = as_text(tokens, len(params.embedding))
    n = len(tokens) - 1
    window = min(check_whole("window", window), n)
    batch_size = max(1, min(TOKENS_AT_ONCE, n) // window)
    params, batches = on_device(params), windows(jnp.asarray(tokens), window, batch_size)
    if mesh is None or mesh.size == 1:
        nll = _nll(one_copy(params, mesh), *batches, end=end)
    else:
        more = [(0, -len(batches[0]) % mesh.size), (0, 0), (0, 0)]  # equally many on each device
        batches = (shard(jnp.pad(x, more), NamedSharding(mesh, P(ROWS))) for x in batches)
        nll = _nll_on_mesh(mesh, params, *batches, end=end)
    return np.asarray(nll, np.float64).ravel()[:n]


def stream_nll(
    params: Params, tokens: Int[AnyArray, "N"], end: int | None = None
) -> Float[np.ndarray, "N-1"]:
    """Compute the nats of each prediction over one stream: the state is never reset.

    Of a text in units, it is reset before each end-of-unit token, `end`, and only there.
    """
    tokens = as_text(tokens, len(params.embedding))
    n = len(tokens) - 1
    pieces = windows(jnp.asarray(tokens), min(TOKENS_AT_ONCE, n), 1)
    nll = _stream_nll(on_device(params), *pieces, end=end)
    return np.asarray(nll, np.float64).ravel()[:n]


def window_loss(
    params: Params,
    tokens: Int[AnyArray, "N"],
    window: int,
    mesh: Mesh | None = None,
    end: int | None = None,
) -> float:
    """Return the mean of `window_nll`, nats per token. Raises what that raises."""
    return float(window_nll(params, tokens, window, mesh, end).mean())


def lines_nll(
    params: Params, lines: Sequence[Chunk], end: int | None = None
) -> list[Float[np.ndarray, "_"]]:
    """Compute the nats of each prediction in each line, from zero state; a line may be empty.

    The longest lines make the first batch. All batches of a length have the same number of rows,
    so one program computes them. `end` is as for `window_nll`. Raises UserError if a token is
    outside the vocabulary.
    """
    as_sequence("tokens", np.concatenate(lines), len(params.embedding))
    params, nats = on_device(params), [np.empty(0)] * len(lines)
    lengths = [max(len(line) - 1, 0) for line in lines]
    left = sorted(filter(lengths.__getitem__, range(len(lines))), key=lambda i: -lengths[i])
    while left:
        if lengths[left[0]] > TOKENS_AT_ONCE:
            longest, *left = left
            nats[longest] = stream_nll(params, lines[longest], end)
            continue
        T = max(SHORTEST, power_of_two(lengths[left[0]]))
        rows = min(power_of_two(len(lines)), max(TOKENS_AT_ONCE // T, 1))
        batch, left = left[:rows], left[rows:]
        padded = np.zeros((1, rows, T + 1), np.int32)
        for row, i in enumerate(batch):
            padded[0, row, : len(lines[i])] = lines[i]
        (nll,) = np.asarray(_nll(params, padded[..., :-1], padded[..., 1:], end=end), np.float64)
        for row, i in enumerate(batch):
            nats[i] = nll[row, : lengths[i]]
    return nats


def random_batch_losses(
    params: Params,
    tokens: Int[AnyArray, "N"],
    window: int,
    key: PRNGKeyArray,
    num_batches: int = 200,
    batch_size: int = 64,
    end: int | None = None,
) -> Float[np.ndarray, "M"]:
    """Compute the mean nats per token of each of M random batches; windows start from zero state.

    nanoGPT evaluates on 200 batches of 64 windows of 256 tokens (`estimate_loss`). Its loss is the
    mean of these; the standard error is their standard deviation / √M. `end` is as for
    `window_nll`.

    Raises what `window_nll` raises, and UserError if the text is too short for a window, or
    `num_batches` or `batch_size` is below 1.
    """
    tokens = as_text(tokens, len(params.embedding))
    window, num_batches = check_whole("window", window), check_whole("num_batches", num_batches)
    batch_size = check_whole("batch_size", batch_size)
    if len(tokens) < window + 2:
        raise UserError(
            f"the text has {counted(len(tokens), 'token')}, but windows of {window} need "
            f"{window + 2}."
        )
    keys = jax.random.split(key, num_batches)
    nll = _random_nll(on_device(params), jnp.asarray(tokens), keys, batch_size, window, end)
    return np.asarray(nll, float)


def memory_curve(
    params: Params,
    tokens: Int[AnyArray, "N"],
    resets: Sequence[int] = RESETS,
    end: int | None = None,
) -> dict[int, float]:
    """Return the mean nats per token for each number of tokens between two resets to zero.

    1 is stateless; the mean of `stream_nll` is the limit. `end` is as for `window_nll`.
    """
    resets = [check_whole("an entry of resets", every) for every in resets]
    return {every: window_loss(params, tokens, every, end=end) for every in resets}


def recovery(
    params: Params,
    tokens: Int[AnyArray, "N"],
    length: int = 256,
    stride: int = 64,
    stream: Float[np.ndarray, "N-1"] | None = None,
    end: int | None = None,
) -> Float[np.ndarray, "M"]:
    """Compute the cost of a reset, in nats, at the 1st, 2nd, … `length`-th prediction after it.

    The cost is the mean excess over `stream_nll` on the same tokens, so their difficulty cancels.
    The mean is over resets `stride` tokens apart. M is `length`, or N − 1 if the text is shorter.

    Args:
      stream: `stream_nll` of these parameters and tokens, if it has been computed already.
      end: as for `window_nll`.
    """
    tokens = as_text(tokens, len(params.embedding))
    length, stride = check_whole("length", length), check_whole("stride", stride)
    n = len(tokens) - 1
    if stream is None:
        stream = stream_nll(params, tokens, end)
    length = min(length, n)
    at = np.arange(0, n - length + 1, stride)[:, None] + np.arange(length)
    batch_size = min(len(at), max(1, TOKENS_AT_ONCE // length))
    padded = np.pad(at, ((0, -len(at) % batch_size), (0, 0)), mode="edge")
    padded = padded.reshape(-1, batch_size, length)
    inputs, targets = np.asarray(tokens)[padded], np.asarray(tokens)[padded + 1]
    nll = _nll(on_device(params), inputs, targets, end=end)
    nll = np.asarray(nll, np.float64).reshape(-1, length)
    return (nll[: len(at)] - stream[at]).mean(axis=0)


def perplexity(nats_per_token: float) -> float:
    """Return exp(nats_per_token), or infinity where a float cannot hold it."""
    try:
        return exp(nats_per_token)
    except OverflowError:
        return float("inf")


def in_units(nats_per_token: float, num_tokens: int, num_characters: int) -> dict[str, float]:
    """Convert a loss to nats and bits per token and per character.

    It may also be a difference of losses. Losses per character of the same text can be compared
    between tokenizers; they are NaN where there is no character.
    """
    nats_per_character = nats_per_token * num_tokens / num_characters if num_characters else nan
    return {
        "nats_per_token": nats_per_token,
        "bits_per_token": nats_per_token / log(2),
        "nats_per_character": nats_per_character,
        "bits_per_character": nats_per_character / log(2),
    }


@partial(jax.jit, static_argnames="end")
def _nll(
    params: Params,
    inputs: Int[Array, "M B T"],
    targets: Int[Array, "M B T"],
    end: int | None = None,
) -> Float[Array, "M B T"]:
    """Compute each batch in turn, every row from zero state."""

    def batch_nll(batch: tuple[Array, Array]) -> Array:
        inputs, targets = batch
        return token_nll(apply(params, inputs, reset=unit_starts(inputs, end))[0], targets)

    return jax.lax.map(batch_nll, (inputs, targets))


@partial(jax.jit, static_argnames=("mesh", "end"))
def _nll_on_mesh(
    mesh: Mesh,
    params: Params,
    inputs: Int[Array, "M B T"],
    targets: Int[Array, "M B T"],
    end: int | None = None,
) -> Float[Array, "M B T"]:
    """Compute `_nll`, with an equal share of the batches on each device; gather the results."""

    share = lambda *given: jax.lax.all_gather(_nll(*given, end=end), ROWS, tiled=True)
    run = jax.shard_map(
        share, mesh=mesh, in_specs=(P(), P(ROWS), P(ROWS)), out_specs=P(), check_vma=False
    )
    return run(params, inputs, targets)


@partial(jax.jit, static_argnames=("batch_size", "window", "end"))
def _random_nll(
    params: Params,
    tokens: Int[Array, "N"],
    keys: Key[Array, "M"],
    batch_size: int,
    window: int,
    end: int | None,
) -> Float[Array, "M"]:
    def batch_loss(key: PRNGKeyArray) -> Array:
        inputs, targets = random_crops(key, tokens, batch_size, window)
        logits, _ = apply(params, inputs, reset=unit_starts(inputs, end))
        return token_nll(logits, targets).mean()

    return jax.lax.map(batch_loss, keys)


@partial(jax.jit, static_argnames="end")
def _stream_nll(
    params: Params,
    inputs: Int[Array, "M 1 T"],
    targets: Int[Array, "M 1 T"],
    end: int | None = None,
) -> Float[Array, "M 1 T"]:
    """Compute each piece in turn, from the state after the one before it."""

    def piece_nll(carry, piece):
        inputs, targets = piece
        logits, carry = apply(params, inputs, carry, reset=unit_starts(inputs, end))
        return carry, token_nll(logits, targets)

    return jax.lax.scan(piece_nll, initial_carry(params, 1), (inputs, targets))[1]
