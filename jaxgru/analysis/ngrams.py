"""N-gram models, interpolated with modified Kneser–Ney smoothing.

Chen & Goodman 1999, "An empirical study of smoothing techniques for language modeling" (Computer
Speech & Language 13; Harvard TR-10-98, whose eq. 26 gives the discounts), after Kneser & Ney 1995,
"Improved backing-off for m-gram language modeling" (ICASSP). With h a context, h′ the context
without its first token, and v any token,

    p(w | h) = (c(hw) − D(c(hw))) / Σ_v c(hv)  +  γ(h) p(w | h′)
    γ(h)     = Σ_v D(c(hv)) / Σ_v c(hv)

In the highest order, c(hw) is how often hw occurs; in a lower order, it is the number of different
tokens that hw occurs after. For the empty context, p(w | h′) is 1/V. A context that was never seen
has γ = 1 and no other term. Of a text in documents, no k-gram goes beyond one; nothing comes before
one that begins with the separator token, so its c is how often it occurs (Heafield et al. 2013,
ACL). D is the discount of a count; each order has its own discounts:

    D(0) = 0,  D(j) = j − (j + 1) Y n_{j+1} / n_j  for j = 1, 2, 3,  D(j) = D(3) for j > 3
    Y = n_1 / (n_1 + 2 n_2),  n_j: the number of k-grams with the count j
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxgru.arguments import as_sequence
from jaxgru.errors import UserError, check_whole
from jaxgru.lm.data.batching import as_text
from jaxgru.lm.sampling import check_sampling

__all__ = [
    "NGram",
    "count_ngrams",
    "pair_frequencies",
]

MAX_ORDER = 8
ABSENT = -1  # the id of a k-gram that the text lacks; as an index, it is the last entry
FALLBACK_DISCOUNTS = (0.0, 0.5, 1.0, 1.5)  # as KenLM's lmplz --discount_fallback


@dataclass(frozen=True)
class Grams:
    """The G different k-grams of a text, for one k. The tables for all k form a trie.

    A k-gram's id is its index in `keys`; the 0-gram, the empty context, has the id 0. The children
    of a context are therefore adjacent, and no key exceeds the text's length times V.
    """

    keys: Int[np.ndarray, "G"]  # ascending: (id of the first k − 1 tokens) · V + last token
    counts: Int[np.ndarray, "G"]  # how often each k-gram occurs
    suffixes: Int[np.ndarray, "G"]  # the id of the last k − 1 tokens

    def find(self, keys: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
        """Return the id of each key, or ABSENT, as for the negative keys of an ABSENT context."""
        ids = np.searchsorted(self.keys, keys)
        return np.where(self.keys.take(ids, mode="clip") == keys, ids, ABSENT)


@dataclass(frozen=True)
class Weights:
    """What the two terms of p(w | h) need for one k, by id; the last entry is ABSENT's."""

    shares: Float[np.ndarray, "_"]  # (c(hw) − D(c(hw))) / Σ_v c(hv) of each k-gram, then 0
    gammas: Float[np.ndarray, "_"]  # γ(h) of each (k − 1)-gram, then 1


@dataclass(frozen=True)
class NGram:
    """A model of the next token given the n − 1 tokens before it; n is `order`, V `vocab_size`."""

    order: int
    vocab_size: int
    grams: tuple[Grams, ...]  # k = 1 … n
    weights: tuple[Weights, ...]

    def token_nll(self, tokens: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N-1"]:
        """Return −log p (nats) of each token but the first, given up to order − 1 tokens before it.

        The predictions are those of `evaluation.stream_nll`; the mean is comparable with its mean.
        """
        tokens = np.asarray(as_text(tokens, self.vocab_size), np.int64)
        p = np.full(len(tokens), 1 / self.vocab_size)
        contexts = np.zeros(len(tokens), np.int64)
        for k, (grams, weights) in enumerate(zip(self.grams, self.weights, strict=True)):
            keys = contexts * self.vocab_size + tokens[k:]
            ids = grams.find(keys)
            p[k:] = weights.shares[ids] + weights.gammas[contexts] * p[k:]
            contexts = ids[:-1]
        return -np.log(p[1:])

    def probabilities(self, context: Int[np.ndarray, "M"]) -> Float[np.ndarray, "V"]:
        """Return p(w | context) for every token w; only the last order − 1 tokens are read."""
        context = np.asarray(context)
        num_unread = max(0, len(context) - self.order + 1)
        context = _checked(context[num_unread:], self.vocab_size)
        p = np.full(self.vocab_size, 1 / self.vocab_size)
        ids = np.zeros(len(context) + 1, np.int64)  # of the k-grams in the context; the last is h
        for k, grams, weights in zip(range(len(ids)), self.grams, self.weights, strict=False):
            h = ids[-1]
            first_key = h * self.vocab_size
            first, end = np.searchsorted(grams.keys, (first_key, first_key + self.vocab_size))
            p *= weights.gammas[h]
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
        allowed: Bool[np.ndarray, "V"] | None = None,
    ) -> Int[np.ndarray, "N"]:
        """Sample `num_tokens` tokens, int32, after the prompt, which may be empty.

        temperature, top_k and top_p are those of `sampling.generate`; `allowed` says which tokens
        may be drawn, at least one of them (None: all). Each token takes one draw from rng (none at
        temperature 0). To continue the text exactly, pass the prompt followed by these tokens as
        the new prompt, with the same rng: 50 tokens and 50 more are the same as 100.
        """
        num_tokens = check_whole("num_tokens", num_tokens)
        check_sampling(self.vocab_size, temperature, top_k, top_p)
        prompt = _checked(prompt, self.vocab_size)
        text = np.concatenate([prompt, np.zeros(num_tokens, np.int64)])
        for t in range(len(prompt), len(text)):
            p = self.probabilities(text[:t])
            if allowed is not None:
                p = p * allowed / p[allowed].sum()
            if temperature == 0:
                text[t] = np.argmax(p)
            else:
                p = _filtered(p, temperature, top_k, top_p)
                text[t] = rng.choice(self.vocab_size, p=p)
        return text[len(prompt) :].astype(np.int32)


def count_ngrams(
    tokens: Int[np.ndarray, "N"], vocab_size: int, order: int, separator_token: int | None = None
) -> NGram:
    """Count the k-grams of a text for k up to order, and return the smoothed model.

    `separator_token` is that of a text in documents, such as `Dataset.separator_token`: only what
    follows one predicts the next token, in the model's text and in any other.

    Raises:
      UserError: as `as_sequence`, and where the order is not in 1 to 8 or the text has fewer tokens
        than that.
    """
    order = check_whole("order", order, MAX_ORDER)
    tokens = _checked(tokens, vocab_size)
    if len(tokens) < order:
        raise UserError(f"an order of {order} needs at least {order} tokens, not {len(tokens)}.")
    tables = []
    starts = np.arange(len(tokens))  # of the k-grams
    ids = np.zeros(len(tokens) + 1, np.int64)  # of the k-gram that starts at each token
    for k in range(order):
        starts = starts[starts + k < len(tokens)]
        if k > 1:
            starts = starts[tokens[starts + k - 1] != separator_token]
        if not len(starts):  # no document is that long
            break
        suffix_of_start = ids[starts + 1]
        keys, id_of_start, counts = np.unique(
            ids[starts] * vocab_size + tokens[starts + k], return_inverse=True, return_counts=True
        )
        ids[starts] = id_of_start
        suffixes = np.empty_like(keys)
        suffixes[id_of_start] = suffix_of_start
        tables.append(Grams(keys, counts, suffixes))
    return NGram(order, vocab_size, tuple(tables), _weights(tables, vocab_size, separator_token))


def pair_frequencies(tokens: Int[np.ndarray, "N"], vocab_size: int) -> Float[np.ndarray, "V V"]:
    """Return the share of each pair of neighbours v, w among all N − 1 pairs.

    Row v sums to the share of v among the contexts; divided by it, the row is the unsmoothed
    bigram, the maximum-likelihood estimate of a transition matrix.
    """
    tokens = np.asarray(as_text(tokens, vocab_size), np.int64)
    counts = np.bincount(tokens[:-1] * vocab_size + tokens[1:], minlength=vocab_size**2)
    return counts.reshape(vocab_size, vocab_size) / (len(tokens) - 1)


def _weights(
    tables: list[Grams], vocab_size: int, separator_token: int | None
) -> tuple[Weights, ...]:
    """Compute the equations at the top of this file, for every k-gram and every context."""
    weights = []
    num_contexts = 1
    begins_document = np.array([False])  # of each context
    for k, grams in enumerate(tables):
        h = grams.keys // vocab_size
        c = grams.counts
        if k + 1 < len(tables):
            num_before = np.bincount(tables[k + 1].suffixes, minlength=len(c))
            c = np.where(begins_document[h], c, num_before)
        weights.append(_weights_of_order(h, c, num_contexts))
        num_contexts = len(c)
        begins_document = begins_document[h] if k else grams.keys == separator_token
    return tuple(weights)


def _weights_of_order(
    h: Int[np.ndarray, "G"], c: Int[np.ndarray, "G"], num_contexts: int
) -> Weights:
    """Compute the weights of all k-grams from their contexts' ids and their counts c(hw)."""
    d = _discounts(c)[np.minimum(c, 3)]
    totals = np.bincount(h, c, num_contexts)
    discounted = np.bincount(h, d, num_contexts)
    # A total is 0 if nothing follows the context. In lower orders, it is also 0 if something
    # follows the context only at the start of the text, where no token comes before it.
    divisors = np.maximum(totals, 1)
    shares = (c - d) / divisors[h]
    gammas = np.where(totals > 0, discounted / divisors, 1)
    return Weights(np.append(shares, 0), np.append(gammas, 1))


def _discounts(c: Int[np.ndarray, "G"]) -> Float[np.ndarray, "4"]:
    """Return D(0) to D(3), or fixed discounts if the counts of counts give one of 0 or less.

    A D of 0 could leave the unseen tokens of a context no probability. In a small text, n_1, n_2 or
    n_3 can be 0.
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
    """Return the distribution to sample from: softmax of `sampling.filter_logits` of ln p."""
    p = (p / p.max()) ** (1 / temperature)
    if top_k is not None:
        p[p < np.sort(p)[-top_k]] = 0
    p /= p.sum()
    if top_p is not None and top_p < 1:
        descending = np.sort(p)[::-1]
        likelier = np.cumsum(descending) - descending
        p[p < descending[likelier < top_p].min()] = 0
    return p / p.sum()


def _checked(tokens: Int[np.ndarray, "N"], vocab_size: int) -> Int[np.ndarray, "N"]:
    """Return the tokens, checked, as int64, so that keys do not overflow."""
    return np.asarray(as_sequence("tokens", tokens, vocab_size), np.int64)
