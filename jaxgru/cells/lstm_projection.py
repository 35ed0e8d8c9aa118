"""The LSTM with a recurrent projection."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.nn import sigmoid
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.cells.base import AnyLSTM, LSTMState, plus, sizes_of_gates, struct
from jaxgru.cells.initial_weights import initializers, lstm_weights
from jaxgru.cells.layout import Layout
from jaxgru.cells.products import dot


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
        """See `Cell.draw`."""
        return init_projected_lstm(key, E, H, options.proj_size, dtype)

    def sizes(self) -> tuple[int, int] | None:
        """Return (E, p); see `Cell.sizes`."""
        p = self.P.shape[-1]
        known = sizes_of_gates(4, self.W, self.U, [(4, self.b)], p)
        return (known[0], p) if known and self.P.shape == (known[1], p) else None

    def hidden_sizes(self) -> str:
        """See `Cell.hidden_sizes`."""
        return f"hidden {len(self.P)}, proj_size {self.P.shape[1]}"

    def inputs(self, x: Float[Array, "*n E"]) -> Float[Array, "*n GH"]:
        """Return x·W + b."""
        return plus(dot(x, self.W), self.b)

    def step(self, layout: Layout, carry: LSTMState, a: Float[Array, "B GH"]) -> LSTMState:
        """Compute one step: (h, c) → (h', c')."""
        h, c = carry
        f, i, o, g = jnp.split(a + layout.times(self.U, h), 4, axis=-1)
        c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
        return LSTMState(layout.product(self.P, sigmoid(o) * jnp.tanh(c)), c)


def init_projected_lstm(
    key: PRNGKeyArray,
    E: int,
    H: int,
    proj_size: int,
    dtype: DTypeLike = jnp.float32,
    recurrent_kernel_init: Initializer | None = None,
    **options: Any,
) -> ProjectedLSTMParams:
    """Draw initial parameters. See `init_lstm`."""
    weights = lstm_weights(
        key, E, H, dtype,
        recurrent_kernel_init=recurrent_kernel_init, state_size=proj_size, **options,
    )  # fmt: skip
    _, P, _ = initializers(
        E, proj_size, dtype, recurrent_kernel_init=recurrent_kernel_init, state_size=H
    )
    return ProjectedLSTMParams(**weights, P=P(jax.random.fold_in(key, 9)))
