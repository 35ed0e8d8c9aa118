"""The tokens after encoded prompts, in chunks, as a model or an n-gram model samples them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

from jaxgru.arrays import AnyArray
from jaxgru.cells import Lookup
from jaxgru.errors import UserError
from jaxgru.layers import unroll
from jaxgru.lm.data.batching import power_of_two
from jaxgru.lm.model import ModelCarry, Params, initial_carry, step
from jaxgru.lm.processors import Processor
from jaxgru.lm.sampling import generate

CHUNK = 16  # tokens generated at once
NGRAM_CONTEXT = 2**13  # more tokens than an n-gram model reads


@runtime_checkable
class NGramModel(Protocol):
    """A model whose state is the text itself, such as `jaxgru.analysis.ngrams.NGram`."""

    def generate(self, *args: Any, **options: Any) -> Int[np.ndarray, "N"]: ...


class SampleIndex(NamedTuple):
    """Which text it is among those generated at once."""

    prompt: int
    sample: int


class Prompt(NamedTuple):
    """What a sampler reads of a prompt, and which tokens it may write after it.

    Attributes:
      tokens: what the model reads, at least one.
      text_tokens: what the processors count as the text so far.
      continues_document: whether the prompt goes on within the document of the text before it.
      separator_token: the token that ends a document; None: the text is not in documents.
      token_mask: which tokens may be written; None: all.
      first_token_mask: which of them may come first; None: all of them.
    """

    tokens: Int[np.ndarray, "P"]
    text_tokens: Int[np.ndarray, "C"]
    continues_document: bool
    separator_token: int | None
    token_mask: Bool[np.ndarray, "V"] | None
    first_token_mask: Bool[np.ndarray, "V"] | None


class ChunkStart(NamedTuple):
    """What a chunk is generated from: the state, and each row's token that is to be read next."""

    carry: ModelCarry
    token: Int[AnyArray, "B 1"]


def sample_keys(seed: int, indices: Sequence[SampleIndex]) -> Key[Array, "B"]:
    """Return a random key per text, which depends on the seed and the text's index alone."""
    prompt, sample = np.array(indices, np.uint32).T
    prompt_key = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), prompt)
    # `generate` splits the keys. A negative number gives a key that no split of another one gives.
    later_key = jax.vmap(jax.random.fold_in)(prompt_key, -sample)
    return jnp.where(sample > 0, later_key, prompt_key)


class ModelSampler:
    """The tokens that a model generates after some prompts, one row for each.

    All chunks run one compiled program. The first one starts from the prompts' last tokens; the
    last one may have more tokens than are asked for.
    """

    def __init__(
        self,
        params: Params,
        prompts: Sequence[Prompt],
        key: Key[Array, "B"],
        carry: ModelCarry | None,
        *,
        stateful: bool,
        logits_processor: Processor | tuple[Processor, ...],
        per_token: dict[str, Any],
    ) -> None:
        """Read the prompts, all but their last tokens.

        Args:
          key: one per row.
          carry: the state before the prompts; None: `initial_carry`.
          per_token: temperature, top_k and top_p of `generate`.
        """
        self.params = _allow_only(prompts[0].token_mask, params)
        self.first_token_mask = _first_token_masks(prompts, len(params.embedding))
        self.separator_token = prompts[0].separator_token
        self.zero_carry = initial_carry(params, len(prompts))
        self.stateful = stateful
        self.logits_processor = logits_processor
        self.per_token = per_token
        self.counts = None
        if logits_processor:
            self.counts = self._count([prompt.text_tokens for prompt in prompts])

        if carry is None or not prompts[0].continues_document:
            carry = self.zero_carry
        start = ChunkStart(carry, np.stack([prompt.tokens[-1:] for prompt in prompts]))
        # Where `generate` leaves them: from other devices, its second call would compile anew.
        devices = params.embedding.devices()
        if len(devices) == 1:
            start, key = jax.device_put((start, key), *devices)
        if stateful:
            start = start._replace(carry=_read_prompts(params, prompts, start.carry))

        self.key = key
        self.next_chunk = start
        self.chunk = start  # the one whose tokens are being yielded
        self.num_yielded = 0  # tokens of it
        self.chunks: list[Int[np.ndarray, "B N"]] = []

    def tokens_of_row(self, row: int) -> Iterator[Int[np.ndarray, "1"]]:
        """Yield a row's tokens one by one; the first is one of those that may come first."""
        for i in itertools.count():
            if i == len(self.chunks):
                self._generate_chunk()
            for number, token in enumerate(self.chunks[i][row, :, None], 1):
                self.num_yielded = number
                yield token

    def carry(self) -> ModelCarry | None:
        """Return the state after the tokens yielded so far, of which there is one row."""
        if not self.stateful:
            return None
        carry = self.chunk.carry
        tokens = [self.chunk.token[0]]
        if self.chunks:
            tokens += list(self.chunks[-1][0, : self.num_yielded, None])
        for token in tokens:
            if token == self.separator_token:
                carry = self.zero_carry
            _, carry = step(self.params, token, carry)
        return carry

    def _generate_chunk(self) -> None:
        """Generate CHUNK more tokens per row, or one where only some tokens may come first."""
        params = self.params
        num_tokens = CHUNK
        if self.first_token_mask is not None:
            params = _allow_only(self.first_token_mask, params)
            num_tokens = 1
            self.first_token_mask = None
        new, carry, self.key = generate(
            params,
            self.key,
            self.next_chunk.token,
            num_tokens,
            self.next_chunk.carry,
            stateful=self.stateful,
            logits_processor=self.logits_processor,
            counts=self.counts,
            **self.per_token,
        )
        self.chunk = self.next_chunk
        self.next_chunk = ChunkStart(carry, new[:, -1:])
        tokens = np.asarray(new)
        if (tokens < 0).any():
            excluded = "the processor excludes every token, or " if self.logits_processor else ""
            raise UserError(f"{excluded}the model's logits are NaN: its weights are damaged.")
        self.chunks.append(tokens)
        if self.counts is not None:
            self.counts = self.counts + self._count(tokens)

    def _count(self, tokens: Iterable[Int[np.ndarray, "_"]]) -> Int[np.ndarray, "B V"]:
        """Return how often each row has each token."""
        vocab_size = len(self.params.head.bo)
        return np.stack([np.bincount(row, minlength=vocab_size) for row in tokens])


class NGramSampler:
    """The tokens after one prompt by a model whose state is the end of the text so far."""

    def __init__(
        self,
        model: NGramModel,
        prompt: Prompt,
        rng: np.random.Generator,
        per_token: dict[str, Any],
    ) -> None:
        self.model = model
        self.rng = rng
        self.per_token = per_token
        self.text = prompt.tokens
        self.token_mask = prompt.token_mask
        self.first_token_mask = prompt.first_token_mask

    def tokens_of_row(self, row: int) -> Iterator[Int[np.ndarray, "1"]]:
        """Yield the tokens of the one row; the first is one of those that may come first."""
        if self.first_token_mask is not None:
            yield from self._generate(1, self.first_token_mask)
        while True:
            yield from self._generate(CHUNK, self.token_mask)

    def carry(self) -> None:
        """Return None: it has no state but the text."""

    def _generate(
        self, num_tokens: int, token_mask: Bool[np.ndarray, "V"] | None
    ) -> Int[np.ndarray, "N 1"]:
        options = {**self.per_token, "allowed": token_mask}
        new = self.model.generate(self.rng, self.text, num_tokens, **options)
        self.text = np.concatenate([self.text, new])[-NGRAM_CONTEXT:]
        return new[:, None]


Sampler: TypeAlias = ModelSampler | NGramSampler


def _first_token_masks(
    prompts: Sequence[Prompt], vocab_size: int
) -> Bool[np.ndarray, "B V"] | None:
    """Return which tokens may come first in each row; None: all in every row."""
    every_token = np.ones(vocab_size, bool)
    masks = [prompt.first_token_mask for prompt in prompts]
    stacked = np.stack([every_token if mask is None else mask for mask in masks])
    return None if stacked.all() else stacked


def _allow_only(mask: Bool[np.ndarray, "*B V"] | None, params: Params) -> Params:
    """Return the parameters of a model that gives all other tokens, in each row, the logit −∞."""
    if mask is None:
        return params
    bo = jnp.where(mask, params.head.bo, -jnp.inf)
    return replace(params, head=replace(params.head, bo=bo))


def _read_prompts(params: Params, prompts: Sequence[Prompt], carry: ModelCarry) -> ModelCarry:
    """Return the state after all tokens of each prompt but its last."""
    lengths = np.array([len(prompt.tokens) - 1 for prompt in prompts])
    if not lengths.any():
        return carry
    if len(prompts) == 1:  # bit for bit as if it came in two parts
        return _read(params, prompts[0].tokens[None, :-1], carry)
    # Padded, so that few programs read many batches.
    padded = np.zeros((len(prompts), power_of_two(int(lengths.max()))), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt.tokens) - 1] = prompt.tokens[:-1]
    return _read(params, padded, carry, lengths)


@jax.jit
def _read(
    params: Params,
    tokens: Int[AnyArray, "B T"],
    carry: ModelCarry,
    lengths: Int[AnyArray, "B"] | None = None,
) -> ModelCarry:
    """Return the state after the tokens, or so many of each row, without computing logits."""
    x = Lookup(params.embedding, jnp.asarray(tokens).T)
    return unroll(params.layers, x, carry, lengths=lengths, time_major=True)[1]
