"""The LSTM with a recurrent projection."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.nn import sigmoid
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.cells.base import AnyLSTM, LSTMState, Recurrence, register, sizes_of_gates
from jaxgru.cells.initial_weights import initializers, lstm_weights
from jaxgru.cells.products import dot, gradient_of
from jaxgru.cells.promotion import plus
from jaxgru.cells.pytrees import struct


@register
@struct
class ProjectedLSTMParams(AnyLSTM):
    """An LSTM layer with a projection: those of `LSTMParams`, and P.

    The equations are those of `LSTMParams`, but h' = (o ⊙ tanh(c'))·P, with p units, while c has H
    (Sak et al. 2014, arXiv 1402.1128). As in `torch.nn.LSTM`, the paper's second, non-recurrent
    projection is left out.
    """

    W: Float[Array, "E GH"]
    U: Float[Array, "p GH"]
    b: Float[Array, "GH"]
    P: Float[Array, "H p"]
    name: ClassVar[str] = "projected_lstm"
    options: ClassVar[frozenset[str]] = frozenset({"proj_size"})

    @classmethod
    def draw(cls, key: PRNGKeyArray, E: int, H: int, options: Any, dtype: DTypeLike) -> Any:
        given = dict(proj_size=options.proj_size, init=options.initial_weights)
        return init_projected_lstm(key, E, H, dtype=dtype, **given)

    def sizes(self) -> tuple[int, int] | None:
        """Return (E, p); see `Cell.sizes`."""
        p = self.P.shape[-1]
        known = sizes_of_gates(4, self.W, self.U, [(4, self.b)], p)
        return (known[0], p) if known and self.P.shape == (known[1], p) else None

    def hidden_sizes(self) -> str:
        return f"hidden {len(self.P)}, proj_size {self.P.shape[1]}"

    def inputs(self, x: Float[Array, "*n E"]) -> Float[Array, "*n GH"]:
        """Return x·W + b."""
        return plus(dot(x, self.W), self.b)

    def by_hand(self) -> tuple[Recurrence, tuple[Array, ...]]:
        return RECURRENCE, (self.U, self.P)


def init_projected_lstm(
    key: PRNGKeyArray,
    E: int,
    H: int,
    proj_size: int,
    dtype: DTypeLike = jnp.float32,
    init: str = "orthogonal",
    recurrent_kernel_init: Initializer | None = None,
    **options: Any,
) -> ProjectedLSTMParams:
    """Draw initial parameters. See `init_lstm`."""
    weights = lstm_weights(
        key, E, H, dtype, init=init,
        recurrent_kernel_init=recurrent_kernel_init, state_size=proj_size, **options,
    )  # fmt: skip
    _, P, _ = initializers(
        E, proj_size, dtype, init, recurrent_kernel_init=recurrent_kernel_init, state_size=H
    )
    return ProjectedLSTMParams(**weights, P=P(jax.random.fold_in(key, 9)))


# --- Many steps. a (T, B, 4H) is x·W + b of f, i, o, g. U (p, 4H), P (H, p).


def _step(layout, U, carry, a):
    (U, P), (h, c) = U, carry
    Uh = layout.split(layout.times(U, h), 4)
    a_f, a_i, a_o, a_g = map(jnp.add, a, Uh)
    f, i, o, g = sigmoid(a_f), sigmoid(a_i), sigmoid(a_o), jnp.tanh(a_g)
    c = f * c + i * g
    m = o * jnp.tanh(c)
    return LSTMState(layout.product(P, m), c), (layout.join(f, i, o), g, m)


def _step_gradient(layout, U, d_carry, before, after, saved):
    (U, P), (dh, dc), (fio, g, _) = U, d_carry, saved
    f, i, o = layout.split(fio, 3)
    tanh_c = jnp.tanh(after.c)
    dm = layout.product(P, dh)
    dc = dc + dm * (o * (1 - tanh_c * tanh_c))
    of_fio = layout.join(before.c, g, tanh_c) * fio * (1 - fio)
    da = layout.join(dc, dc, dm, dc) * layout.join(of_fio, i * (1 - g * g))
    return LSTMState(layout.times_transposed(U, da), dc * f), (da, dh)


def _gradients(layout, U, before, after, saved, kept):
    (U, P), (_, _, m), (da, dh) = U, saved, kept
    return (gradient_of(U, layout.drop(before.h), da), gradient_of(P, m, dh)), da


RECURRENCE = Recurrence(4, _step, _step_gradient, _gradients)
