"""Sampling of the next token, and generation with an explicit state.

Stateless generation is the same program, except that the carry is reset before each token.
It reproduces the published bug, for comparison only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeAlias, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Integer, Key, PRNGKeyArray, Real

from jaxgru.arguments import as_array, as_sequence, as_tokens, check_number, check_tokens, is_known
from jaxgru.arrays import AnyArray, Tree, at_least_float32, choose_rows
from jaxgru.cells import embed
from jaxgru.errors import UserError, check_flags, check_whole
from jaxgru.layers import check_carry, unroll
from jaxgru.lm.data.batching import power_of_two
from jaxgru.lm.model import ModelCarry, Params, initial_carry, on_device, stepper, token_nll
from jaxgru.lm.processors import Processor
from jaxgru.printing import shown
from jaxgru.steps import valid_steps

__all__ = ["check_sampling", "draw", "filter_logits"]

Scalar: TypeAlias = float | Real[Array, ""]


class Keywords(TypedDict, total=False):
    """The keywords of `generate` that do not change how many values it returns."""

    temperature: Scalar
    top_k: SupportsIndex | None
    top_p: Scalar | None
    stateful: bool
    lengths: AnyArray | None
    stop: Sequence[SupportsIndex] | AnyArray | None
    logits_processor: Processor | tuple[Processor, ...]
    counts: AnyArray | None


@overload
def generate(
    params: Params,
    key: Array,
    prompt: AnyArray,
    num_tokens: SupportsIndex,
    carry: ModelCarry | None = None,
    *,
    return_logprobs: Literal[False] = False,
    **keywords: Unpack[Keywords],
) -> tuple[Array, ModelCarry, Array]: ...


@overload
def generate(
    params: Params,
    key: Array,
    prompt: AnyArray,
    num_tokens: SupportsIndex,
    carry: ModelCarry | None = None,
    *,
    return_logprobs: Literal[True],
    **keywords: Unpack[Keywords],
) -> tuple[Array, ModelCarry, Array, Array]: ...


def generate(
    params: Params,
    key: PRNGKeyArray | Key[Array, "B"],
    prompt: Integer[AnyArray, "B P"],
    num_tokens: SupportsIndex,
    carry: ModelCarry | None = None,
    *,
    temperature: Scalar = 1.0,
    top_k: SupportsIndex | None = None,
    top_p: Scalar | None = None,
    stateful: bool = True,
    lengths: Integer[AnyArray, "B"] | None = None,
    stop: Sequence[SupportsIndex] | Integer[AnyArray, "S"] | None = None,
    logits_processor: Processor | tuple[Processor, ...] = (),
    counts: Integer[AnyArray, "B V"] | None = None,
    return_logprobs: bool = False,
) -> tuple[Array, ModelCarry, Array] | tuple[Array, ModelCarry, Array, Array]:
    """Read the prompt, starting in the state `carry`; then sample `num_tokens` tokens per row.

    One compiled program serves all numbers of tokens that round up to the same power of two.
    Another prompt shape, top_k, processor or set of options in use needs another program; within
    `jit`, `grad` or `vmap`, each num_tokens does.

    Args:
      key: for the random choices; returned as the key of the next call. With a key per row, (B,), a
        row's tokens are those of a call with its prompt and key alone, up to rounding.
      prompt: at least one token per row, of any integer dtype.
      carry: the state before the prompt; None: `initial_carry`. With `stateful=False` it is
        ignored.
      temperature: a divisor of the logits. 0 takes the most likely token, the first one in a tie; a
        traced 0 samples among the tied tokens, as very small temperatures do.
      top_k: sample only from the k most likely tokens (Fan et al. 2018, arXiv 1805.04833); None:
        from all.
      top_p: after temperature and top_k, sample only from the most likely tokens that together
        reach this probability (nucleus sampling, Holtzman et al. 2019, arXiv 1904.09751); None:
        from all.
      stateful: False resets the carry before every token, also within the prompt, of which
        only the last token then matters.
      lengths: the number of tokens of each row's prompt; those after it are padding. A row's tokens
        are those of its prompt alone, except for the random numbers, if the rows share a key.
      stop: tokens at which a row ends. It then repeats its stop token and keeps its carry. Once all
        rows have ended, nothing more is computed.
      logits_processor: one of `lm/processors.py` or a function like them, or a tuple of these,
        applied in turn.
      counts: for the processors: how often each token occurs in each row's text so far, the prompt
        included; None: in the prompt.
      return_logprobs: also return log p of each token, before processors, temperature and filters.

    Returns:
      The tokens (B, num_tokens), int32 (int64 if the prompt has 64 bits); the carry after every
      token but the last; and the key. With `return_logprobs`, also the log-probabilities
      (B, num_tokens) in nats, which are 0 after a stop. Passing `tokens[:, -1:]`, the carry and the
      key to another call continues the text exactly: 50 tokens and 50 more are the same as 100.

      If the logits are NaN or all −∞, the token is -1, and so are all later tokens of that row. The
      causes are NaN in the parameters or the carry, a traced token or temperature out of range, and
      a processor that excludes every token.

      Under `grad` the tokens are constants: the gradient of the carry is that of reading them.

    Raises:
      UserError: an argument has a wrong shape or dtype, or is out of range, which is not checked of
        traced ones.
      ValueError: the carry does not fit, or a flag is no bool.
    """
    params = on_device(params)
    vocab_size = len(params.embedding)
    prompt = as_prompt(prompt, vocab_size)
    B, P = prompt.shape
    num_tokens = check_whole("num_tokens", num_tokens)
    temperature, top_k, top_p = check_sampling(vocab_size, temperature, top_k, top_p)
    check_flags(stateful=stateful, return_logprobs=return_logprobs)
    if _per_row(key) and key.shape != (B,):
        raise UserError(
            f"key is {key.dtype} {key.shape}; it must be one key, or one per row, ({B},)."
        )
    if carry is not None:
        carry = check_carry(params.layers, carry, B)
    if lengths is not None:
        lengths = _as_integers("lengths", lengths, (B,), 1, P)
    stop_tokens = None
    if stop is not None:
        stop_tokens = as_stop(stop, vocab_size)
    processors = as_processors(logits_processor)
    if not processors:
        counts = None
    elif counts is not None:
        counts = _as_integers("counts", counts, (B, vocab_size), 0, 2**31 - 1)

    options = _Options(
        top_k=top_k,
        is_greedy=not isinstance(temperature, Tracer) and bool(temperature == 0),
        stateful=bool(stateful),
        processors=processors,
        return_logprobs=return_logprobs,
    )
    inputs = _Inputs(params, key, prompt, carry, temperature, top_p, lengths, stop_tokens, counts)
    sampled, carry, key = _compute(num_tokens, options, inputs)
    if sampled.logprob is not None:
        return sampled.token, carry, key, sampled.logprob
    return sampled.token, carry, key


def as_prompt(prompt: Any, vocab_size: int) -> Integer[Array, "B P"]:
    """Return a prompt as an array. Raises UserError if it is not one of this vocabulary."""
    prompt = as_tokens("the prompt", prompt)
    if prompt.ndim != 2 or prompt.shape[1] < 1 or prompt.dtype == bool:
        raise UserError(
            f"the prompt is {prompt.dtype} {prompt.shape}; it must be integers (B, P) with P at "
            "least 1."
        )
    check_tokens("the prompt", prompt, vocab_size)
    return jnp.asarray(prompt)


def _as_integers(
    name: str, value: Any, shape: tuple[int, ...], least: int, most: int
) -> Integer[Array, "..."]:
    """Return whole numbers of a shape, in int32; their range is checked where they are known."""
    value = as_array(name, value)
    if value.shape != shape or not jnp.issubdtype(value.dtype, jnp.integer):
        raise UserError(f"{name} is {value.dtype} {value.shape}; it must be integers {shape}.")
    if is_known(value) and value.size:
        smallest = int(np.min(value))
        largest = int(np.max(value))
        if smallest < least or largest > most:
            raise UserError(
                f"{name} range from {smallest} to {largest}; they must be in {least} … {most}."
            )
    return jnp.asarray(value, jnp.int32)


def as_stop(stop: Sequence[SupportsIndex] | Integer[AnyArray, "S"], vocab_size: int) -> Any:
    """Return the stop tokens as an array; None where there are none. Raises as `as_sequence`."""
    stop = as_sequence("stop", stop, vocab_size)
    if stop.dtype == bool:
        raise UserError(f"stop is bool {stop.shape}; it must be tokens, (S,).")
    return jnp.asarray(stop) if stop.size else None


def check_sampling(
    vocab_size: int, temperature: Scalar, top_k: SupportsIndex | None, top_p: Scalar | None
) -> tuple[Scalar, int | None, Scalar | None]:
    """Return the options of `generate`, checked, as Python's numbers; traced ones as they are."""
    temperature = check_number(
        "temperature", temperature, lambda t: 0 <= t < float("inf"), "a finite number, 0 or more"
    )
    if top_k is not None:
        top_k = check_whole("top_k", top_k, vocab_size, f"the vocabulary's {vocab_size}")
    if top_p is not None:
        top_p = check_number("top_p", top_p, lambda p: 0 < p <= 1, "a number above 0 and at most 1")
    return temperature, top_k, top_p


def as_processors(logits_processor: Any) -> tuple[Processor, ...]:
    """Return the processors as a tuple. Raises UserError if one is no function."""
    processors = logits_processor
    if not isinstance(processors, tuple):
        processors = (processors,)
    if not all(map(callable, processors)):
        what = f"logits_processor is {shown(logits_processor)}"
        raise UserError(f"{what}; it must be a function or a tuple of functions.")
    return processors


class _Options(NamedTuple):
    """What one compiled program is for."""

    top_k: int | None
    is_greedy: bool
    stateful: bool
    processors: tuple[Processor, ...]
    return_logprobs: bool


class _Inputs(NamedTuple):
    """The values that a compiled program takes."""

    params: Params
    key: PRNGKeyArray | Key[Array, "B"]
    prompt: Integer[Array, "B P"]
    carry: ModelCarry | None
    temperature: Scalar
    top_p: Scalar | None
    lengths: Int[Array, "B"] | None
    stop: Integer[Array, "S"] | None
    counts: Int[Array, "B V"] | None


class _State(NamedTuple):
    """What one token hands on to the next."""

    carry: ModelCarry
    token: Int[Array, "B"]
    key: PRNGKeyArray | Key[Array, "B"]
    counts: Tree  # Int[Array, "B V"]; None without processors
    stopped: Bool[Array, "B"]


class _Sampled(NamedTuple):
    """A token per row, or N of them, and log p of each, if that is returned."""

    token: Array
    logprob: Array | None


class _Loop(NamedTuple):
    """How many tokens are written, the state after them, and the room for all tokens."""

    num_written: int | Array
    state: _State
    sampled: _Sampled


_Step: TypeAlias = Callable[[Array, ModelCarry], tuple[Array, ModelCarry]]
_NextToken: TypeAlias = Callable[[_State], tuple[_State, _Sampled]]


def _compute(
    num_tokens: int, options: _Options, inputs: _Inputs
) -> tuple[_Sampled, ModelCarry, Array]:
    """Return `num_tokens` tokens, the carry and the key, from the program that fits the call."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(inputs)):
        return _generate(num_tokens, options, inputs)  # a scan, which has a gradient
    most = min(power_of_two(num_tokens), 2**31 - 1)  # the loop counts in int32
    sampled, carry, key = _generate(most, options, inputs, num_tokens)
    if num_tokens < most:
        shorten = partial(jax.lax.slice_in_dim, start_index=0, limit_index=num_tokens, axis=1)
        sampled = jax.tree.map(shorten, sampled)
    return sampled, carry, key


@partial(jax.jit, static_argnums=(0, 1))
def _generate(
    most: int,
    options: _Options,
    inputs: _Inputs,
    num_tokens: int | Int[Array, ""] | None = None,
) -> tuple[_Sampled, ModelCarry, Array]:
    """Return `most` tokens, or, in a program for all numbers up to it, the first `num_tokens`."""
    dtype = jnp.int64 if inputs.prompt.dtype.itemsize == 8 else jnp.int32
    inputs = inputs._replace(prompt=inputs.prompt.astype(dtype))
    if inputs.stop is not None:
        inputs = inputs._replace(stop=inputs.stop.astype(dtype))
    state = _read_prompt(options, inputs)
    step = _step_of(options, inputs)
    next_token = partial(_next_token, step, options, inputs)
    if num_tokens is None:
        state, sampled = jax.lax.scan(next_token, state, length=most)
    else:
        has_stop = inputs.stop is not None
        state, sampled = _generate_up_to(most, num_tokens, next_token, state, has_stop)
    return jax.tree.map(jnp.transpose, sampled), state.carry, state.key


def _read_prompt(options: _Options, inputs: _Inputs) -> _State:
    """Return the state from which the first token is sampled, which reads the prompt's last one."""
    params = inputs.params
    prompt = inputs.prompt
    lengths = inputs.lengths
    B, P = prompt.shape
    carry = inputs.carry
    if carry is None:
        carry = initial_carry(params, B)
    last = prompt[:, -1]
    if lengths is not None:
        last = jnp.take_along_axis(prompt, lengths[:, None] - 1, axis=1)[:, 0]
    if options.stateful and P > 1:
        x = embed(params.embedding, prompt[:, :-1])
        lengths_before_last = None if lengths is None else lengths - 1
        _, carry = unroll(params.layers, x, carry, lengths=lengths_before_last)
    counts = inputs.counts
    if options.processors and counts is None:
        counts = _count(prompt, lengths, len(params.embedding))
    # False everywhere; unlike a constant, it varies over a mesh as the tokens do.
    stopped = last != last
    return _State(carry, last, inputs.key, counts, stopped)


def _count(
    prompt: Integer[Array, "B P"], lengths: Int[Array, "B"] | None, vocab_size: int
) -> Int[Array, "B V"]:
    """Return how often each token occurs in each row's prompt, padding left out."""
    if lengths is None:
        is_token = prompt == prompt
    else:
        is_token = valid_steps(lengths, prompt.shape, 1)
    B = len(prompt)
    counts = jnp.zeros((B, vocab_size), jnp.int32)
    return counts.at[jnp.arange(B)[:, None], prompt].add(is_token.astype(counts.dtype))


def _step_of(options: _Options, inputs: _Inputs) -> _Step:
    """Return the model's step, which starts anew each time unless it is stateful."""
    step = stepper(inputs.params)
    if options.stateful:
        return step
    zeros = initial_carry(inputs.params, len(inputs.prompt))
    return lambda token, _: step(token, zeros)


def _next_token(
    step: _Step, options: _Options, inputs: _Inputs, state: _State, _: None = None
) -> tuple[_State, _Sampled]:
    """Read the state's token, and return the next state and the token sampled for it."""
    logits, carry = step(state.token, state.carry)
    key, subkey = _split(state.key)
    processed = _process(options.processors, logits, state.counts)
    token = _choose(subkey, processed, options, inputs).astype(state.token.dtype)
    logprob = -token_nll(logits, token) if options.return_logprobs else None
    counts = state.counts
    if counts is not None:
        counts += jax.nn.one_hot(token, counts.shape[1], dtype=counts.dtype)
    stopped = state.stopped
    if inputs.stop is not None:
        # A row that has stopped keeps its stop token, and the state before it.
        carry = choose_rows(stopped, state.carry, carry)
        token = jnp.where(stopped, state.token, token)
        if logprob is not None:
            logprob = jnp.where(stopped, 0, logprob)
        stopped |= jnp.isin(token, inputs.stop)
    return _State(carry, token, key, counts, stopped), _Sampled(token, logprob)


def _process(
    processors: tuple[Processor, ...], logits: Float[Array, "B V"], counts: Tree
) -> Float[Array, "B V"]:
    """Apply the processors in turn. Raises UserError where one does not return logits."""
    processed = logits
    for process in processors:
        processed = process(processed, counts)
        is_float = jnp.issubdtype(getattr(processed, "dtype", bool), jnp.floating)
        if not is_float or processed.shape != logits.shape:
            raise UserError(
                f"a processor returned {shown(processed)}; it must return floating-point "
                f"logits (B, V), {logits.shape}."
            )
    return processed


def _choose(
    key: PRNGKeyArray | Key[Array, "B"],
    logits: Float[Array, "B V"],
    options: _Options,
    inputs: _Inputs,
) -> Int[Array, "B"]:
    """Return the likeliest token of each row, or one that is drawn."""
    if options.is_greedy:
        return _unless_nan(logits.max(axis=-1), jnp.argmax(logits, axis=-1))
    return draw(key, filter_logits(logits, inputs.temperature, options.top_k, inputs.top_p))


def _generate_up_to(
    most: int,
    num_tokens: int | Int[Array, ""],
    next_token: _NextToken,
    state: _State,
    has_stop: bool,
) -> tuple[_State, _Sampled]:
    """Return the state after `num_tokens` tokens, and room for `most` that begins with them."""

    def is_unfinished(loop: _Loop) -> bool | Array:
        unfinished = loop.num_written < num_tokens
        if has_stop:
            unfinished &= ~loop.state.stopped.all()
        return unfinished

    def write_next(loop: _Loop) -> _Loop:
        state, sampled = next_token(loop.state)
        write = partial(jax.lax.dynamic_update_index_in_dim, index=loop.num_written, axis=0)
        return _Loop(loop.num_written + 1, state, jax.tree.map(write, loop.sampled, sampled))

    _, shapes = jax.eval_shape(next_token, state)
    empty = jax.tree.map(lambda entry: jnp.zeros((most, *entry.shape), entry.dtype), shapes)
    loop = jax.lax.while_loop(is_unfinished, write_next, _Loop(0, state, empty))
    if has_stop:
        loop = _repeat_stop_tokens(loop, num_tokens)
    return loop.state, loop.sampled


def _repeat_stop_tokens(loop: _Loop, num_tokens: int | Int[Array, ""]) -> _Loop:
    """Return a loop that ended once all rows had stopped, as if all its steps had been computed."""
    sampled = loop.sampled
    is_later = jnp.arange(len(sampled.token))[:, None] >= loop.num_written
    token = jnp.where(is_later, loop.state.token, sampled.token)
    next_key = lambda _, key: _split(key)[0]
    key = jax.lax.fori_loop(loop.num_written, num_tokens, next_key, loop.state.key)
    return _Loop(num_tokens, loop.state._replace(key=key), sampled._replace(token=token))


def _per_row(key: Any) -> bool:
    """Return whether there is a key per row. Raw keys, which are numbers, are one."""
    return jnp.issubdtype(getattr(key, "dtype", bool), jax.dtypes.prng_key) and key.ndim > 0


def _split(key: PRNGKeyArray | Key[Array, "B"]) -> tuple[Array, Array]:
    """Return the next key and one to draw with or, if there is a key per row, those of each row."""
    if _per_row(key):
        return jax.vmap(lambda key: tuple(jax.random.split(key)))(key)
    next_key, subkey = jax.random.split(key)
    return next_key, subkey


def filter_logits(
    logits: Float[Array, "B V"],
    temperature: Scalar,
    top_k: int | None = None,
    top_p: Scalar | None = None,
) -> Float[Array, "B V"]:
    """Return the logits of the distribution to sample from: −∞ for excluded tokens.

    The order is temperature, top_k, and top_p among the tokens that top_k kept. Tokens that tie
    with the last token kept are kept, too, and top_p always keeps the most likely token. A
    temperature of 0 means the limit: only the most likely tokens have a probability. A negative
    temperature gives NaN.

    The logits returned have at least 32 bits.
    """
    logits = at_least_float32(logits)
    tiny = float(jnp.finfo(logits.dtype).tiny)
    # Divided by almost zero, several logits would become ∞. With the largest subtracted, it is 0
    # and the others −∞. Divided by √tiny, 1e-19 in float32, they stay finite. Hardware may
    # treat a temperature below `tiny` as 0.
    top = logits.max(axis=-1, keepdims=True)
    logits = logits - jnp.where(temperature < tiny**0.5, top, 0)
    logits = logits / jnp.where(temperature < 0, jnp.nan, jnp.maximum(temperature, tiny))
    if top_k is not None:
        threshold = kth_largest(jax.lax.stop_gradient(logits), top_k)
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    if top_p is not None:
        descending = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(descending, axis=-1)
        likelier = jnp.cumsum(probabilities, axis=-1) - probabilities
        # The running sum can round to 1 before the last token, but top_p = 1 excludes no token.
        in_nucleus = (likelier < jnp.maximum(top_p, tiny)) | (top_p >= 1)
        threshold = jnp.min(jnp.where(in_nucleus, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    return logits


def draw(key: PRNGKeyArray | Key[Array, "B"], logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """Draw a token per row from softmax(logits): the first whose cumulative probability exceeds u.

    u is uniform in [0, 1), one number per row, from the one key or from each row's. Gumbel noise
    (`jax.random.categorical`) takes one, and two logarithms, per token of the vocabulary. u has 23
    bits: any token likelier than 2⁻²³ can be drawn, and a token of probability 0 never is. A row
    with a NaN, or of −∞ alone, gives -1. Gradients stop here.
    """
    logits = jax.lax.stop_gradient(at_least_float32(logits))
    top = logits.max(axis=-1, keepdims=True)
    # XLA may have rounded the largest logit but not the others, so a difference can be above 0;
    # at a temperature of 1e-30 it reaches 1e22 in either direction.
    p = jnp.where(logits == top, 1, jnp.exp(jnp.minimum(logits - top, 0)))
    cumulative = jnp.cumsum(p, axis=-1)
    total = cumulative[:, -1:]
    if _per_row(key):
        u = jax.vmap(lambda key: jax.random.uniform(key, (1,), total.dtype))(key)
    else:
        u = jax.random.uniform(key, total.shape, total.dtype)
    u *= total
    # u can round up to the total, but the last token with a probability is the first to reach it.
    token = jnp.sum(cumulative <= jnp.minimum(u, jnp.nextafter(total, 0)), axis=-1)
    return _unless_nan(top[:, 0], token)


def _unless_nan(top: Float[Array, "B"], token: Int[Array, "B"]) -> Int[Array, "B"]:
    """Return the token, or -1 if the largest logit is −∞ or any logit is NaN."""
    return jnp.where(top > -jnp.inf, token, -1)


def kth_largest(x: Float[Array, "B V"], k: int) -> Float[Array, "B 1"]:
    """Return the k-th largest of each row, counting repeats: `jax.lax.top_k(x, k)[0][:, -1:]`."""
    return jax.lax.platform_dependent(
        x,
        cpu=lambda x: _kth_largest_by_bisection(x, k),
        default=lambda x: jax.lax.top_k(x, k)[0][:, -1:],
    )


def _kth_largest_by_bisection(x: Float[Array, "B V"], k: int) -> Float[Array, "B 1"]:
    """Find, bit by bit, the largest number that at least k entries of the row reach.

    On a CPU this is 5 times faster than XLA's top_k, which sorts. Floating-point numbers have the
    order of their bits as integers, once negative numbers have all bits inverted and the others
    the sign bit.
    """
    width = jnp.finfo(x.dtype).bits
    unsigned = jnp.dtype(f"uint{width}")
    bits = jax.lax.bitcast_convert_type(x, unsigned)
    sign = jnp.asarray(1 << (width - 1), unsigned)
    ordered = jnp.where(bits & sign, ~bits, bits | sign)

    def next_bit(i: Array, largest: Array) -> Array:
        candidate = largest | (sign >> jnp.asarray(i, unsigned))
        num_reaching = jnp.sum(ordered >= candidate, axis=-1, keepdims=True)
        return jnp.where(num_reaching >= k, candidate, largest)

    largest = jax.lax.fori_loop(0, width, next_bit, jnp.zeros((len(x), 1), unsigned))
    bits = jnp.where(largest & sign, largest ^ sign, ~largest)
    return jax.lax.bitcast_convert_type(bits, x.dtype)
