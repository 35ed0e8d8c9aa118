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

from jaxgru.cells import GRUParams, LSTMParams, ProjectedLSTMParams, RNNParams, sizes
from jaxgru.layers.stack import Layers
from jaxgru.layers.validate import as_array
from jaxgru.libraries import InteropError, check_shapes, common, import_torch
from jaxgru.printing import shown, type_name

KINDS: dict[str, type] = {"gru": GRUParams, "lstm": LSTMParams, "rnn": RNNParams}
ORDERS = {GRUParams: "rzn", LSTMParams: "ifgo", ProjectedLSTMParams: "ifgo", RNNParams: "h"}
NAMES = {"W": "weight_ih", "U": "weight_hh", "b": "bias_ih", "c": "bias_hh", "P": "weight_hr"}


def from_torch(module: Any, *, cell: str | None = None, prefix: str = "") -> Any:
    """Convert a `torch.nn.GRU`, `LSTM` or `RNN`, float32 or float64, to layers for `jaxgru.unroll`.

    A GRU's `reset_gate` is "after". PyTorch's z is 1 minus ours, so z's weights and biases change
    sign, which is exact; both biases of each gate are kept. The two biases of an LSTM or RNN act
    only as their sum, which becomes b. Missing biases become zeros.

    `batch_first` only concerns the layout of the input and is ignored; so is `dropout`, which a
    module applies between its layers in training. A module with hooks, parametrized weights or
    methods of its own is refused.

    Args:
      module: the module; or a `GRUCell`, `LSTMCell` or `RNNCell`; or the `state_dict` of one of the
        six, whose values may also be NumPy arrays, as from `safetensors.numpy`. PyTorch is then not
        needed.
      cell: for a `state_dict`, "gru", "lstm", "rnn" (tanh) or "rnn_relu". None: the shapes tell;
        but they do not tell an RNN's nonlinearity, so an RNN must be named.
      prefix: for the `state_dict` of a larger model, the name of the module in it: "encoder.gru".

    Returns:
      A tuple of layers; for a cell, one layer, for `jaxgru.step`. For a bidirectional module, two
      such tuples, forward and backward, for `jaxgru.bidirectional`.
    """
    if isinstance(module, Mapping):
        where = f"the state_dict at {shown(prefix)}" if prefix else "the state_dict"
        return _layers(where, _below(prefix, module), cell)
    if prefix:
        raise InteropError(
            f"the prefix {shown(prefix)} is for a state_dict; of a module, pass the part itself."
        )
    kind = _check_module(import_torch(), module)
    where = f"this {type(module).__name__}"
    if cell not in (None, kind):
        raise InteropError(f"{where} is not that of cell={shown(cell)}; its cell is {kind}.")
    return _layers(where, module.state_dict(), kind)


def to_torch(layers: Layers | Sequence[Any], *, batch_first: bool = False) -> Any:
    """Convert layers to a `torch.nn.GRU`, `LSTM` or `RNN`.

    The module always has biases. The b of an LSTM or RNN becomes b_ih, and b_hh is zero; a GRU's
    second biases become b_hh, zero where there are none. `from_torch` returns the same layers, bit
    for bit (absent second biases of a GRU as zeros).

    Args:
      layers: one layer, or those of the module; or, as from `from_torch`, the pair of lists of both
        directions.
      batch_first: the module takes x (B, T, F); False: (T, B, F). Its states are (L, B, H) in both.

    Raises what PyTorch raises for layers that are not all of one kind and size.
    """
    torch = import_torch()
    common.check_known(layers, "a PyTorch module")
    sides = common.directions(layers)
    state: dict[str, Any] = {}
    for i, level in enumerate(zip(*sides, strict=True)):
        for p, end in zip(level, ("", "_reverse"), strict=False):
            state |= {f"{NAMES[n]}_l{i}{end}": torch.from_numpy(w) for n, w in _arrays(p).items()}
    first = sides[0][0]
    E, H = sizes(first)
    options: dict[str, Any] = dict(num_layers=len(sides[0]), bidirectional=len(sides) == 2)
    if isinstance(first, ProjectedLSTMParams):
        H, options["proj_size"] = len(first.P), H
    if isinstance(first, RNNParams):
        options["nonlinearity"] = first.activation
        if len({p.activation for side in sides for p in side if isinstance(p, RNNParams)}) > 1:
            raise InteropError("some layers have tanh, some ReLU; a torch.nn.RNN has one for all.")
    modules: dict[type, Any] = {GRUParams: torch.nn.GRU, RNNParams: torch.nn.RNN}
    make = modules.get(type(first), torch.nn.LSTM)
    with torch.device("meta"):  # no weights are drawn, which would move PyTorch's random generator
        module = make(E, H, batch_first=batch_first, **options)
    module.load_state_dict(state, assign=True)
    return module


def _check_module(torch: ModuleType, module: Any) -> str:
    """Return the name of the module's cell. Raises InteropError if it may compute another."""
    nn, name = torch.nn, type(module).__name__
    if (
        type(module) not in (nn.GRU, nn.LSTM, nn.RNN, nn.GRUCell, nn.LSTMCell, nn.RNNCell)
        or module._forward_pre_hooks
        or module._forward_hooks
        or nn.utils.parametrize.is_parametrized(module)
    ):
        raise InteropError(
            f"{type_name(module)} cannot be converted: it must be a torch.nn.GRU, LSTM or RNN, or "
            "a cell of these, without hooks, parametrized weights or methods of its own (remove "
            "them first by remove_weight_norm, remove_spectral_norm, prune.remove or "
            "parametrize.remove_parametrizations in torch.nn.utils), or the state_dict of one."
        )
    computes: str = getattr(module, "mode", getattr(module, "nonlinearity", ""))  # cells lack modes
    return name.removesuffix("Cell").lower() + "_relu" * computes.lower().endswith("relu")


def _below(prefix: str, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a larger model's state dict with this prefix, with or without its dot."""
    if not prefix:
        return state
    start = prefix.removesuffix(".") + "."
    part = {name[len(start) :]: w for name, w in state.items() if name.startswith(start)}
    if not part:
        raise InteropError(
            f"the state_dict has no tensor at the prefix {shown(prefix)}; {_recurrent(state)}."
        )
    return part


def _recurrent(state: Mapping[str, Any]) -> str:
    """Say which parts of a state dict are recurrent modules."""
    names = (name.rpartition(".") for name in state)
    parts = dict.fromkeys(part for part, dot, name in names if dot and name.startswith("weight_ih"))
    return f"its recurrent modules are {', '.join(parts) or 'none'}"


def _layers(where: str, state: Mapping[str, Any], cell: str | None) -> Any:
    """Return the layers with the weights of a module or a cell, by PyTorch's names."""
    shapes: dict[str, tuple[int, ...]]
    shapes = {name: tuple(getattr(weight, "shape", ())) for name, weight in state.items()}
    first = "" if "weight_ih" in shapes else "_l0"
    W, U, P = (shapes.get(f"weight_{part}{first}", ()) for part in ("ih", "hh", "hr"))
    H = U[1] if len(U) == 2 else 0
    units = P[1] if len(P) == 2 else H
    fits = lambda cls: len(W) == 2 and W[0] == len(ORDERS[cls]) * units > 0
    kind = next((name for name, cls in KINDS.items() if fits(cls)), None)
    if kind is None or cell not in (None, kind, *["rnn_relu"] * (kind == "rnn")):
        kinds = "a GRU, an LSTM or an RNN" if cell is None else f"cell={shown(cell)}"
        raise InteropError(
            f"{where} is not that of {kinds}: weight_ih{first} has shape {W}, weight_hh{first} "
            f"{U}; of a larger model, pass the prefix of the recurrent module: {_recurrent(state)}."
        )
    if kind == "rnn" and cell is None:
        raise InteropError(
            f"{where} is of an RNN and does not say its nonlinearity; if it is tanh, pass "
            'cell="rnn", and if it is ReLU, cell="rnn_relu".'
        )
    rows, E = W
    D = 2 if "weight_ih_l0_reverse" in shapes else 1
    depth = next(i for i in range(1, len(shapes) + 2) if f"weight_ih_l{i}" not in shapes)
    suffixes = [f"_l{i}{d}" for i in range(depth) for d in ("", "_reverse")[:D]] if first else [""]
    cls = ProjectedLSTMParams if P and kind == "lstm" else KINDS[kind]
    fields = "WU" + "bc" * (f"bias_ih{first}" in shapes) + "P" * (cls is ProjectedLSTMParams)
    want: dict[str, tuple[int, ...]] = {}
    for i, suffix in enumerate(suffixes):
        takes = E if i < D else H * D
        of = {"W": (rows, takes), "U": (rows, H), "b": (rows,), "c": (rows,), "P": (H, units)}
        want |= {NAMES[field] + suffix: of[field] for field in fields}
    check_shapes(where, shapes, want)
    others: dict[str, Any] = {"activation": "relu"} if cell == "rnn_relu" else {}
    layers = []
    for suffix in suffixes:
        arrays: dict[str, Any] = {n: _array(state[NAMES[n] + suffix]).T for n in fields}
        arrays |= {"P": jnp.asarray(arrays["P"])} if "P" in fields else {}
        layers.append(common.layer_from_weights(cls, ORDERS[cls], **arrays, **others))
    if not first:
        return layers[0]
    return (tuple(layers[::2]), tuple(layers[1::2])) if D == 2 else tuple(layers)


def _array(weight: Any) -> np.ndarray:
    dtype = str(weight.dtype).removeprefix("torch.")
    common.check_dtype("the module's weights", dtype, "convert the module with .float(), or ")
    if hasattr(weight, "detach"):
        weight = weight.detach().cpu().numpy()
    return np.array(as_array("a weight", weight))  # JAX may share the memory, PyTorch write to it


def _arrays(p: Any) -> dict[str, np.ndarray]:
    """Return one layer's arrays by the names of our fields, (out, in) as PyTorch's."""
    has = "PyTorch has an LSTM, an RNN, and a GRU whose reset gate acts after the product"
    options = ("activation",) if isinstance(p, RNNParams) else ()
    sides = common.sides(p, common.counterpart(p, ORDERS, has, *options))
    arrays = dict(zip("WUbc", sides, strict=True))
    arrays |= {"P": p.P} if isinstance(p, ProjectedLSTMParams) else {}
    return {name: np.array(np.asarray(w).T, order="C") for name, w in arrays.items()}
