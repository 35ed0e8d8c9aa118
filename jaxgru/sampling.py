"""Choosing the next token, and generating with an explicit state.

Stateless generation is the same program with the carry put back to its start before each token,
and nothing else: the published bug as an option, for comparison only.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxgru.errors import UserError
from jaxgru.model import ModelCarry, Params, apply, initial_carry, step


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
    """Reads the whole prompt from `carry`, then samples `num_tokens` tokens for each row.

    Compiled once for each shape of prompt, num_tokens, top_k, and which of the options are set.

    Args:
      prompt: at least one token a row.
      carry: the state before the prompt; None: zeros.
      temperature: logits are divided by it; 0 takes the most likely token.
      top_k: only the k most likely tokens; None: all.
      top_p: only the likeliest tokens that together reach this probability (nucleus sampling,
        Holtzman et al. 2019, arXiv 1904.09751), after temperature and top_k; None: all.
      stateful: False puts the carry back to zeros before every token, the prompt's included.

    Returns:
      The tokens; the carry, which has seen everything but the last of them; and the key. Handing in
      `tokens[:, -1:]`, the carry and the key goes on exactly: 50 and 50 more are 100.

    Raises:
      UserError: an empty or misshapen prompt, num_tokens below 1, a negative temperature, top_k
        outside [1, V], top_p outside (0, 1].
    """
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise UserError(f"the prompt must be (B, P) with P at least 1; this is {prompt.shape}.")
    if num_tokens < 1:
        raise UserError(f"num_tokens is {num_tokens}; it must be at least 1.")
    check_sampling(params.head.bo.shape[0], temperature, top_k, top_p)
    greedy = not isinstance(temperature, jax.core.Tracer) and temperature == 0
    return _generate(
        params, key, prompt, num_tokens, carry, temperature, top_k, top_p, greedy, stateful
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


@partial(jax.jit, static_argnames=("num_tokens", "top_k", "greedy", "stateful"))
def _generate(params, key, prompt, num_tokens, carry, temperature, top_k, top_p, greedy, stateful):
    start = initial_carry(params, prompt.shape[0])
    if carry is None:
        carry = start
    if stateful and prompt.shape[1] > 1:
        _, carry = apply(params, prompt[:, :-1], carry)

    def next_token(state, _):
        carry, token, key = state
        logits, carry = step(params, token, carry if stateful else start)
        key, subkey = jax.random.split(key)
        if greedy:
            token = jnp.argmax(logits, axis=-1)
        else:
            logits = filter_logits(logits, temperature, top_k, top_p)
            token = jax.random.categorical(subkey, logits)
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
) -> Float[Array, "B V"]:
    """The logits of the distribution that is sampled: −∞ for tokens left out.

    In this order: temperature (above 0), top_k, top_p of what top_k left. Tokens as likely as the
    last one kept are kept too; with any top_p at least the likeliest token is.
    """
    logits = logits / temperature
    if top_k is not None:
        kth = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if top_p is not None:
        descending = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # the running sum can round to 1 before the last token, and top_p = 1 leaves none out
        kept = (before < top_p) | (top_p >= 1)
        least = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits
