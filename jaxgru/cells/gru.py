"""The GRU, with the reset gate after the matrix product (the default) or before it."""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

import jax.numpy as jnp
from jax.nn import sigmoid
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.cells.base import (
    Cell,
    Hidden,
    Recurrence,
    RecurrentLayer,
    Size,
    StateWeights,
    aligned,
    check_flags,
    plus,
    sizes_of_gates,
    struct,
)
from jaxgru.cells.initial_weights import gru_weights
from jaxgru.cells.layer_norm_gru import LayerNormGRUParams, init_layer_norm_gru
from jaxgru.cells.products import dense, gradient_of
from jaxgru.errors import UserError, shown


@struct
class GRUParams:
    """Parameters of a GRU layer whose reset gate comes after the product.

    W, U and b hold the gates z, r and n side by side, and c those of z and r:

        z  = σ(x·Wz + h·Uz + bz + cz)               update gate
        r  = σ(x·Wr + h·Ur + br + cr)               reset gate
        n  = tanh(x·Wn + r ⊙ (h·Un + cn) + bn)      candidate
        h' = (1 − z) ⊙ h + z ⊙ n

    This is the GRU of PyTorch, cuDNN and Keras. z weights the new value n, as in Chung et al. 2014
    (arXiv 1412.3555). In PyTorch and ONNX, z weights the old state: it is 1 minus ours.

    U is (H, 3H), or (n, k, 3k): for each gate, the n blocks of a block-diagonal matrix. `c`, which
    PyTorch and the study have, is redundant in the equations, but AdamW updates it separately from
    b. None acts as zeros.
    """

    cn: Float[Array, "H"]  # the first leaf: Equinox reads leaves in order, and tells the GRUs by it
    W: Float[Array, "E GH"]
    U: StateWeights
    b: Float[Array, "GH"]
    c: Float[Array, "2*H"] | None = None
    gates: ClassVar[str] = "zrn"
    reset_gate: ClassVar[str] = "after"


@struct
class ResetBeforeGRUParams:
    """Parameters of a GRU layer whose reset gate comes before the product: as `GRUParams`, but

        n  = tanh(x·Wn + (r ⊙ h)·Un + bn)           candidate

    This is the GRU of Cho et al. 2014 (arXiv 1406.1078) and of the study. It is a class of its own,
    without cn, so that no library restores the weights of one GRU as those of the other.
    """

    W: Float[Array, "E GH"]
    U: StateWeights
    b: Float[Array, "GH"]
    c: Float[Array, "2*H"] | None = None
    gates: ClassVar[str] = "zrn"
    reset_gate: ClassVar[str] = "before"


AnyGRU: TypeAlias = GRUParams | ResetBeforeGRUParams


def init_gru(
    key: PRNGKeyArray,
    in_features: int,
    hidden_dim: int,
    *,
    second_bias: bool = False,
    dtype: DTypeLike = jnp.float32,
    reset_gate: str = "after",
    kernel_init: Initializer | None = None,
    recurrent_kernel_init: Initializer | None = None,
    bias_init: Initializer | None = None,
    layer_norm: bool = False,
    num_blocks: int = 1,
) -> AnyGRU | LayerNormGRUParams:
    """Draw the initial parameters of a GRU layer.

    W and b are uniform in ±1/√E, and U in ±1/√(its rows), as in PyTorch's `nn.Linear`; c and cn
    are zeros.

    Args:
      in_features: E, the size of the input at a step.
      hidden_dim: H, the size of the state.
      second_bias: also return c.
      dtype: of the parameters, floating-point.
      reset_gate: "after" for `GRUParams`, "before" for `ResetBeforeGRUParams`.
      kernel_init: draws each gate's W (E, H) instead: a function `(key, shape, dtype)`, such as
        `jax.nn.initializers.orthogonal()`.
      recurrent_kernel_init: draws each gate's U (H, H), or each of its blocks, instead.
      bias_init: draws each gate's b (H,) instead.
      layer_norm: normalise within the cell, and return `LayerNormGRUParams`.
      num_blocks: n, a divisor of H. The units form n groups, and each unit reads only the h of its
        own group: U (n, H/n, H/n) holds the blocks of a block-diagonal matrix.

    Raises:
      ValueError: a size is not a positive whole number; the dtype is not floating-point; an
        initializer is not a function, or does not return floating-point numbers of the given shape;
        a flag is not a bool; `reset_gate` is unknown; `num_blocks` does not divide H; or
        `layer_norm` is combined with `second_bias` or with `reset_gate` "before".
    """
    check_flags(second_bias=second_bias, layer_norm=layer_norm)
    options: dict[str, Any] = dict(
        kernel_init=kernel_init,
        recurrent_kernel_init=recurrent_kernel_init,
        bias_init=bias_init,
        num_blocks=num_blocks,
    )
    if layer_norm:
        if second_bias or reset_gate != "after":
            raise UserError(
                "with layer_norm, second_bias must be False and reset_gate 'after'; they are "
                f"{second_bias} and {shown(reset_gate)}."
            )
        return init_layer_norm_gru(key, in_features, hidden_dim, dtype, **options)
    if reset_gate not in ("before", "after"):
        raise UserError(f"reset_gate is {shown(reset_gate)}; it must be before or after.")
    weights = gru_weights(key, in_features, hidden_dim, dtype, **options)
    if second_bias:
        weights["c"] = jnp.zeros(2 * hidden_dim, dtype)
    if reset_gate == "before":
        return ResetBeforeGRUParams(**weights)
    return GRUParams(cn=jnp.zeros(hidden_dim, dtype), **weights)


def gru_cell(p: AnyGRU, h: Hidden, x: Float[Array, "B E"]) -> Hidden:
    """Compute one step: h → h'."""
    p, h, x = aligned(dense(p), h, x)
    H = h.shape[-1]
    x_zr, x_n = jnp.split(x @ p.W + p.b, [2 * H], axis=-1)
    U_zr, U_n = jnp.split(p.U, [2 * H], axis=-1)
    z, r = jnp.split(sigmoid(plus(x_zr + h @ U_zr, p.c)), 2, axis=-1)
    if isinstance(p, ResetBeforeGRUParams):
        n = jnp.tanh(x_n + (r * h) @ U_n)
    else:
        n = jnp.tanh(x_n + r * (h @ U_n + p.cn))
    return (1 - z) * h + z * n


def sizes(p: AnyGRU) -> tuple[int, int] | None:
    """Return (E, H), or None if the shapes contradict each other."""
    vectors: list[tuple[int, Any]] = [(3, p.b)]
    if p.c is not None:
        vectors.append((2, p.c))
    if isinstance(p, GRUParams):
        vectors.append((1, p.cn))
    return sizes_of_gates(3, p.W, p.U, vectors)


def zero_carry(p: AnyGRU, batch_size: Size) -> Hidden:
    """Return the state before the first step: zeros (B, H) in the biases' dtype."""
    return jnp.zeros((batch_size, len(p.b) // 3), p.b.dtype)


# --- Many steps. a (T, B, 3H) is x·W + b of z, r, n.


def prepare(p: AnyGRU) -> RecurrentLayer:
    """Prepare a layer for many steps."""
    b = p.b
    if p.c is not None:
        b_zr, b_n = jnp.split(p.b, [len(p.c)])
        b = jnp.concatenate([b_zr + p.c, b_n])
    if isinstance(p, GRUParams):
        return RecurrentLayer(p.W, b, (p.U, p.cn), RESET_AFTER)
    U = jnp.split(p.U, [p.U.shape[-1] // 3 * 2], axis=-1)
    return RecurrentLayer(p.W, b, tuple(U), RESET_BEFORE)


# Reset gate before the product. Uzr (H, 2H), Un (H, H).


def _before_step(layout, U, h, a):
    (Uzr, Un), (a_z, a_r, a_n) = U, a
    Uh_z, Uh_r = layout.gates(layout.times(Uzr, h), 2)
    z, r = sigmoid(a_z + Uh_z), sigmoid(a_r + Uh_r)
    n = jnp.tanh(a_n + layout.times(Un, r * h))
    return (1 - z) * h + z * n, (layout.join(z, r), n)


def _before_factors(layout, h, after, saved):
    """Return the factors of da_n = dh·(…), (da_z, da_r) = (dh, d_rh)·(…) and dh·(…), and r."""
    zr, n = saved
    z, r = layout.gates(zr, 2)
    return z * (1 - n * n), layout.join(n - h, h) * zr * (1 - zr), 1 - z, r


def _before_step_gradient(layout, U, dh, factors):
    (Uzr, Un), (of_n, of_zr, of_h, r) = U, factors
    da_n = dh * of_n
    d_rh = layout.times(Un, da_n)
    da_zr = layout.join(dh, d_rh) * of_zr
    return dh * of_h + d_rh * r + layout.times(Uzr, da_zr), (da_zr, da_n)


def _before_gradients(layout, U, h, after, saved, kept):
    (Uzr, Un), (zr, _), (da_zr, da_n) = U, saved, kept
    _, r = layout.gates(zr, 2)
    return (gradient_of(Uzr, h, da_zr), gradient_of(Un, r * h, da_n)), layout.join(da_zr, da_n)


RESET_BEFORE = Recurrence(
    3, _before_step, _before_factors, _before_step_gradient, _before_gradients
)


# Reset gate after the product. U (H, 3H), m = h·Un + cn.


def _after_step(layout, U, h, a):
    (U, cn), (a_z, a_r, a_n) = U, a
    Uh_z, Uh_r, Uh_n = layout.gates(layout.times(U, h), 3)
    z, r = sigmoid(a_z + Uh_z), sigmoid(a_r + Uh_r)
    m = Uh_n + cn
    n = jnp.tanh(a_n + r * m)
    return (1 - z) * h + z * n, (layout.join(z, r), m, n)


def _after_factors(layout, h, after, saved):
    """Return the factors of da_n = dh·(…), (da_z, da_r, da_n·r) = (dh, dh, dh)·(…) and dh·(…)."""
    zr, m, n = saved
    z, r = layout.gates(zr, 2)
    of_n = z * (1 - n * n)
    of_zr = layout.join(n - h, of_n * m) * zr * (1 - zr)
    return of_n, layout.join(of_zr, of_n * r), 1 - z


def _after_step_gradient(layout, U, dh, factors):
    (U, _), (of_n, of_Uh, of_h) = U, factors
    d_Uh = layout.join(dh, dh, dh) * of_Uh
    return dh * of_h + layout.times(U, d_Uh), (dh * of_n, d_Uh)


def _after_gradients(layout, U, h, after, saved, kept):
    (U, _), (da_n, d_Uh) = U, kept
    d_z, d_r, d_n = layout.gates(d_Uh, 3)
    return (gradient_of(U, h, d_Uh), d_n.sum((0, 1))), layout.join(d_z, d_r, da_n)


RESET_AFTER = Recurrence(3, _after_step, _after_factors, _after_step_gradient, _after_gradients)


GRU = Cell(
    name="gru",
    params=(GRUParams, ResetBeforeGRUParams),
    init=lambda key, E, H, options, dtype: init_gru(
        key,
        E,
        H,
        second_bias=options.second_bias,
        reset_gate=options.reset_gate,
        num_blocks=options.num_blocks,
        dtype=dtype,
    ),
    sizes=sizes,
    step=gru_cell,
    zero_carry=zero_carry,
    options=frozenset({"second_bias", "reset_gate", "num_blocks"}),
    prepare=prepare,
)
