"""The Mogrifier GRU, whose input and state gate each other before the step of a GRU."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.nn import sigmoid
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.cells.base import Cell, Hidden, Recurrence, RecurrentLayer, Size, aligned, struct
from jaxgru.cells.initial_weights import check_size, gru_weights
from jaxgru.cells.products import gradient_of


@struct
class MogrifierGRUParams:
    """Parameters of a Mogrifier GRU layer. W, U and b hold the gates z, r and n side by side.

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


def init_mogrifier_gru(
    key: PRNGKeyArray,
    in_features: int,
    hidden_dim: int,
    *,
    num_rounds: int = 5,
    rank: int | None = None,
    dtype: DTypeLike = jnp.float32,
) -> MogrifierGRUParams:
    """Draw the initial parameters of a Mogrifier GRU layer.

    Each is uniform in ±1/√(its rows), and b in ±1/√E, as in PyTorch's `nn.Linear`; cn is zeros.

    Args:
      in_features: E, the size of the input at a step.
      hidden_dim: H, the size of the state.
      num_rounds: how often x or h is gated, 2 or more. The paper found 5 and 6 best.
      rank: k, of the products Qa·Qb and Ra·Rb; None: H/8, rounded down, but at least 1.
      dtype: of the parameters, floating-point.

    Raises:
      ValueError: a size is not a positive whole number, `num_rounds` is below 2, or the dtype is
        not floating-point.
    """
    E, H = in_features, hidden_dim
    check_size("num_rounds", num_rounds, least=2)
    weights = gru_weights(key, E, H, dtype)  # it checks E, H and the dtype
    k = max(H // 8, 1) if rank is None else rank
    check_size("rank", k)
    keys = jax.random.split(jax.random.fold_in(key, 9), 4)

    def draw(key: PRNGKeyArray, *shape: int) -> Array:
        bound = shape[1] ** -0.5
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    n, m = -(-num_rounds // 2), num_rounds // 2
    return MogrifierGRUParams(
        **weights, cn=jnp.zeros(H, dtype),
        Qa=draw(keys[0], n, H, k), Qb=draw(keys[1], n, k, E),
        Ra=draw(keys[2], m, E, k), Rb=draw(keys[3], m, k, H),
    )  # fmt: skip


def mogrifier_gru_cell(p: MogrifierGRUParams, h: Hidden, x: Float[Array, "B E"]) -> Hidden:
    """Compute one step: h → h'."""
    p, h, x = aligned(p, h, x)
    state = h
    for i in range(len(p.Qa) + len(p.Ra)):
        j = i // 2
        if i % 2 == 0:
            x = 2 * sigmoid(h @ p.Qa[j] @ p.Qb[j]) * x
        else:
            h = 2 * sigmoid(x @ p.Ra[j] @ p.Rb[j]) * h
    x_z, x_r, x_n = jnp.split(x @ p.W + p.b, 3, axis=-1)
    h_z, h_r, h_n = jnp.split(h @ p.U, 3, axis=-1)
    z, r = sigmoid(x_z + h_z), sigmoid(x_r + h_r)
    n = jnp.tanh(x_n + r * (h_n + p.cn))
    return (1 - z) * state + z * n


def sizes(p: MogrifierGRUParams) -> tuple[int, int] | None:
    """Return (E, H), or None if the shapes contradict each other."""
    if not p.W.ndim == p.U.ndim == p.Qa.ndim - 1 == p.Ra.ndim - 1 == 2:
        return None
    E, H, (n, _, k), m = len(p.W), len(p.U), p.Qa.shape, len(p.Ra)
    shapes = (E, 3 * H), (H, 3 * H), (3 * H,), (H,), (n, H, k), (n, k, E), (m, E, k), (m, k, H)
    fits = all(leaf.shape == shape for leaf, shape in zip(vars(p).values(), shapes, strict=True))
    return (E, H) if fits and n - m in (0, 1) else None


def zero_carry(p: MogrifierGRUParams, batch_size: Size) -> Hidden:
    """Return the state before the first step: zeros (B, H) in the biases' dtype."""
    return jnp.zeros((batch_size, *p.cn.shape), p.cn.dtype)


# --- Many steps. a (T, B, E) is x itself. The weights are W, U, b, cn, and A and B of every round.
# Round i = 0, 1, … multiplies v[i % 2] of v = [x, h] by s = 2·σ(u·A·B), where u is the other one.


def prepare(p: MogrifierGRUParams) -> RecurrentLayer:
    """Prepare a layer for many steps."""
    rounds = range(len(p.Qa) + len(p.Ra))
    A = [(p.Ra if i % 2 else p.Qa)[i // 2] for i in rounds]
    B = [(p.Rb if i % 2 else p.Qb)[i // 2] for i in rounds]
    return RecurrentLayer(None, None, (p.W, p.U, p.b, p.cn, *A, *B), RECURRENCE)


def _rounds(weights):
    """Return W, U, b, cn, and (A, B) of every round."""
    half = (len(weights) + 4) // 2
    return weights[:4], list(zip(weights[4:half], weights[half:], strict=True))


def _gated(x, h, gates):
    """Return [x, h] before each round, and after the last, given each round's s."""
    v, each = [x, h], []
    for i, s in enumerate(gates):
        each.append([*v])
        v[i % 2] = s * v[i % 2]
    return [*each, v]


def _step(layout, weights, h, a):
    (W, U, b, cn), rounds = _rounds(weights)
    v, gates, middles = [*a, h], [], []
    for i, (A, B) in enumerate(rounds):
        middles.append(layout.times(A, v[1 - i % 2]))
        gates.append(2 * sigmoid(layout.times(B, middles[i])))
        v[i % 2] = gates[i] * v[i % 2]
    x_z, x_r, x_n = layout.gates(layout.times(W, v[0]) + b, 3)
    h_z, h_r, h_n = layout.gates(layout.times(U, v[1]), 3)
    z, r = sigmoid(x_z + h_z), sigmoid(x_r + h_r)
    m = h_n + cn
    n = jnp.tanh(x_n + r * m)
    return (1 - z) * h + z * n, (*a, gates, layout.join(z, r), m, n, middles)


def _factors(layout, h, after, saved):
    """Return the factors of da_n, (da_z, da_r, da_n·r) and dh; and each round's s and slope."""
    x, gates, zr, m, n, _ = saved
    z, r = layout.gates(zr, 2)
    of_n = z * (1 - n * n)
    of_zr = layout.join(n - h, of_n * m) * zr * (1 - zr)
    before = _gated(x, h, gates)
    slopes = [before[i][i % 2] * s * (1 - s / 2) for i, s in enumerate(gates)]
    return of_n, layout.join(of_zr, of_n * r), 1 - z, gates, slopes


def _step_gradient(layout, weights, dh, factors):
    (W, U, _, _), rounds = _rounds(weights)
    of_n, of_Uh, of_h, gates, slopes = factors
    d_Uh = layout.join(dh, dh, dh) * of_Uh
    d_z, d_r, _ = layout.gates(d_Uh, 3)
    da = layout.join(d_z, d_r, dh * of_n)
    d = [layout.times(W, da), layout.times(U, d_Uh)]  # of v
    kept = []
    for i in reversed(range(len(rounds))):
        A, B = rounds[i]
        d_B = d[i % 2] * slopes[i]
        d_A = layout.times(B, d_B)
        d[i % 2] *= gates[i]
        d[1 - i % 2] += layout.times(A, d_A)
        kept.insert(0, (d_A, d_B))
    return dh * of_h + d[1], (da, d_Uh, d[0], kept)


def _gradients(layout, weights, h, after, saved, kept):
    (W, U, _, _), rounds = _rounds(weights)
    (x, gates, *_, middles), (da, d_Uh, dx, of_rounds) = saved, kept
    *before, (last_x, last_h) = _gated(x, h, gates)
    total = lambda d: d.sum((0, 1))
    d_cn = layout.gates(d_Uh, 3)[2]
    of_gru = gradient_of(W, last_x, da), gradient_of(U, last_h, d_Uh), total(da), total(d_cn)
    of_A, of_B = [], []
    for i, ((A, B), (d_A, d_B)) in enumerate(zip(rounds, of_rounds, strict=True)):
        of_A.append(gradient_of(A, before[i][1 - i % 2], d_A))
        of_B.append(gradient_of(B, middles[i], d_B))
    return (*of_gru, *of_A, *of_B), dx


RECURRENCE = Recurrence(1, _step, _factors, _step_gradient, _gradients)


MOGRIFIER_GRU = Cell(
    name="mogrifier_gru",
    params=MogrifierGRUParams,
    init=lambda key, E, H, options, dtype: init_mogrifier_gru(key, E, H, dtype=dtype),
    sizes=sizes,
    step=mogrifier_gru_cell,
    zero_carry=zero_carry,
    prepare=prepare,
)
