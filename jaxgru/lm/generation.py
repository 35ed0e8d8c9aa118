"""Text from a prompt, chunk by chunk: the prompt is encoded, tokens are sampled and decoded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from jaxgru.cells.base import AnyArray
from jaxgru.errors import UserError
from jaxgru.lm.data.corpus import TINY_SHAKESPEARE_SHA256
from jaxgru.lm.data.tokenizers import SPACE, Start, Tokenizer, TokenizerError
from jaxgru.lm.model import ModelCarry, Params, apply, initial_carry
from jaxgru.lm.sampling import check_num_tokens, check_sampling, generate

PROMPT = "ROMEO: "  # of Tiny Shakespeare, where the user gives none
CHUNK = 16  # tokens generated at once
READ = 2**13  # tokens of a prompt read at once, which bounds the memory used


@runtime_checkable
class NGramModel(Protocol):
    """A model whose state is the text itself, such as `jaxgru.analysis.ngrams.NGram`."""

    def generate(
        self,
        rng: np.random.Generator,
        prompt: Int[np.ndarray, "P"],
        num_tokens: int,
        *,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        first: Bool[np.ndarray, "V"] | None = None,
    ) -> Int[np.ndarray, "N"]:
        """Return the next tokens; `first` says which may be the first."""
        ...


Next: TypeAlias = Callable[[Bool[np.ndarray, "V"] | None], Int[np.ndarray, "N"]]
"""Returns the next CHUNK tokens, or only the next one, of those that may come first."""


@dataclass(frozen=True)
class Options:
    """How text is sampled: the arguments of `jaxgru.lm.generate`, and two more.

    Attributes:
      last_token_only: give the model only the last token of the prompt, as the study's samplers do.
      seed: of the random key; with the same seed, the text is the same.
    """

    num_tokens: int = 400
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    stateful: bool = True
    last_token_only: bool = False
    seed: int = 0

    @property
    def per_token(self) -> dict[str, Any]:
        """The options that say how one token is drawn from its logits."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


def default_prompt(text_sha256: str, tokenizer: Tokenizer) -> str:
    """Return what the text of a model of a text begins with where the user gives no prompt.

    After Tiny Shakespeare it is PROMPT; after another text a newline, or a word if the tokenizer
    has no newline.
    """
    candidates = ["\n", " "]
    if text_sha256 == TINY_SHAKESPEARE_SHA256:
        candidates.insert(0, PROMPT)
    pieces = [piece.removeprefix(SPACE) for piece in tokenizer.pieces]
    candidates += [piece for piece in pieces if len(piece) > 2 and piece.isalpha()]
    for prompt in [*candidates, *pieces]:
        with contextlib.suppress(TokenizerError):
            if len(tokenizer.encode(prompt)):
                return prompt
    raise UserError("the tokenizer has no piece that a text could begin with.")


def stream_text(
    model: Params | NGramModel, tokenizer: Tokenizer, prompt: str, options: Options, sample: int = 0
) -> Iterator[str]:
    """Yield the prompt, then the text generated from it, in chunks of CHUNK tokens.

    Each chunk starts from the state after the one before it; the last may be shorter. Where the
    tokenizer writes a space and the word after it as one, a space at the end of the prompt is that
    of a new word.

    Args:
      sample: the sample's index; each index gives another text for the same seed.

    Raises:
      UserError: the prompt is empty or has unknown characters, or an option is out of range; raised
        at the call, before anything is generated.
    """
    check_sampling(tokenizer.vocab_size, **options.per_token)
    if not 0 <= options.seed < 2**32:
        raise UserError(f"seed is {options.seed}; it must be at least 0 and below {2**32}.")
    check_num_tokens(options.num_tokens)
    end, first = tokenizer.may_follow(prompt)
    known = tokenizer.encode(prompt[: len(prompt) - len(end)])
    if prompt == "":
        raise UserError("the prompt is empty; give at least one character to begin with.")
    if len(known) == 0:
        raise UserError(
            f"the prompt {prompt!r} gives no token, because SentencePiece drops white space and "
            "control characters; give at least one word to begin with."
        )
    return _text(model, tokenizer, prompt, known, (end, first), options, sample)


def _text(
    model: Params | NGramModel,
    tokenizer: Tokenizer,
    prompt: str,
    known: Int[np.ndarray, "P"],
    start: Start,
    options: Options,
    sample: int,
) -> Iterator[str]:
    read = known[-1:] if options.last_token_only else known
    if isinstance(model, Params):
        next_tokens = _recurrent(model, read, options, sample)
    else:
        next_tokens = _counted(model, read, options, sample)
    end, first = start
    yield prompt
    texts = tokenizer.continuation(_chunks(next_tokens, first, options.num_tokens))
    if first is not None:
        yield next(texts)[len(end) :]  # the prompt ends with it
    yield from texts


def _chunks(
    next_tokens: Next, first: Bool[np.ndarray, "V"] | None, num_tokens: int
) -> Iterator[Int[np.ndarray, "N"]]:
    while num_tokens > 0:
        tokens = next_tokens(first)[:num_tokens]
        yield tokens
        num_tokens, first = num_tokens - len(tokens), None


def _recurrent(params: Params, prompt: Int[np.ndarray, "P"], options: Options, sample: int) -> Next:
    """Return a function that generates the next tokens, from the state after the last ones.

    All chunks run one compiled program. The first starts from the prompt's last token; the last may
    have more tokens than are needed.
    """
    key = jax.random.fold_in(jax.random.key(options.seed), sample)
    tokens: Any = prompt[None, -1:]
    carry = initial_carry(params, 1)
    # On the device where `generate` leaves them: with others, its second call compiles anew
    if len(devices := params.embedding.devices()) == 1:
        tokens, carry, key = jax.device_put((tokens, carry, key), *devices)
    before = prompt[:-1] if options.stateful else prompt[:0]  # the state after it would be reset
    for start in range(0, len(before), READ):
        carry = _read(params, before[None, start : start + READ], carry)

    def next_tokens(first: Bool[np.ndarray, "V"] | None) -> Int[np.ndarray, "N"]:
        nonlocal tokens, carry, key
        model, num_tokens = params, CHUNK
        if first is not None:
            bo = jnp.where(first, params.head.bo, -jnp.inf)
            model, num_tokens = replace(params, head=replace(params.head, bo=bo)), 1
        new, carry, key = generate(
            model, key, tokens, num_tokens, carry, stateful=options.stateful, **options.per_token
        )
        tokens, found = new[:, -1:], np.asarray(new[0])
        if (found < 0).any():
            raise UserError("the model's logits are NaN: its weights are damaged.")
        return found

    return next_tokens


@jax.jit
def _read(params: Params, tokens: Int[AnyArray, "B T"], carry: ModelCarry) -> ModelCarry:
    """Return the state after these tokens, without computing logits."""
    return apply(params, tokens, carry)[1]


def _counted(
    model: NGramModel, prompt: Int[np.ndarray, "P"], options: Options, sample: int
) -> Next:
    """Return such a function for a model whose state is the end of the text so far."""
    rng, text = np.random.default_rng([options.seed, sample]), prompt

    def next_tokens(first: Bool[np.ndarray, "V"] | None) -> Int[np.ndarray, "N"]:
        nonlocal text
        num_tokens = CHUNK if first is None else 1
        new = model.generate(rng, text, num_tokens, first=first, **options.per_token)
        text = np.concatenate([text, new])[-READ:]  # it reads less
        return new

    return next_tokens
