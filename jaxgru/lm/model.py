"""The language model: embedding → stacked cells → (LayerNorm) → head. The state is explicit.

Letters: B batch, T time, V vocabulary size, E embedding size, H hidden size, L number of layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Integer, PRNGKeyArray, Shaped

from jaxgru import cells
from jaxgru.arguments import as_jax, as_tokens
from jaxgru.arrays import (
    AnyArray,
    Size,
    at_least_float32,
    plus,
    promoted_matmul,
    sharded_by_xla,
    widest,
)
from jaxgru.cells import CELLS, AnyCell, Carry, Lookup, embed, hidden, matmul, round_weights, sizes
from jaxgru.cells import layer_norm as layer_norm_without_shift
from jaxgru.errors import UserError, forward_mode_explained
from jaxgru.layers import Dropouts, Implementation, init_stack, unroll
from jaxgru.layers import initial_carry as carry_of_layers
from jaxgru.layers import step as step_of_layers
from jaxgru.lm.config import ModelConfig
from jaxgru.printing import type_name
from jaxgru.pytrees import struct
from jaxgru.steps import as_flags

SMALL_VOCABULARY = 256  # up to this size, `stepper` computes embedding·W of its first layer once

ModelCarry: TypeAlias = tuple[Carry, ...]


@struct
class LayerNormParams:
    """Parameters of a layer normalisation (Ba et al. 2016, arXiv 1607.06450)."""

    scale: Float[Array, "H"]
    shift: Float[Array, "H"]


@struct
class HeadParams:
    """Parameters of the head, which maps the last layer's output to logits: h·Wo + bo.

    Wo is None in a model whose head is tied to its embedding: see `Params.Wo`.
    """

    Wo: Float[Array, "H V"] | None
    bo: Float[Array, "V"]


@struct
class Params:
    """Parameters of a model. `apply` needs no config: types and shapes define the model."""

    embedding: Float[Array, "V E"]
    layers: tuple[AnyCell, ...]
    norm: LayerNormParams | None
    head: HeadParams

    @property
    def Wo(self) -> Float[Array, "H V"]:
        """The head's weights: the embedding, transposed, if the two are tied."""
        return self.embedding.T if self.head.Wo is None else self.head.Wo


def init(key: PRNGKeyArray, config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """Draw initial parameters from the distributions of the study's code.

    Embedding: normal(0, 1). Layers: see the cell's `init` function. LayerNorm: ones, zeros. Head:
    uniform ±1/√H. These are PyTorch's defaults for `nn.Embedding`, `nn.LayerNorm` and `nn.Linear`,
    from which the study builds its models. A tied embedding is drawn in the same way: drawn as a
    head, it learned more slowly.

    Args:
      dtype: of all parameters; a floating-point one.
    """
    V = config.vocab_size
    E = config.embedding_dim
    k_embedding, k_layers, k_weight, k_bias = jax.random.split(key, 4)
    layers = init_stack(
        CELLS[config.cell],
        k_layers,
        E,
        config.hidden_dim,
        config.num_layers,
        dtype=dtype,
        **config.cell_options(),
    )
    H = sizes(layers[-1])[1]
    norm = None
    if config.final_norm:
        norm = LayerNormParams(scale=jnp.ones(H, dtype), shift=jnp.zeros(H, dtype))
    bound = H**-0.5
    Wo = None
    if not config.tied_embedding:
        Wo = jax.random.uniform(k_weight, (H, V), dtype, -bound, bound)
    bo = jax.random.uniform(k_bias, (V,), dtype, -bound, bound)
    return Params(
        embedding=jax.random.normal(k_embedding, (V, E), dtype),
        layers=layers,
        norm=norm,
        head=HeadParams(Wo, bo),
    )


def shapes(config: ModelConfig) -> Params:
    """Return the shapes and dtypes of a model's parameters; nothing is drawn."""
    return jax.eval_shape(lambda: init(jax.random.key(0), config))


def num_params(params: Params) -> int:
    """Return the number of trainable parameters: all entries of all arrays.

    Raises:
      UserError: they are not a model's.
    """
    check_params(params)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def flatten(tree: Any) -> dict[str, Any]:
    """Return a tree's leaves by path; for parameters "embedding", "layers.0.W", …, "head.bo"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def unflatten(like: Any, leaves: Mapping[str, Any]) -> Any:
    """Return a tree with the structure of `like` and these leaves; the inverse of `flatten`."""
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in flatten(like)])


def round_model(params: Params, dtype: DTypeLike) -> Params:
    """Return the parameters with the matrices of the layers and the head in a narrower dtype.

    Products with them then take operands of that dtype and return the biases' dtype, which is also
    the dtype of states, gates and logits. The embedding is not rounded, because it is a lookup; a
    head that is tied to it becomes an array of its own.

    Raises:
      UserError: they are not a model's.
    """
    check_params(params)
    head = dataclasses.replace(params.head, Wo=params.Wo)
    return dataclasses.replace(
        params,
        layers=round_weights(params.layers, dtype),
        head=round_weights(head, dtype),
    )


def initial_carry(params: Params, batch_size: Size) -> ModelCarry:
    """Return the state before the first token: zeros, a tuple with one entry per layer.

    An entry is h (B, H), or (h, c) for an LSTM, or for an MLP h and its last K − 1 inputs
    (B, K − 1, E).

    Raises:
      UserError: `params` are not a model's; and whatever `jaxgru.initial_carry` raises.
    """
    check_params(params)
    return carry_of_layers(params.layers, batch_size)


def apply(
    params: Params,
    tokens: Integer[AnyArray, "B T"] | Bool[AnyArray, "B T"],
    carry: ModelCarry | None = None,
    dropout: Dropouts = None,
    implementation: Implementation = "auto",
    *,
    reset: Shaped[AnyArray, "B T"] | None = None,
) -> tuple[Float[Array, "B T V"], ModelCarry]:
    """Compute the logits of the token after each token, and the state after the last token.

    The gradient supports reverse mode. Forward mode (`jvp`, `jacfwd`) needs the implementation
    "autodiff", and parameters of one dtype.

    Args:
      tokens: at least one per row. A token outside the vocabulary gives NaN, and so does a negative
        one.
      carry: the state before the first token; None: `initial_carry`. Passing the returned carry
        with the next tokens gives the same logits as one call with all tokens.
      dropout: for training, a `jaxgru.Dropout` or a tuple of them; None: no dropout.
      implementation: how the layers are computed, as for `jaxgru.unroll`.
      reset: bool (B, T), True where `initial_carry` is set before the token is read, such as
        where a document begins; None: nowhere.

    Raises:
      ValueError: the tokens are not integers (B, T) with T ≥ 1; and whatever `jaxgru.unroll`
        raises.
    """
    params = on_device(params)
    tokens = as_tokens("tokens", tokens)
    if tokens.ndim != 2 or tokens.shape[1] < 1:
        raise ValueError(f"tokens are {tokens.shape}; they must be (B, T) with T at least 1.")
    x = Lookup(params.embedding, jnp.asarray(tokens).T)
    options: dict[str, Any] = dict(dropout=dropout, implementation=implementation)
    if reset is not None:
        options["reset"] = as_flags("reset", reset, tokens.shape).T
    h, last_carry = unroll(params.layers, x, carry, time_major=True, **options)
    # The gradient of `matmul` is written by hand, and so has no forward mode.
    multiply = promoted_matmul if implementation == "autodiff" else matmul
    head = sharded_by_xla(partial(_logits, multiply), h, (0, 1, None))
    logits = head(params, h)
    return logits.swapaxes(0, 1), last_carry


def step(
    params: Params, token: Integer[AnyArray, "B"] | Bool[AnyArray, "B"], carry: ModelCarry
) -> tuple[Float[Array, "B V"], ModelCarry]:
    """Compute `apply` for one token per row, without the time axis.

    Args:
      token: one per row.
      carry: the state before the token, from `initial_carry`, `apply` or a step.

    Returns:
      The logits of the next token, and the next carry.

    Raises:
      ValueError: the tokens are not integers (B,), or the carry is None or does not fit.
    """
    params = on_device(params)
    token = as_tokens("token", token)
    if token.ndim != 1:
        raise ValueError(f"token is {token.shape}; it must be (B,), one token per row.")
    with forward_mode_explained():
        return _step(params, jnp.asarray(token), carry)


@jax.jit  # outside of `jit`, one program; called op by op, a step would take ten times as long
def _step(params: Params, token: Array, carry: ModelCarry) -> tuple[Array, ModelCarry]:
    x = embed(params.embedding, token)
    h, carry = step_of_layers(params.layers, x, carry)
    return _logits(matmul, params, h), carry


def stepper(
    params: Params,
) -> Callable[[Int[Array, "B"], ModelCarry], tuple[Float[Array, "B V"], ModelCarry]]:
    """Return a faster `step` for many tokens; it equals `step` up to rounding.

    For a small vocabulary, it computes the first layer's product with the whole embedding once.
    """
    params = on_device(params)
    has_table = len(params.embedding) <= SMALL_VOCABULARY
    first, *others = params.layers
    first_step = cells.stepper(first, params.embedding if has_table else None)
    steps = [first_step, *(cells.stepper(layer, None) for layer in others)]

    def step(token: Array, carry: ModelCarry) -> tuple[Array, ModelCarry]:
        x = token if has_table else embed(params.embedding, token)
        carry_after = []
        for step_layer, layer_carry in zip(steps, carry, strict=True):
            layer_carry = step_layer(layer_carry, x)
            carry_after.append(layer_carry)
            x = hidden(layer_carry)
        return _logits(matmul, params, x), tuple(carry_after)

    return step


def check_params(params: object) -> None:
    """Raise UserError unless a value is a model's parameters."""
    if not isinstance(params, Params):
        raise UserError(
            f"params is {type_name(params)}; it must be a jaxgru.lm.Params, such as lm.init "
            "returns, or the first of the three values that lm.load returns."
        )


def on_device(params: Params) -> Params:
    """Return the parameters as JAX arrays; a caller may pass NumPy arrays.

    Raises:
      UserError: they are not a model's.
    """
    check_params(params)
    if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params)):
        return params  # faster than rebuilding the tree
    return jax.tree.map(partial(as_jax, "a parameter"), params)


# Called outside of `jit`, this is one program; within, it changes nothing.
@partial(jax.jit, static_argnums=0)
def _logits(
    multiply: Callable[[Array, Array], Array], params: Params, h: Float[Array, "... H"]
) -> Float[Array, "... V"]:
    if params.norm is not None:
        h = layer_norm(params.norm, h)
    return plus(multiply(h, params.Wo), params.head.bo)


def token_nll(
    logits: Float[Array, "*batch V"], targets: Int[AnyArray, "*batch"]
) -> Float[Array, "*batch"]:
    """Compute −log softmax(logits)[target] in nats: the cross-entropy of each prediction.

    In float32 at least. NaN for a target outside the vocabulary.
    """
    logits = at_least_float32(as_jax("logits", logits))
    targets = as_tokens("targets", targets)
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets is {targets.shape}; it must be {logits.shape[:-1]}.")
    if targets.dtype == bool:
        targets = targets.astype(jnp.uint8)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    # A negative index would count from the end.
    return jnp.where(targets < 0, jnp.nan, log_z - target_logits)


def layer_norm(p: LayerNormParams, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    """Compute (x − mean) / √(variance + 1e-5) · scale + shift, over the last axis."""
    return plus(layer_norm_without_shift(x.astype(widest(p.scale, x)), p.scale), p.shift)
