"""Text from a prompt, chunk by chunk: the prompt is encoded, tokens are sampled and decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Int

from jaxgru.cells.base import AnyArray
from jaxgru.data.tokenizers import Tokenizer
from jaxgru.errors import UserError
from jaxgru.model import ModelCarry, Params, apply, initial_carry
from jaxgru.sampling import check_num_tokens, check_sampling, generate

PROMPT = "ROMEO: "  # where the user gives none
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
    ) -> Int[np.ndarray, "N"]:
        """Return the next tokens."""
        ...


@dataclass(frozen=True)
class Options:
    """How text is sampled: the arguments of `jaxgru.generate`, and two more.

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


def stream_text(
    model: Params | NGramModel,
    tokenizer: Tokenizer,
    prompt: str,
    options: Options,
    sample: int = 0,
) -> Iterator[str]:
    """Yield the prompt, then the text generated from it, in chunks of CHUNK tokens.

    Each chunk starts from the state after the one before it; the last may be shorter.

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
    known = tokenizer.encode(prompt)
    if len(known) == 0:
        raise UserError("the prompt is empty; give at least one character to begin with.")
    return _chunks(model, tokenizer, known, options, sample)


def _chunks(
    model: Params | NGramModel,
    tokenizer: Tokenizer,
    prompt: Int[np.ndarray, "P"],
    options: Options,
    sample: int,
) -> Iterator[str]:
    read = prompt[-1:] if options.last_token_only else prompt
    if isinstance(model, Params):
        next_tokens = _recurrent(model, read, options, sample)
    else:
        next_tokens = _counted(model, read, options, sample)
    known, printed = prompt, tokenizer.decode(prompt)
    yield printed
    for start in range(0, options.num_tokens, CHUNK):
        known = np.concatenate([known, next_tokens()[: options.num_tokens - start]])
        text = tokenizer.decode(known)
        yield text[len(printed) :]
        printed = text


def _recurrent(
    params: Params, prompt: Int[np.ndarray, "P"], options: Options, sample: int
) -> Callable[[], Int[np.ndarray, "N"]]:
    """Return a function that generates the next CHUNK tokens, from the state after the last ones.

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

    def next_tokens() -> Int[np.ndarray, "N"]:
        nonlocal tokens, carry, key
        new, carry, key = generate(
            params, key, tokens, CHUNK, carry, stateful=options.stateful, **options.per_token
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
) -> Callable[[], Int[np.ndarray, "N"]]:
    """Return such a function for a model whose state is the text so far."""
    rng, text = np.random.default_rng([options.seed, sample]), prompt

    def next_tokens() -> Int[np.ndarray, "N"]:
        nonlocal text
        new = model.generate(rng, text, CHUNK, **options.per_token)
        text = np.concatenate([text, new])
        return new

    return next_tokens
