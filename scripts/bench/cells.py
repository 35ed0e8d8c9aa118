"""The cells whose layers are measured, by name: a function (key, E, H) → parameters for each."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.nn import sigmoid

import jaxgru
from jaxgru.cells import Cell, Layout, struct


@struct
class LEM(Cell):
    """A user's own cell, with two products in a chain (Rusch et al. 2022, arXiv:2110.04744)."""

    W: jax.Array
    U: jax.Array
    V: jax.Array
    b: jax.Array

    def sizes(self) -> tuple[int, int]:
        return self.W.shape[0], len(self.V)

    def zero_carry(self, n: int) -> tuple[jax.Array, jax.Array]:
        return tuple(jnp.zeros((2, n, len(self.V)), self.b.dtype))

    def inputs(self, x: jax.Array) -> jax.Array:
        return x @ self.W + self.b

    def step(self, layout: Layout, carry: tuple, a: jax.Array) -> tuple:
        y, z = carry
        a_y, a_z, a_in, a_out = jnp.split(a, 4, -1)
        u_y, u_z, u_in = jnp.split(layout.times(self.U, y), 3, -1)
        dt_y = sigmoid(a_y + u_y)
        dt_z = sigmoid(a_z + u_z)
        z = (1 - dt_z) * z + dt_z * jnp.tanh(a_in + u_in)
        y = (1 - dt_y) * y + dt_y * jnp.tanh(a_out + layout.matmul(self.V, z))
        return y, z


def init_lem(key: jax.Array, E: int, H: int) -> LEM:
    """Draw initial parameters: normal, with a variance of 1 / rows."""

    def draw(key: jax.Array, num_rows: int, num_columns: int) -> jax.Array:
        return jax.random.normal(key, (num_rows, num_columns)) * num_rows**-0.5

    W_key, U_key, V_key = jax.random.split(key, 3)
    return LEM(
        W=draw(W_key, E, 4 * H),
        U=draw(U_key, H, 3 * H),
        V=draw(V_key, H, H),
        b=jnp.zeros(4 * H),
    )


CELLS = {
    "GRU": jaxgru.init_gru,
    "GRU, reset before": partial(jaxgru.init_gru, reset_gate="before"),
    "LSTM": jaxgru.init_lstm,
    "RNN": jaxgru.init_rnn,
    "LayerNorm GRU": partial(jaxgru.init_gru, layer_norm=True),
    "Mogrifier GRU": jaxgru.init_mogrifier_gru,
    "LEM": init_lem,
}
"""Other libraries have two of the first three."""
