"""The exact analysis of the stateless model, which is a first-order Markov chain.

If the carry is reset to zero before each token, the next token depends only on the last one, so
one V×V matrix P, P[v, w] = p(next = w | last = v), describes all stateless text. It is the chain of
`generate(stateful=False)` at temperature 1 without top_k and top_p.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Real

from jaxgru.lm.model import Params, initial_carry, step


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
    """
    successor = P.argmax(axis=1)
    end = np.arange(len(successor))
    for _ in range(len(successor)):
        end = successor[end]  # after V steps every token has reached its cycle
    cycles, done = [], set()
    for v in np.unique(end).tolist():  # exactly the tokens of the cycles
        if v not in done:
            tokens = [v]
            while (v := int(successor[v])) != tokens[0]:
                tokens.append(v)
            done.update(tokens)
            cycles.append((tuple(tokens), int(np.isin(end, tokens).sum())))
    return sorted(cycles, key=lambda cycle: -cycle[1])
