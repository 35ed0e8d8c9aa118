"""The LSTM with a forget gate, and with a recurrent projection."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.cells.carry import LSTMState
from jaxgru.cells.contract import Recurrence, Weights, register
from jaxgru.cells.gated import (
    Activated,
    AnyLSTM,
    ByHand,
    Equations,
    StateWeights,
    sizes_of_gates,
)
from jaxgru.cells.initial_weights import check_defaults, initializers, lstm_weights
from jaxgru.cells.layer_norm_lstm import LayerNormLSTMCell, init_layer_norm_lstm
from jaxgru.cells.products import weight_gradient
from jaxgru.errors import check_flags
from jaxgru.pytrees import struct


@struct
class LSTMCell(Activated[LSTMState], ByHand[LSTMState], AnyLSTM):
    """An LSTM layer: W for the input, U for the state, b the biases.

    Each holds the gates f, i, o and g side by side:

        f  = σ(x·Wf + h·Uf + bf)            forget gate
        i  = σ(x·Wi + h·Ui + bi)            input gate
        o  = σ(x·Wo + h·Uo + bo)            output gate
        g  = tanh(x·Wg + h·Ug + bg)         candidate
        c' = f ⊙ c + i ⊙ g
        h' = o ⊙ tanh(c')

    U is (H, 4H), or (n, k, 4k): for each gate, the n blocks of a block-diagonal matrix. See
    Hochreiter & Schmidhuber 1997 (Neural Computation 9(8)) and, for the forget gate, Gers et al.
    2000 (Neural Computation 12(10)). With the `activation` "relu", ReLU takes the place of tanh;
    with `clip`, the arguments of the gates' σ and tanh are clipped to ±clip first, as in ONNX.
    """

    W: Float[Array, "E GH"]
    U: StateWeights
    b: Float[Array, "GH"]
    activation: str = field(default="tanh", kw_only=True, metadata={"static": True})
    clip: float | None = field(default=None, kw_only=True, metadata={"static": True})

    def sizes(self) -> tuple[int, int] | None:
        return sizes_of_gates(4, self.W, self.U, [(4, self.b)])

    def equations(self) -> tuple[Recurrence[LSTMState], Weights]:
        return LSTM(*self.functions()), (self.U,)


@struct
class ProjectedLSTMCell(ByHand[LSTMState], AnyLSTM):
    """An LSTM layer with a projection: those of `LSTMCell`, and P.

    The equations are those of `LSTMCell`, but h' = (o ⊙ tanh(c'))·P, with p units, while c has H
    (Sak et al. 2014, arXiv 1402.1128). As in `torch.nn.LSTM`, the paper's second, non-recurrent
    projection is left out.
    """

    W: Float[Array, "E GH"]
    U: Float[Array, "p GH"]
    b: Float[Array, "GH"]
    P: Float[Array, "H p"]

    def sizes(self) -> tuple[int, int] | None:
        """Return (E, p); see `Cell.sizes`."""
        p = self.P.shape[-1]
        fitting = sizes_of_gates(4, self.W, self.U, [(4, self.b)], p)
        return (fitting[0], p) if fitting and self.P.shape == (fitting[1], p) else None

    def hidden_sizes(self) -> str:
        return f"hidden {len(self.P)}, proj_size {self.P.shape[1]}"

    def equations(self) -> tuple[Recurrence[LSTMState], Weights]:
        return LSTM(), (self.U, self.P)


@register
def init_lstm(
    key: PRNGKeyArray,
    in_features: int,
    hidden_dim: int,
    *,
    dtype: DTypeLike = jnp.float32,
    init_scheme: str = "orthogonal",
    kernel_init: Initializer | None = None,
    recurrent_kernel_init: Initializer | None = None,
    bias_init: Initializer | None = None,
    layer_norm: bool = False,
    num_blocks: int = 1,
    proj_size: int | None = None,
    activation: str = "tanh",
    clip: float | None = None,
) -> LSTMCell | LayerNormLSTMCell | ProjectedLSTMCell:
    """Draw the initial parameters of an LSTM layer.

    As in Flax, each gate's U and P are orthogonal, and its W is normal with the variance 1/E
    (truncated). With `init_scheme` "pytorch", W is uniform in ±1/√E, and U and P in ±1/√(their
    rows), as in PyTorch's `nn.Linear` and the study. b is zeros, but ones in the forget gate
    (Jozefowicz et al. 2015, PMLR 37).

    Args:
      in_features: E, the size of the input at a step.
      hidden_dim: H, the size of h and of c.
      dtype: of the parameters, floating-point.
      init_scheme: "orthogonal" or "pytorch"; see above.
      kernel_init: as for `init_gru`.
      recurrent_kernel_init: as for `init_gru`; it also draws P (H, p).
      bias_init: as for `init_gru`, also for the forget gate.
      layer_norm: normalise within the cell, and return `LayerNormLSTMCell`.
      num_blocks: n, a divisor of H. The units form n groups (heads), and each unit reads only the h
        of its own group: U (n, H/n, H/n) holds the blocks of a block-diagonal matrix.
      proj_size: p; project h to this size, and return `ProjectedLSTMCell`. c keeps the size H.
      activation: "tanh" or "relu", the function of the candidate and of c'.
      clip: the arguments of the gates' σ and tanh, not that of tanh(c'), are clipped to ±clip, as
        in ONNX Runtime; None: they are not.

    Raises:
      ValueError: an argument is not as described above, or two do not go together; the message says
        which and what would be right.

    Example:
      ```python
      layer = jaxgru.init_lstm(jax.random.key(0), in_features=3, hidden_dim=4)
      y, (h, c) = jaxgru.unroll(layer, jnp.ones((2, 5, 3)))
      ```
    """
    check_flags(layer_norm=layer_norm)
    options: dict[str, Any] = dict(
        init_scheme=init_scheme,
        kernel_init=kernel_init,
        recurrent_kernel_init=recurrent_kernel_init,
        bias_init=bias_init,
    )
    functions: dict[str, Any] = dict(activation=activation, clip=clip)
    if proj_size is not None:
        others = dict(layer_norm=layer_norm, num_blocks=num_blocks)
        check_defaults("proj_size", init_lstm, **others, **functions)
        return init_projected_lstm(key, in_features, hidden_dim, proj_size, dtype, **options)
    options["num_blocks"] = num_blocks
    if layer_norm:
        check_defaults("layer_norm", init_lstm, **functions)
        return init_layer_norm_lstm(key, in_features, hidden_dim, dtype, **options)
    weights = lstm_weights(key, in_features, hidden_dim, dtype, **options)
    return LSTMCell(**weights, **functions)


def init_projected_lstm(
    key: PRNGKeyArray,
    E: int,
    H: int,
    proj_size: int,
    dtype: DTypeLike = jnp.float32,
    init_scheme: str = "orthogonal",
    recurrent_kernel_init: Initializer | None = None,
    **options: Any,
) -> ProjectedLSTMCell:
    """Draw initial parameters. See `init_lstm`."""
    weights = lstm_weights(
        key, E, H, dtype, init_scheme=init_scheme,
        recurrent_kernel_init=recurrent_kernel_init, state_size=proj_size, **options,
    )  # fmt: skip
    _, P, _ = initializers(
        E,
        proj_size,
        dtype,
        init_scheme,
        recurrent_kernel_init=recurrent_kernel_init,
        state_size=H,
    )
    return ProjectedLSTMCell(**weights, P=P(jax.random.fold_in(key, 9)))


class LSTM(Equations[LSTMState]):
    """Gates f, i, o, g. U (H, 4H); with a projection, U (p, 4H) and P (H, p)."""

    num_gates = 4

    def step(self, layout, U, carry, a):
        Ufiog, *P = U  # P is absent without a projection
        h, c = carry
        Uh = layout.split(layout.times(Ufiog, h), 4)
        a_f, a_i, a_o, a_g = (x + y for x, y in zip(a, Uh, strict=True))
        f = self.sigmoid(a_f)
        i = self.sigmoid(a_i)
        o = self.sigmoid(a_o)
        g = self.phi(self.clipped(a_g))
        c = f * c + i * g
        m = o * self.phi(c)
        h = layout.matmul(P[0], m) if P else m
        return LSTMState(h, c), (layout.join(f, i, o), g, *[m] * len(P))

    def step_gradient(self, layout, U, d_carry, carry, after, residuals):
        Ufiog, *P = U
        fio, g, *_ = residuals
        f, i, o = layout.split(fio, 3)
        dh, dc = d_carry
        tanh_c = jnp.tanh(after.c)
        dm = layout.matmul(P[0], dh) if P else dh
        dc = dc + dm * (o * (1 - tanh_c * tanh_c))
        of_fio = layout.join(carry.c, g, tanh_c) * fio * (1 - fio)
        da = layout.join(dc, dc, dm, dc) * layout.join(of_fio, i * (1 - g * g))
        d_before = LSTMState(layout.times_transposed(Ufiog, da), dc * f)
        return d_before, (da, *[dh] * len(P))

    def gradients(self, layout, U, carry, after, residuals, backward_residuals):
        Ufiog, *P = U
        _, _, *m = residuals
        da, *dh = backward_residuals
        dUfiog = weight_gradient(Ufiog, layout.drop(carry.h), da)
        dP = map(weight_gradient, P, m, dh)
        return (dUfiog, *dP), da
