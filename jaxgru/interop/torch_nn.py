"""Convert `torch.nn.GRU`, `torch.nn.LSTM` and `torch.nn.RNN` to layers, and back.

The formulas are those of PyTorch's documentation of the three classes
(https://docs.pytorch.org/docs/stable/generated/torch.nn.GRU.html, and likewise LSTM and RNN).
PyTorch keeps the weights of all gates in one matrix, (out, in): a GRU's in the order r, z, n, an
LSTM's in the order i, f, g, o; each gate has an input bias b_ih and a recurrent bias b_hh.

States have the same values on both sides: PyTorch's (L, B, H) stacks the carries of our L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgru.cells import CellParams, GRUParams, LSTMParams, RNNParams
from jaxgru.interop import InteropError, import_torch


def from_torch(module: Any) -> tuple[CellParams, ...]:
    """Convert a `torch.nn.GRU`, `LSTM` or `RNN`, float32 or float64, to layers for `unroll`.

    A GRU becomes our GRU with the reset after the product. Its z is 1 minus ours, so z's weights
    and biases change sign, which is exact; both biases of each gate are kept. The two biases of an
    LSTM or RNN act only as their sum, which becomes b. Without biases, they are zeros.

    `batch_first` only concerns the layout of the input and is ignored; so is `dropout`, which a
    module applies between its layers in training.

    Raises:
      InteropError: PyTorch is not installed; the module is of another class, bidirectional, has a
        projection (`proj_size`) or a nonlinearity other than tanh; or its dtype is neither float32
        nor, where JAX has 64 bits enabled, float64.
    """
    torch = import_torch()
    _check_module(torch, module)
    makers = {torch.nn.GRU: _gru_layer, torch.nn.LSTM: _lstm_layer, torch.nn.RNN: _rnn_layer}
    make = next(make for cls, make in makers.items() if isinstance(module, cls))
    return tuple(make(*map(_array, weights)) for weights in module.all_weights)


def to_torch(layers: Sequence[CellParams]) -> Any:
    """Convert layers to a `torch.nn.GRU`, `LSTM` or `RNN`, whose input is time-major.

    The module always has biases. The b of an LSTM or RNN becomes b_ih, and b_hh is zero; a GRU's
    second biases become b_hh, zero where there are none. `from_torch` returns the same layers, bit
    for bit (absent second biases of a GRU as zeros).

    Raises:
      InteropError: PyTorch is not installed; there is no layer; the layers are not of one kind and
        size, as a module requires; or a GRU resets before the product, unlike `torch.nn.GRU`.
    """
    torch = import_torch()
    if not layers:
        raise InteropError("there is no layer to convert; a module needs at least one.")
    kinds = {GRUParams: torch.nn.GRU, LSTMParams: torch.nn.LSTM, RNNParams: torch.nn.RNN}
    tensors = [_tensors(layer) for layer in layers]
    (_, E), (_, H) = tensors[0][0].shape, tensors[0][1].shape
    dtypes = {str(tensor.dtype) for layer in tensors for tensor in layer}
    if len({type(layer) for layer in layers}) > 1 or dtypes not in ({"float32"}, {"float64"}):
        raise InteropError(
            "the layers of a PyTorch module must be of one kind and all float32 or all float64."
        )
    for i, (W, U, *_) in enumerate(tensors):
        if (W.shape[1], U.shape[1]) != ((E if i == 0 else H), H):
            raise InteropError(
                f"layer {i} is {W.shape[1]} → {U.shape[1]}, but in a PyTorch module whose first is "
                f"{E} → {H} it must be {H} → {H}."
            )
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    state = {
        f"{name}_l{i}": torch.from_numpy(tensor)
        for i, layer in enumerate(tensors)
        for name, tensor in zip(names, layer, strict=True)
    }
    with torch.device("meta"):  # draw no weights, to leave PyTorch's random generator alone
        module = kinds[type(layers[0])](E, H, num_layers=len(layers))
    module.load_state_dict(state, assign=True)
    return module


def _check_module(torch: ModuleType, module: Any) -> None:
    if not isinstance(module, (torch.nn.GRU, torch.nn.LSTM, torch.nn.RNN)):
        raise InteropError(
            f"a {type(module).__name__} cannot be converted; a torch.nn.GRU, LSTM or RNN can."
        )
    if module.bidirectional:
        raise InteropError(
            "a bidirectional module cannot be converted: a language model reads in one direction."
        )
    if module.proj_size:
        raise InteropError(
            f"proj_size is {module.proj_size}; an LSTM with a projection cannot be converted."
        )
    if isinstance(module, torch.nn.RNN) and module.nonlinearity != "tanh":
        raise InteropError(
            f"the nonlinearity is {module.nonlinearity}; only an RNN with tanh can be converted."
        )


def _array(parameter: Any) -> np.ndarray:
    dtype = str(parameter.dtype).removeprefix("torch.")
    if dtype not in ("float32", "float64"):
        raise InteropError(f"the module's weights are {dtype}; they must be float32 or float64.")
    x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]  set at run time
    if dtype == "float64" and not x64:
        raise InteropError(
            "the module's weights are float64, which JAX rounds to float32 unless 64 bits are "
            "enabled: convert the module with .float(), or set JAX_ENABLE_X64=1."
        )
    return parameter.detach().cpu().numpy().copy()  # JAX may share memory that PyTorch writes to


def _gru_layer(W, U, b=None, c=None) -> GRUParams:
    (Wr, Wz, Wn), (Ur, Uz, Un) = _matrices(W, 3), _matrices(U, 3)
    br, bz, bn = _biases(b, 3, like=W)
    cr, cz, cn = (None, None, None) if c is None else _biases(c, 3, like=W)
    return GRUParams(
        Wz=-Wz, Uz=-Uz, bz=-bz,
        Wr=Wr, Ur=Ur, br=br,
        Wn=Wn, Un=Un, bn=bn,
        cz=None if cz is None else -cz, cr=cr, cn=cn,
        reset="after",
    )  # fmt: skip


def _lstm_layer(W, U, b=None, c=None) -> LSTMParams:
    (Wi, Wf, Wg, Wo), (Ui, Uf, Ug, Uo) = _matrices(W, 4), _matrices(U, 4)
    bi, bf, bg, bo = _biases(b if c is None else b + c, 4, like=W)
    return LSTMParams(
        Wf=Wf, Uf=Uf, bf=bf,
        Wi=Wi, Ui=Ui, bi=bi,
        Wo=Wo, Uo=Uo, bo=bo,
        Wg=Wg, Ug=Ug, bg=bg,
    )  # fmt: skip


def _rnn_layer(W, U, b=None, c=None) -> RNNParams:
    (b,) = _biases(b if c is None else b + c, 1, like=W)
    return RNNParams(W=_matrices(W, 1)[0], U=_matrices(U, 1)[0], b=b)


def _matrices(W: np.ndarray, num_gates: int) -> list[jax.Array]:
    """Split a matrix (gates · out, in) into the gates' matrices (in, out)."""
    return [jnp.asarray(gate.T) for gate in np.split(W, num_gates)]


def _biases(b: np.ndarray | None, num_gates: int, like: np.ndarray) -> list[jax.Array]:
    """Split a vector (gates · out) into the gates' biases; None gives zeros."""
    b = np.zeros(len(like), like.dtype) if b is None else b
    return [jnp.asarray(gate) for gate in np.split(b, num_gates)]


def _tensors(p: CellParams) -> tuple[np.ndarray, ...]:
    """Return a layer's weight_ih, weight_hh, bias_ih and bias_hh."""
    match p:
        case GRUParams():
            if p.reset != "after":
                raise InteropError(
                    "a GRU that resets before the product cannot be converted: torch.nn.GRU resets "
                    "after it."
                )
            zero = np.zeros_like(p.bz)
            cz, cr, cn = (zero if c is None else c for c in (p.cz, p.cr, p.cn))
            W, U = (p.Wr, -p.Wz, p.Wn), (p.Ur, -p.Uz, p.Un)
            b, c = (p.br, -p.bz, p.bn), (cr, -cz, cn)
        case LSTMParams():
            W, U = (p.Wi, p.Wf, p.Wg, p.Wo), (p.Ui, p.Uf, p.Ug, p.Uo)
            b = (p.bi, p.bf, p.bg, p.bo)
            c = [np.zeros_like(p.bi)] * 4
        case RNNParams():
            W, U, b, c = (p.W,), (p.U,), (p.b,), (np.zeros_like(p.b),)
        case _:
            raise InteropError(f"a {type(p).__name__} is not the parameters of a layer.")
    return (
        np.concatenate([np.asarray(gate).T for gate in W]),
        np.concatenate([np.asarray(gate).T for gate in U]),
        np.concatenate([np.asarray(gate) for gate in b]),
        np.concatenate([np.asarray(gate) for gate in c]),
    )
