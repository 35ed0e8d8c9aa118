"""What counting alone can do: n-gram models, interpolated with modified Kneser–Ney smoothing.

Chen & Goodman 1999, "An empirical study of smoothing techniques for language modeling" (Computer
Speech & Language 13; Harvard TR-10-98, whose eq. 26 gives the discounts), after Kneser & Ney 1995,
"Improved backing-off for m-gram language modeling" (ICASSP). With h a context, h′ the context
without its first token, and v any token,

    p(w | h) = (c(hw) − D(c(hw))) / Σ_v c(hv)  +  γ(h) p(w | h′)
    γ(h)     = Σ_v D(c(hv)) / Σ_v c(hv)

c(hw) counts, in the highest order, how often hw occurs; in every lower order, after how many
different tokens it occurs. The empty context's p(w | h′) is 1/V, and a context that was never seen
has only its γ, which is 1. What is taken from each count, one set of discounts an order:

    D(0) = 0,  D(j) = j − (j + 1) Y n_{j+1} / n_j  for j = 1, 2, 3,  D(j) = D(3) for j > 3
    Y = n_1 / (n_1 + 2 n_2),  n_j: how many k-grams have the count j
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from jaxgru.errors import UserError
from jaxgru.sampling import check_sampling

MAX_ORDER = 8
ABSENT = -1  # the id of a k-gram that the text lacks; as an index, the entry behind the last id
FALLBACK_DISCOUNTS = (0.0, 0.5, 1.0, 1.5)  # those of KenLM's lmplz --discount_fallback


@dataclass(frozen=True)
class Grams:
    """The G different k-grams of a text, for one k. All of the tables together are a trie.

    A k-gram's id is its place in `keys`; the 0-gram, the empty context, has the id 0. So the
    children of a context are neighbours, and no key exceeds the text's length times V.
    """

    keys: Int[np.ndarray, "G"]  # ascending: the id of the first k − 1 tokens, times V, + the last
    counts: Int[np.ndarray, "G"]  # how often each occurs
    suffixes: Int[np.ndarray, "G"]  # the id of the last k − 1 tokens

    def find(self, keys: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
        """The id of each key, or ABSENT. A key made with an ABSENT context is negative: absent."""
        ids = np.searchsorted(self.keys, keys)
        return np.where(self.keys.take(ids, mode="clip") == keys, ids, ABSENT)


@dataclass(frozen=True)
class Weights:
    """Both terms of p(w | h) for one k, by id; behind the last id, what holds for ABSENT."""

    shares: Float[np.ndarray, "G+1"]  # (c(hw) − D(c(hw))) / Σ_v c(hv) of each k-gram; 0
    gammas: Float[np.ndarray, "C+1"]  # γ(h) of each (k−1)-gram; 1


@dataclass(frozen=True)
class NGram:
    """A language model of `order` n: the next token given the n − 1 before it. V is vocab_size."""

    order: int
    vocab_size: int
    grams: tuple[Grams, ...]  # k = 1 … n
    weights: tuple[Weights, ...]

    def lower(self, order: int) -> NGram:
        """The model that `count_ngrams` makes with this order, without counting again.

        Raises:
          UserError: an order below 1 or above this model's.
        """
        if order not in range(1, self.order + 1):
            raise UserError(f"the order is {order}; it must be 1 to this model's {self.order}.")
        return _smoothed(self.grams[:order], self.vocab_size)

    def token_nll(self, tokens: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N-1"]:
        """Nats: −log p of each token but the first, given the up to order − 1 tokens before it.

        The predictions are those of `evaluation.stream_loss`, whose loss is this one's mean.

        Raises:
          UserError: fewer than two tokens, or tokens outside the vocabulary.
        """
        tokens = _checked(tokens, self.vocab_size)
        if len(tokens) < 2:
            raise UserError(f"a loss needs at least 2 tokens; these are {len(tokens)}.")
        p = np.full(len(tokens), 1 / self.vocab_size)
        contexts = np.zeros(len(tokens), np.int64)
        for k, (grams, weights) in enumerate(zip(self.grams, self.weights, strict=True)):
            ids = grams.find(contexts * self.vocab_size + tokens[k:])
            p[k:] = weights.shares[ids] + weights.gammas[contexts] * p[k:]
            contexts = ids[:-1]
        return -np.log(p[1:])

    def probabilities(self, context: Int[np.ndarray, "M"]) -> Float[np.ndarray, "V"]:
        """p(w | context) of every token w; only the last order − 1 tokens of the context matter.

        Raises:
          UserError: one of those is outside the vocabulary.
        """
        context = _checked(context[max(0, len(context) - self.order + 1) :], self.vocab_size)
        p = np.full(self.vocab_size, 1 / self.vocab_size)
        ids = np.zeros(len(context) + 1, np.int64)  # of the k-grams in the context; the last is h
        for k, grams, weights in zip(range(len(ids)), self.grams, self.weights, strict=False):
            first_key = ids[-1] * self.vocab_size
            first, end = np.searchsorted(grams.keys, (first_key, first_key + self.vocab_size))
            p *= weights.gammas[ids[-1]]
            p[grams.keys[first:end] - first_key] += weights.shares[first:end]
            ids = grams.find(ids[:-1] * self.vocab_size + context[k:])
        return p

    def generate(
        self,
        rng: np.random.Generator,
        prompt: Int[np.ndarray, "P"],
        num_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> Int[np.ndarray, "N"]:
        """Samples `num_tokens` tokens, int32, to follow the prompt, which may be empty.

        temperature, top_k and top_p mean what they mean to `sampling.generate`. Every token takes
        one draw from rng (none at temperature 0), so going on with the prompt and these tokens as
        the prompt, and the same rng, is exact: 50 and 50 more are 100.

        Raises:
          UserError: num_tokens below 1, a prompt that ends in tokens outside the vocabulary, a
            negative temperature, top_k outside [1, V], top_p outside (0, 1].
        """
        if num_tokens < 1:
            raise UserError(f"num_tokens is {num_tokens}; it must be at least 1.")
        check_sampling(self.vocab_size, temperature, top_k, top_p)
        text = np.concatenate([prompt, np.zeros(num_tokens, np.int64)])
        for t in range(len(prompt), len(text)):
            p = self.probabilities(text[:t])
            if temperature == 0:
                text[t] = np.argmax(p)
            else:
                p = _filtered(p, temperature, top_k, top_p)
                text[t] = rng.choice(self.vocab_size, p=p)
        return text[len(prompt) :].astype(np.int32)


def count_ngrams(tokens: Int[np.ndarray, "N"], vocab_size: int, order: int) -> NGram:
    """Counts every k-gram of a text up to k = order, 1 to 8, and smooths.

    Raises:
      UserError: an order outside 1 to 8, fewer tokens than that, or tokens outside the vocabulary.
    """
    if order not in range(1, MAX_ORDER + 1):
        raise UserError(f"the order is {order}; it must be 1 to {MAX_ORDER}.")
    tokens = _checked(tokens, vocab_size)
    if len(tokens) < order:
        raise UserError(f"an order of {order} needs {order} tokens; these are {len(tokens)}.")
    tables = []
    ids = np.zeros(len(tokens) + 1, np.int64)  # of the k-gram at each place: 0-grams to begin with
    for k in range(order):
        contexts, endings = ids[:-1], ids[1:]
        keys, ids, counts = np.unique(
            contexts * vocab_size + tokens[k:], return_inverse=True, return_counts=True
        )
        suffixes = np.empty_like(keys)
        suffixes[ids] = endings
        tables.append(Grams(keys, counts, suffixes))
    return _smoothed(tuple(tables), vocab_size)


def bigram_probabilities(tokens: Int[np.ndarray, "N"], vocab_size: int) -> Float[np.ndarray, "V V"]:
    """The counted bigrams, unsmoothed: [v, w] is the share of w among the tokens that follow v.

    The maximum-likelihood estimate of a transition matrix; rows of tokens that nothing follows
    are uniform.

    Raises:
      UserError: fewer than two tokens, or tokens outside the vocabulary.
    """
    tokens = _checked_pairs(tokens, vocab_size)
    pairs = tokens[:-1] * vocab_size + tokens[1:]
    counts = np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size)
    totals = counts.sum(1, keepdims=True)
    return np.where(totals > 0, counts / np.maximum(totals, 1), 1 / vocab_size)


def context_frequencies(tokens: Int[np.ndarray, "N"], vocab_size: int) -> Float[np.ndarray, "V"]:
    """The share of each token among all that are followed by another: how the rows weigh.

    Raises:
      UserError: fewer than two tokens, or tokens outside the vocabulary.
    """
    tokens = _checked_pairs(tokens, vocab_size)
    return np.bincount(tokens[:-1], minlength=vocab_size) / (len(tokens) - 1)


def _smoothed(tables: tuple[Grams, ...], vocab_size: int) -> NGram:
    """The equations at the top of this file, for every k-gram and every context."""
    weights = []
    num_contexts = 1
    for grams, longer in zip(tables, (*tables[1:], None), strict=True):
        c = grams.counts
        if longer is not None:
            c = np.bincount(longer.suffixes, minlength=len(grams.keys))
        d = _discounts(c)[np.minimum(c, 3)]
        h = grams.keys // vocab_size
        totals = np.bincount(h, c, num_contexts)
        discounted = np.bincount(h, d, num_contexts)
        # A total is 0 where nothing follows the context, or, in lower orders, only at the beginning
        # of the text, before which there is no token.
        divisors = np.maximum(totals, 1)
        shares = (c - d) / divisors[h]
        gammas = np.where(totals > 0, discounted / divisors, 1)
        weights.append(Weights(np.append(shares, 0), np.append(gammas, 1)))
        num_contexts = len(grams.keys)
    return NGram(len(tables), vocab_size, tables, tuple(weights))


def _discounts(c: Int[np.ndarray, "G"]) -> Float[np.ndarray, "4"]:
    """D(0), D(1), D(2) and D(3), or fixed ones where the counts of counts give none above 0.

    A D of 0 could leave a context's unseen tokens nothing, and small texts have no n_1, n_2 or n_3.
    """
    n = np.bincount(np.minimum(c, 5), minlength=5)
    if n[1:4].all():
        j = np.arange(1, 4)
        Y = n[1] / (n[1] + 2 * n[2])
        D = j - (j + 1) * Y * n[j + 1] / n[j]
        if (D > 0).all():
            return np.append(0, D)
    return np.array(FALLBACK_DISCOUNTS)


def _filtered(
    p: Float[np.ndarray, "V"], temperature: float, top_k: int | None, top_p: float | None
) -> Float[np.ndarray, "V"]:
    """The distribution that is sampled: softmax of `sampling.filter_logits` of ln p."""
    p = (p / p.max()) ** (1 / temperature)
    if top_k is not None:
        p[p < np.sort(p)[-top_k]] = 0
    p /= p.sum()
    if top_p is not None and top_p < 1:
        descending = np.sort(p)[::-1]
        before = np.cumsum(descending) - descending
        p[p < descending[before < top_p].min()] = 0
    return p / p.sum()


def _checked(tokens: Int[np.ndarray, "N"], vocab_size: int) -> Int[np.ndarray, "N"]:
    """The tokens as int64, whose keys do not overflow; UserError where one is not in [0, V)."""
    tokens = np.asarray(tokens, np.int64)
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        raise UserError(f"the token {outside[0]} is outside the vocabulary of {vocab_size} tokens.")
    return tokens


def _checked_pairs(tokens: Int[np.ndarray, "N"], vocab_size: int) -> Int[np.ndarray, "N"]:
    tokens = _checked(tokens, vocab_size)
    if len(tokens) < 2:
        raise UserError(f"a bigram needs at least 2 tokens; these are {len(tokens)}.")
    return tokens
