"""Text from a prompt: the prompt is encoded, and the tokens sampled after it are decoded."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Int

from jaxgru.arguments import check_string
from jaxgru.errors import UserError, check_flags, check_whole
from jaxgru.lm.data.corpus import TINY_SHAKESPEARE_SHA256
from jaxgru.lm.data.documents import documents_of, separator_character, separator_token_of
from jaxgru.lm.data.tokenizers import SPACE, Tokenizer, TokenizerError
from jaxgru.lm.data.tokenizers.base import check_utf_8
from jaxgru.lm.model import ModelCarry, Params, check_params
from jaxgru.lm.processors import Processor
from jaxgru.lm.samplers import (
    ModelSampler,
    NGramModel,
    NGramSampler,
    Prompt,
    SampleIndex,
    Sampler,
    sample_keys,
)
from jaxgru.lm.sampling import as_processors, check_sampling
from jaxgru.printing import counted, shown

__all__ = [
    "Options",
    "PROMPT",
    "TextStream",
    "default_prompt",
    "generate_texts",
]

PROMPT = "ROMEO: "
"""The prompt for models of Tiny Shakespeare, where the user gives none."""
PROMPTS_AT_ONCE = 64

Item = TypeVar("Item")


@dataclass(frozen=True)
class Options:
    """How text is sampled. What is not described here is as for `jaxgru.lm.generate`.

    Attributes:
      last_token_only: give the model only the last token of the prompt, as the study's samplers do.
      seed: of the random key, from 0 to 2³² − 1; with the same seed, the text is the same.
      stop: the text ends before one of these strings, as soon as a token completes it.
      logits_processor: as for `generate`; its counts are those of the prompt and the new text.
      separator: `data.separator` of the model's config. The prompt, which may be "", then begins a
        document, and the text ends where the document does; with the carry of another text, the
        prompt goes on. What ends a document within the prompt begins another: of the prompt, all
        before is neither read nor counted. The line ends of Windows are read as newlines.
      unknown: whether the new text, and not only the prompt, may hold the tokenizer's unknown
        token, such as " <unk>" of words.
    """

    num_tokens: int = 400
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    stateful: bool = True
    last_token_only: bool = False
    seed: int = 0
    stop: Sequence[str] = ()
    logits_processor: Processor | tuple[Processor, ...] = ()
    separator: str = ""
    unknown: bool = False

    @property
    def per_token(self) -> dict[str, Any]:
        """The options that say how one token is drawn from its logits."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


def default_prompt(text_sha256: str, tokenizer: Tokenizer) -> str:
    """Return the prompt where the user gives none, for a model trained on the text of this SHA-256.

    For Tiny Shakespeare it is PROMPT; for another text a newline, or a word if the tokenizer has no
    newline.
    """
    candidates = ["\n", " "]
    if text_sha256 == TINY_SHAKESPEARE_SHA256:
        candidates.insert(0, PROMPT)
    pieces = [piece.removeprefix(SPACE) for piece in tokenizer.pieces]
    candidates += [piece for piece in pieces if len(piece) > 2 and piece.isalpha()]
    for prompt in [*candidates, *pieces]:
        with contextlib.suppress(TokenizerError):
            tokens = tokenizer.encode(prompt)
            if len(tokens) and tokenizer.unknown not in tokens:
                return prompt
    raise UserError("the tokenizer has no piece that a text could begin with.")


class TextStream(Iterator[str]):
    """A text while it is generated: iterating over it gives the prompt, then a piece per token."""

    def __init__(self, pieces: Iterator[str], sampler: Sampler) -> None:
        self._pieces = pieces
        self._sampler = sampler

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def carry(self) -> ModelCarry | None:
        """The state after the text so far, prompt included, from which another text can go on.

        If the text has ended before a stop string, this state has read that string, too, and if a
        document has ended, the next one goes on from it. None where no state is carried: with
        `stateful=False`, and with an n-gram model.
        """
        return self._sampler.carry()


def stream_text(
    model: Params | NGramModel,
    tokenizer: Tokenizer,
    prompt: str,
    options: Options,
    sample: int = 0,
    carry: ModelCarry | None = None,
) -> TextStream:
    """Return an iterator over the prompt and the text generated from it, in pieces of one token.

    Tokens are generated some at a time, each chunk from the state after the one before it. Where
    the tokenizer joins a space and the word after it into one token, a space at the end of the
    prompt begins a new word.

        story = stream_text(params, tokenizer, "Once", options)
        for piece in story: print(piece, end="")
        more = stream_text(params, tokenizer, " And then", options, carry=story.carry)

    Args:
      model: a model's parameters, or an n-gram model.
      options: a `jaxgru.lm.generation.Options`.
      sample: the sample's index, from 0 to 2³² − 1; each index gives another text for the same
        seed.
      carry: the state before the prompt, such as the `carry` of another text; None:
        `initial_carry`.

    Raises:
      UserError: at the call, an argument is wrong; later, the model's logits are NaN, or a
        processor excludes every token or does not return logits.
      ValueError: at the call, the carry does not fit, or a flag is no bool.
    """
    check_whole("sample", sample, 2**32 - 1, least=0)
    _check(model, tokenizer, options)
    encoded = _encode(tokenizer, prompt, options, has_carry=carry is not None)
    index = SampleIndex(prompt=sample, sample=0)
    sampler = _sampler(model, [encoded.prompt], options, [index], carry)
    new = _continuation(tokenizer, encoded, sampler.tokens_of_row(0), options)
    return TextStream(itertools.chain([prompt], new), sampler)


def generate_texts(
    model: Params | NGramModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    options: Options,
    num_samples: int = 1,
) -> Iterator[str]:
    """Yield the text that follows each prompt, computed in batches of up to 64 prompts.

    With `num_samples`, a second text for each prompt follows, and so on. The random numbers of a
    text come from the seed, its prompt's index and its sample's: more prompts or samples change no
    other text. The first one after prompts[i] is that of `stream_text` with sample=i, unless
    rounding, which may depend on the batch, decides between two tokens.

        for text in generate_texts(params, tokenizer, ["ROMEO:", "JULIET:"], Options(seed=1)):
            print(text)

    Options and all prompts are checked at the call.

    Raises:
      UserError: as `stream_text`, and where the prompts are one string.
      ValueError: as `stream_text`.
    """
    if isinstance(prompts, str):
        raise UserError("prompts is one string; give a list of prompts.")
    _check(model, tokenizer, options)
    num_samples = check_whole("num_samples", num_samples, 2**32)
    encoded = _encode_all(tokenizer, prompts, options)
    rows = 1
    if isinstance(model, Params):
        rows = min(PROMPTS_AT_ONCE, len(encoded) * num_samples)
    samples = (
        (SampleIndex(i, sample), prompt)
        for sample in range(num_samples)
        for i, prompt in enumerate(encoded)
    )
    texts = (
        _batch_texts(model, tokenizer, batch, options, rows) for batch in _batches(samples, rows)
    )
    return itertools.chain.from_iterable(texts)


def _batches(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    """Yield the items in lists of that size; the last one may be shorter."""
    while batch := list(itertools.islice(items, size)):
        yield batch


def _batch_texts(
    model: Params | NGramModel,
    tokenizer: Tokenizer,
    batch: list[tuple[SampleIndex, _EncodedPrompt]],
    options: Options,
    rows: int,
) -> list[str]:
    """Return the texts after some prompts. Every call has `rows` rows, and so the same program."""
    padding = batch[:1] * (rows - len(batch))
    indices, encoded = zip(*batch, *padding, strict=True)
    prompts = [prompt.prompt for prompt in encoded]
    sampler = _sampler(model, prompts, options, indices, None)
    texts = []
    for row in range(len(batch)):
        tokens = sampler.tokens_of_row(row)
        texts.append("".join(_continuation(tokenizer, encoded[row], tokens, options)))
    return texts


def _sampler(
    model: Params | NGramModel,
    prompts: Sequence[Prompt],
    options: Options,
    indices: Sequence[SampleIndex],
    carry: ModelCarry | None,
) -> Sampler:
    """Return the sampler of either kind of model."""
    if isinstance(model, Params):
        return ModelSampler(
            model,
            prompts,
            sample_keys(options.seed, indices),
            carry,
            stateful=options.stateful,
            logits_processor=options.logits_processor,
            per_token=options.per_token,
        )
    if carry is not None or options.logits_processor:
        raise UserError("an n-gram model has no carry and no logits to process; leave them out.")
    [prompt] = prompts
    [index] = indices
    rng = np.random.default_rng([options.seed, *index])
    return NGramSampler(model, prompt, rng, options.per_token)


def _check(model: Params | NGramModel, tokenizer: Tokenizer, options: Options) -> None:
    """Raise an error where the tokenizer is not the model's, or an option is wrong."""
    if not isinstance(model, NGramModel):
        check_params(model)
    if isinstance(model, Params):
        vocab_size = len(model.embedding)
        if tokenizer.vocab_size != vocab_size:
            has = counted(tokenizer.vocab_size, "token")
            raise UserError(f"the tokenizer has {has}, but the model has {vocab_size:,}.")
    check_sampling(tokenizer.vocab_size, **options.per_token)
    check_whole("seed", options.seed, 2**32 - 1, least=0)
    check_whole("num_tokens", options.num_tokens)
    check_flags(
        stateful=options.stateful,
        last_token_only=options.last_token_only,
        unknown=options.unknown,
    )
    as_processors(options.logits_processor)
    check_string("separator", options.separator)
    if not _are_stop_strings(options.stop):
        raise UserError(
            f"stop is {shown(options.stop)}; it must be a tuple or list of strings of at least one "
            "character."
        )


def _are_stop_strings(stop: object) -> bool:
    """Return whether a value is a tuple or list of strings, none of them empty."""
    if not isinstance(stop, tuple | list):
        return False
    return all(isinstance(string, str) and string != "" for string in stop)


class _EncodedPrompt(NamedTuple):
    """A prompt for a sampler, and where the text after it begins and stops.

    Attributes:
      tail: the prompt's end, with which the first new token begins once more.
      stop: the text ends before one of these strings, as soon as a token completes it.
    """

    prompt: Prompt
    tail: str
    stop: Sequence[str]


def _encode_all(
    tokenizer: Tokenizer, prompts: Sequence[str], options: Options
) -> list[_EncodedPrompt]:
    """Encode each prompt. Raises UserErrors that name the prompt by its number."""
    encoded = []
    for number, prompt in enumerate(prompts, 1):
        try:
            encoded.append(_encode(tokenizer, prompt, options, has_carry=False))
        except UserError as error:
            raise UserError(f"prompt {number}: {error}") from error
    return encoded


def _encode(tokenizer: Tokenizer, prompt: str, options: Options, has_carry: bool) -> _EncodedPrompt:
    """Encode a prompt; `has_carry`: it may go on within the document of another text."""
    check_string("the prompt", prompt)
    if not tokenizer.reads_bytes:  # an argument's bytes that are no UTF-8 are such halves
        check_utf_8(prompt)
    text = prompt
    stop = options.stop
    beginning: list[int] = []
    separator_token = separator_token_of(tokenizer, options.separator)
    if separator_token is not None:
        *earlier_documents, text = documents_of(prompt, options.separator)
        stop = (*stop, separator_character(options.separator))
        if earlier_documents or not has_carry:
            beginning = [separator_token]

    tail, first_token_mask = tokenizer.may_follow(text)
    text_tokens = tokenizer.encode(text.removesuffix(tail))
    tokens = np.concatenate([np.array(beginning, text_tokens.dtype), text_tokens])
    if len(tokens) == 0:
        raise UserError(f"the prompt {prompt!r} gives no token; give at least one word.")
    if options.last_token_only:
        tokens = tokens[-1:]

    token_mask = _token_mask(tokenizer, options)
    if token_mask is not None and first_token_mask is not None:
        first_token_mask = first_token_mask & token_mask
    sampled = Prompt(
        tokens=tokens,
        text_tokens=text_tokens,
        continues_document=not beginning,
        separator_token=separator_token,
        token_mask=token_mask,
        first_token_mask=first_token_mask,
    )
    return _EncodedPrompt(sampled, tail, stop)


def _token_mask(tokenizer: Tokenizer, options: Options) -> Bool[np.ndarray, "V"] | None:
    """Return which tokens a text may hold: not the unknown one, unless asked for; None: all."""
    if tokenizer.unwritten is None or options.unknown:
        return None
    return np.arange(tokenizer.vocab_size) != tokenizer.unwritten


def _continuation(
    tokenizer: Tokenizer,
    encoded: _EncodedPrompt,
    tokens: Iterator[Int[np.ndarray, "1"]],
    options: Options,
) -> Iterator[str]:
    """Yield the text after a prompt, in pieces of one token."""
    pieces = tokenizer.continuation(itertools.islice(tokens, options.num_tokens))
    pieces = _without_start(pieces, len(encoded.tail))
    if encoded.stop:
        return _until(encoded.stop, pieces)
    return pieces


def _without_start(pieces: Iterable[str], length: int) -> Iterator[str]:
    """Yield a text's pieces, the first one without so many characters at its start."""
    for number, piece in enumerate(pieces):
        yield piece if number else piece[length:]


def _until(stop: Sequence[str], pieces: Iterable[str]) -> Iterator[str]:
    """Yield a text up to the first of some strings; what might be the beginning of one waits."""
    pending = ""
    for piece in pieces:
        pending += piece
        ends = [pending.index(string) for string in stop if string in pending]
        if ends:
            yield pending[: min(ends)]
            return
        settled = len(pending) - _length_of_beginning(stop, pending)
        yield pending[:settled]
        pending = pending[settled:]
    yield pending


def _length_of_beginning(stop: Sequence[str], text: str) -> int:
    """Return how many characters at a text's end may be the beginning of one of the strings."""
    lengths = (
        length
        for string in stop
        for length in range(1, len(string))
        if text.endswith(string[:length])
    )
    return max(lengths, default=0)
