"""The cost of a reset state for one model: every measure of the study, as one JSON record."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from msgspec import Meta

from jaxgru.analysis.markov import bigram_divergence, greedy_cycles, transition_matrix
from jaxgru.analysis.ngrams import pair_frequencies
from jaxgru.analysis.text import distinct_ngrams, find_loop, words
from jaxgru.cells.base import AnyArray
from jaxgru.lm.data.dataset import Dataset
from jaxgru.lm.data.tokenizers import Tokenizer
from jaxgru.lm.evaluation import (
    RESETS,
    memory_curve,
    random_batch_losses,
    stream_nll,
    window_loss,
)
from jaxgru.lm.model import Params
from jaxgru.lm.records import Count, Number, Record, Whole
from jaxgru.lm.sampling import generate

MAX_CHAIN = 4096  # tokens in the vocabulary: the chain needs V² memory
RANDOM_WINDOW = 256  # tokens, of the random batches: nanoGPT's block_size

TREATMENTS = {
    "stateless": (False, False),
    "last token only": (True, True),
    "stateful": (True, False),
}
"""Whether the state is kept, and whether only the last token of the prompt is read: the published
bug; the study's stateful sampler; and ours."""

NUM_PROMPTS, PROMPT_LENGTH = 32, 32  # taken from the validation split, evenly spaced
GREEDY_TOKENS, SAMPLED_TOKENS = 1000, 500  # generated per prompt
TEMPERATURE, TOP_K = 0.8, 30
NUM_WORDS = 1500  # of the sampled text, for distinct n-grams
TEXT_MEASURES = {
    "share_that_loops": "greedy texts that end in a loop, share",
    "median_period": "its period, tokens (median)",
    "median_onset": "its onset, tokens (median)",
    "known_words": "words that the training text has, share",
    "distinct_1": f"distinct words among {NUM_WORDS:,}",
    "distinct_2": "distinct pairs of words",
    "distinct_3": "distinct triples of words",
}
"""The labels of `Text`'s measures."""

Reset = Annotated[int, Meta(ge=1, le=2**31)]  # the state is reset every so many tokens


class Cycle(Record, frozen=True):
    """A cycle of greedy stateless text, and the share of the vocabulary that leads into it."""

    text: str
    period: Count
    basin: Number


class Chain(Record, frozen=True):
    """The Markov chain that a model is without its state; its KL divergence in nats."""

    kl_to_bigram: Number
    cycles: list[Cycle]


class Text(Record, frozen=True):
    """Measures of text. None: there are no loops or words."""

    share_that_loops: Number | None = None
    median_period: Number | None = None
    median_onset: Number | None = None
    num_words: Whole = 0
    known_words: Number | None = None
    distinct_1: Number | None = None
    distinct_2: Number | None = None
    distinct_3: Number | None = None


class MeanLoss(Record, frozen=True, kw_only=True):
    """The loss of random batches, nats per token: the mean and its standard error."""

    mean: Number
    standard_error: Number


class StateCost(Record, frozen=True):
    """Every measure of a model; losses in nats per token on the whole validation split."""

    num_tokens: Count
    num_characters: Count
    windows: Number
    stream: Number
    stateless: Number
    sensitivity: Number
    memory_curve: Annotated[list[tuple[Reset, Number]], Meta(min_length=1)]
    chain: Chain | None
    text: Mapping[str, Text]
    random_batches: MeanLoss | None = None


def measure(
    params: Params,
    tokenizer: Tokenizer,
    dataset: Dataset,
    window: int = 128,
    progress: Callable[[str], None] = lambda _: None,
    random_batches: bool = False,
) -> StateCost:
    """Measure a model.

    Args:
      window: the window of the `windows` loss: the sequence length in training.
      progress: called with the name of each measure before it is computed.
      random_batches: also evaluate the model as nanoGPT does, on 200 random batches of 64 windows
        of 256 tokens. This takes three times as long as all other losses.

    There are no measures of text if the data is read in units, at whose ends the state of a long
    text would go on.
    """
    tokens, end = dataset.validation, dataset.end
    batches = None
    if random_batches:  # first, because the text can be too short for them
        progress("random batches")
        batches = evaluate_random_batches(params, tokens, end)
    progress("one stream")
    stream = stream_nll(params, tokens, end)
    progress("the memory curve")
    curve = memory_curve(params, tokens, RESETS, end)
    chain = None
    if tokenizer.vocab_size <= MAX_CHAIN:
        progress("the stateless chain")
        chain = _chain(params, tokenizer, dataset)
    progress("text")
    unbroken, stateless = float(stream.mean()), curve[1]
    return StateCost(
        num_tokens=len(tokens) - 1,
        num_characters=dataset.num_characters,
        windows=curve[window] if window in curve else window_loss(params, tokens, window, end=end),
        stream=unbroken,
        stateless=stateless,
        sensitivity=stateless - unbroken,
        memory_curve=list(curve.items()),
        chain=chain,
        text={} if end is not None else _text(params, tokenizer, dataset),
        random_batches=batches,
    )


def evaluate_random_batches(
    params: Params, tokens: Int[AnyArray, "N"], end: int | None = None
) -> MeanLoss:
    """Return the mean of `random_batch_losses` and its standard error, of windows of 256 tokens."""
    batches = random_batch_losses(params, tokens, RANDOM_WINDOW, jax.random.key(0), end=end)
    error = batches.std(ddof=1) / len(batches) ** 0.5
    return MeanLoss(mean=float(batches.mean()), standard_error=float(error))


def _chain(params: Params, tokenizer: Tokenizer, dataset: Dataset) -> Chain:
    P = transition_matrix(params)
    V = len(P)
    pairs = pair_frequencies(dataset.train, V)
    cycles = [
        Cycle(tokenizer.decode(np.array(tokens)), len(tokens), basin / V)
        for tokens, basin in greedy_cycles(P)[:5]
    ]
    return Chain(bigram_divergence(P, pairs), cycles)


def _text(params: Params, tokenizer: Tokenizer, dataset: Dataset) -> dict[str, Text]:
    tokens = dataset.validation
    length = min(PROMPT_LENGTH, len(tokens) - 1)
    starts = np.linspace(0, len(tokens) - length, NUM_PROMPTS).astype(int)
    prompts = jnp.asarray(tokens[starts[:, None] + np.arange(length)])
    vocabulary = frozenset(words(tokenizer.decode(dataset.train)))
    itself = _whole_words(tokenizer.decode(tokens[: NUM_PROMPTS * SAMPLED_TOKENS]))
    record = {"validation text": Text(**_words(itself, vocabulary))}
    for name, treatment in TREATMENTS.items():
        greedy = texts_of(params, prompts, GREEDY_TOKENS, 0, *treatment)
        sampled = texts_of(params, prompts, SAMPLED_TOKENS, TEMPERATURE, *treatment)
        text = "\n".join(_whole_words(tokenizer.decode(row)) for row in sampled)
        record[name] = Text(**_loops(greedy), **_words(text, vocabulary))
    return record


def texts_of(
    params: Params, prompts: jax.Array, num_tokens: int, temperature: float, stateful: bool,
    last_token_only: bool,
) -> np.ndarray:  # fmt: skip
    """Generate texts that continue prompts (B, P), under one of TREATMENTS."""
    top_k = min(TOP_K, len(params.head.bo)) if temperature else None
    options = {"temperature": temperature, "top_k": top_k, "stateful": stateful}
    prompts = prompts[:, -1:] if last_token_only else prompts
    return np.asarray(generate(params, jax.random.key(0), prompts, num_tokens, **options)[0])


def _loops(greedy: np.ndarray) -> dict[str, Any]:
    """Return the share of greedy texts that end in a loop, and the median loop."""
    loops = [loop for row in greedy if (loop := find_loop(row))]
    measures = {"share_that_loops": len(loops) / len(greedy)}
    if loops:
        onsets, periods = zip(*loops, strict=True)
        measures["median_period"] = statistics.median(periods)
        measures["median_onset"] = statistics.median(onsets)
    return measures


def _whole_words(text: str) -> str:
    """Remove the first and the last word, which may be incomplete."""
    return re.sub(r"\A\S*|\S*\Z", "", text)


def _words(text: str, vocabulary: frozenset[str]) -> dict[str, Any]:
    """Return the share of known words, repeats counted, and the shares of distinct word n-grams."""
    every = words(text)
    known = {"known_words": sum(word in vocabulary for word in every) / len(every)} if every else {}
    found = every[:NUM_WORDS]
    distinct = {f"distinct_{n}": distinct_ngrams(found, n) for n in (1, 2, 3) if len(found) >= n}
    return {"num_words": len(found), **known, **distinct}
