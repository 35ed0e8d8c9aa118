"""What `generate` may do to the logits before it draws: `logits_processor=`.

A processor is a pure function (logits, counts) → logits, both (B, V). The logits are the model's,
before temperature, top_k and top_p. The counts say how often each token occurs in the text so far,
the prompt included. −∞ excludes a token. A processor is a static argument of the compiled program:
the same function, or an equal one of those here, compiles nothing anew. Those here raise UserError
for a number that is out of their range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxgru.arguments import as_tokens, check_number, check_tokens

MOST = 1e6
"""The largest penalty. With all counts and temperatures, the logits stay finite in float32."""
Processor: TypeAlias = Callable[[Float[Array, "B V"], Int[Array, "B V"]], Float[Array, "B V"]]


@dataclass(frozen=True)
class RepetitionPenalty:
    """Divide the logits of tokens already in the text by `penalty` (Keskar et al. 2019, §4.1).

    arXiv 1909.05858. A negative logit is multiplied, because dividing it would make its token
    likelier; Hugging Face's transformers do so, too. The authors use 1.2; 1 changes nothing.
    """

    penalty: float

    def __post_init__(self) -> None:
        check_number(
            "repetition_penalty",
            self.penalty,
            lambda x: 1 / MOST <= x <= MOST,
            f"a number from {1 / MOST:g} to {MOST:g}",
        )

    def __call__(self, logits: Float[Array, "B V"], counts: Int[Array, "B V"]) -> Array:
        penalised = jnp.where(logits < 0, logits * self.penalty, logits / self.penalty)
        return jnp.where(counts > 0, penalised, logits)


def _check_size(name: str, penalty: float) -> None:
    """Raise UserError if a penalty, of either sign, is larger than MOST."""
    wanted = f"a number from {-MOST:g} to {MOST:g}"
    check_number(name, penalty, lambda x: abs(x) <= MOST, wanted)


@dataclass(frozen=True)
class FrequencyPenalty:
    """Subtract `penalty` from a token's logit for each time that it is in the text so far.

    This is OpenAI's frequency_penalty, from −2 to 2, but theirs does not count the prompt. Nor does
    this one, if `generate` is given zeros as `counts`.
    """

    penalty: float

    def __post_init__(self) -> None:
        _check_size("frequency_penalty", self.penalty)

    def __call__(self, logits: Float[Array, "B V"], counts: Int[Array, "B V"]) -> Array:
        return logits - self.penalty * counts.astype(logits.dtype)


@dataclass(frozen=True)
class PresencePenalty:
    """Subtract `penalty` from the logits of tokens already in the text, however often.

    This is OpenAI's presence_penalty; as for `FrequencyPenalty`, the prompt counts here.
    """

    penalty: float

    def __post_init__(self) -> None:
        _check_size("presence_penalty", self.penalty)

    def __call__(self, logits: Float[Array, "B V"], counts: Int[Array, "B V"]) -> Array:
        return jnp.where(counts > 0, logits - self.penalty, logits)


@dataclass(frozen=True)
class Exempt:
    """Apply a penalty, or a processor of your own, for which some tokens do not count.

        Exempt(RepetitionPenalty(1.2), tokenizer.encode(" \\n"))

    A call raises UserError for a token outside the vocabulary.
    """

    processor: Processor
    tokens: Sequence[int] | Int[np.ndarray, "N"]

    def __post_init__(self) -> None:
        tokens = np.asarray(as_tokens("exempt", self.tokens)).ravel()
        # A tuple has a hash.
        object.__setattr__(self, "tokens", tuple(tokens.tolist()))

    def __call__(self, logits: Float[Array, "B V"], counts: Int[Array, "B V"]) -> Array:
        tokens = np.array(self.tokens, int)
        check_tokens("exempt", tokens, counts.shape[1])
        return self.processor(logits, counts.at[:, tokens].set(0))


@dataclass(frozen=True)
class MinP:
    """Exclude tokens less likely than `fraction` × the likeliest one (Nguyen et al. 2024, §3).

    arXiv 2407.01082. The authors use 0.05 to 0.1; 1 leaves only the likeliest.
    """

    fraction: float

    def __post_init__(self) -> None:
        check_number("min_p", self.fraction, lambda x: 0 < x <= 1, "a number above 0 and at most 1")

    def __call__(self, logits: Float[Array, "B V"], counts: Int[Array, "B V"]) -> Array:
        threshold = logits.max(axis=-1, keepdims=True) + math.log(self.fraction)
        return jnp.where(logits < threshold, -jnp.inf, logits)


@dataclass(frozen=True)
class Typical:
    """Keep tokens of nearly average surprise until their probabilities add up to `mass`.

    Locally typical sampling (Meister et al. 2023, TACL 11, arXiv 2202.00666, eq. 10): tokens are
    kept in the order of |−log p − H|, where H is the entropy of p. Those that tie with the last one
    are kept, too. The authors use 0.2 to 0.95; 1 excludes nothing.
    """

    mass: float

    def __post_init__(self) -> None:
        check_number("typical", self.mass, lambda x: 0 < x <= 1, "a number above 0 and at most 1")

    def __call__(self, logits: Float[Array, "B V"], counts: Int[Array, "B V"]) -> Array:
        if self.mass == 1:
            return logits
        log_p = jax.nn.log_softmax(jax.lax.stop_gradient(logits), axis=-1)
        p = jnp.exp(log_p)
        entropy = -jnp.sum(jnp.where(p > 0, p * log_p, 0), axis=-1, keepdims=True)
        distance = jnp.abs(-log_p - entropy)
        sorted_distance, sorted_p = jax.lax.sort((distance, p), num_keys=1)
        mass_before = jnp.cumsum(sorted_p, axis=-1) - sorted_p
        included_distance = jnp.where(mass_before < self.mass, sorted_distance, 0)
        threshold = jnp.max(included_distance, axis=-1, keepdims=True)
        return jnp.where(distance > threshold, -jnp.inf, logits)
