"""The likeliest texts, by beam search (Sutskever et al. 2014, arXiv 1409.3215, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxgru.arrays import AnyArray, Tree, at_least_float32, choose_rows
from jaxgru.errors import check_whole
from jaxgru.layers import check_carry
from jaxgru.lm.model import ModelCarry, Params, apply, initial_carry, on_device, stepper
from jaxgru.lm.sampling import as_prompt, as_stop


def beam_search(
    params: Params,
    prompt: Integer[AnyArray, "B P"],
    num_tokens: SupportsIndex,
    num_beams: SupportsIndex,
    carry: ModelCarry | None = None,
    *,
    stop: Sequence[SupportsIndex] | Integer[AnyArray, "S"] | None = None,
) -> tuple[Int[Array, "B K N"], Float[Array, "B K"], Any]:
    """Read the prompt, starting in `carry`; then keep the K likeliest texts, token by token.

    A text's score is the sum of log p of its tokens; nothing corrects it for its length. One beam
    gives the tokens of `generate` at temperature 0. V^(N − 1) beams, one for every text of N − 1
    tokens, make the search exact. It is compiled once per shape, num_tokens and num_beams.

    Args:
      prompt: at least one token per row.
      num_tokens: N, the tokens to add.
      num_beams: K.
      carry: the state before the prompt; None: `initial_carry`.
      stop: tokens at which a text ends. It then keeps its score and its state, and repeats its stop
        token.

    Returns:
      The tokens of each row's K beams, the likeliest first; their scores in nats, −∞ for beams
      beyond the number of texts that there are, NaN after a NaN in the logits; and the carry of
      B · K rows after every token but the last. This carry and `tokens.reshape(B * K, -1)[:, -1:]`
      continue every beam in `generate`.

    Raises:
      UserError: as `generate`.
      ValueError: as `generate`.
    """
    params = on_device(params)
    vocab_size = len(params.embedding)
    prompt = as_prompt(prompt, vocab_size)
    num_tokens = check_whole("num_tokens", num_tokens)
    num_beams = check_whole("num_beams", num_beams)
    if carry is not None:
        carry = check_carry(params.layers, carry, prompt.shape[0])
    if stop is not None:
        stop = as_stop(stop, vocab_size)
    return _search(num_tokens, num_beams, params, prompt, carry, stop)


class _Beams(NamedTuple):
    """Rows are those of the batch, each with its K beams."""

    carry: ModelCarry
    token: Int[Array, "BK"]
    score: Float[Array, "B K"]
    stopped: Bool[Array, "BK"]


class _Choice(NamedTuple):
    """The beams that a step keeps: which beam each one continues, and with which token."""

    parent: Int[Array, "B K"]
    token: Int[Array, "B K"]


_Step: TypeAlias = Callable[[Array, ModelCarry], tuple[Array, ModelCarry]]


@partial(jax.jit, static_argnums=(0, 1))
def _search(
    num_tokens: int,
    K: int,
    params: Params,
    prompt: Integer[Array, "B P"],
    carry: ModelCarry | None,
    stop: Integer[Array, "S"] | None,
) -> tuple[Int[Array, "B K N"], Float[Array, "B K"], Tree]:
    B, P = prompt.shape
    if carry is None:
        carry = initial_carry(params, B)
    if P > 1:
        _, carry = apply(params, prompt[:, :-1], carry)
    beams = _first_beams(K, params, prompt, carry)
    next_beams = partial(_next_beams, stepper(params), stop)
    beams, choices = jax.lax.scan(next_beams, beams, length=num_tokens)
    return _tokens_of_beams(choices), beams.score, beams.carry


def _first_beams(
    K: int, params: Params, prompt: Integer[Array, "B P"], carry: ModelCarry
) -> _Beams:
    """Return K copies of each prompt, of which only the first one counts: they are one text."""
    each_beam = lambda leaf: jnp.repeat(leaf, K, axis=0)
    token = each_beam(prompt[:, -1].astype(jnp.int32))
    score = jnp.where(jnp.arange(K) == 0, 0.0, -jnp.inf)
    score = score.astype(at_least_float32(params.head.bo).dtype)
    return _Beams(
        carry=jax.tree.map(each_beam, carry),
        token=token,
        score=jnp.broadcast_to(score, (len(prompt), K)),
        stopped=token != token,
    )


def _next_beams(
    step: _Step, stop: Integer[Array, "S"] | None, beams: _Beams, _: None
) -> tuple[_Beams, _Choice]:
    """Continue every beam with every token, and keep the K likeliest of each row."""
    B, K = beams.score.shape
    logits, carry = step(beams.token, beams.carry)
    V = logits.shape[1]
    logp = jax.nn.log_softmax(at_least_float32(logits))
    if stop is not None:
        logp = _repeat_when_stopped(beams, logp)
        carry = choose_rows(beams.stopped, beams.carry, carry)
    totals = beams.score[:, :, None] + logp.reshape(B, K, V)
    score, best = jax.lax.top_k(totals.reshape(B, K * V), K)
    parent, token = jnp.divmod(best, V)

    rows = (K * jnp.arange(B, dtype=parent.dtype)[:, None] + parent).ravel()
    stopped = beams.stopped[rows]
    if stop is not None:
        stopped |= jnp.isin(token.ravel(), stop.astype(token.dtype))
    carry = jax.tree.map(lambda leaf: leaf[rows], carry)
    return _Beams(carry, token.ravel(), score, stopped), _Choice(parent, token)


def _repeat_when_stopped(beams: _Beams, logp: Float[Array, "BK V"]) -> Float[Array, "BK V"]:
    """Return log p = 0 for the token of a beam that has stopped, and −∞ for its other tokens."""
    is_repeated = jax.nn.one_hot(beams.token, logp.shape[1], dtype=bool)
    repeated = jnp.where(is_repeated, 0, -jnp.inf).astype(logp.dtype)
    return jnp.where(beams.stopped[:, None], repeated, logp)


def _tokens_of_beams(choices: _Choice) -> Int[Array, "B K N"]:
    """Return the tokens of the beams after the last step, followed back from there."""

    def back(beam: Array, choice: _Choice) -> tuple[Array, Array]:
        parent = jnp.take_along_axis(choice.parent, beam, axis=1)
        token = jnp.take_along_axis(choice.token, beam, axis=1)
        return parent, token

    _, B, K = choices.parent.shape
    last = jnp.broadcast_to(jnp.arange(K, dtype=choices.parent.dtype), (B, K))
    _, tokens = jax.lax.scan(back, last, choices, reverse=True)
    return jnp.moveaxis(tokens, 0, -1)
