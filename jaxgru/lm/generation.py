"""Text from a prompt, token by token: the prompt is encoded, tokens are sampled and decoded."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from jaxgru.cells import Lookup
from jaxgru.cells.carry import AnyArray
from jaxgru.errors import UserError, check_flags, check_whole
from jaxgru.layers.api import unroll
from jaxgru.lm.arguments import check_string
from jaxgru.lm.data.batching import power_of_two
from jaxgru.lm.data.corpus import TINY_SHAKESPEARE_SHA256
from jaxgru.lm.data.tokenizers import SPACE, Tokenizer, TokenizerError
from jaxgru.lm.data.tokenizers.base import check_utf_8
from jaxgru.lm.data.units import end_of, end_token, units_of
from jaxgru.lm.model import ModelCarry, Params, check_params, initial_carry, step
from jaxgru.lm.processors import Processor
from jaxgru.lm.sampling import as_processors, check_sampling, generate
from jaxgru.printing import counted, shown

PROMPT = "ROMEO: "  # for models of Tiny Shakespeare, where the user gives none
CHUNK = 16  # tokens generated at once
PROMPTS_AT_ONCE = 64
Sample: TypeAlias = tuple[int, int]  # the prompt's index and the sample's


@runtime_checkable
class NGramModel(Protocol):
    """A model whose state is the text itself, such as `jaxgru.analysis.ngrams.NGram`."""

    def generate(self, *args: Any, **options: Any) -> Int[np.ndarray, "N"]: ...


@dataclass(frozen=True)
class Options:
    """How text is sampled. What is not described here is as for `jaxgru.lm.generate`.

    Attributes:
      last_token_only: give the model only the last token of the prompt, as the study's samplers do.
      seed: of the random key, from 0 to 2³² − 1; with the same seed, the text is the same.
      stop: the text ends before the first of these strings.
      logits_processor: as for `generate`; its counts are those of the prompt and the new text.
      unit: `data.unit` of the model's config. The prompt, which may be "", then begins a unit, and
        the text ends where the unit does; with the carry of another text, the prompt goes on. What
        ends a unit within the prompt begins another: of the prompt, all before is neither read nor
        counted. The line ends of Windows are read as newlines.
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
    unit: str = ""
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

    def __init__(self, texts: Iterator[str], tokens: _Recurrent | _Counted) -> None:
        self._texts, self._tokens = texts, tokens

    def __next__(self) -> str:
        return next(self._texts)

    @property
    def carry(self) -> ModelCarry | None:
        """The state after the text so far, prompt included, from which another text can go on.

        If the text has ended before a stop string, this state has read that string, too, and if a
        unit has ended, the next one goes on from it. None where no state is carried: with
        `stateful=False`, and with an n-gram model.
        """
        return self._tokens.carry()


def stream_text(
    model: Params | NGramModel,
    tokenizer: Tokenizer,
    prompt: str,
    options: Options,
    sample: int = 0,
    carry: ModelCarry | None = None,
) -> TextStream:
    """Return an iterator over the prompt and the text generated from it, in pieces of one token.

    Tokens are generated CHUNK at a time, each chunk from the state after the one before it. Where
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
      carry: the state before the prompt, such as the `carry` of another text; None: zeros.

    Raises UserError or ValueError at the call where an argument is wrong; and UserError later where
    the model's logits are NaN, or a processor excludes every token or does not return logits.
    """
    check_whole("sample", sample, 2**32 - 1, least=0)
    _check(model, tokenizer, options)
    encoded = _encode(tokenizer, prompt, options, carry is not None)
    tokens = _tokens(model, [encoded], options, [(sample, 0)], carry)
    new = _continuation(tokenizer, encoded, tokens.of_row(0), options)
    return TextStream(itertools.chain([prompt], new), tokens)


def generate_texts(
    model: Params | NGramModel, tokenizer: Tokenizer, prompts: Sequence[str], options: Options,
    num_samples: int = 1,
) -> Iterator[str]:  # fmt: skip
    """Yield the text that follows each prompt, computed in batches of up to 64 prompts.

    With `num_samples`, a second text for each prompt follows, and so on. The random numbers of a
    text come from the seed, its prompt's index and its sample's: more prompts or samples change no
    other text. The first one after prompts[i] is that of `stream_text` with sample=i, unless
    rounding, which may depend on the batch, decides between two tokens.

        for text in generate_texts(params, tokenizer, ["ROMEO:", "JULIET:"], Options(seed=1)):
            print(text)

    Raises what `stream_text` raises, and UserError if the prompts are one string. Options and all
    prompts are checked at the call.
    """
    if isinstance(prompts, str):
        raise UserError("prompts is one string; give a list of prompts.")
    _check(model, tokenizer, options)
    num_samples = check_whole("num_samples", num_samples, 2**32)
    encoded = []
    for number, prompt in enumerate(prompts, 1):
        try:
            encoded.append(_encode(tokenizer, prompt, options, goes_on=False))
        except UserError as error:
            raise UserError(f"prompt {number}: {error}") from error
    rows = min(PROMPTS_AT_ONCE if isinstance(model, Params) else 1, len(encoded) * num_samples)
    samples = (((n, i), prompt) for i in range(num_samples) for n, prompt in enumerate(encoded))
    batches = iter(lambda: list(itertools.islice(samples, rows)), [])
    return itertools.chain.from_iterable(
        _batch_texts(model, tokenizer, batch, options, rows) for batch in batches
    )


def _batch_texts(
    model: Params | NGramModel, tokenizer: Tokenizer, prompts: list[tuple[Sample, _Prompt]],
    options: Options, rows: int,
) -> list[str]:  # fmt: skip
    """Return the texts after some prompts. Every call has `rows` rows, and so the same program."""
    samples, encoded = zip(*prompts, *prompts[:1] * (rows - len(prompts)), strict=True)
    tokens = _tokens(model, encoded, options, samples, None)
    rest = lambda row: _continuation(tokenizer, encoded[row], tokens.of_row(row), options)
    return ["".join(rest(row)) for row in range(len(prompts))]


class _Prompt(NamedTuple):
    """What a model reads of a prompt, what may come first, how texts begin and where they stop."""

    read: Int[np.ndarray, "P"]
    counted: Int[np.ndarray, "C"]  # of the text so far, for the processors
    goes_on: bool  # within the unit of the text before
    first: Bool[np.ndarray, "V"] | None
    allowed: Bool[np.ndarray, "V"] | None
    end: str
    stop: Sequence[str]
    unit_end: int | None


def _check(model: Params | NGramModel, tokenizer: Tokenizer, options: Options) -> None:
    if not isinstance(model, NGramModel):
        check_params(model)
    if isinstance(model, Params) and tokenizer.vocab_size != (V := len(model.embedding)):
        has = counted(tokenizer.vocab_size, "token")
        raise UserError(f"the tokenizer has {has}, but the model has {V:,}.")
    check_sampling(tokenizer.vocab_size, **options.per_token)
    check_whole("seed", options.seed, 2**32 - 1, least=0)
    check_whole("num_tokens", options.num_tokens)
    flags = ("stateful", "last_token_only", "unknown")
    check_flags(**{flag: getattr(options, flag) for flag in flags})
    as_processors(options.logits_processor)
    check_string("unit", options.unit)
    is_end = lambda end: isinstance(end, str) and end != ""
    if not (isinstance(options.stop, tuple | list) and all(map(is_end, options.stop))):
        raise UserError(
            f"stop is {shown(options.stop)}; it must be a tuple or list of strings of at least one "
            "character."
        )


def _encode(tokenizer: Tokenizer, prompt: str, options: Options, goes_on: bool) -> _Prompt:
    check_string("the prompt", prompt)
    if not tokenizer.reads_bytes:  # an argument's bytes that are no UTF-8 are such halves
        check_utf_8(prompt)
    unit_end, stop = end_token(tokenizer, options.unit), options.stop
    before, text, begins = [], prompt, []
    if unit_end is not None:
        *before, text = units_of(prompt, options.unit)
        stop = (*stop, end_of(options.unit))
        begins = [unit_end] if before or not goes_on else []
    end, first = tokenizer.may_follow(text)
    allowed = None
    if tokenizer.unwritten is not None and not options.unknown:
        allowed = np.arange(tokenizer.vocab_size) != tokenizer.unwritten
        first = None if first is None else first & allowed
    counted = tokenizer.encode(text.removesuffix(end))
    read = np.concatenate([np.array(begins, counted.dtype), counted])
    if len(read) == 0:
        raise UserError(f"the prompt {prompt!r} gives no token; give at least one word.")
    read = read[-1:] if options.last_token_only else read
    return _Prompt(read, counted, not begins, first, allowed, end, stop, unit_end)


def _continuation(
    tokenizer: Tokenizer, prompt: _Prompt, tokens: Iterator[Int[np.ndarray, "1"]], options: Options
) -> Iterator[str]:
    """Yield the text after a prompt, in pieces of one token."""
    new = tokenizer.continuation(itertools.islice(tokens, options.num_tokens))
    # the prompt ends with it
    new = (text[len(prompt.end) * (i == 0) :] for i, text in enumerate(new))
    return _until(prompt.stop, new) if prompt.stop else new


def _until(stop: Sequence[str], texts: Iterable[str]) -> Iterator[str]:
    """Yield a text up to the first of some strings; what might be the beginning of one waits."""
    held = ""
    for text in texts:
        held += text
        if ends := [held.index(end) for end in stop if end in held]:
            yield held[: min(ends)]
            return
        begun = (n for end in stop for n in range(1, len(end)) if held.endswith(end[:n]))
        settled = len(held) - max(begun, default=0)
        yield held[:settled]
        held = held[settled:]
    yield held


class _Recurrent:
    """The tokens that a model generates after some prompts. All chunks run one compiled program.

    The first chunk starts from the prompts' last tokens; the last may have more tokens than are
    asked for.
    """

    def __init__(
        self, params: Params, prompts: Sequence[_Prompt], options: Options,
        samples: Sequence[Sample], carry: ModelCarry | None,
    ) -> None:  # fmt: skip
        self.params, self.options = _only(prompts[0].allowed, params), options
        every = np.ones(len(params.embedding), bool)
        first = np.stack([every if p.first is None else p.first for p in prompts])
        self.first = None if first.all() else first
        number, sample = np.array(samples, np.uint32).T
        key = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(options.seed), number)
        # It is the first sample's; `split`, which `generate` goes on with, gives no other's
        key = jnp.where(sample > 0, jax.vmap(jax.random.fold_in)(key, -sample), key)
        read = [prompt.read for prompt in prompts]
        last: Any = np.stack([tokens[-1:] for tokens in read])
        self.unit_end, self.start = prompts[0].unit_end, initial_carry(params, len(prompts))
        if carry is None or not prompts[0].goes_on:
            carry = self.start
        # On the device where `generate` leaves them: with others, its second call compiles anew
        if len(devices := params.embedding.devices()) == 1:
            last, carry, key = jax.device_put((last, carry, key), *devices)
        lengths = np.array([len(tokens) - 1 for tokens in read])
        if options.stateful and lengths.any():
            if len(read) == 1:  # bit for bit as if it came in two parts
                carry = _read(params, read[0][None, :-1], carry)
            else:  # padded, so that few programs read many batches
                padded = np.zeros((len(read), power_of_two(int(lengths.max()))), np.int32)
                for row, tokens in zip(padded, read, strict=True):
                    row[: len(tokens) - 1] = tokens[:-1]
                carry = _read(params, padded, carry, lengths)
        self.counts = None
        if options.logits_processor:
            self.counts = self._counted([prompt.counted for prompt in prompts])
        # the state before the next chunk, and its prompt
        self.key, self.ahead = key, (cast(ModelCarry, carry), last)
        self.behind, self.num_yielded = self.ahead, 0  # of the chunk that `of_row` yields
        self.chunks: list[Int[np.ndarray, "B N"]] = []

    def of_row(self, row: int) -> Iterator[Int[np.ndarray, "1"]]:
        """Yield a row's tokens one by one; the first is one of those that may come first."""
        for i in itertools.count():
            if i == len(self.chunks):
                self._generate()
            for number, token in enumerate(self.chunks[i][row, :, None], 1):
                self.num_yielded = number
                yield token

    def _generate(self) -> None:
        params, options, num_tokens = self.params, self.options, CHUNK
        if self.first is not None:
            params, num_tokens = _only(self.first, params), 1
            self.first = None
        (carry, last), processor = self.ahead, options.logits_processor
        new, after, self.key = generate(
            params, self.key, last, num_tokens, carry, stateful=options.stateful,
            logits_processor=processor, counts=self.counts, **options.per_token,
        )  # fmt: skip
        self.behind, self.ahead = self.ahead, (after, new[:, -1:])
        new = np.asarray(new)
        if (new < 0).any():
            excluded = "the processor excludes every token, or " if processor else ""
            raise UserError(f"{excluded}the model's logits are NaN: its weights are damaged.")
        self.chunks.append(new)
        if self.counts is not None:
            self.counts = self.counts + self._counted(new)

    def _counted(self, tokens: Iterable[Int[np.ndarray, "_"]]) -> Int[np.ndarray, "B V"]:
        """Return how often each row has each token."""
        return np.stack([np.bincount(row, minlength=len(self.params.head.bo)) for row in tokens])

    def carry(self) -> ModelCarry | None:
        """Return the state after the tokens yielded so far, of which there is one row."""
        if not self.options.stateful:
            return None
        carry, last = self.behind
        yielded = self.chunks[-1][0, : self.num_yielded, None] if self.chunks else ()
        for token in (last[0], *yielded):
            carry = self.start if token == self.unit_end else carry
            _, carry = step(self.params, token, carry)
        return carry


def _only(allowed: Bool[np.ndarray, "*B V"] | None, params: Params) -> Params:
    """Return the parameters of a model that gives all other tokens, in each row, the logit −∞."""
    if allowed is None:
        return params
    bo = jnp.where(allowed, params.head.bo, -jnp.inf)
    return replace(params, head=replace(params.head, bo=bo))


@jax.jit
def _read(
    params: Params, tokens: Int[AnyArray, "B T"], carry: ModelCarry,
    lengths: Int[AnyArray, "B"] | None = None,
) -> ModelCarry:  # fmt: skip
    """Return the state after the tokens, or so many of each row, without computing logits."""
    x = Lookup(params.embedding, jnp.asarray(tokens).T)
    return unroll(params.layers, x, carry, lengths=lengths, time_major=True)[1]


def _tokens(model: Params | NGramModel, *arguments: Any) -> _Recurrent | _Counted:
    """Return the tokens of either kind of model."""
    return (_Recurrent if isinstance(model, Params) else _Counted)(cast(Any, model), *arguments)


class _Counted:
    """The tokens of a model whose state is the end of the text so far."""

    def __init__(
        self, model: NGramModel, prompts: Sequence[_Prompt], options: Options,
        samples: Sequence[Sample], carry: ModelCarry | None,
    ) -> None:  # fmt: skip
        if carry is not None or options.logits_processor:
            raise UserError(
                "an n-gram model has no carry and no logits to process; leave them out."
            )
        [prompt], [sample] = prompts, samples
        self.model, self.options, self.text = model, options, prompt.read
        self.first, self.allowed = prompt.first, prompt.allowed
        self.rng = np.random.default_rng([options.seed, *sample])

    def of_row(self, row: int) -> Iterator[Int[np.ndarray, "1"]]:
        """Yield the tokens of the one row; the first is one of those that may come first."""
        while True:
            allowed, num_tokens = (self.allowed, CHUNK) if self.first is None else (self.first, 1)
            self.first = None
            options = {**self.options.per_token, "allowed": allowed}
            new = self.model.generate(self.rng, self.text, num_tokens, **options)
            self.text = np.concatenate([self.text, new])[-(2**13) :]  # it reads fewer
            yield from new[:, None]

    def carry(self) -> None:
        """Return None: it has no state but the text."""
