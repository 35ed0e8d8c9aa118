"""The GRU, with the reset gate after the matrix product (the default) or before it."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar, TypeAlias

import jax.numpy as jnp
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.arrays import plus
from jaxgru.cells.carry import Hidden
from jaxgru.cells.contract import Recurrence, Weights, register
from jaxgru.cells.gated import Activated, ByHand, Equations, StateWeights, sizes_of_gates
from jaxgru.cells.initial_weights import check_defaults, gru_weights
from jaxgru.cells.layer_norm_gru import LayerNormGRUCell, init_layer_norm_gru
from jaxgru.cells.products import matmul, weight_gradient
from jaxgru.errors import check_flags, check_one_of
from jaxgru.pytrees import struct


class _GRU(Activated[Hidden], ByHand[Hidden]):
    """What the two GRUs share."""

    c: Float[Array, "2*H"] | None
    gates: ClassVar[str] = "zrn"

    def sizes(self) -> tuple[int, int] | None:
        vectors = [(3, self.b), (2, self.c), (1, getattr(self, "cn", None))]
        return sizes_of_gates(3, self.W, self.U, vectors)

    def inputs(self, x: Float[Array, "*n E"]) -> Float[Array, "*n GH"]:
        """Return x·W + b, with c added to the biases of z and r."""
        b = self.b
        if self.c is not None:
            b = b + jnp.pad(self.c, (0, len(self.b) - len(self.c)))
        return plus(matmul(x, self.W), b)


@struct
class GRUCell(_GRU):
    """A GRU layer whose reset gate comes after the product.

    W, U and b hold the gates z, r and n side by side, and c those of z and r:

        z  = σ(x·Wz + h·Uz + bz + cz)               update gate
        r  = σ(x·Wr + h·Ur + br + cr)               reset gate
        n  = tanh(x·Wn + r ⊙ (h·Un + cn) + bn)      candidate
        h' = (1 − z) ⊙ h + z ⊙ n

    This is the GRU of PyTorch, cuDNN and Keras. z weights the new value n, as in Chung et al. 2014
    (arXiv 1412.3555). In PyTorch and ONNX, z weights the old state: it is 1 minus ours.

    U is (H, 3H), or (n, k, 3k): for each gate, the n blocks of a block-diagonal matrix. `c`, which
    PyTorch and the study have, is redundant in the equations, but AdamW updates it separately from
    b. None acts as zeros. With the `activation` "relu", ReLU takes the place of tanh; with `clip`,
    the arguments of σ and tanh are clipped to ±clip first, as in ONNX.
    """

    cn: Float[Array, "H"]  # the first leaf: Equinox reads leaves in order, and tells the GRUs by it
    W: Float[Array, "E GH"]
    U: StateWeights
    b: Float[Array, "GH"]
    c: Float[Array, "2*H"] | None = None
    activation: str = field(default="tanh", kw_only=True, metadata={"static": True})
    clip: float | None = field(default=None, kw_only=True, metadata={"static": True})
    reset_gate: ClassVar[str] = "after"

    def equations(self) -> tuple[Recurrence[Hidden], Weights]:
        return ResetAfter(*self.functions()), (self.U, self.cn)


@struct
class ResetBeforeGRUCell(_GRU):
    """A GRU layer whose reset gate comes before the product: as `GRUCell`, but

        n  = tanh(x·Wn + (r ⊙ h)·Un + bn)           candidate

    This is the GRU of Cho et al. 2014 (arXiv 1406.1078) and of the study. It is a class of its own,
    without cn, so that no library restores the weights of one GRU as those of the other.
    """

    W: Float[Array, "E GH"]
    U: StateWeights
    b: Float[Array, "GH"]
    c: Float[Array, "2*H"] | None = None
    activation: str = field(default="tanh", kw_only=True, metadata={"static": True})
    clip: float | None = field(default=None, kw_only=True, metadata={"static": True})
    reset_gate: ClassVar[str] = "before"

    def equations(self) -> tuple[Recurrence[Hidden], Weights]:
        Uzr, Un = jnp.split(self.U, [self.U.shape[-1] // 3 * 2], axis=-1)
        return ResetBefore(*self.functions()), (Uzr, Un)


AnyGRU: TypeAlias = GRUCell | ResetBeforeGRUCell


@register
def init_gru(
    key: PRNGKeyArray,
    in_features: int,
    hidden_dim: int,
    *,
    second_bias: bool = False,
    dtype: DTypeLike = jnp.float32,
    reset_gate: str = "after",
    init_scheme: str = "orthogonal",
    kernel_init: Initializer | None = None,
    recurrent_kernel_init: Initializer | None = None,
    bias_init: Initializer | None = None,
    layer_norm: bool = False,
    num_blocks: int = 1,
    activation: str = "tanh",
    clip: float | None = None,
) -> AnyGRU | LayerNormGRUCell:
    """Draw the initial parameters of a GRU layer.

    As in Flax, each gate's U is orthogonal, its W normal with the variance 1/E (truncated), and b
    zeros. With `init_scheme` "pytorch", W and b are uniform in ±1/√E, and U in ±1/√(its rows), as
    in PyTorch's `nn.Linear` and the study. c and cn are zeros.

    Args:
      in_features: E, the size of the input at a step.
      hidden_dim: H, the size of the state.
      second_bias: also return c.
      dtype: of the parameters, floating-point.
      reset_gate: "after" for `GRUCell`, "before" for `ResetBeforeGRUCell`.
      init_scheme: "orthogonal" or "pytorch"; see above.
      kernel_init: draws each gate's W (E, H) instead: a function `(key, shape, dtype)`, such as
        `jax.nn.initializers.orthogonal()`.
      recurrent_kernel_init: draws each gate's U (H, H), or each of its blocks, instead.
      bias_init: draws each gate's b (H,) instead.
      layer_norm: normalise within the cell, and return `LayerNormGRUCell`.
      num_blocks: n, a divisor of H. The units form n groups, and each unit reads only the h of its
        own group: U (n, H/n, H/n) holds the blocks of a block-diagonal matrix.
      activation: "tanh" or "relu", the candidate's function.
      clip: the arguments of σ and tanh are clipped to ±clip, as in ONNX; None: they are not.

    Raises:
      ValueError: an argument is not as described above, or two do not go together; the message says
        which and what would be right.

    Example:
      ```python
      layer = jaxgru.init_gru(jax.random.key(0), in_features=3, hidden_dim=4, reset_gate="before")
      y, h = jaxgru.unroll(layer, jnp.ones((2, 5, 3)))
      ```
    """
    check_flags(second_bias=second_bias, layer_norm=layer_norm)
    options: dict[str, Any] = dict(
        init_scheme=init_scheme,
        kernel_init=kernel_init,
        recurrent_kernel_init=recurrent_kernel_init,
        bias_init=bias_init,
        num_blocks=num_blocks,
    )
    functions: dict[str, Any] = dict(activation=activation, clip=clip)
    if layer_norm:
        others = dict(second_bias=second_bias, reset_gate=reset_gate)
        check_defaults("layer_norm", init_gru, **others, **functions)
        return init_layer_norm_gru(key, in_features, hidden_dim, dtype, **options)
    check_one_of("reset_gate", reset_gate, ("before", "after"))
    weights = gru_weights(key, in_features, hidden_dim, dtype, **options)
    if second_bias:
        weights["c"] = jnp.zeros(2 * hidden_dim, dtype)
    if reset_gate == "before":
        return ResetBeforeGRUCell(**weights, **functions)
    return GRUCell(cn=jnp.zeros(hidden_dim, dtype), **weights, **functions)


class ResetBefore(Equations[Hidden]):
    """The reset gate before the product. Uzr (H, 2H), Un (H, H)."""

    num_gates = 3

    def step(self, layout, U, carry, a):
        Uzr, Un = U
        a_z, a_r, a_n = a
        h = carry
        Uh_z, Uh_r = layout.split(layout.times(Uzr, h), 2)
        z = self.sigmoid(a_z + Uh_z)
        r = self.sigmoid(a_r + Uh_r)
        n = self.phi(self.clipped(a_n + layout.times(Un, r * h)))
        h_new = (1 - z) * h + z * n
        return h_new, (layout.join(z, r), n)

    def step_gradient(self, layout, U, d_carry, carry, after, residuals):
        Uzr, Un = U
        zr, n = residuals
        z, r = layout.split(zr, 2)
        h = carry
        dh = d_carry
        da_n = dh * (z * (1 - n * n))
        d_rh = layout.times_transposed(Un, da_n)
        da_zr = layout.join(dh, d_rh) * (layout.join(n - h, h) * zr * (1 - zr))
        d_before = dh * (1 - z) + d_rh * r + layout.times_transposed(Uzr, da_zr)
        return d_before, (da_zr, da_n)

    def gradients(self, layout, U, carry, after, residuals, backward_residuals):
        Uzr, Un = U
        zr, _ = residuals
        da_zr, da_n = backward_residuals
        h = carry
        _, r = layout.split(zr, 2)
        dUzr = weight_gradient(Uzr, layout.drop(h), da_zr)
        dUn = weight_gradient(Un, layout.drop(r * h), da_n)
        return (dUzr, dUn), layout.join(da_zr, da_n)


class ResetAfter(Equations[Hidden]):
    """The reset gate after the product. U (H, 3H), m = h·Un + cn."""

    num_gates = 3

    def step(self, layout, U, carry, a):
        Uzrn, cn = U
        a_z, a_r, a_n = a
        h = carry
        Uh_z, Uh_r, Uh_n = layout.split(layout.times(Uzrn, h), 3)
        z = self.sigmoid(a_z + Uh_z)
        r = self.sigmoid(a_r + Uh_r)
        m = Uh_n + cn
        n = self.phi(self.clipped(a_n + r * m))
        h_new = (1 - z) * h + z * n
        return h_new, (layout.join(z, r), m, n)

    def step_gradient(self, layout, U, d_carry, carry, after, residuals):
        Uzrn, _ = U
        zr, m, n = residuals
        z, r = layout.split(zr, 2)
        h = carry
        dh = d_carry
        of_n = z * (1 - n * n)
        of_zr = layout.join(n - h, of_n * m) * zr * (1 - zr)
        d_Uh = layout.join(dh, dh, dh) * layout.join(of_zr, of_n * r)
        d_before = dh * (1 - z) + layout.times_transposed(Uzrn, d_Uh)
        return d_before, (dh * of_n, d_Uh)

    def gradients(self, layout, U, carry, after, residuals, backward_residuals):
        Uzrn, _ = U
        da_n, d_Uh = backward_residuals
        h = carry
        dUzrn = weight_gradient(Uzrn, layout.drop(h), d_Uh)
        d_z, d_r, d_n = layout.split(d_Uh, 3)
        dcn = d_n.sum((0, 1))
        return (dUzrn, dcn), layout.join(d_z, d_r, da_n)
