"""Convert `torch.nn.GRU`, `torch.nn.LSTM` and `torch.nn.RNN` to layers, and back.

The formulas are those of PyTorch's documentation of the three classes
(https://docs.pytorch.org/docs/stable/generated/torch.nn.GRU.html, and likewise LSTM and RNN).
PyTorch keeps the weights of all gates in one matrix, (out, in): a GRU's in the order r, z, n, an
LSTM's in the order i, f, g, o; each gate has an input bias b_ih and a recurrent bias b_hh.

States have the same values on both sides: PyTorch's (L, B, H) stacks the carries of our L layers.
In a bidirectional module it is (2·L, B, H): for each layer, the forward carry, then the backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxgru.cells import (
    CellParams,
    GRUParams,
    LSTMParams,
    ProjectedLSTMParams,
    ResetBeforeGRUParams,
    RNNParams,
)
from jaxgru.errors import a_type, shown
from jaxgru.layers.arguments import as_array
from jaxgru.libraries import InteropError, check_shapes, common, import_torch

GATES = {"gru": 3, "lstm": 4, "rnn": 1}


def from_torch(module: Any, *, cell: str | None = None) -> Any:
    """Convert a `torch.nn.GRU`, `LSTM` or `RNN`, float32 or float64, to layers for `jaxgru.unroll`.

    A GRU's `reset_gate` is "after". PyTorch's z is 1 minus ours, so z's weights and biases change
    sign, which is exact; both biases of each gate are kept. The two biases of an LSTM or RNN act
    only as their sum, which becomes b. Missing biases become zeros.

    `batch_first` only concerns the layout of the input and is ignored; so is `dropout`, which a
    module applies between its layers in training.

    Args:
      module: the module; or a `GRUCell`, `LSTMCell` or `RNNCell`; or the `state_dict` of one of the
        six, whose values may also be NumPy arrays, as from `safetensors.numpy`. PyTorch is then not
        needed.
      cell: for a `state_dict`, "gru", "lstm" or "rnn". None: the shapes tell. But an RNN must be
        named, because they do not tell its nonlinearity: "rnn" says that it is tanh.

    Returns:
      A tuple of layers; for a cell, one layer, for `jaxgru.step`. For a bidirectional module, two
      such tuples, forward and backward, for `jaxgru.bidirectional`.

    Raises:
      InteropError: PyTorch is not installed; the module is of another class, even a subclass, or
        something may change what it computes: hooks, parametrized weights, parameters of its own;
        it has a nonlinearity other than tanh; its dtype is neither float32 nor, if JAX has 64 bits
        enabled, float64; a `state_dict` has other names or shapes than those of one such module; or
        `cell` contradicts them, or comes with a module.
    """
    if isinstance(module, Mapping):
        return _layers("the state_dict", module, cell)
    if cell is not None:
        raise InteropError(
            f"cell is {shown(cell)}; leave it out, because only a state_dict needs it."
        )
    kind = _check_module(import_torch(), module)
    return _layers(f"this {type(module).__name__}", module.state_dict(), kind)


def to_torch(
    layers: CellParams | Sequence[CellParams],
    backward: CellParams | Sequence[CellParams] | None = None,
) -> Any:
    """Convert layers to a `torch.nn.GRU`, `LSTM` or `RNN`, whose input is time-major.

    The module always has biases. The b of an LSTM or RNN becomes b_ih, and b_hh is zero; a GRU's
    second biases become b_hh, zero where there are none. `from_torch` returns the same layers, bit
    for bit (absent second biases of a GRU as zeros).

    Args:
      layers: one layer, or the layers of the module, or of its forward direction; or, as from
        `from_torch`, the pair of both directions.
      backward: the layers of the backward direction; None: the module has one direction.

    Raises:
      InteropError: PyTorch is not installed, or has no such layer; there is no layer; the layers
        are not of one kind, all float32 or all float64; a GRU's `reset_gate` is "before"; a
        projection is not smaller than c; or the weights are not known, as under `jit`.
      RuntimeError: a layer has other sizes than PyTorch's module, whose first is like ours.
    """
    torch = import_torch()
    common.check_known((layers, backward), "a PyTorch module")
    layers, backward = common.in_directions(layers, backward)
    directions = 1 if backward is None else 2
    if backward is not None:
        layers = [layer for pair in zip(layers, backward, strict=True) for layer in pair]
    kinds = {
        GRUParams: torch.nn.GRU,
        LSTMParams: torch.nn.LSTM,
        ProjectedLSTMParams: torch.nn.LSTM,
        RNNParams: torch.nn.RNN,
    }
    tensors = [_tensors(layer) for layer in layers]
    E, H = tensors[0][0].shape[1], tensors[0][1].shape[1]
    dtypes = {str(tensor.dtype) for layer in tensors for tensor in layer}
    if len({type(layer) for layer in layers}) > 1 or dtypes not in ({"float32"}, {"float64"}):
        raise InteropError(
            "the layers of a PyTorch module must be of one kind and all float32 or all float64."
        )
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    state = {
        f"{name}_l{i // directions}{'_reverse' * (i % directions)}": torch.from_numpy(tensor)
        for i, layer in enumerate(tensors)
        for name, tensor in zip(names, layer, strict=False)
    }
    units, options = H, {}
    if isinstance(layers[0], ProjectedLSTMParams):
        units, options = len(layers[0].P), {"proj_size": H}
        if H >= units:
            raise InteropError(
                f"the projection has {H} units; in PyTorch it must have fewer than the LSTM's "
                f"{units}."
            )
    with torch.device("meta"):  # no weights are drawn, which would move PyTorch's random generator
        module = kinds[type(layers[0])](
            E, units, num_layers=len(layers) // directions, bidirectional=directions == 2, **options
        )
    module.load_state_dict(state, assign=True)
    return module


def _check_module(torch: ModuleType, module: Any) -> str:
    """Return the name of the module's cell. Raises InteropError if it may compute another."""
    name = type(module).__name__
    kinds = (torch.nn.GRU, torch.nn.LSTM, torch.nn.RNN)
    kinds += (torch.nn.GRUCell, torch.nn.LSTMCell, torch.nn.RNNCell)
    if not isinstance(module, kinds):
        raise InteropError(
            f"{a_type(module)} cannot be converted; a torch.nn.GRU, LSTM or RNN, a cell of these, "
            "or the state_dict of one can."
        )
    if (
        type(module) not in kinds
        or module._forward_pre_hooks
        or module._forward_hooks
        or torch.nn.utils.parametrize.is_parametrized(module)
    ):
        theirs = next(kind.__name__ for kind in kinds if isinstance(module, kind))
        raise InteropError(
            f"{a_type(module)} with hooks, parametrized weights or methods of its own may compute "
            f"something other than a torch.nn.{theirs}; remove them first (by remove_weight_norm, "
            "remove_spectral_norm, prune.remove or parametrize.remove_parametrizations in "
            "torch.nn.utils) or, if they change nothing, convert its state_dict."
        )
    if getattr(module, "nonlinearity", "tanh") != "tanh":
        raise InteropError(
            f"the nonlinearity is {module.nonlinearity}; only an RNN with tanh can be converted."
        )
    return name.removesuffix("Cell").lower()


def _layers(where: str, state: Mapping[str, Any], cell: str | None) -> Any:
    """Return the layers with the weights of a module or a cell, by PyTorch's names."""
    shapes: dict[str, tuple[int, ...]]
    shapes = {name: tuple(getattr(weight, "shape", ())) for name, weight in state.items()}
    first = "" if "weight_ih" in shapes else "_l0"
    W, U, P = (shapes.get(f"weight_{part}{first}", ()) for part in ("ih", "hh", "hr"))
    if len(W) != 2 or len(U) != 2:
        inner = next((n for n in shapes if n.endswith((f".weight_ih{first}", ".weight_ih"))), None)
        hint = f", but {shown(inner)} is there; pass that module's own state_dict" if inner else ""
        raise InteropError(
            f"{where}: the matrices weight_ih{first} and weight_hh{first} are missing{hint}."
        )
    rows, E, H, units = *W, U[1], P[-1] if len(P) == 2 else U[1]
    found = next((name for name, gates in GATES.items() if rows == gates * units > 0), None)
    if found is None or cell not in (None, found):
        kinds = "a GRU, an LSTM or an RNN" if cell is None else f"cell={shown(cell)}"
        raise InteropError(
            f"{where}: weight_ih{first} {W} and weight_hh{first} {U} do not fit {kinds}."
        )
    if found == "rnn" and cell is None:
        raise InteropError(
            f"{where} is of an RNN and does not say its nonlinearity; if it is tanh, pass "
            'cell="rnn".'
        )
    directions = ("", "_reverse") if "weight_ih_l0_reverse" in shapes else ("",)
    depth = next(i for i in range(1, len(shapes) + 2) if f"weight_ih_l{i}" not in shapes)
    suffixes = [f"_l{i}{d}" for i in range(depth) for d in directions] if first else [""]
    biases = ("bias_ih", "bias_hh") if f"bias_ih{first}" in shapes else ()
    want: dict[str, tuple[int, ...]] = {}
    for i, suffix in enumerate(suffixes):
        takes = E if i < len(directions) else H * len(directions)
        want |= {f"weight_ih{suffix}": (rows, takes), f"weight_hh{suffix}": (rows, H)}
        want |= {f"{bias}{suffix}": (rows,) for bias in biases}
        want |= {f"weight_hr{suffix}": (H, units)} if P else {}
    check_shapes(where, shapes, want)
    if P and found != "lstm":
        raise InteropError(
            f"{where}: weight_hr{first} is an LSTM's, but the other tensors are of {found}."
        )

    names = {"W": "weight_ih", "U": "weight_hh", "b": "bias_ih", "c": "bias_hh", "P": "weight_hr"}
    present = {ours: name for ours, name in names.items() if name + first in shapes}
    layers = tuple(
        _layer(found, **{ours: _array(state[name + suffix]) for ours, name in present.items()})
        for suffix in suffixes
    )
    if not first:
        return layers[0]
    return (layers[::2], layers[1::2]) if len(directions) == 2 else layers


def _array(weight: Any) -> np.ndarray:
    dtype = str(weight.dtype).removeprefix("torch.")
    common.check_dtype("the module's weights", dtype, "convert the module with .float(), or ")
    if hasattr(weight, "detach"):
        weight = weight.detach().cpu().numpy()
    return np.array(as_array("a weight", weight))  # JAX may share the memory, PyTorch write to it


def _layer(cell: str, W, U, b=None, c=None, P=None) -> CellParams:
    others = {} if P is None else {"P": jnp.asarray(P.T)}
    cls = LSTMParams if P is None else ProjectedLSTMParams
    cls, order = {"gru": (GRUParams, "rzn"), "lstm": (cls, "ifgo"), "rnn": (RNNParams, "h")}[cell]
    return common.layer_of_both_biases(cls, order, W.T, U.T, b, c, **others)


def _tensors(p: CellParams) -> tuple[np.ndarray, ...]:
    """Return one layer's weight_ih, weight_hh, bias_ih, bias_hh and, if there is one, weight_hr."""
    match p:
        case GRUParams() | ResetBeforeGRUParams():
            common.check_reset_gate(p, "after", "torch.nn.GRU")
            return common.stacked(p, "rzn")
        case LSTMParams():
            return common.stacked(p, "ifgo")
        case ProjectedLSTMParams():
            return *common.stacked(p, "ifgo"), np.array(np.asarray(p.P).T, order="C")
        case RNNParams():
            return common.stacked(p, "h")
    raise common.refusal(p, "PyTorch has a GRU, an LSTM and an RNN")
