"""Text from a prompt, token by token: the prompt is encoded, tokens are sampled and decoded."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from jaxgru.cells.base import AnyArray, check_flags
from jaxgru.errors import UserError, shown
from jaxgru.lm.arguments import check_whole
from jaxgru.lm.data.corpus import TINY_SHAKESPEARE_SHA256
from jaxgru.lm.data.tokenizers import SPACE, Tokenizer, TokenizerError
from jaxgru.lm.model import ModelCarry, Params, apply, initial_carry, step
from jaxgru.lm.processors import Processor
from jaxgru.lm.sampling import check_sampling, generate

PROMPT = "ROMEO: "  # for models of Tiny Shakespeare, where the user gives none
CHUNK = 16  # tokens generated at once


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

    @property
    def per_token(self) -> dict[str, Any]:
        """The options that say how one token is drawn from its logits."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


def default_prompt(text_sha256: str, tokenizer: Tokenizer) -> str:
    """Return the prompt where the user gives none, for a model trained on the text of this SHA-256.

    For Tiny Shakespeare it is PROMPT; for another text a newline, or a word if the tokenizer has no
    newline.

    Raises:
      UserError: the tokenizer can encode none of its own pieces.
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


class TextStream(Iterator[str]):
    """A text while it is generated: iterating over it gives the prompt, then a piece per token."""

    def __init__(self, texts: Iterator[str], tokens: _Recurrent | _Counted) -> None:
        self._texts, self._tokens = texts, tokens

    def __next__(self) -> str:
        return next(self._texts)

    @property
    def carry(self) -> ModelCarry | None:
        """The state after the text so far, prompt included, from which another text can go on.

        If the text has ended before a stop string, this state has read that string, too. None where
        no state is carried: with `stateful=False`, and with an n-gram model.
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

    Raises:
      UserError: at the call: the prompt gives no token or has unknown characters, an option or the
        sample's index is out of range, `stop` is not of strings, or an n-gram model is given a
        carry or a processor. While the text is generated: the model's logits are NaN, or a
        processor excludes every token or does not return logits.
      ValueError: the carry does not fit the model, or a flag is neither True nor False.
      TypeError: num_tokens, top_k, the seed or the sample's index is not a whole number.
    """
    check_sampling(tokenizer.vocab_size, **options.per_token)
    for name, value in (("seed", options.seed), ("sample", sample)):
        check_whole(name, value, 2**32 - 1, least=0)
    check_whole("num_tokens", options.num_tokens)
    check_flags(stateful=options.stateful, last_token_only=options.last_token_only)
    is_end = lambda end: isinstance(end, str) and end != ""
    if not (isinstance(options.stop, tuple | list) and all(map(is_end, options.stop))):
        raise UserError(
            f"stop is {shown(options.stop)}; it must be a tuple or list of strings of at least one "
            "character."
        )
    end, first = tokenizer.may_follow(prompt)
    known = tokenizer.encode(prompt.removesuffix(end))
    if len(known) == 0:
        raise UserError(f"the prompt {prompt!r} gives no token; give at least one word.")
    read = known[-1:] if options.last_token_only else known
    if isinstance(model, Params):
        tokens = _Recurrent(model, read, options, sample, first, carry)
    elif carry is None and not options.logits_processor:
        tokens = _Counted(model, read, options, sample, first)
    else:
        raise UserError("an n-gram model has no carry, and no logits to process; leave them out.")
    new = tokenizer.continuation(tokens.next_token() for _ in range(options.num_tokens))
    new = (text[len(end) * (i == 0) :] for i, text in enumerate(new))  # the prompt ends with it
    new = _until(options.stop, new) if options.stop else new
    return TextStream(itertools.chain([prompt], new), tokens)


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
    """The tokens that a model generates. All chunks run one compiled program.

    The first chunk starts from the prompt's last token; the last may have more tokens than are
    asked for.
    """

    def __init__(
        self,
        params: Params,
        prompt: Int[np.ndarray, "P"],
        options: Options,
        sample: int,
        first: Bool[np.ndarray, "V"] | None,
        carry: ModelCarry | None,
    ) -> None:
        self.params, self.options, self.first = params, options, first
        key = jax.random.fold_in(jax.random.key(options.seed), sample)
        last: Any = prompt[None, -1:]
        if carry is None:
            carry = initial_carry(params, 1)
        # On the device where `generate` leaves them: with others, its second call compiles anew
        if len(devices := params.embedding.devices()) == 1:
            last, carry, key = jax.device_put((last, carry, key), *devices)
        if options.stateful and len(prompt) > 1:
            carry = _read(params, prompt[None, :-1], carry)
        self.counts = None
        if options.logits_processor:
            self.counts = np.bincount(prompt[:-1], minlength=len(params.head.bo))[None]
        # the state before the next chunk, and its prompt
        self.key, self.ahead = key, (cast(ModelCarry, carry), last)
        self.behind, self.new, self.given = self.ahead, prompt[:0], 0  # of the chunk being given

    def next_token(self) -> Int[np.ndarray, "1"]:
        """Return the next token; the first one is one of those that may come first."""
        if self.given == len(self.new):
            self._generate()
        self.given += 1
        return self.new[self.given - 1 : self.given]

    def _generate(self) -> None:
        params, options, num_tokens = self.params, self.options, CHUNK
        if self.first is not None:
            bo = jnp.where(self.first, params.head.bo, -jnp.inf)
            params, num_tokens = replace(params, head=replace(params.head, bo=bo)), 1
            self.first = None
        (carry, last), processor = self.ahead, options.logits_processor
        new, after, self.key = generate(
            params, self.key, last, num_tokens, carry, stateful=options.stateful,
            logits_processor=processor, counts=self.counts, **options.per_token,
        )  # fmt: skip
        self.behind, self.ahead, self.given = self.ahead, (after, new[:, -1:]), 0
        self.new = np.asarray(new[0])
        if (self.new < 0).any():
            excluded = "the processor excludes every token, or " if processor else ""
            raise UserError(f"{excluded}the model's logits are NaN: its weights are damaged.")
        if self.counts is not None:
            read = np.concatenate([np.asarray(last[0]), self.new[:-1]])
            self.counts = self.counts + np.bincount(read, minlength=self.counts.shape[1])

    def carry(self) -> ModelCarry | None:
        """Return the state after the tokens given so far."""
        if not self.options.stateful:
            return None
        carry, last = self.behind
        for token in (last[0], *self.new[: self.given, None]):
            _, carry = step(self.params, token, carry)
        return carry


@jax.jit
def _read(params: Params, tokens: Int[AnyArray, "B T"], carry: ModelCarry) -> ModelCarry:
    """Return the state after these tokens, without computing logits."""
    return apply(params, tokens, carry)[1]


class _Counted:
    """The tokens of a model whose state is the end of the text so far."""

    def __init__(
        self,
        model: NGramModel,
        prompt: Int[np.ndarray, "P"],
        options: Options,
        sample: int,
        first: Bool[np.ndarray, "V"] | None,
    ) -> None:
        self.model, self.options, self.text, self.first = model, options, prompt, first
        self.rng, self.new = np.random.default_rng([options.seed, sample]), prompt[:0]

    def next_token(self) -> Int[np.ndarray, "1"]:
        """Return the next token; the first one is one of those that may come first."""
        if not len(self.new):
            num_tokens = CHUNK if self.first is None else 1
            options = {**self.options.per_token, "first": self.first}
            self.new = self.model.generate(self.rng, self.text, num_tokens, **options)
            self.text = np.concatenate([self.text, self.new])[-(2**13) :]  # it reads fewer
            self.first = None
        token, self.new = self.new[:1], self.new[1:]
        return token

    def carry(self) -> None:
        """Return None: it has no state but the text."""
