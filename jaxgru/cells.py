"""The cells: parameters, initialisation, initial carry and ONE step of gru, lstm, rnn and mlp.

Vectors are rows and weights are (in, out), so the code reads like the equations. Letters:
B batch, E length of the input, H length of the hidden state; σ is logistic, ⊙ elementwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import struct
from jax.nn import sigmoid
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray


@struct.dataclass
class GRUParams:
    """W acts on the input, U on the state, b is a bias; z update, r reset, n candidate.

    `cz` and `cr` are the study's second biases: redundant in the equations, but trained beside bz
    and br, so each takes its own AdamW update. None in a single-bias cell.

    `reset` says what r multiplies: the state, "before" its product with Un, or "after" it that
    product, as in PyTorch and cuDNN. Only the latter can have `cn`, a bias inside the reset.
    """

    Wz: Float[Array, "E H"]
    Uz: Float[Array, "H H"]
    bz: Float[Array, "H"]
    Wr: Float[Array, "E H"]
    Ur: Float[Array, "H H"]
    br: Float[Array, "H"]
    Wn: Float[Array, "E H"]
    Un: Float[Array, "H H"]
    bn: Float[Array, "H"]
    cz: Float[Array, "H"] | None = None
    cr: Float[Array, "H"] | None = None
    cn: Float[Array, "H"] | None = None
    reset: str = struct.field(pytree_node=False, default="before")

    def __post_init__(self) -> None:
        if self.reset not in ("before", "after"):
            raise ValueError(f"reset is {self.reset!r}; it must be before or after.")
        if self.reset == "before" and self.cn is not None:
            raise ValueError("cn is a bias inside the reset: it needs reset='after'.")


@struct.dataclass
class LSTMParams:
    """W acts on the input, U on the state, b is a bias; f forget, i input, o output, g new."""

    Wf: Float[Array, "E H"]
    Uf: Float[Array, "H H"]
    bf: Float[Array, "H"]
    Wi: Float[Array, "E H"]
    Ui: Float[Array, "H H"]
    bi: Float[Array, "H"]
    Wo: Float[Array, "E H"]
    Uo: Float[Array, "H H"]
    bo: Float[Array, "H"]
    Wg: Float[Array, "E H"]
    Ug: Float[Array, "H H"]
    bg: Float[Array, "H"]


@struct.dataclass
class RNNParams:
    """W acts on the input, U on the state, b is the bias."""

    W: Float[Array, "E H"]
    U: Float[Array, "H H"]
    b: Float[Array, "H"]


@struct.dataclass
class MLPParams:
    """W[j] acts on the input of K − 1 − j steps ago, b is the bias: a memory of K inputs."""

    W: Float[Array, "K E H"]
    b: Float[Array, "H"]


CellParams: TypeAlias = GRUParams | LSTMParams | RNNParams | MLPParams
Hidden: TypeAlias = Float[Array, "B H"]
Context: TypeAlias = Float[Array, "B K-1 E"]
Carry: TypeAlias = Hidden | tuple[Hidden, Hidden] | tuple[Hidden, Context]


def gru_cell(p: GRUParams, h: Hidden, x: Float[Array, "B E"]) -> Hidden:
    """One step of the GRU, by default with the reset BEFORE the product (Cho et al. 2014, arXiv
    1406.1078).

        z  = σ(x·Wz + h·Uz + bz)
        r  = σ(x·Wr + h·Ur + br)
        n  = tanh(x·Wn + (r ⊙ h)·Un + bn)           reset "before"
        n  = tanh(x·Wn + r ⊙ (h·Un + cn) + bn)      reset "after": torch.nn.GRU, cuDNN
        h' = (1 − z) ⊙ h + z ⊙ n

    z opens to the new value, as in Cho et al.'s follow-up by Chung et al. 2014 (arXiv 1412.3555);
    PyTorch's and ONNX's z is 1 minus ours.
    """
    z = sigmoid(x @ p.Wz + h @ p.Uz + plus(p.bz, p.cz))
    r = sigmoid(x @ p.Wr + h @ p.Ur + plus(p.br, p.cr))
    if p.reset == "before":
        n = jnp.tanh(x @ p.Wn + (r * h) @ p.Un + p.bn)
    else:
        n = jnp.tanh(x @ p.Wn + r * plus(h @ p.Un, p.cn) + p.bn)
    return (1 - z) * h + z * n


def plus(b: Float[Array, "... H"], c: Float[Array, "H"] | None) -> Float[Array, "... H"]:
    """b + c, or b where there is no second bias c."""
    return b if c is None else b + c


def lstm_cell(
    p: LSTMParams, carry: tuple[Hidden, Hidden], x: Float[Array, "B E"]
) -> tuple[Hidden, Hidden]:
    """One step of the LSTM with a forget gate (Hochreiter & Schmidhuber 1997; Gers et al. 2000).

    f, i, o = σ(x·W + h·U + b) each
    g  = tanh(x·Wg + h·Ug + bg)
    c' = f ⊙ c + i ⊙ g
    h' = o ⊙ tanh(c')
    """
    h, c = carry
    f = sigmoid(x @ p.Wf + h @ p.Uf + p.bf)
    i = sigmoid(x @ p.Wi + h @ p.Ui + p.bi)
    o = sigmoid(x @ p.Wo + h @ p.Uo + p.bo)
    g = jnp.tanh(x @ p.Wg + h @ p.Ug + p.bg)
    c = f * c + i * g
    return o * jnp.tanh(c), c


def rnn_cell(p: RNNParams, h: Hidden, x: Float[Array, "B E"]) -> Hidden:
    """One step of the vanilla RNN (Elman 1990): h' = tanh(x·W + h·U + b)."""
    return jnp.tanh(x @ p.W + h @ p.U + p.b)


def mlp_cell(
    p: MLPParams, carry: tuple[Hidden, Context], x: Float[Array, "B E"]
) -> tuple[Hidden, Context]:
    """One step of the hidden layer of Bengio et al. 2003 (JMLR 3, section 2), written as a cell.

        h' = tanh(x₋ₖ₊₁·W[0] + … + x₋₁·W[K−2] + x·W[K−1] + b)

    The state is the K − 1 inputs before this one, oldest first, zeros where there were none; h is
    carried beside them for the layer above only, and h' does not depend on it. The paper's direct
    connections from the inputs to the logits, which it calls optional, are left out.
    """
    _, context = carry
    context = jnp.concatenate([context, x[:, None]], axis=1)
    h = jnp.tanh(jnp.einsum("bke,keh->bh", context, p.W) + p.b)
    return h, context[:, 1:]


def cell(p: CellParams, carry: Carry, x: Float[Array, "B E"]) -> Carry:
    """One step of whichever cell the parameters belong to."""
    step = {
        GRUParams: gru_cell,
        LSTMParams: lstm_cell,
        RNNParams: rnn_cell,
        MLPParams: mlp_cell,
    }[type(p)]
    return step(p, carry, x)


def hidden(carry: Carry) -> Hidden:
    """The part of a layer's carry that the layer above sees: h of a pair, else the carry itself."""
    return carry[0] if isinstance(carry, tuple) else carry


def zero_carry(p: CellParams, batch_size: int) -> Carry:
    """A layer's carry before it has seen anything: zeros, in the biases' dtype."""

    def zeros(b: Float[Array, "H"], *shape: int) -> Array:
        return jnp.zeros((batch_size, *(shape or b.shape)), b.dtype)

    match p:
        case GRUParams():
            return zeros(p.bz)
        case LSTMParams():
            return zeros(p.bf), zeros(p.bf)
        case RNNParams():
            return zeros(p.b)
        case MLPParams():
            K, E, _ = p.W.shape
            return zeros(p.b), zeros(p.b, K - 1, E)
    raise TypeError(f"no carry for parameters of type {type(p).__name__}")


def init_gru(
    key: PRNGKeyArray,
    E: int,
    H: int,
    second_bias: bool = False,
    dtype: DTypeLike = jnp.float32,
    reset: str = "before",
) -> GRUParams:
    """W, b: uniform ±1/√E; U: uniform ±1/√H (PyTorch's `nn.Linear`); second biases: zeros."""
    W, U, b = _initializers(E, H, dtype)
    k = jax.random.split(key, 9)
    return GRUParams(
        Wz=W(k[0]), Uz=U(k[1]), bz=b(k[2]),
        Wr=W(k[3]), Ur=U(k[4]), br=b(k[5]),
        Wn=W(k[6]), Un=U(k[7]), bn=b(k[8]),
        cz=jnp.zeros(H, dtype) if second_bias else None,
        cr=jnp.zeros(H, dtype) if second_bias else None,
        cn=jnp.zeros(H, dtype) if second_bias and reset == "after" else None,
        reset=reset,
    )  # fmt: skip


def init_lstm(key: PRNGKeyArray, E: int, H: int, dtype: DTypeLike = jnp.float32) -> LSTMParams:
    """W: uniform ±1/√E; U: uniform ±1/√H; biases zero, but 1 for the forget gate (Gers et al.)."""
    W, U, _ = _initializers(E, H, dtype)
    k = jax.random.split(key, 8)
    return LSTMParams(
        Wf=W(k[0]), Uf=U(k[1]), bf=jnp.ones(H, dtype),
        Wi=W(k[2]), Ui=U(k[3]), bi=jnp.zeros(H, dtype),
        Wo=W(k[4]), Uo=U(k[5]), bo=jnp.zeros(H, dtype),
        Wg=W(k[6]), Ug=U(k[7]), bg=jnp.zeros(H, dtype),
    )  # fmt: skip


def init_rnn(key: PRNGKeyArray, E: int, H: int, dtype: DTypeLike = jnp.float32) -> RNNParams:
    """W, b: uniform ±1/√E; U: uniform ±1/√H (PyTorch's `nn.Linear`)."""
    W, U, b = _initializers(E, H, dtype)
    k = jax.random.split(key, 3)
    return RNNParams(W=W(k[0]), U=U(k[1]), b=b(k[2]))


def init_mlp(
    key: PRNGKeyArray, E: int, H: int, K: int, dtype: DTypeLike = jnp.float32
) -> MLPParams:
    """W, b: uniform ±1/√(K·E) (PyTorch's `nn.Linear` from K concatenated inputs)."""
    W, _, b = _initializers(K * E, H, dtype)
    k_weight, k_bias = jax.random.split(key)
    return MLPParams(W=W(k_weight).reshape(K, E, H), b=b(k_bias))


def _initializers(E: int, H: int, dtype: DTypeLike) -> tuple[Callable[..., Array], ...]:
    """How W, U and b are drawn from a key: uniform within ±1/√fan_in."""

    def uniform(shape: tuple[int, ...], fan_in: int) -> Callable[[PRNGKeyArray], Array]:
        bound = fan_in**-0.5
        return lambda key: jax.random.uniform(key, shape, dtype, -bound, bound)

    return uniform((E, H), E), uniform((H, H), H), uniform((H,), E)
