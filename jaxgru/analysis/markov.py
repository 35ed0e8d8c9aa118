"""The exact analysis of the stateless model, which is a first-order Markov chain.

If the carry is reset to zero before each token, the next token depends only on the last one, so
one V×V matrix P, P[v, w] = p(next = w | last = v), describes all stateless text. It is the chain of
`generate(stateful=False)` at temperature 1 without top_k and top_p.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Real

from jaxgru.lm import Params, initial_carry, step


class GreedyCycle(NamedTuple):
    """The tokens of one period, beginning with the smallest, and how many tokens lead into it."""

    tokens: tuple[int, ...]
    basin: int


def transition_matrix(params: Params) -> Float[np.ndarray, "V V"]:
    """Return P; row v has the probabilities of the token after v, from a state of zeros.

    The logits have the parameters' precision. The softmax is float64, so the rows sum to 1.
    """
    V = len(params.embedding)
    logits, _ = step(params, jnp.arange(V), initial_carry(params, V))
    logits = np.asarray(logits, np.float64)
    P = np.exp(logits - logits.max(axis=1, keepdims=True))
    return P / P.sum(axis=1, keepdims=True)


def bigram_divergence(P: Float[np.ndarray, "V V"], pairs: Float[np.ndarray, "V V"]) -> float:
    """Return how many nats per token the chain loses to the bigram counts on their own text.

    That is Σ_v p(v) · KL(p(w | v) ‖ P[v]), with 0 · log 0 = 0: the chain's cross-entropy there
    minus the bigram's entropy. It is infinite if P excludes a pair that was counted. `pairs`, the
    p(v, w), are those of `ngrams.pair_frequencies`.
    """
    occurs = pairs != 0
    p = pairs[occurs]
    contexts = np.broadcast_to(pairs.sum(axis=1, keepdims=True), pairs.shape)[occurs]
    with np.errstate(divide="ignore"):  # the chain's log 0 is −∞, as intended
        log_chain = np.log(P[occurs])
    return float(p @ (np.log(p / contexts) - log_chain))


def greedy_cycles(P: Real[np.ndarray, "V V"]) -> list[GreedyCycle]:
    """Return the cycles of v → argmax P[v], by decreasing basin, then by smallest token.

    A basin is the number of the V tokens that lead into a cycle, including its own.

    All greedy stateless text enters one of them after fewer than V tokens. In a tie the first token
    is chosen, as in greedy `generate`.
    """
    successor = P.argmax(axis=1)
    V = len(successor)
    # After V steps every token has reached its cycle, and all tokens of the cycles are reached.
    end = np.arange(V)
    for _ in range(V):
        end = successor[end]
    cycles = []
    visited: set[int] = set()
    for first in np.unique(end).tolist():
        if first in visited:
            continue
        tokens = _cycle_from(successor, first)
        visited.update(tokens)
        basin = int(np.isin(end, tokens).sum())
        cycles.append(GreedyCycle(tuple(tokens), basin))
    return sorted(cycles, key=lambda cycle: -cycle.basin)


def _cycle_from(successor: Int[np.ndarray, "V"], first: int) -> list[int]:
    """Return the tokens of a cycle, beginning with one of them."""
    tokens = [first]
    token = int(successor[first])
    while token != first:
        tokens.append(token)
        token = int(successor[token])
    return tokens
