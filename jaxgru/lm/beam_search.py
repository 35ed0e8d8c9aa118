"""The likeliest texts, by beam search (Sutskever et al. 2014, arXiv 1409.3215, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxgru.cells.carry import AnyArray, Tree
from jaxgru.cells.layout import IN_ROWS
from jaxgru.cells.promotion import at_least_float32
from jaxgru.errors import check_whole
from jaxgru.layers.validate import as_carry, carry_like
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
      carry: the state before the prompt; None: zeros.
      stop: tokens at which a text ends. It then keeps its score and its state, and repeats its stop
        token.

    Returns:
      The tokens of each row's K beams, the likeliest first; their scores in nats, −∞ for beams
      beyond the number of texts that there are, NaN after a NaN in the logits; and the carry of
      B · K rows after every token but the last. This carry and `tokens.reshape(B * K, -1)[:, -1:]`
      continue every beam in `generate`.

    Raises UserError or ValueError as `generate` does.
    """
    params, V = on_device(params), len(params.embedding)
    prompt = as_prompt(prompt, V)
    sizes = check_whole("num_tokens", num_tokens), check_whole("num_beams", num_beams)
    if carry is not None:
        carry = as_carry(carry, carry_like(params.layers, prompt.shape[0]))
    if stop is not None:
        stop = as_stop(stop, V)
    return _search(*sizes, params, prompt, carry, stop)


class _Beams(NamedTuple):
    """Rows are those of the batch, each with its K beams."""

    carry: ModelCarry
    token: Int[Array, "BK"]
    score: Float[Array, "B K"]
    stopped: Bool[Array, "BK"]


@partial(jax.jit, static_argnums=(0, 1))
def _search(
    num_tokens: int, K: int, params: Params, prompt: Integer[Array, "B P"],
    carry: ModelCarry | None, stop: Integer[Array, "S"] | None,
) -> tuple[Int[Array, "B K N"], Float[Array, "B K"], Tree]:  # fmt: skip
    B, P = prompt.shape
    V = len(params.embedding)
    step = stepper(params)
    carry = initial_carry(params, B) if carry is None else carry
    if P > 1:
        _, carry = apply(params, prompt[:, :-1], carry)
    each_beam = lambda leaf: jnp.repeat(leaf, K, axis=0)

    def next_token(beams: _Beams, _: None) -> tuple[_Beams, tuple[Array, Array]]:
        logits, after = step(beams.token, beams.carry)
        logp = jax.nn.log_softmax(at_least_float32(logits))
        if stop is not None:
            again = jax.nn.one_hot(beams.token, V, dtype=bool)
            repeated = jnp.where(again, 0, -jnp.inf).astype(logp.dtype)
            logp = jnp.where(beams.stopped[:, None], repeated, logp)
            after = IN_ROWS.choose(beams.stopped, beams.carry, after)
        totals = beams.score[:, :, None] + logp.reshape(B, K, V)
        score, best = jax.lax.top_k(totals.reshape(B, K * V), K)
        parent, token = jnp.divmod(best, V)
        rows = (K * jnp.arange(B, dtype=parent.dtype)[:, None] + parent).ravel()
        stopped = beams.stopped[rows]
        if stop is not None:
            stopped |= jnp.isin(token.ravel(), stop.astype(token.dtype))
        after = jax.tree.map(lambda leaf: leaf[rows], after)
        return _Beams(after, token.ravel(), score, stopped), (parent, token)

    alone = jnp.where(jnp.arange(K) == 0, 0.0, -jnp.inf)  # the K copies of a prompt are one text
    score = jnp.broadcast_to(alone.astype(at_least_float32(params.head.bo).dtype), (B, K))
    last = each_beam(prompt[:, -1].astype(jnp.int32))
    beams = _Beams(jax.tree.map(each_beam, carry), last, score, last != last)
    beams, steps = jax.lax.scan(next_token, beams, length=num_tokens)

    def back(beam: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        parent, token = (jnp.take_along_axis(choice, beam, axis=1) for choice in step)
        return parent, token

    ends = jnp.broadcast_to(jnp.arange(K, dtype=steps[0].dtype), (B, K))
    _, tokens = jax.lax.scan(back, ends, steps, reverse=True)
    return jnp.moveaxis(tokens, 0, -1), beams.score, beams.carry
