"""The minimal gated unit (Zhou et al. 2016, arXiv 1603.09420): a recurrence in one file.

f  = σ(x·Wf + h·Uf + bf)
n  = tanh(x·Wn + (f ⊙ h)·Un + bn)
h' = (1 − f) ⊙ h + f ⊙ n
"""

import jax
import jax.numpy as jnp
from jax.nn import sigmoid
from jaxtyping import Array, Float

from jaxgru.cells.base import Cell, struct
from jaxgru.cells.initial_weights import initializers


@struct
class MGUParams:
    Wf: Float[Array, "E H"]
    Uf: Float[Array, "H H"]
    bf: Float[Array, "H"]
    Wn: Float[Array, "E H"]
    Un: Float[Array, "H H"]
    bn: Float[Array, "H"]


def init_mgu(key, E, H, options, dtype):
    W, U, b = initializers(E, H, dtype)
    k = jax.random.split(key, 6)
    return MGUParams(Wf=W(k[0]), Uf=U(k[1]), bf=b(k[2]), Wn=W(k[3]), Un=U(k[4]), bn=b(k[5]))


def mgu_cell(p, h, x):
    f = sigmoid(x @ p.Wf + h @ p.Uf + p.bf)
    n = jnp.tanh(x @ p.Wn + (f * h) @ p.Un + p.bn)
    return (1 - f) * h + f * n


MGU = Cell(
    name="mgu",
    params=MGUParams,
    init=init_mgu,
    sizes=lambda p: p.Wf.shape,
    step=mgu_cell,
    zero_carry=lambda p, batch_size: jnp.zeros((batch_size, *p.bf.shape), p.bf.dtype),
)
