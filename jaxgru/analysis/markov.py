"""The exact analysis of the stateless model, which is a first-order Markov chain.

If the carry is reset to zero before each token, the next token depends only on the last one, so
one V×V matrix P, P[v, w] = p(next = w | last = v), describes all stateless text. It is the chain of
`generate(stateful=False)` at temperature 1 without top_k and top_p.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Real

from jaxgru.errors import UserError
from jaxgru.lm.model import Params, initial_carry, step


class NotUnique(UserError):
    """A Markov chain has several stationary distributions, or as good as several."""


def transition_matrix(params: Params) -> Float[np.ndarray, "V V"]:
    """Return P; row v has the probabilities of the token after v, from a state of zeros.

    The logits have the parameters' precision. The softmax is float64, so the rows sum to 1.
    """
    logits = np.asarray(_stateless_logits(params), np.float64)
    P = np.exp(logits - logits.max(axis=1, keepdims=True))
    return P / P.sum(axis=1, keepdims=True)


def stationary_distribution(P: Real[np.ndarray, "V V"]) -> Float[np.ndarray, "V"]:
    """Return the distribution π with πP = π: how often each token occurs in infinite text.

    It is unique if there is only one set of tokens that lead to each other and to no others; all
    tokens outside the set have π[v] = 0. The entries of a softmax are all positive, so its chain
    also forgets its first token (Perron and Frobenius); but those of a model that is very sure of
    itself are rounded to 0.

    It is computed in O(V³) by the elimination of Grassmann, Taksar & Heyman (1985, Operations
    Research 33(5), 1107–1116). That adds, multiplies and divides positive numbers but never
    subtracts, so nearly all digits of each π[v] are right, even if π[v] is tiny or the chain rarely
    leaves a set of tokens.

    Raises:
      NotUnique: there are several such sets, or sets that are left so rarely that float64
        overflows.
      UserError: P is not a transition matrix.
    """
    _check_transitions(P)
    A = np.array(P, np.float64)
    first, *more = _closed_sets(A)
    pi = np.zeros(len(A))
    with np.errstate(over="ignore", invalid="ignore"):
        pi[first] = _stationary(A[np.ix_(first, first)])
    if more or not np.isfinite(pi).all():
        raise NotUnique(
            f"the chain never leaves {1 + len(more)} sets of tokens, or hardly ever leaves some, "
            "so its stationary distribution is not unique or cannot be computed."
        )
    return pi


def _closed_sets(P: Float[np.ndarray, "V V"]) -> list[Int[np.ndarray, "n"]]:
    """Return the sets of tokens that lead to each other and to no others."""
    from scipy.sparse import coo_array  # JAX needs SciPy, too
    from scipy.sparse.csgraph import connected_components

    if P.all():
        return [np.arange(len(P))]
    pairs = coo_array(P > 0)
    num_sets, set_of = connected_components(pairs, connection="strong")
    source, target = set_of[pairs.row], set_of[pairs.col]
    left = source[source != target]
    return [np.flatnonzero(set_of == i) for i in np.setdiff1d(np.arange(num_sets), left)]


def _stationary(A: Float[np.ndarray, "V V"]) -> Float[np.ndarray, "V"]:
    """Return the stationary distribution of a chain whose tokens all lead to each other."""
    V = len(A)
    for v in range(V - 1, 0, -1):  # leaves the chain observed on tokens 0 … v − 1
        leaving = A[v, :v].sum()
        A[:v, v] /= leaving
        A[:v, :v] += np.outer(A[:v, v], A[v, :v])
    pi = np.ones(V)
    for v in range(1, V):
        pi[v] = pi[:v] @ A[:v, v]
    return pi / pi.sum()


def bigram_divergence(P: Float[np.ndarray, "V V"], pairs: Float[np.ndarray, "V V"]) -> float:
    """Return how many nats per token the chain loses to the bigram counts on their own text.

    That is Σ_v p(v) · KL(p(w | v) ‖ P[v]), with 0 · log 0 = 0: the chain's cross-entropy there
    minus the bigram's entropy. It is infinite if P excludes a pair that was counted.

    Args:
      P: the chain, as returned by `transition_matrix`.
      pairs: p(v, w), as returned by `ngrams.pair_frequencies`.
    """
    seen = pairs != 0
    contexts = np.broadcast_to(pairs.sum(axis=1, keepdims=True), pairs.shape)
    with np.errstate(divide="ignore"):  # the chain's log 0 is −∞, as intended
        return float(pairs[seen] @ (np.log(pairs[seen] / contexts[seen]) - np.log(P[seen])))


def greedy_cycles(P: Real[np.ndarray, "V V"]) -> list[tuple[tuple[int, ...], int]]:
    """Return the cycles of v → argmax P[v], by decreasing basin, then by smallest token.

    Each is the tokens of one period, beginning with the smallest, and its basin: how many of the V
    tokens lead into it, including its own.

    All greedy stateless text enters one of them after fewer than V tokens. In a tie the first token
    is chosen, as in greedy `generate`.

    Raises:
      UserError: P is not a transition matrix.
    """
    _check_transitions(P)
    successor = np.asarray(P).argmax(axis=1)
    end = np.arange(len(successor))
    for _ in range(len(successor)):
        end = successor[end]  # after V steps every token has reached its cycle
    cycles, found = [], set()
    for v in np.unique(end).tolist():  # exactly the tokens of the cycles
        if v not in found:
            tokens = [v]
            while (v := int(successor[v])) != tokens[0]:
                tokens.append(v)
            found.update(tokens)
            cycles.append((tuple(tokens), int(np.isin(end, tokens).sum())))
    return sorted(cycles, key=lambda cycle: -cycle[1])


@jax.jit
def _stateless_logits(params: Params) -> Float[Array, "V V"]:
    V = params.embedding.shape[0]
    logits, _ = step(params, jnp.arange(V), initial_carry(params, V))
    return logits


def _check_transitions(P: Real[np.ndarray, "V V"]) -> None:
    P = np.asarray(P)
    is_square = P.ndim == 2 and P.shape[0] == P.shape[1] > 0
    if not (is_square and P.min() >= 0 and np.abs(P.sum(axis=1) - 1).max() < 1e-9):
        raise UserError(
            f"the transition matrix is {P.dtype} {P.shape}; it must be (V, V), with entries of at "
            "least 0 and rows that sum to 1."
        )
