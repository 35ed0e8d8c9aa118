"""How likely a text is: the loss of each of its tokens, with the mean in every unit."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import nan
from typing import Any, TypeAlias, TypeVar

import numpy as np
from jaxtyping import Float, Int

from jaxgru.cells.base import AnyArray
from jaxgru.errors import UserError, shown
from jaxgru.lm.data.tokenizers import Tokenizer, TokenizerError, Tokens
from jaxgru.lm.data.units import encode_text, end_token
from jaxgru.lm.evaluation import in_units, lines_nll, perplexity, stream_nll, window_nll
from jaxgru.lm.model import Params

LINES_AT_ONCE = 4096  # lines that are read and sorted by length before any is computed

Model = TypeVar("Model")
NLL: TypeAlias = Callable[[Model, Int[np.ndarray, "N"]], Float[np.ndarray, "N-1"]]
"""Computes the nats of each prediction in a text, as `stream_nll` does."""


@dataclass(frozen=True)
class Scores:
    """The losses of a text's tokens but the first, which the model only reads.

    Attributes:
      nats: −log p of each, given all before it.
      num_characters: the length of the text that these tokens stand for.
      pieces: each token as the vocabulary spells it (SentencePiece writes a space as "▁"), of
        `score`; of `evaluate`, which takes tokens, none.
    """

    nats: Float[np.ndarray, "N"]
    num_characters: int
    pieces: list[str] = field(default_factory=list)

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
        return perplexity(self.loss)

    @property
    def bits_per_character(self) -> float:
        """The sum of the losses in bits, per character: comparable between tokenizers."""
        return in_units(self.loss, self.num_tokens, self.num_characters)["bits_per_character"]


def evaluate(
    params: Params,
    tokens: Int[AnyArray, "N"],
    num_characters: int,
    window: int = 128,
    end: int | None = None,
) -> dict[str, Scores]:
    """Score tokens under each treatment of the state.

    Args:
      num_characters: the length of the text that tokens[1:], the targets, stand for, as in
        `Dataset.num_characters`.
      end: of a text in units, the end-of-unit token, such as `Dataset.end`: the state is also
        reset before each of these.

    Returns:
      The scores where the state is reset every `window` tokens ("windows"), as in training; never
      ("stream"); and before every token ("stateless").
    """
    nats = {
        "windows": window_nll(params, tokens, window, end=end),
        "stream": stream_nll(params, tokens, end),
        "stateless": window_nll(params, tokens, 1),
    }
    return {name: Scores(each, num_characters) for name, each in nats.items()}


def score(model: Model, tokenizer: Tokenizer, text: str, nll: NLL[Model] = stream_nll) -> Scores:
    """Compute how likely each token of a text is, given all before it.

    Args:
      model: the parameters, or whatever `nll` takes in their place.
      text: at least two tokens.
      nll: computes the nats of each prediction from the model and the tokens. The default reads the
        text as one stream, from zero state; `partial(window_nll, window=1)` is stateless.

    Raises UserError if the text is of fewer than two tokens or cannot be encoded.
    """
    tokens, num_characters = encode_text(tokenizer, text)
    return _scores(tokenizer, tokens, num_characters, nll(model, tokens))


def score_lines(
    model: Model,
    tokenizer: Tokenizer,
    lines: Iterable[str],
    nll: NLL[Model] | None = None,
    unit: str = "",
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
      unit: `data.unit` of the model's config. The end-of-unit token is then read in place of the
        newline, and the line as in training: a separator in it ends a unit, where the state is
        reset, and the line ends of Windows are newlines.

    Raises:
      UserError: `lines` is one string, which `text.splitlines()` cuts; or, when its turn comes, a
        line is no string.
      TokenizerError: when its turn comes: a line cannot be encoded.
    """
    if isinstance(lines, str):
        raise UserError("lines is one string; give a list of lines, such as text.splitlines().")
    start = ""
    if not unit:
        with contextlib.suppress(TokenizerError):
            end_token(tokenizer, "line")  # there is one
            start = "\n"
    numbered = enumerate(lines, 1)
    groups = iter(lambda: list(itertools.islice(numbered, LINES_AT_ONCE)), [])
    return itertools.chain.from_iterable(
        _group_scores(model, tokenizer, start, group, nll, unit) for group in groups
    )


def _group_scores(
    model: Any, tokenizer: Tokenizer, start: str, group: list[tuple[int, str]], nll: NLL | None,
    unit: str,
) -> Iterator[Scores]:  # fmt: skip
    encoded = []
    for number, line in group:
        if not isinstance(line, str):
            raise UserError(f"line {number} is {shown(line)}; it must be a string.")
        try:
            encoded.append(encode_text(tokenizer, start + line, unit))
        except UserError as error:
            raise TokenizerError(f"line {number} cannot be encoded: {error}") from error
    tokens, sizes = zip(*encoded, strict=True)
    if nll is None:
        nats = lines_nll(model, tokens, end_token(tokenizer, unit))
    else:
        nats = [nll(model, line) if len(line) > 1 else np.empty(0) for line in tokens]
    return map(partial(_scores, tokenizer), tokens, sizes, nats)


def _scores(
    tokenizer: Tokenizer, tokens: Tokens, num_characters: int, nats: Float[np.ndarray, "_"]
) -> Scores:
    """Return the scores of a text's tokens but the first."""
    return Scores(nats, num_characters, [tokenizer.pieces[token] for token in tokens[1:]])
