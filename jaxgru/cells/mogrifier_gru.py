"""The Mogrifier GRU, whose input and state gate each other before the step of a GRU."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.nn import sigmoid
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.arrays import plus
from jaxgru.cells.carry import Hidden
from jaxgru.cells.contract import Cell, register
from jaxgru.cells.initial_weights import gru_weights
from jaxgru.cells.layout import Layout
from jaxgru.errors import check_whole
from jaxgru.pytrees import struct


@struct
class MogrifierGRUCell(Cell[Hidden]):
    """A Mogrifier GRU layer. W, U and b hold the gates z, r and n side by side.

    x and h gate each other in turn, x first. Each of these rounds has its own Q or R:

        x ← 2·σ(h·Q) ⊙ x,  Q = Qa·Qb        then        h ← 2·σ(x·R) ⊙ h,  R = Ra·Rb

    The gated x and h, here x' and h', enter the products of a GRU with the reset gate after the
    product; the state itself is not gated:

        z, r = σ(x'·[Wz Wr] + h'·[Uz Ur] + [bz br])
        n    = tanh(x'·Wn + r ⊙ (h'·Un + cn) + bn)
        next = (1 − z) ⊙ h + z ⊙ n

    The rounds are those of Melis et al. 2020 (arXiv 1909.01792, eq. 1 and 2), who apply them to an
    LSTM, with Q and R of rank k. There are n rounds for x, and n or n − 1 for h.
    """

    W: Float[Array, "E GH"]
    U: Float[Array, "H GH"]
    b: Float[Array, "GH"]
    cn: Float[Array, "H"]
    Qa: Float[Array, "n H k"]
    Qb: Float[Array, "n k E"]
    Ra: Float[Array, "m E k"]
    Rb: Float[Array, "m k H"]
    gates: ClassVar[str] = "zrn"
    recurrent: ClassVar[tuple[str, ...]] = ("U",)

    def sizes(self) -> tuple[int, int] | None:
        if not self.W.ndim == self.U.ndim == self.Qa.ndim - 1 == self.Ra.ndim - 1 == 2:
            return None
        E = len(self.W)
        H = len(self.U)
        n, _, k = self.Qa.shape
        m = len(self.Ra)
        gates = [(E, 3 * H), (H, 3 * H), (3 * H,), (H,)]
        rounds = [(n, H, k), (n, k, E), (m, E, k), (m, k, H)]
        fits = [leaf.shape for leaf in vars(self).values()] == gates + rounds
        return (E, H) if fits and n - m in (0, 1) else None

    def step(self, layout: Layout, state: Hidden, x: Float[Array, "B E"]) -> Hidden:
        return MogrifierGRUCell.prepared_step(self)(layout, state, x)

    def prepared_step(self) -> Callable[[Layout, Hidden, Array], Hidden]:
        Q = list(zip(self.Qa, self.Qb, strict=True))
        R = list(zip(self.Ra, self.Rb, strict=True))

        def step(layout: Layout, state: Hidden, x: Array) -> Hidden:
            times = layout.times
            matmul = layout.matmul
            h = state
            for i in range(len(Q) + len(R)):
                if i % 2 == 0:
                    Qa, Qb = Q[i // 2]
                    x = 2 * sigmoid(matmul(Qb, times(Qa, h))) * x
                else:
                    Ra, Rb = R[i // 2]
                    h = 2 * sigmoid(matmul(Rb, matmul(Ra, x))) * h
            x_z, x_r, x_n = jnp.split(plus(matmul(self.W, x), self.b), 3, axis=-1)
            h_z, h_r, h_n = jnp.split(times(self.U, h), 3, axis=-1)
            z = sigmoid(x_z + h_z)
            r = sigmoid(x_r + h_r)
            n = jnp.tanh(x_n + r * plus(h_n, self.cn))
            return (1 - z) * state + z * n

        return step


@register
def init_mogrifier_gru(
    key: PRNGKeyArray,
    in_features: int,
    hidden_dim: int,
    *,
    num_rounds: int = 5,
    rank: int | None = None,
    dtype: DTypeLike = jnp.float32,
    init_scheme: str = "orthogonal",
) -> MogrifierGRUCell:
    """Draw the initial parameters of a Mogrifier GRU layer.

    W, U, b and cn are drawn as by `init_gru`; the others are uniform in ±1/√(their rows).

    Args:
      in_features: E, the size of the input at a step.
      hidden_dim: H, the size of the state.
      num_rounds: how often x or h is gated, 2 or more. The paper found 5 and 6 best.
      rank: k, of the products Qa·Qb and Ra·Rb; None: H/8, rounded down, but at least 1.
      dtype: of the parameters, floating-point.
      init_scheme: "orthogonal" or "pytorch"; see `init_gru`.

    Raises:
      ValueError: an argument is not as described above, or two do not go together; the message says
        which and what would be right.

    Example:
      ```python
      layer = jaxgru.init_mogrifier_gru(jax.random.key(0), 3, 4, num_rounds=4, rank=2)
      y, h = jaxgru.unroll(layer, jnp.ones((2, 5, 3)))
      ```
    """
    E, H = in_features, hidden_dim
    check_whole("num_rounds", num_rounds, least=2)
    weights = gru_weights(key, E, H, dtype, init_scheme=init_scheme)  # it checks these arguments
    k = max(H // 8, 1) if rank is None else rank
    check_whole("rank", k)
    keys = jax.random.split(jax.random.fold_in(key, 9), 4)

    def draw(key: PRNGKeyArray, *shape: int) -> Array:
        bound = shape[1] ** -0.5
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    n, m = -(-num_rounds // 2), num_rounds // 2
    return MogrifierGRUCell(
        **weights, cn=jnp.zeros(H, dtype),
        Qa=draw(keys[0], n, H, k), Qb=draw(keys[1], n, k, E),
        Ra=draw(keys[2], m, E, k), Rb=draw(keys[3], m, k, H),
    )  # fmt: skip
