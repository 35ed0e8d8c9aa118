"""`torch.nn.GRU`, `torch.nn.LSTM` and `torch.nn.RNN`: their weights into layers, and back.

The formulas are those of PyTorch's documentation of the three classes
(https://docs.pytorch.org/docs/stable/generated/torch.nn.GRU.html and its neighbours). PyTorch keeps
the weights of all gates in one matrix, (out, in): a GRU's in the order r, z, n, an LSTM's in the
order i, f, g, o; each gate has an input-side bias b_ih and a state-side bias b_hh.

PyTorch's state (L, B, H) is the carries of the L layers, stacked. Of a bidirectional module it is
(2·L, B, H): layer by layer, the forward carry before the backward one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jaxgru.cells import CellParams, GRUParams, LSTMParams, RNNParams
from jaxgru.interop import InteropError, import_torch
from jaxgru.interop.gates import added, check_reset, layer_of, other_z


def from_torch(module: Any) -> Any:
    """Return the layers of a `torch.nn.GRU`, `LSTM` or `RNN`, for `jaxgru.unroll`.

    A GRU becomes a GRU with the reset after the product. Its z is 1 minus jaxgru's, so z's weights
    and biases change sign, which is exact; both biases of each gate are kept. An LSTM's and RNN's
    two biases act only as their sum and become it. A module without biases gets zeros.

    `batch_first` says how a module takes its input, not what it computes, and is ignored; so is
    `dropout`, which a module applies between its layers in training only.

    Returns:
      A tuple of layers; of a bidirectional module two such tuples, forward and backward, for
      `jaxgru.bidirectional`. In float32 or float64.

    Raises:
      InteropError: PyTorch is not installed; the module is of another class, has a projection
        (`proj_size`) or a nonlinearity other than tanh; or its dtype is neither float32 nor, where
        JAX has 64 bits enabled, float64.
    """
    torch = import_torch()
    _check_module(torch, module)
    layers = tuple(_layer(module, *map(_array, weights)) for weights in module.all_weights)
    return (layers[::2], layers[1::2]) if module.bidirectional else layers


def to_torch(layers: Sequence[CellParams], backward: Sequence[CellParams] | None = None) -> Any:
    """Return a `torch.nn.GRU`, `LSTM` or `RNN` with the layers' weights; its input is time-major.

    It always has biases. Of an LSTM or RNN, b becomes b_ih, and b_hh is zero; a GRU's second biases
    become b_hh, zero where there is none. `from_torch` returns the same layers bit for bit (a GRU's
    missing second biases as zeros).

    Args:
      layers: of the module, or of its forward direction.
      backward: of the other direction, which makes the module bidirectional.

    Raises:
      InteropError: PyTorch is not installed; there is no layer; the layers are not of one kind and
        size, as a module's must be; or a GRU resets before the product, as `torch.nn.GRU` cannot.
    """
    torch = import_torch()
    if not layers:
        raise InteropError("there is no layer to make a module of.")
    directions = 1 if backward is None else 2
    if backward is not None:
        if len(layers) != len(backward):
            raise InteropError(
                f"there are {len(layers)} forward and {len(backward)} backward layers; there must "
                "be as many."
            )
        layers = [layer for pair in zip(layers, backward, strict=True) for layer in pair]
    kinds = {GRUParams: torch.nn.GRU, LSTMParams: torch.nn.LSTM, RNNParams: torch.nn.RNN}
    tensors = [_tensors(layer) for layer in layers]
    (_, E), (_, H) = tensors[0][0].shape, tensors[0][1].shape
    dtypes = {str(tensor.dtype) for layer in tensors for tensor in layer}
    if len({type(layer) for layer in layers}) > 1 or dtypes not in ({"float32"}, {"float64"}):
        raise InteropError(
            "the layers of a PyTorch module must be of one kind and all float32 or all float64."
        )
    for i, (W, U, *_) in enumerate(tensors):
        taken = E if i < directions else H * directions
        if (W.shape[1], U.shape[1]) != (taken, H):
            raise InteropError(
                f"layer {i // directions} is {W.shape[1]} → {U.shape[1]}, but in a PyTorch module "
                f"whose first is {E} → {H} it must be {taken} → {H}."
            )
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    state = {
        f"{name}_l{i // directions}{'_reverse' * (i % directions)}": torch.from_numpy(tensor)
        for i, layer in enumerate(tensors)
        for name, tensor in zip(names, layer, strict=True)
    }
    with torch.device("meta"):  # no weights are drawn, which would move PyTorch's random generator
        module = kinds[type(layers[0])](
            E, H, num_layers=len(layers) // directions, bidirectional=directions == 2
        )
    module.load_state_dict(state, assign=True)
    return module


def _check_module(torch: ModuleType, module: Any) -> None:
    if not isinstance(module, (torch.nn.GRU, torch.nn.LSTM, torch.nn.RNN)):
        raise InteropError(
            f"a {type(module).__name__} cannot be converted; a torch.nn.GRU, LSTM or RNN can."
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
    return parameter.detach().cpu().numpy().copy()  # JAX may share the memory, PyTorch write to it


def _layer(module: Any, W, U, b=None, c=None) -> CellParams:
    weights = dict(W=W.T, U=U.T, b=b)
    if module.mode == "GRU":
        return other_z(layer_of(partial(GRUParams, reset="after"), "rzn", **weights, c=c))
    weights["b"] = None if b is None else added(b, c)
    if module.mode == "LSTM":
        return layer_of(LSTMParams, "ifgo", **weights)
    return layer_of(RNNParams, [""], **weights)


def _tensors(p: CellParams) -> tuple[np.ndarray, ...]:
    """Return one layer's weight_ih, weight_hh, bias_ih and bias_hh."""
    match p:
        case GRUParams():
            check_reset(p, "after", "torch.nn.GRU")
            p, zero = other_z(p), np.zeros_like(p.bz)
            W, U, b = (p.Wr, p.Wz, p.Wn), (p.Ur, p.Uz, p.Un), (p.br, p.bz, p.bn)
            c = [zero if c is None else c for c in (p.cr, p.cz, p.cn)]
        case LSTMParams():
            W, U = (p.Wi, p.Wf, p.Wg, p.Wo), (p.Ui, p.Uf, p.Ug, p.Uo)
            b = (p.bi, p.bf, p.bg, p.bo)
            c = [np.zeros_like(p.bi)] * 4
        case RNNParams():
            W, U, b, c = (p.W,), (p.U,), (p.b,), (np.zeros_like(p.b),)
        case _:
            raise InteropError(f"a {type(p).__name__} is no layer's parameters.")
    return (
        np.concatenate([np.asarray(gate).T for gate in W]),
        np.concatenate([np.asarray(gate).T for gate in U]),
        np.concatenate([np.asarray(gate) for gate in b]),
        np.concatenate([np.asarray(gate) for gate in c]),
    )
