"""Choosing the next token, and generating with an explicit state.

Stateless generation is the same program with the carry put back to its start before each token,
and nothing else: the published bug as an option, for comparison only.
"""

from __future__ import annotations

import operator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxgru.errors import UserError
from jaxgru.model import ModelCarry, Params, apply, check_carry, initial_carry, stepper


def generate(
    params: Params,
    key: PRNGKeyArray,
    prompt: Int[Array, "B P"],
    num_tokens: int,
    carry: ModelCarry | None = None,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stateful: bool = True,
) -> tuple[Int[Array, "B N"], ModelCarry, PRNGKeyArray]:
    """Read the whole prompt from `carry`, then sample `num_tokens` tokens for each row.

    Compiled once for each shape of prompt, num_tokens, top_k, and which of the options are set.

    Args:
      prompt: at least one token a row, of any integer dtype.
      carry: the state before the prompt; None: zeros.
      temperature: logits are divided by it; 0 takes the most likely token, the first of equals. A
        traced 0 draws from the equals, as the smallest temperatures do.
      top_k: only the k most likely tokens; None: all.
      top_p: only the likeliest tokens that together reach this probability (nucleus sampling,
        Holtzman et al. 2019, arXiv 1904.09751), after temperature and top_k; None: all.
      stateful: False puts the carry back to zeros before every token, the prompt's included.

    Returns:
      The tokens, int32 (int64 where the prompt has 64 bits); the carry, which has seen everything
      but the last of them; and the key. `tokens[:, -1:]`, the carry and the key, passed to another
      call, continue the text exactly: 50 and 50 more are 100.

      Where the logits are NaN, the token is -1, and so is every later one of that row. The cause is
      NaN in the parameters or the carry, or a traced token or temperature that is out of range.

      Under `grad` the tokens are constants: the gradient of the carry is that of reading them.

    Raises:
      UserError: the prompt is empty or misshapen, its dtype is no integer, or a token is outside
        the vocabulary; num_tokens is below 1, the temperature is negative, top_k is outside [1, V],
        or top_p outside (0, 1]. Of traced values only the shape and the dtype are checked.
      ValueError: the carry is not of this model and batch.
    """
    num_tokens, top_k = operator.index(num_tokens), top_k and operator.index(top_k)
    V = params.head.bo.shape[0]
    _check_prompt(prompt, V)
    if num_tokens < 1:
        raise UserError(f"num_tokens is {num_tokens}; it must be at least 1.")
    check_sampling(V, temperature, top_k, top_p)
    traced = isinstance(temperature, jax.core.Tracer)
    greedy = not traced and bool(temperature == 0)
    near_zero = traced or bool(temperature < _near_zero(params.head.bo))
    return _generate(
        params, key, prompt, num_tokens, carry, temperature, top_k, top_p,
        greedy, near_zero, bool(stateful),
    )  # fmt: skip


def _check_prompt(prompt: Int[Array, "B P"], vocab_size: int) -> None:
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise UserError(f"the prompt must be (B, P) with P at least 1; this is {prompt.shape}.")
    if not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise UserError(f"the prompt's dtype is {prompt.dtype}; it must be an integer dtype.")
    if isinstance(prompt, jax.core.Tracer) or not getattr(prompt, "is_fully_addressable", True):
        return
    tokens = np.asarray(prompt)
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if outside.size:
        raise UserError(
            f"the prompt has a token {outside[0]}; the vocabulary's are 0 to {vocab_size - 1}."
        )


def check_sampling(
    vocab_size: int, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    """Raises UserError where an option of `generate` is out of range; traced values pass."""
    if not isinstance(temperature, jax.core.Tracer) and not 0 <= temperature < float("inf"):
        raise UserError(f"temperature is {temperature}; it must be at least 0 and finite.")
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise UserError(
            f"top_k is {top_k}; it must be at least 1 and at most the vocabulary's {vocab_size}."
        )
    if top_p is not None and not isinstance(top_p, jax.core.Tracer) and not 0 < top_p <= 1:
        raise UserError(f"top_p is {top_p}; it must be above 0 and at most 1.")


def _near_zero(logits: Array) -> float:
    """The temperature by which logits of this dtype can be divided without overflow: 1e-19."""
    return float(jnp.finfo(logits.dtype).tiny) ** 0.5


@partial(jax.jit, static_argnames=("num_tokens", "top_k", "greedy", "near_zero", "stateful"))
def _generate(
    params, key, prompt, num_tokens, carry, temperature, top_k, top_p, greedy, near_zero, stateful
):
    prompt = prompt.astype(jnp.int64 if prompt.dtype.itemsize == 8 else jnp.int32)
    start = initial_carry(params, prompt.shape[0])
    if carry is None:
        carry = start
    check_carry(params, carry, prompt.shape[0])
    if stateful and prompt.shape[1] > 1:
        _, carry = apply(params, prompt[:, :-1], carry)

    step = stepper(params)

    def next_token(state, _):
        carry, token, key = state
        logits, carry = step(token, carry if stateful else start)
        key, subkey = jax.random.split(key)
        if greedy:
            token = _unless_nan(logits.max(axis=-1), jnp.argmax(logits, axis=-1))
        else:
            token = draw(subkey, filter_logits(logits, temperature, top_k, top_p, near_zero))
        token = token.astype(prompt.dtype)
        return (carry, token, key), token

    state = (carry, prompt[:, -1], key)
    (carry, _, key), tokens = jax.lax.scan(next_token, state, length=num_tokens)
    return tokens.T, carry, key


def filter_logits(
    logits: Float[Array, "B V"],
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    near_zero: bool = True,
) -> Float[Array, "B V"]:
    """The logits of the distribution that is sampled: −∞ for tokens left out.

    In this order: temperature, top_k, top_p of what top_k left. Tokens as likely as the last one
    kept are kept too; with any top_p at least the likeliest token is. A temperature of 0 is the
    limit: only the likeliest tokens have any probability. A negative one gives NaN.

    near_zero False says that the temperature is an ordinary one, and saves a little time.
    """
    tiny = float(jnp.finfo(logits.dtype).tiny)
    if near_zero:
        # Divided by next to nothing, several logits would be ∞; less the largest, all but it are
        # −∞. Below `tiny`, a temperature may be 0 to the hardware.
        top = logits.max(axis=-1, keepdims=True)
        logits = logits - jnp.where(temperature < _near_zero(logits), top, 0)
        temperature = jnp.where(temperature < 0, jnp.nan, jnp.maximum(temperature, tiny))
    logits = logits / temperature
    if top_k is not None:
        least = kth_largest(jax.lax.stop_gradient(logits), top_k)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if top_p is not None:
        descending = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # the running sum can round to 1 before the last token, and top_p = 1 leaves none out
        kept = (before < jnp.maximum(top_p, tiny)) | (top_p >= 1)
        least = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


def draw(key: PRNGKeyArray, logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """One token a row from softmax(logits): the first whose cumulative probability exceeds u.

    One uniform number a row, where Gumbel noise (`jax.random.categorical`) takes one, and two
    logarithms, for every token of the vocabulary. u has 23 bits: what is likelier than 2⁻²³ can be
    drawn, and what has no probability never is. -1 where a row has a NaN. Gradients end here.
    """
    logits = jax.lax.stop_gradient(logits)
    top = logits.max(axis=-1, keepdims=True)
    # A logit that XLA has not rounded yet, less the largest that it has, need not be 0 or below:
    # at a temperature of 1e-30 it is 1e22 either way
    p = jnp.where(logits == top, 1, jnp.exp(jnp.minimum(logits - top, 0)))
    cumulative = jnp.cumsum(p, axis=-1)
    total = cumulative[:, -1:]
    u = jax.random.uniform(key, total.shape, total.dtype) * total
    # u can round up to the total; the last token that adds to it is where the total is reached
    token = jnp.sum(cumulative <= jnp.minimum(u, jnp.nextafter(total, 0)), axis=-1)
    return _unless_nan(top[:, 0], token)


def _unless_nan(top: Float[Array, "B"], token: Int[Array, "B"]) -> Int[Array, "B"]:
    """The token; -1 where the largest logit is NaN, as it is where any is, or −∞."""
    return jnp.where(top > -jnp.inf, token, -1)


def kth_largest(x: Float[Array, "B V"], k: int) -> Float[Array, "B 1"]:
    """The k-th largest of each row, equal ones counted apart: `jax.lax.top_k(x, k)[0][:, -1:]`."""
    return jax.lax.platform_dependent(
        x,
        cpu=lambda x: _kth_largest_by_bisection(x, k),
        default=lambda x: jax.lax.top_k(x, k)[0][:, -1:],
    )


def _kth_largest_by_bisection(x: Float[Array, "B V"], k: int) -> Float[Array, "B 1"]:
    """Bit by bit, the largest number that k entries reach. On a CPU, XLA sorts: 5 times slower.

    The bits of floating-point numbers are ordered as the numbers are, once those of negative ones
    are turned over and the sign bit means positive.
    """
    width = jnp.finfo(x.dtype).bits
    unsigned = jnp.dtype(f"uint{width}")
    bits = jax.lax.bitcast_convert_type(x, unsigned)
    sign = jnp.asarray(1 << (width - 1), unsigned)
    ordered = jnp.where(bits & sign, ~bits, bits | sign)

    def next_bit(i: Array, found: Array) -> Array:
        candidate = found | (sign >> i.astype(unsigned))
        reached = jnp.sum(ordered >= candidate, axis=-1, keepdims=True) >= k
        return jnp.where(reached, candidate, found)

    found = jax.lax.fori_loop(0, width, next_bit, jnp.zeros((len(x), 1), unsigned))
    return jax.lax.bitcast_convert_type(jnp.where(found & sign, found ^ sign, ~found), x.dtype)
