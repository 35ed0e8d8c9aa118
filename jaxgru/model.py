"""The language model: embedding → stacked cells → (LayerNorm) → head. The state is explicit.

Letters: B batch, T time, V vocabulary size, E embedding size, H hidden size, L number of layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct
from jax.extend.random import threefry_2x32
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Integer, PRNGKeyArray, UInt32

from jaxgru.cells import CELLS, Carry, CellParams, cell, hidden, zero_carry
from jaxgru.cells.base import AnyArray, Lookup, Mask, dot, rows
from jaxgru.config import ModelConfig
from jaxgru.layers import layer_stepper, unroll_layers


@struct.dataclass
class LayerNormParams:
    """Parameters of a layer normalisation (Ba et al. 2016, arXiv 1607.06450)."""

    scale: Float[Array, "H"]
    shift: Float[Array, "H"]


@struct.dataclass
class HeadParams:
    """Parameters of the head, which maps the last layer's output to logits: h·Wo + bo."""

    Wo: Float[Array, "H V"]
    bo: Float[Array, "V"]


@struct.dataclass
class Params:
    """Parameters of a model. `apply` needs no config: types and shapes define the model."""

    embedding: Float[Array, "V E"]
    layers: tuple[CellParams, ...]
    norm: LayerNormParams | None
    head: HeadParams


@struct.dataclass
class Dropout:
    """Dropout for one training step: a new mask per layer and time step, drawn from `key`.

    rate: the probability of dropping a unit.
    site: where units are dropped: "state", inside the recurrence of every layer (as in the study's
      code); "between", in each layer's output to the next layer; "output", in the last layer's
      output.
    first_row, first_step: if the batch is a part of a larger one, the row and the time step of the
      larger batch at which it starts; the masks are then that part of the larger batch's masks.
    """

    key: PRNGKeyArray
    rate: float = struct.field(pytree_node=False)
    site: str = struct.field(pytree_node=False, default="state")
    first_row: int | Int[Array, ""] = 0
    first_step: int | Int[Array, ""] = 0


SMALL_VOCABULARY = 256  # up to this size, a sampler multiplies the whole embedding once

ModelCarry: TypeAlias = tuple[Carry, ...]


def init(key: PRNGKeyArray, config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """Draw initial parameters, distributed like PyTorch's defaults, which the study uses.

    Embedding: normal(0, 1). Linear weights and biases: uniform ±1/√fan_in. LayerNorm: ones, zeros.
    """
    V, E, H, L = config.vocab_size, config.embedding_dim, config.hidden_dim, config.num_layers
    k_embedding, k_layers, k_weight, k_bias = jax.random.split(key, 4)
    inputs = [E] + [H] * (L - 1)
    init_cell = CELLS[config.cell].init
    bound = H**-0.5
    norm = LayerNormParams(jnp.ones(H, dtype), jnp.zeros(H, dtype)) if config.layer_norm else None
    return Params(
        embedding=jax.random.normal(k_embedding, (V, E), dtype),
        layers=tuple(
            init_cell(key, E, H, config, dtype)
            for key, E in zip(jax.random.split(k_layers, L), inputs, strict=True)
        ),
        norm=norm,
        head=HeadParams(
            Wo=jax.random.uniform(k_weight, (H, V), dtype, -bound, bound),
            bo=jax.random.uniform(k_bias, (V,), dtype, -bound, bound),
        ),
    )


def num_params(params: Params) -> int:
    """Return the number of trained numbers."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def flatten(tree: Any) -> dict[str, Any]:
    """Return a tree's leaves by path; for parameters "embedding", "layers.0.Wz", …, "head.bo"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def unflatten(like: Any, leaves: Mapping[str, Any]) -> Any:
    """Return a tree with the structure of `like` and these leaves; the inverse of `flatten`."""
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in flatten(like)])


def round_weights(params: Params, dtype: DTypeLike) -> Params:
    """Return the parameters with the matrices of the layers and the head in a narrower dtype.

    Products with them then take operands of that dtype and return the biases' dtype, which is also
    the dtype of states, gates and logits. The embedding is not rounded, because it is a lookup.
    """

    def rounded(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim > 1 else leaf, tree)

    layers, head = rounded(params.layers), rounded(params.head)
    return dataclasses.replace(params, layers=layers, head=head)


def initial_carry(params: Params, batch_size: int) -> ModelCarry:
    """Return the state before the first token: zeros, one entry per layer.

    An entry is h for a GRU or an RNN, (h, c) for an LSTM, (h, its last inputs) for an MLP.
    """
    return tuple(zero_carry(layer, batch_size) for layer in params.layers)


def apply(
    params: Params,
    tokens: Integer[AnyArray, "B T"] | Bool[AnyArray, "B T"],
    carry: ModelCarry | None = None,
    dropout: Dropout | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "B T V"], ModelCarry]:
    """Compute the logits of the token after each token, and the state after the last token.

    The gradient supports reverse mode. Forward mode (`jvp`, `jacfwd`, `hessian`) needs the
    implementation "plain", and parameters of one dtype.

    Args:
      tokens: at least one per row. A token outside the vocabulary, also a negative one, gives NaN.
      carry: the state before the first token; None: zeros. Passing the returned carry with the next
        tokens gives the same logits as one call with all tokens.
      dropout: in training; None otherwise.
      implementation: how the layers are computed: one of `layers.IMPLEMENTATIONS`.

    Raises:
      ValueError: the tokens are not (B, T) with T ≥ 1, the carry does not fit this model and batch,
        or its dtype is narrower than the model's.
    """
    if tokens.ndim != 2 or tokens.shape[1] < 1:
        raise ValueError(f"tokens must be (B, T) with T at least 1; these are {tokens.shape}.")
    B, T = tokens.shape
    if carry is None:
        carry = initial_carry(params, B)
    else:
        check_carry(params, carry, B)
    masks = dropout_masks(params, dropout, B, T)

    params = _on_device(params)
    x = Lookup(params.embedding, jnp.asarray(tokens).T)
    if B * T < len(params.embedding):
        x = x.rows()
    h, carry = unroll_layers(params.layers, x, carry, masks, implementation)
    return _logits(params, h).swapaxes(0, 1), carry


def step(
    params: Params, token: Integer[AnyArray, "B"] | Bool[AnyArray, "B"], carry: ModelCarry
) -> tuple[Float[Array, "B V"], ModelCarry]:
    """Compute `apply` for one token per row, without the time axis.

    Raises:
      ValueError: the token is not (B,), or the carry is wrong as in `apply`.
    """
    if token.ndim != 1:
        raise ValueError(f"token must be (B,), one token per row; this is {token.shape}.")
    check_carry(params, carry, len(token))
    params = _on_device(params)
    layers = [partial(cell, layer) for layer in params.layers]
    return _one_step(params, layers, rows(params.embedding, jnp.asarray(token)), carry)


def stepper(
    params: Params,
) -> Callable[[Int[Array, "B"], ModelCarry], tuple[Float[Array, "B V"], ModelCarry]]:
    """Return a function that computes `step`, up to rounding, faster if called for many tokens.

    It computes once what does not depend on the token: the concatenated weights and, for a small
    vocabulary, the first layer's product with the whole embedding.
    """
    params, V = _on_device(params), len(params.embedding)
    table = params.embedding if V <= SMALL_VOCABULARY else None
    layers = [layer_stepper(p, None if i else table) for i, p in enumerate(params.layers)]

    def step(token: Array, carry: ModelCarry) -> tuple[Array, ModelCarry]:
        x = token if table is not None else rows(params.embedding, token)
        return _one_step(params, layers, x, carry)

    return step


def _on_device(params: Params) -> Params:
    """Return the parameters as JAX arrays; they can be NumPy arrays, for example of a file."""
    return jax.tree.map(jnp.asarray, params)


def _one_step(
    params: Params, layers: Sequence[Callable[[Carry, Array], Carry]], x: Array, carry: ModelCarry
) -> tuple[Float[Array, "B V"], ModelCarry]:
    """Compute the step of each layer, (carry, x) → carry, from the bottom up; then the head."""
    new_carry = []
    for layer, c in zip(layers, carry, strict=True):
        c = layer(c, x)
        x = hidden(c)
        new_carry.append(c)
    return _logits(params, x), tuple(new_carry)


def _logits(params: Params, x: Float[Array, "... H"]) -> Float[Array, "... V"]:
    if params.norm is not None:
        x = layer_norm(params.norm, x)
    return dot(x, params.head.Wo) + params.head.bo


def layer_norm(p: LayerNormParams, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    """Compute (x − mean) / √(variance + 1e-5) · scale + shift, over the last axis."""
    x = x - x.mean(axis=-1, keepdims=True)
    variance = (x * x).mean(axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(variance + 1e-5) * p.scale + p.shift


def dropout_masks(
    params: Params, dropout: Dropout | None, batch_size: int, num_steps: int
) -> list[tuple[Mask | None, Mask | None]]:
    """Draw a pair of masks (T, B, H) per layer: inside the recurrence, and on the layer's output.

    16 bits are drawn per unit, so the rate is rounded to a multiple of 2⁻¹⁶. The scale 1/(1 − rate)
    uses the rounded rate, so expectations are exact.

    Raises:
      ValueError: the rate is not in [0, 1), or the site is not state, between or output.
    """
    L = len(params.layers)
    if dropout is None or dropout.rate == 0:
        return [(None, None)] * L
    if not 0 < dropout.rate < 1:
        raise ValueError(f"the dropout rate is {dropout.rate}; it must be at least 0 and below 1.")
    if dropout.site not in ("state", "between", "output"):
        raise ValueError(
            f"the dropout site is {dropout.site!r}; it must be state, between or output."
        )
    H, V = params.head.Wo.shape
    threshold = min(round(dropout.rate * 2**16), 2**16 - 1)
    scale = jnp.asarray(1 / (1 - threshold / 2**16), params.head.bo.dtype)
    masks: list[tuple[Mask | None, Mask | None]] = []
    for i, key in enumerate(jax.random.split(dropout.key, L)):
        last = i == L - 1
        if dropout.site == "between" and last or dropout.site == "output" and not last:
            masks.append((None, None))
            continue
        bits = _random_16_bits(
            key, (num_steps, batch_size, H), dropout.first_step, dropout.first_row
        )
        mask = Mask(bits >= threshold, scale)
        masks.append((mask, None) if dropout.site == "state" else (None, mask))
    return masks


def _random_16_bits(
    key: PRNGKeyArray,
    shape: tuple[int, int, int],
    first_step: int | Int[Array, ""],
    first_row: int | Int[Array, ""],
) -> UInt32[Array, "T B H"]:
    """Draw uniformly from 0 … 2¹⁶ − 1, four numbers per Threefry block (Salmon et al., SC 2011).

    `jax.random.bits` computes one block per number, however few its bits: five times slower.
    """
    T, B, H = shape
    key_words = jax.random.bits(key, (2,), jnp.uint32)
    blocks = -(-H // 4)
    t, b, i = (jax.lax.broadcasted_iota(jnp.uint32, (T, B, blocks), axis) for axis in range(3))
    t, b = t + jnp.uint32(first_step), b + jnp.uint32(first_row)
    counters = jnp.stack([t, b * blocks + i])  # all different
    words = threefry_2x32(key_words, counters)
    halves = [part for word in words for part in (word & 0xFFFF, word >> 16)]
    return jnp.concatenate(halves, axis=-1)[..., :H]


def check_carry(params: Params, carry: ModelCarry, batch_size: int) -> None:
    """Raise ValueError if the carry does not fit this model and batch, or its dtype is narrower."""
    expected = jax.eval_shape(lambda: initial_carry(params, batch_size))
    seen = jax.tree.map(jnp.shape, carry)
    wanted = jax.tree.map(lambda leaf: leaf.shape, expected)
    if seen != wanted:
        raise ValueError(
            f"the carry's shapes are {seen}, but this model and batch need {wanted}: "
            "one entry per layer, made by initial_carry or returned by apply."
        )
    for leaf, like in zip(jax.tree.leaves(carry), jax.tree.leaves(expected), strict=True):
        dtype = jnp.result_type(leaf)
        if jnp.promote_types(dtype, like.dtype) != dtype:
            raise ValueError(f"the carry's dtype is {dtype}; this model's is {like.dtype}.")
