"""The stateless model, exactly: with no state, a language model is a first-order Markov chain.

With the carry put back to zeros before each token, what comes next depends on the last token alone,
so everything that stateless text can be is in one V×V matrix P, P[v, w] = p(next = w | last = v).
It is the chain of `generate(stateful=False)` at temperature 1 with no top_k or top_p.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxgru.errors import UserError
from jaxgru.model import Params, initial_carry, step


def transition_matrix(params: Params) -> Float[np.ndarray, "V V"]:
    """Row v: the probabilities of the token after v, from a state of zeros.

    The logits have the parameters' precision; the softmax is float64, so the rows sum to 1.
    """
    logits = np.asarray(_stateless_logits(params), np.float64)
    P = np.exp(logits - logits.max(axis=1, keepdims=True))
    return P / P.sum(axis=1, keepdims=True)


def stationary_distribution(P: Float[np.ndarray, "V V"]) -> Float[np.ndarray, "V"]:
    """The one distribution π with πP = π: how often each token occurs in endless text.

    A chain in which every token can lead to every other has exactly one; a softmax's chain, all of
    whose entries are positive, also forgets its first token (Perron and Frobenius).

    By the elimination of Grassmann, Taksar & Heyman (1985, Operations Research 33(5), 1107–1116),
    which adds, multiplies and divides what is positive and never subtracts: each π[v] is right to
    nearly all its digits, however small it is and however seldom the chain leaves a set of tokens.
    O(V³).

    Raises:
      UserError: P is no matrix of transitions, or some tokens never lead to the others.
    """
    _check_transitions(P)
    A = np.array(P, np.float64)
    V = len(A)
    for v in range(V - 1, 0, -1):  # what is left is the chain watched only on tokens 0 … v − 1
        leaving = A[v, :v].sum()
        if leaving == 0:
            raise UserError(
                f"from token {v} the chain never comes to a token below {v}, so its text depends "
                "on its first token and has no one stationary distribution to compute."
            )
        A[:v, v] /= leaving
        A[:v, :v] += np.outer(A[:v, v], A[v, :v])
    pi = np.ones(V)
    for v in range(1, V):
        pi[v] = pi[:v] @ A[:v, v]
    return pi / pi.sum()


def bigram_divergence(
    P: Float[np.ndarray, "V V"], bigram: Float[np.ndarray, "V V"], weights: Float[np.ndarray, "V"]
) -> float:
    """Nats: Σ_v weights[v] · KL(bigram[v] ‖ P[v]), with 0 · log 0 = 0.

    The excess nats a token of the chain over the counted bigram, on the text that was counted: the
    chain's cross-entropy there less the bigram's own entropy. Infinite where P rules out what was
    counted.

    Args:
      P: the chain, as from `transition_matrix`.
      bigram: row v, the counted probabilities of the token after v; not looked at where weights[v]
        is 0, so the row of a token that was never a context may hold anything.
      weights: each token's share of the contexts; they sum to 1.

    Raises:
      UserError: the shapes do not agree, or the weights are no distribution.
    """
    P, bigram, weights = (np.asarray(x, np.float64) for x in (P, bigram, weights))
    if not P.shape == bigram.shape == 2 * weights.shape:
        raise UserError(
            f"the chain is {P.shape}, the bigram {bigram.shape} and the weights {weights.shape}; "
            "they must be (V, V), (V, V) and (V,)."
        )
    if not (weights.min() >= 0 and abs(weights.sum() - 1) < 1e-9):
        raise UserError(
            f"the weights sum to {weights.sum()} and the least is {weights.min()}; "
            "they must be shares, at least 0, that sum to 1."
        )
    seen = weights > 0
    P, bigram, weights = P[seen], bigram[seen], weights[seen]
    counted = bigram != 0
    terms = np.zeros_like(P)
    with np.errstate(divide="ignore"):  # log 0 of the chain is −∞, as it should be
        terms[counted] = bigram[counted] * (np.log(bigram[counted]) - np.log(P[counted]))
    return float(weights @ terms.sum(axis=1))


@dataclass(frozen=True)
class Cycle:
    """A loop of greedy stateless text.

    tokens: once round, from its smallest token on; its length is the period.
    basin: how many of the V tokens lead into it, its own included.
    """

    tokens: tuple[int, ...]
    basin: int


def greedy_cycles(P: Float[np.ndarray, "V V"]) -> list[Cycle]:
    """The cycles of v → argmax P[v], largest basin first, then by smallest token.

    All greedy stateless text is one of them, after fewer than V tokens. Of tokens equally likely
    the first is taken, as greedy `generate` does.

    Raises:
      UserError: P is no matrix of transitions.
    """
    _check_transitions(P)
    successor = np.asarray(P).argmax(axis=1)
    end = np.arange(len(successor))
    for _ in range(len(successor)):
        end = successor[end]  # after V steps every token has come into its cycle
    cycles: list[Cycle] = []
    found: set[int] = set()
    for v in np.unique(end).tolist():  # all tokens of all cycles: a cycle only turns its own round
        if v in found:
            continue
        tokens = [v]
        while (v := int(successor[v])) != tokens[0]:
            tokens.append(v)
        found.update(tokens)
        cycles.append(Cycle(tuple(tokens), int(np.isin(end, tokens).sum())))
    return sorted(cycles, key=lambda cycle: -cycle.basin)


@jax.jit
def _stateless_logits(params: Params) -> Float[Array, "V V"]:
    V = params.embedding.shape[0]
    logits, _ = step(params, jnp.arange(V), initial_carry(params, V))
    return logits


def _check_transitions(P: Float[np.ndarray, "V V"]) -> None:
    P = np.asarray(P)
    if P.ndim != 2 or P.shape[0] != P.shape[1] or len(P) < 1:
        raise UserError(f"a matrix of transitions must be (V, V) with V at least 1, not {P.shape}.")
    sums = P.sum(axis=1)
    worst = int(np.abs(sums - 1).argmax())  # a NaN counts as the largest
    if not (P.min() >= 0 and abs(sums[worst] - 1) < 1e-9):
        raise UserError(
            f"row {worst} of the matrix of transitions sums to {sums[worst]} and the least entry "
            f"is {P.min()}; rows must be at least 0 and sum to 1."
        )
