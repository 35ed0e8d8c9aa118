"""Dynamic evaluation (Krause et al. 2018): the loss of a model that goes on learning as it reads.

The text is one stream, cut into segments of a few tokens. Each segment is first predicted, with the
weights and the state that the segments before it left; its gradient then updates the weights:

    θ ← θ − η · g / (√m + ε) + λ · s ⊙ (θ₀ − θ)        s = √m / mean(√m), at most 1/λ

g is the gradient of the segment's mean loss, cut off at its start; m is the mean of g² over the
segments of a training text, with the weights θ₀ that training found (arXiv 1709.07432, section 4).
A token is predicted before any weight has seen it, so the loss is that of an honest predictor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxgru.arguments import check_number
from jaxgru.arrays import AnyArray, at_least_float32, in_dtypes_of
from jaxgru.errors import UserError, check_whole
from jaxgru.lm.data.batching import as_text, windows
from jaxgru.lm.model import (
    ModelCarry,
    Params,
    apply,
    check_params,
    initial_carry,
    on_device,
    token_nll,
)
from jaxgru.printing import counted

CHOSEN_ON = 2**13  # tokens at the end of the training text, which suffice to choose settings
LEARNING_RATES = (1e-4, 3e-4, 1e-3)
DECAYS = (0.0, 1e-3, 1e-2)


class _Learner(NamedTuple):
    """What one segment leaves to the next: the weights or a sum over gradients, and the state."""

    params: Params
    carry: ModelCarry


class _Segment(NamedTuple):
    """Some tokens that are read, and the tokens after each; or several such segments (M, 1, T)."""

    inputs: Int[Array, "*M 1 T"]
    targets: Int[Array, "*M 1 T"]


class _Rates(NamedTuple):
    """η, λ and ε."""

    learning_rate: Any
    decay: Any
    epsilon: Any


@dataclass(frozen=True)
class Dynamic:
    """How a model learns while it reads; the letters are those of the formula above.

    Attributes:
      mean_squares: m, the mean of each parameter's squared gradient: `mean_squares`.
      learning_rate: η.
      decay: λ, the pull back to the weights that training found; 0: none.
      epsilon: ε, in the unit of a gradient.
      every: the number of tokens in a segment, and so between two updates.

    Raises:
      UserError: one is out of range.
    """

    mean_squares: Params
    learning_rate: float
    decay: float = 0.0
    epsilon: float = 1e-4
    every: int = 32

    def __post_init__(self) -> None:
        check_whole("every", self.every)
        for name in ("learning_rate", "decay"):
            number = getattr(self, name)
            check_number(name, number, lambda x: 0 <= x < math.inf, "finite, 0 or more")
        # At 0, the weights of a token that the training text lacks would become 0/0.
        check_number("epsilon", self.epsilon, lambda x: 0 < x < math.inf, "finite, above 0")


def dynamic_nll(
    params: Params, tokens: Int[AnyArray, "N"], dynamic: Dynamic
) -> Float[np.ndarray, "N-1"]:
    """Compute the nats of each prediction over one stream, with weights that learn from it.

    Raises:
      UserError: as `evaluation.window_nll`, and where `dynamic` is of another model.
    """
    params = on_device(params)
    if jax.tree.map(jnp.shape, dynamic.mean_squares) != jax.tree.map(jnp.shape, params):
        raise UserError("the mean_squares are not this model's; compute them with its parameters.")
    segments, num_predictions = _segments(params, tokens, dynamic.every)
    rates = _Rates(dynamic.learning_rate, dynamic.decay, dynamic.epsilon)
    nll = _dynamic_nll(params, dynamic.mean_squares, rates, segments)
    return np.asarray(nll, np.float64).ravel()[:num_predictions]


def mean_squares(params: Params, tokens: Int[AnyArray, "N"], every: int = 32) -> Params:
    """Return the mean of each parameter's squared gradient, over the whole segments of a stream.

    Raises:
      UserError: as `evaluation.window_nll`, and where there are fewer than `every` + 1 tokens.
    """
    segments, num_predictions = _segments(params, tokens, check_whole("every", every))
    if num_predictions < every:
        has = counted(num_predictions + 1, "token")
        raise UserError(f"the text has {has}; a segment of {every} needs {every + 1}.")
    num_whole = num_predictions // every
    whole = jax.tree.map(lambda tokens: tokens[:num_whole], segments)
    return _mean_squares(on_device(params), whole)


def choose_dynamic(params: Params, tokens: Int[AnyArray, "N"], every: int = 32) -> Dynamic:
    """Return the pair of one of LEARNING_RATES and one of DECAYS with the lowest loss on a text.

    Args:
      tokens: of the TRAINING text, e.g. its last CHOSEN_ON, so that nothing is chosen with an eye
        on what is then evaluated.
    """
    squares = mean_squares(params, tokens, every)
    candidates = [
        Dynamic(squares, learning_rate, decay, every=every)
        for learning_rate, decay in product(LEARNING_RATES, DECAYS)
    ]

    def loss(dynamic: Dynamic) -> float:
        mean = dynamic_nll(params, tokens, dynamic).mean()
        return float(np.nan_to_num(mean, nan=np.inf))

    return min(candidates, key=loss)


def _segments(params: Params, tokens: Any, every: int) -> tuple[_Segment, int]:
    """Return the segments of a text, and the number of predictions. The last one may be padded.

    It is predicted before its gradient updates anything, so the padding reaches no loss.
    """
    check_params(params)
    tokens = as_text(tokens, len(params.embedding))
    inputs, targets = windows(jnp.asarray(tokens), every, 1)
    return _Segment(inputs, targets), len(tokens) - 1


def _loss(
    params: Params, segment: _Segment, carry: ModelCarry
) -> tuple[Float[Array, ""], tuple[Float[Array, "1 T"], ModelCarry]]:
    """Return the mean loss of the targets, the loss of each, and the next state."""
    logits, carry = apply(params, segment.inputs, carry)
    nll = token_nll(logits, segment.targets)
    return nll.mean(), (nll, carry)


@jax.jit
def _dynamic_nll(
    trained: Params, mean_squares: Params, rates: _Rates, segments: _Segment
) -> Float[Array, "M T"]:
    roots = jax.tree.map(jnp.sqrt, mean_squares)
    leaves = jax.tree.leaves(roots)
    mean_root = sum(leaf.sum() for leaf in leaves) / sum(leaf.size for leaf in leaves)
    start = _Learner(at_least_float32(trained), initial_carry(trained, 1))

    def update(p: Array, start: Array, g: Array, root: Array) -> Array:
        pull = jnp.minimum(rates.decay * root / mean_root, 1)
        change = rates.learning_rate * g / (root + rates.epsilon)
        return p - change.astype(p.dtype) + pull * (start - p)

    def read(learner: _Learner, segment: _Segment) -> tuple[_Learner, Array]:
        params = in_dtypes_of(trained, learner.params)
        gradient, (nll, carry) = jax.grad(_loss, has_aux=True)(params, segment, learner.carry)
        gradient = at_least_float32(gradient)
        params = jax.tree.map(update, learner.params, start.params, gradient, roots)
        return _Learner(params, carry), nll.ravel()

    _, nll = jax.lax.scan(read, start, segments)
    return nll


@jax.jit
def _mean_squares(params: Params, segments: _Segment) -> Params:
    def add_squares(total: _Learner, segment: _Segment) -> tuple[_Learner, None]:
        gradient, (_, carry) = jax.grad(_loss, has_aux=True)(params, segment, total.carry)
        squares = jax.tree.map(jnp.square, at_least_float32(gradient))
        return _Learner(jax.tree.map(jnp.add, total.params, squares), carry), None

    zeros = at_least_float32(jax.tree.map(jnp.zeros_like, params))
    total, _ = jax.lax.scan(add_squares, _Learner(zeros, initial_carry(params, 1)), segments)
    return jax.tree.map(lambda t: t / len(segments.inputs), total.params)
