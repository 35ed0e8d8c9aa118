"""What is measured of a model on a text: a record, each line of which is a measure.

A new measure is a function of a `Subject` and its line in `Measurements`, under another name than
the function's. `jaxgru evaluate` then prints it, a run's study.json holds it and, if the line names
a column, docs/study.md shows it.
"""

# The annotations of records are read here: no `from __future__ import annotations`
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxgru.analysis.markov import bigram_divergence, greedy_cycles, transition_matrix
from jaxgru.analysis.ngrams import pair_frequencies
from jaxgru.analysis.text import distinct_ngrams, find_loop, words
from jaxgru.errors import UserError, needs
from jaxgru.lm import Params, generate
from jaxgru.lm.data.batching import random_crops
from jaxgru.lm.data.dataset import Dataset
from jaxgru.lm.dynamic import CHOSEN_ON, choose_dynamic, dynamic_nll
from jaxgru.lm.evaluation import batches_nll, lines_nll, stream_nll, window_loss
from jaxgru.printing import counted
from jaxgru.records import Count, Number, Record, Whole

with needs("train"):
    from msgspec import Meta

RESETS = tuple(2**i for i in range(11))  # tokens between resets, of the memory curve: 1, 2, … 1024
RECOVERY = 256  # predictions after each reset
STRIDE = 64  # tokens between two of the resets
NUM_BATCHES = 200  # these three are those of nanoGPT's `estimate_loss`
BATCH_SIZE = 64
BATCH_WINDOW = 256
MAX_CHAIN = 4096  # tokens in the vocabulary: the chain needs V² memory


class Treatment(NamedTuple):
    """Whether the state is kept, and whether only the last token of the prompt is read."""

    stateful: bool
    last_token_only: bool


TREATMENTS = {
    "stateless": Treatment(stateful=False, last_token_only=False),
    "last token only": Treatment(stateful=True, last_token_only=True),
    "stateful": Treatment(stateful=True, last_token_only=False),
}
"""The published bug; the study's stateful sampler; and ours."""

NUM_PROMPTS = 32  # taken from the validation split, evenly spaced
PROMPT_LENGTH = 32
GREEDY_TOKENS = 1000  # generated per prompt
SAMPLED_TOKENS = 500
TEMPERATURE = 0.8
TOP_K = 30
NUM_WORDS = 1500  # of the sampled text, for distinct n-grams

Reset = Annotated[int, Meta(ge=1, le=2**31)]  # the state is reset every so many tokens
Mark = TypeVar("Mark")


@dataclass
class Subject:
    """A model, the text on whose validation split it is measured, and its window in training.

    The text is the one that it was trained on or, if the training split is empty, another one.
    """

    params: Params
    text: Dataset
    window: int = 128
    _losses: dict[int, float] = field(default_factory=dict, init=False)

    @cached_property
    def nats(self) -> Float[np.ndarray, "N"]:
        """Those of each prediction over one stream."""
        return stream_nll(self.params, self.text.validation, self.text.separator_token)

    @property
    def stream(self) -> float:
        """Their mean."""
        return float(self.nats.mean())

    @property
    def never(self) -> str:
        """What tables call the treatment that keeps the state."""
        return (
            "never: one stream"
            if self.text.separator_token is None
            else "only where a document begins"
        )

    def loss(self, every: int) -> float:
        """Return the nats per token where the state is reset every so many tokens."""
        if every not in self._losses:
            tokens = self.text.validation
            self._losses[every] = window_loss(
                self.params, tokens, every, separator_token=self.text.separator_token
            )
        return self._losses[every]


@dataclass(frozen=True)
class Measure:
    """What a line of `Measurements` says.

    Attributes:
      title: what tables call it; {s} is the subject, {v} the value.
      function: computes it; None: it does not apply.
      needs: "text": any; "own text": the one that the model was trained on; "asking": its name.
      unit: of a number, or of the `mean` of a record; "": it has a table of its own, or none.
      column: what the study's table over seeds calls it; "": that leaves it out.
      help: of the option of `jaxgru evaluate` that asks for it; "": there is none.
    """

    title: str
    function: Callable[[Subject], Any]
    needs: Literal["text", "own text", "asking"] = "text"
    unit: str = "nats/token"
    column: str = ""
    help: str = ""


# --- Losses


class MeanLoss(Record, frozen=True, kw_only=True):
    """The loss of random batches, nats per token: the mean and its standard error."""

    mean: Number
    standard_error: Number


def random_batch_loss(s: Subject) -> MeanLoss:
    """Evaluate as nanoGPT does, from zero state: three times as long as all other losses."""
    tokens = jnp.asarray(s.text.validation)
    if len(tokens) < BATCH_WINDOW + 2:
        raise UserError(
            f"the text has {counted(len(tokens), 'token')}, but windows of {BATCH_WINDOW} need "
            f"{BATCH_WINDOW + 2}."
        )
    keys = jax.random.split(jax.random.key(0), NUM_BATCHES)
    crops = jax.vmap(lambda key: random_crops(key, tokens, BATCH_SIZE, BATCH_WINDOW))(keys)
    nats = np.asarray(
        batches_nll(s.params, *crops, separator_token=s.text.separator_token), np.float64
    )
    losses = nats.mean(axis=(1, 2))
    standard_error = losses.std(ddof=1) / NUM_BATCHES**0.5
    return MeanLoss(mean=float(losses.mean()), standard_error=float(standard_error))


class DynamicLoss(Record, frozen=True, kw_only=True):
    """The loss of weights that learn as they read, nats per token, and how they learn."""

    mean: Number
    learning_rate: Number
    decay: Number
    every: Count


def dynamic_loss(s: Subject) -> DynamicLoss:
    """Choose on the end of the training text how the weights learn, and evaluate them."""
    dynamic = choose_dynamic(s.params, s.text.train[-CHOSEN_ON:])
    nats = dynamic_nll(s.params, s.text.validation, dynamic)
    return DynamicLoss(
        mean=float(nats.mean()),
        learning_rate=dynamic.learning_rate,
        decay=dynamic.decay,
        every=dynamic.every,
    )


def recovery_of(s: Subject) -> list[float]:
    """Return what a reset costs at the 1st, 2nd, … prediction after it.

    It is the mean excess over one stream on the same tokens, so their difficulty cancels, over
    resets STRIDE tokens apart.
    """
    tokens = s.text.validation
    length = min(RECOVERY, len(s.nats))
    starts = range(0, len(tokens) - length, STRIDE)
    after_reset = lines_nll(
        s.params, [tokens[i : i + length + 1] for i in starts], s.text.separator_token
    )
    in_stream = [s.nats[i : i + length] for i in starts]
    excess = np.mean(after_reset, axis=0) - np.mean(in_stream, axis=0)
    return [float(f"{nats:.5g}") for nats in excess]


# --- The chain that a model is without its state


class Cycle(Record, frozen=True):
    """A cycle of greedy stateless text, and the share of the vocabulary that leads into it."""

    text: str
    period: Count
    basin: Number


class Chain(Record, frozen=True):
    """The Markov chain that a model is without its state; its KL divergence in nats."""

    kl_to_bigram: Number
    cycles: list[Cycle]


def chain_of(s: Subject) -> Chain | None:
    """Return the model's chain; None: the vocabulary is too large."""
    tokenizer = s.text.tokenizer
    V = tokenizer.vocab_size
    if V > MAX_CHAIN:
        return None
    P = transition_matrix(s.params)
    cycles = [
        Cycle(tokenizer.decode(np.array(cycle.tokens)), len(cycle.tokens), cycle.basin / V)
        for cycle in greedy_cycles(P)[:5]
    ]
    return Chain(bigram_divergence(P, pair_frequencies(s.text.train, V)), cycles)


# --- Text that a model writes


class Text(Record, frozen=True):
    """Measures of text, and what tables call them. None: there are no loops or words."""

    share_that_loops: Annotated[Number | None, "greedy texts that end in a loop, share"] = None
    median_period: Annotated[Number | None, "its period, tokens (median)"] = None
    median_onset: Annotated[Number | None, "its onset, tokens (median)"] = None
    num_words: Whole = 0
    known_words: Annotated[Number | None, "words that the training text has, share"] = None
    distinct_1: Annotated[Number | None, f"distinct words among {NUM_WORDS:,}"] = None
    distinct_2: Annotated[Number | None, "distinct pairs of words"] = None
    distinct_3: Annotated[Number | None, "distinct triples of words"] = None


def text_of(s: Subject) -> dict[str, Text] | None:
    """Return measures of the validation split and of text by the model, under each treatment.

    None: the data is in documents, at whose ends the state of a long text would go on.
    """
    if s.text.separator_token is not None:
        return None
    tokens = s.text.validation
    decode = s.text.tokenizer.decode
    length = min(PROMPT_LENGTH, len(tokens) - 1)
    starts = np.linspace(0, len(tokens) - length, NUM_PROMPTS).astype(int)
    prompts = jnp.asarray(tokens[starts[:, None] + np.arange(length)])
    vocabulary = frozenset(words(decode(s.text.train)))
    validation = [decode(tokens[: NUM_PROMPTS * SAMPLED_TOKENS])]
    texts = {"validation text": Text(**words_in(validation, vocabulary))}
    for name, treatment in TREATMENTS.items():
        greedy = texts_of(s.params, prompts, GREEDY_TOKENS, 0, *treatment)
        sampled = texts_of(s.params, prompts, SAMPLED_TOKENS, TEMPERATURE, *treatment)
        measures_of_words = words_in(map(decode, sampled), vocabulary)
        texts[name] = Text(**loops_in(greedy), **measures_of_words)
    return texts


def texts_of(
    params: Params,
    prompts: jax.Array,
    num_tokens: int,
    temperature: float,
    stateful: bool,
    last_token_only: bool,
) -> np.ndarray:
    """Generate texts that continue prompts (B, P), under one of TREATMENTS."""
    top_k = min(TOP_K, len(params.head.bo)) if temperature else None
    if last_token_only:
        prompts = prompts[:, -1:]
    tokens, *_ = generate(
        params,
        jax.random.key(0),
        prompts,
        num_tokens,
        temperature=temperature,
        top_k=top_k,
        stateful=stateful,
    )
    return np.asarray(tokens)


def loops_in(greedy: np.ndarray) -> dict[str, Any]:
    """Return the share of greedy texts that end in a loop, and the median loop."""
    loops = [loop for loop in map(find_loop, greedy) if loop is not None]
    measures = {"share_that_loops": len(loops) / len(greedy)}
    if loops:
        measures["median_period"] = statistics.median(loop.period for loop in loops)
        measures["median_onset"] = statistics.median(loop.onset for loop in loops)
    return measures


def words_in(texts: Iterable[str], vocabulary: frozenset[str]) -> dict[str, Any]:
    """Return the share of known words, repeats counted, and the shares of distinct word n-grams.

    The first and the last word of each text, which may be incomplete, do not count.
    """
    whole_words = words("\n".join(re.sub(r"\A\S*|\S*\Z", "", text) for text in texts))
    first_words = whole_words[:NUM_WORDS]
    measures: dict[str, Any] = {"num_words": len(first_words)}
    if whole_words:
        num_known = sum(word in vocabulary for word in whole_words)
        measures["known_words"] = num_known / len(whole_words)
    for n in (1, 2, 3):
        if len(first_words) >= n:
            measures[f"distinct_{n}"] = distinct_ngrams(first_words, n)
    return measures


# --- The table of measures, and the record


# fmt: off
class Measurements(Record, frozen=True, kw_only=True):
    """What was measured of a subject; losses and their differences in nats per token."""

    num_tokens: Count
    num_characters: Count
    windows: Annotated[Number, Measure(
        "windows of {s.window}, as in training", lambda s: s.loss(s.window), column="windows")]
    stateless: Annotated[Number, Measure("every token", lambda s: s.loss(1))]
    memory_curve: Annotated[list[tuple[Reset, Number]], Measure(
        "every {k:,} tokens", lambda s: [(k, s.loss(k)) for k in RESETS], "own text")] = []
    stream: Annotated[Number, Measure("{s.never}", lambda s: s.stream, column="kept")]
    sensitivity: Annotated[Number, Measure(
        "sensitivity: every token minus never", lambda s: s.loss(1) - s.stream, column="cost")]
    chain: Annotated[Chain | None, Measure("", chain_of, "own text", "")] = None
    text: Annotated[Mapping[str, Text], Measure("", text_of, "own text", "")] = {}
    random_batches: Annotated[MeanLoss | None, Measure(
        f"{NUM_BATCHES} random batches of {BATCH_SIZE} windows of {BATCH_WINDOW} "
        "(± {v.standard_error:.4f} nats/token)",
        random_batch_loss, "asking",
        help="also evaluate 200 random batches of 64 windows of 256 tokens, like nanoGPT")] = None
    dynamic: Annotated[DynamicLoss | None, Measure(
        "never, and the weights learn: η {v.learning_rate:g}, λ {v.decay:g}, every {v.every}",
        dynamic_loss, "asking",
        help="also evaluate weights that keep learning as they read (Krause et al. 2018), with "
        "settings chosen on the end of the training text; takes minutes")] = None
    recovery: Annotated[list[Number], Measure("", recovery_of, "asking", "")] = []
# fmt: on


def _marks(record: type[Record], kind: type[Mark]) -> dict[str, Mark]:
    """Return by field what its annotation says beside the type."""
    marks = {}
    for name, hint in get_type_hints(record, include_extras=True).items():
        mark = getattr(hint, "__metadata__", [None])[0]
        if isinstance(mark, kind):
            marks[name] = mark
    return marks


MEASURES = _marks(Measurements, Measure)
TEXT_MEASURES = _marks(Text, str)


def measure(
    subject: Subject, asked: Collection[str] = (), progress: Callable[[str], None] = lambda _: None
) -> Measurements:
    """Return every measure whose needs the subject meets, and those that are asked for by name.

    The latter come first, because they can fail. `progress` is called with the name of each
    measure before it is computed.
    """
    met_needs = {"text"}
    if len(subject.text.train):
        met_needs.add("own text")
    applicable = [name for name, row in MEASURES.items() if row.needs in met_needs]
    values: dict[str, Any] = {}
    for name in [*asked, *applicable]:
        progress(name.replace("_", " "))
        values[name] = MEASURES[name].function(subject)
    return Measurements(
        num_tokens=len(subject.nats),
        num_characters=subject.text.num_characters,
        **{name: value for name, value in values.items() if value is not None},
    )
