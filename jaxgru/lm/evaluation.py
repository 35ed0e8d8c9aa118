"""How likely a text is, with the state kept in windows, in one stream, or not at all.

Functions whose names end in `_nll` return nats for each prediction. NumPy averages them in float64,
so rounding errors do not grow with the text. `separator_token` is everywhere what it is for
`window_nll`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, inf, log, nan
from typing import Any, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxgru.arguments import as_sequence, check_string
from jaxgru.arrays import AnyArray
from jaxgru.errors import UserError, check_whole
from jaxgru.lm.data.batching import as_text, document_starts, power_of_two, windows
from jaxgru.lm.data.documents import encode_text, separator_token_of
from jaxgru.lm.data.tokenizers import Chunk, Tokenizer, TokenizerError, Tokens
from jaxgru.lm.model import ModelCarry, Params, apply, initial_carry, on_device, token_nll
from jaxgru.parallel import ROWS, one_copy, shard

TOKENS_AT_ONCE = 8192  # in one batch or one piece of a stream: bounds the memory of the logits
LINES_AT_ONCE = 4096  # lines that are read and sorted by length before any is computed
SHORTEST = 16  # tokens to which lines are padded; longer ones to a power of two

Model = TypeVar("Model")
NLL: TypeAlias = Callable[[Model, Int[np.ndarray, "N"]], Float[np.ndarray, "N-1"]]
"""Computes the nats of each prediction in a text, as `stream_nll` does."""


def window_nll(
    params: Params,
    tokens: Int[AnyArray, "N"],
    window: int,
    mesh: Mesh | None = None,
    separator_token: int | None = None,
) -> Float[np.ndarray, "N-1"]:
    """Compute the nats of each prediction, with the state reset every `window` tokens.

    The result has all N − 1 predictions in order. A window of 1 is stateless.

    Args:
      mesh: the devices that share the batches; the parameters must be on it. One device computes
        each batch, so the result is bit-identical to that of a single device. None: one device
        computes all batches.
      separator_token: of a text in documents, their separator: the state is also reset before each
        of these. None: the text is one.

    Raises:
      UserError: the window is below 1, or the tokens are fewer than two, not one sequence of
        integers, or outside the vocabulary.
    """
    params = on_device(params)
    tokens = as_text(tokens, len(params.embedding))
    n = len(tokens) - 1
    window = min(check_whole("window", window), n)
    batch_size = max(1, min(TOKENS_AT_ONCE, n) // window)
    batches = windows(jnp.asarray(tokens), window, batch_size)
    if mesh is None or mesh.size == 1:
        nll = batches_nll(one_copy(params, mesh), *batches, separator_token=separator_token)
    else:
        # Every device computes equally many batches.
        num_missing = -len(batches[0]) % mesh.size
        padding = [(0, num_missing), (0, 0), (0, 0)]
        sharding = NamedSharding(mesh, P(ROWS))
        inputs, targets = (shard(jnp.pad(x, padding), sharding) for x in batches)
        nll = _nll_on_mesh(mesh, params, inputs, targets, separator_token=separator_token)
    return np.asarray(nll, np.float64).ravel()[:n]


def window_loss(
    params: Params,
    tokens: Int[AnyArray, "N"],
    window: int,
    mesh: Mesh | None = None,
    separator_token: int | None = None,
) -> float:
    """Return the mean of `window_nll`, nats per token. Raises what that raises."""
    return float(window_nll(params, tokens, window, mesh, separator_token).mean())


def stream_nll(
    params: Params, tokens: Int[AnyArray, "N"], separator_token: int | None = None
) -> Float[np.ndarray, "N-1"]:
    """Compute the nats of each prediction over one stream: the state is never reset.

    Of a text in documents, it is reset before each separator token, and only there.
    """
    params = on_device(params)
    tokens = as_text(tokens, len(params.embedding))
    n = len(tokens) - 1
    pieces = windows(jnp.asarray(tokens), min(TOKENS_AT_ONCE, n), 1)
    nll = batches_nll(params, *pieces, separator_token=separator_token, keep=True)
    return np.asarray(nll, np.float64).ravel()[:n]


def lines_nll(
    params: Params, lines: Sequence[Chunk], separator_token: int | None = None
) -> list[Float[np.ndarray, "_"]]:
    """Compute the nats of each prediction in each line, from zero state; a line may be empty.

    The longest lines make the first batch. All batches of a length have the same number of rows,
    so one program computes them. Raises UserError if a token is outside the vocabulary.
    """
    params = on_device(params)
    as_sequence("tokens", np.concatenate(lines), len(params.embedding))
    nats = [np.empty(0)] * len(lines)
    lengths = [max(len(line) - 1, 0) for line in lines]
    with_predictions = [i for i, length in enumerate(lengths) if length]
    remaining = sorted(with_predictions, key=lambda i: -lengths[i])
    while remaining:
        longest = remaining[0]
        if lengths[longest] > TOKENS_AT_ONCE:
            nats[longest] = stream_nll(params, lines[longest], separator_token)
            remaining = remaining[1:]
            continue
        T = max(SHORTEST, power_of_two(lengths[longest]))
        rows = min(power_of_two(len(lines)), max(TOKENS_AT_ONCE // T, 1))
        batch = remaining[:rows]
        remaining = remaining[rows:]
        nll = _padded_nll(params, [lines[i] for i in batch], rows, T, separator_token)
        for i, line_nll in zip(batch, nll, strict=False):
            nats[i] = line_nll[: lengths[i]]
    return nats


def _padded_nll(
    params: Params, lines: Sequence[Chunk], rows: int, T: int, separator_token: int | None
) -> Float[np.ndarray, "B T"]:
    """Compute one batch whose first rows are the lines, each padded to T predictions."""
    padded = np.zeros((1, rows, T + 1), np.int32)
    for row, line in zip(padded[0], lines, strict=False):
        row[: len(line)] = line
    nll = batches_nll(params, padded[..., :-1], padded[..., 1:], separator_token=separator_token)
    return np.asarray(nll, np.float64)[0]


def in_units(nats_per_token: float, num_tokens: int, num_characters: int) -> dict[str, float]:
    """Convert a loss to nats per token, perplexity, and nats and bits per character.

    It may also be a difference of losses. Losses per character of the same text can be compared
    between tokenizers; they are NaN where there is no character.
    """
    nats_per_character = nan
    if num_characters:
        nats_per_character = nats_per_token * num_tokens / num_characters
    return {
        "nats_per_token": nats_per_token,
        "perplexity": inf if nats_per_token > 709 else exp(nats_per_token),
        "nats_per_character": nats_per_character,
        "bits_per_character": nats_per_character / log(2),
    }


@dataclass(frozen=True)
class Scores:
    """The losses of a text's tokens but the first, which the model only reads.

    Attributes:
      nats: −log p of each, given all before it.
      num_characters: the length of the text that these tokens stand for.
      pieces: each token as the vocabulary spells it (SentencePiece writes a space as "▁").
    """

    nats: Float[np.ndarray, "N"]
    num_characters: int
    pieces: list[str]

    @property
    def num_tokens(self) -> int:
        """The number of predictions."""
        return len(self.nats)

    @property
    def loss(self) -> float:
        """The mean, nats per token; NaN where there are none."""
        return float(self.nats.mean()) if self.num_tokens else nan

    @property
    def perplexity(self) -> float:
        """exp(loss): a uniform guess among that many tokens has the same loss."""
        return in_units(self.loss, self.num_tokens, self.num_characters)["perplexity"]

    @property
    def bits_per_character(self) -> float:
        """The sum of the losses in bits, per character: comparable between tokenizers."""
        return in_units(self.loss, self.num_tokens, self.num_characters)["bits_per_character"]


def score(model: Model, tokenizer: Tokenizer, text: str, nll: NLL[Model] = stream_nll) -> Scores:
    """Compute how likely each token of a text is, given all before it.

    Args:
      model: the parameters, or whatever `nll` takes in their place.
      text: at least two tokens.
      nll: computes the nats of each prediction from the model and the tokens. The default reads the
        text as one stream, from zero state; `partial(window_nll, window=1)` is stateless.

    Raises:
      UserError: the text is of fewer than two tokens, or cannot be encoded.
    """
    tokens, num_characters = encode_text(tokenizer, text)
    return _scores(tokenizer, tokens, num_characters, nll(model, tokens))


def score_lines(
    model: Model,
    tokenizer: Tokenizer,
    lines: Iterable[str],
    nll: NLL[Model] | None = None,
    separator: str = "",
) -> Iterator[Scores]:
    """Yield how likely each token of each line is, its first one included, given those before it.

    Every line is a text of its own: the state is zero, the model reads a newline, and the line's
    tokens are scored. This is `score` of "\\n" + line, up to rounding. Where the tokenizer has no
    newline, it is `score` of the line: its first token is only read. A newline at a line's end is
    scored as its other tokens are: `text.splitlines(keepends=True)` has them, `text.splitlines()`
    does not.

        names = ["Rosalind", "Orlando", "Xqzzk"]
        scores = lm.score_lines(params, tokenizer, names)
        ranked = sorted(zip((s.nats.sum() for s in scores), names))

    Lines are read 4,096 at a time and computed in batches of similar lengths, padded to powers of
    two, so few programs are compiled.

    Args:
      lines: a list, or an iterator such as a large file's. An empty line has no tokens; the mean of
        its losses is NaN.
      nll: as for `score`, called for each line. None: the model is the parameters, and lines are
        computed in batches.
      separator: `data.separator` of the model's config. The separator token is then read in place
        of the newline, and the line as in training: a separator in it ends a document, where the
        state is reset, and the line ends of Windows are newlines.

    Raises:
      UserError: `lines` is one string, which `text.splitlines()` cuts, or a line is no string.
      TokenizerError: a line cannot be encoded. Lines before its group are scored first.
    """
    if isinstance(lines, str):
        raise UserError("lines is one string; give a list of lines, such as text.splitlines().")
    start = ""
    if not separator and _has_newline(tokenizer):
        start = "\n"
    numbered = enumerate(lines, 1)
    while group := list(itertools.islice(numbered, LINES_AT_ONCE)):
        encoded = [
            _encode_line(tokenizer, start, number, line, separator) for number, line in group
        ]
        tokens, sizes = zip(*encoded, strict=True)
        if nll is None:
            nats = lines_nll(cast(Params, model), tokens, separator_token_of(tokenizer, separator))
        else:
            nats = [nll(model, line) if len(line) > 1 else np.empty(0) for line in tokens]
        yield from map(partial(_scores, tokenizer), tokens, sizes, nats)


def _has_newline(tokenizer: Tokenizer) -> bool:
    """Return whether a newline is a token of its own."""
    try:
        separator_token_of(tokenizer, "line")
    except TokenizerError:
        return False
    return True


def _encode_line(
    tokenizer: Tokenizer, start: str, number: int, line: str, separator: str
) -> tuple[Tokens, int]:
    """Return what `encode_text` returns. Raises errors that name the line by its number."""
    check_string(f"line {number}", line)
    try:
        return encode_text(tokenizer, start + line, separator)
    except UserError as error:
        raise TokenizerError(f"line {number} cannot be encoded: {error}") from error


def _scores(
    tokenizer: Tokenizer, tokens: Tokens, num_characters: int, nats: Float[np.ndarray, "_"]
) -> Scores:
    """Return the scores of a text's tokens but the first."""
    pieces = [tokenizer.pieces[token] for token in tokens[1:]]
    return Scores(nats, num_characters, pieces)


@partial(jax.jit, static_argnames=("separator_token", "keep"))
def batches_nll(
    params: Params,
    inputs: Int[Array, "M B T"],
    targets: Int[Array, "M B T"],
    separator_token: int | None = None,
    keep: bool = False,
) -> Float[Array, "M B T"]:
    """Compute each batch in turn; `keep`: from the state after the batch before, not from zeros."""

    def batch_nll(carry: ModelCarry | None, batch: tuple[Array, Array]) -> tuple[Any, Array]:
        inputs, targets = batch
        logits, after = apply(params, inputs, carry, reset=document_starts(inputs, separator_token))
        return after if keep else None, token_nll(logits, targets)

    start = initial_carry(params, inputs.shape[1]) if keep else None
    _, nll = jax.lax.scan(batch_nll, start, (inputs, targets))
    return nll


@partial(jax.jit, static_argnames=("mesh", "separator_token"))
def _nll_on_mesh(
    mesh: Mesh,
    params: Params,
    inputs: Int[Array, "M B T"],
    targets: Int[Array, "M B T"],
    separator_token: int | None = None,
) -> Float[Array, "M B T"]:
    """Compute `batches_nll`, an equal share of the batches on each device; gather the results."""

    def share(params: Params, inputs: Array, targets: Array) -> Array:
        nll = batches_nll(params, inputs, targets, separator_token=separator_token)
        return jax.lax.all_gather(nll, ROWS, tiled=True)

    in_specs = (P(), P(ROWS), P(ROWS))
    gathered = jax.shard_map(share, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=False)
    return gathered(params, inputs, targets)
