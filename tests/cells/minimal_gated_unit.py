"""The minimal gated unit (Zhou et al. 2016, arXiv 1603.09420): a recurrence in one file.

f  = σ(x·Wf + h·Uf + bf)
n  = tanh(x·Wn + (f ⊙ h)·Un + bn)
h' = (1 − f) ⊙ h + f ⊙ n
"""

import jax
import jax.numpy as jnp
from jax.nn import sigmoid
from jaxtyping import Array, Float

from jaxgru.cells.contract import Cell
from jaxgru.cells.initial_weights import initializers
from jaxgru.pytrees import struct


@struct
class MGUCell(Cell):
    Wf: Float[Array, "E H"]
    Uf: Float[Array, "H H"]
    bf: Float[Array, "H"]
    Wn: Float[Array, "E H"]
    Un: Float[Array, "H H"]
    bn: Float[Array, "H"]
    recurrent = "Uf", "Un"

    def sizes(self):
        return self.Wf.shape

    def zero_carry(self, batch_size):
        return jnp.zeros((batch_size, *self.bf.shape), self.bf.dtype)

    def inputs(self, x):
        return jnp.concatenate([x @ self.Wf + self.bf, x @ self.Wn + self.bn], axis=-1)

    def step(self, layout, h, a):
        x_f, x_n = jnp.split(a, 2, axis=-1)
        f = sigmoid(x_f + layout.times(self.Uf, h))
        n = jnp.tanh(x_n + layout.times(self.Un, f * h))
        return (1 - f) * h + f * n


def init_mgu(key, in_features, hidden_dim, *, dtype=jnp.float32):
    W, U, b = initializers(in_features, hidden_dim, dtype)
    k = jax.random.split(key, 6)
    return MGUCell(Wf=W(k[0]), Uf=U(k[1]), bf=b(k[2]), Wn=W(k[3]), Un=U(k[4]), bn=b(k[5]))
