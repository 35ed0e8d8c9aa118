"""The LSTM with peepholes, and the one whose input and forget gates are coupled."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

import jax.numpy as jnp
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.cells.carry import LSTMState
from jaxgru.cells.contract import register
from jaxgru.cells.gated import Activated, AnyLSTM, Equations, sizes_of_gates
from jaxgru.cells.initial_weights import lstm_weights
from jaxgru.cells.layout import Layout
from jaxgru.errors import check_flags
from jaxgru.pytrees import struct


class _Peeping(Activated[LSTMState], AnyLSTM):
    """Both kinds; `gates` says which gates they have, and `peepholes` which of them see c."""

    p: Float[Array, "PH"] | None
    peepholes: ClassVar[str]

    def sizes(self) -> tuple[int, int] | None:
        vectors = [(len(self.gates), self.b), (len(self.peepholes), self.p)]
        return sizes_of_gates(len(self.gates), self.W, self.U, vectors)

    def step(self, layout: Layout, carry: LSTMState, a: Float[Array, "B GH"]) -> LSTMState:
        functions: Equations[LSTMState] = Equations(*self.functions())
        h, c = carry
        a_of = by_letter(self.gates, a + layout.times(self.U, h))
        p_of = {} if self.p is None else by_letter(self.peepholes, self.p[None])

        def sigmoid(gate: str, c: Array) -> Array:
            """Return σ of a gate that sees c, if there are peepholes."""
            return functions.sigmoid(a_of[gate] + p_of[gate] * c if p_of else a_of[gate])

        i = sigmoid("i", c)
        f = sigmoid("f", c) if "f" in a_of else 1 - i
        c = f * c + i * functions.phi(functions.clipped(a_of["g"]))
        o = sigmoid("o", c)
        return LSTMState(o * functions.phi(c), c)


def by_letter(gates: str, x: Float[Array, "*n GH"]) -> dict[str, Array]:
    """Return what stands side by side by the letters of the gates."""
    return dict(zip(gates, jnp.split(x, len(gates), axis=-1), strict=True))


@struct
class PeepholeLSTMCell(_Peeping):
    """An LSTM layer whose gates see c: as `LSTMCell`, with p for the gates f, i and o.

        f  = σ(x·Wf + h·Uf + pf ⊙ c + bf)           forget gate
        i  = σ(x·Wi + h·Ui + pi ⊙ c + bi)           input gate
        c' = f ⊙ c + i ⊙ tanh(x·Wg + h·Ug + bg)
        o  = σ(x·Wo + h·Uo + po ⊙ c' + bo)          output gate
        h' = o ⊙ tanh(c')

    See Gers & Schmidhuber 2000 (IJCNN) and Graves 2013 (arXiv 1308.0850, eq. 7 to 11), whose
    peephole weights are diagonal, as here. `activation` and `clip` are as in `LSTMCell`.
    """

    W: Float[Array, "E GH"]
    U: Float[Array, "H GH"]
    b: Float[Array, "GH"]
    p: Float[Array, "PH"] | None
    activation: str = field(default="tanh", kw_only=True, metadata={"static": True})
    clip: float | None = field(default=None, kw_only=True, metadata={"static": True})
    peepholes: ClassVar[str] = "fio"


@struct
class CoupledLSTMCell(_Peeping):
    """An LSTM layer that forgets as much as it reads: f = 1 − i.

    Otherwise as `LSTMCell` or, with p for the gates i and o, `PeepholeLSTMCell`. W, U and b
    hold the gates i, o and g side by side. See Greff et al. 2017 (arXiv 1503.04069), who call it
    CIFG. It has three quarters of an LSTM's weights.
    """

    W: Float[Array, "E GH"]
    U: Float[Array, "H GH"]
    b: Float[Array, "GH"]
    p: Float[Array, "PH"] | None = None
    activation: str = field(default="tanh", kw_only=True, metadata={"static": True})
    clip: float | None = field(default=None, kw_only=True, metadata={"static": True})
    gates: ClassVar[str] = "iog"
    peepholes: ClassVar[str] = "io"


@register
def init_peephole_lstm(
    key: PRNGKeyArray,
    in_features: int,
    hidden_dim: int,
    *,
    dtype: DTypeLike = jnp.float32,
    init_scheme: str = "orthogonal",
    kernel_init: Initializer | None = None,
    recurrent_kernel_init: Initializer | None = None,
    bias_init: Initializer | None = None,
    activation: str = "tanh",
    clip: float | None = None,
) -> PeepholeLSTMCell:
    """Draw the initial parameters of an LSTM layer with peepholes, which begin as zeros.

    Arguments and errors are those of `init_lstm`.

    Example:
      ```python
      layer = jaxgru.init_peephole_lstm(jax.random.key(0), in_features=3, hidden_dim=4)
      y, (h, c) = jaxgru.unroll(layer, jnp.ones((2, 5, 3)))
      ```
    """
    weights = lstm_weights(
        key, in_features, hidden_dim, dtype, bias_init,
        init_scheme=init_scheme, kernel_init=kernel_init,
        recurrent_kernel_init=recurrent_kernel_init,
    )  # fmt: skip
    p = jnp.zeros(3 * hidden_dim, dtype)
    return PeepholeLSTMCell(**weights, p=p, activation=activation, clip=clip)


@register
def init_coupled_lstm(
    key: PRNGKeyArray,
    in_features: int,
    hidden_dim: int,
    *,
    peepholes: bool = False,
    dtype: DTypeLike = jnp.float32,
    init_scheme: str = "orthogonal",
    kernel_init: Initializer | None = None,
    recurrent_kernel_init: Initializer | None = None,
    bias_init: Initializer | None = None,
    activation: str = "tanh",
    clip: float | None = None,
) -> CoupledLSTMCell:
    """Draw the initial parameters of an LSTM layer whose input and forget gates are coupled.

    Other arguments and errors are those of `init_lstm`.

    Args:
      peepholes: the gates i and o see c; p begins as zeros.

    Example:
      ```python
      layer = jaxgru.init_coupled_lstm(jax.random.key(0), in_features=3, hidden_dim=4)
      y, (h, c) = jaxgru.unroll(layer, jnp.ones((2, 5, 3)))
      ```
    """
    check_flags(peepholes=peepholes)
    weights = lstm_weights(
        key, in_features, hidden_dim, dtype, bias_init,
        init_scheme=init_scheme, kernel_init=kernel_init,
        recurrent_kernel_init=recurrent_kernel_init,
    )  # fmt: skip
    without_f = {name: leaf[..., hidden_dim:] for name, leaf in weights.items()}
    p = jnp.zeros(2 * hidden_dim, dtype) if peepholes else None
    return CoupledLSTMCell(**without_f, p=p, activation=activation, clip=clip)
