"""Convert `torch.nn.GRU`, `torch.nn.LSTM` and `torch.nn.RNN` to layers, and back.

The formulas are those of PyTorch's documentation of the three classes
(https://docs.pytorch.org/docs/stable/generated/torch.nn.GRU.html, and likewise LSTM and RNN).
PyTorch keeps the weights of all gates in one matrix, (out, in): a GRU's in the order r, z, n, an
LSTM's in the order i, f, g, o; each gate has an input bias b_ih and a recurrent bias b_hh.

States have the same values on both sides: PyTorch's (L, B, H) stacks the carries of our L layers.
In a bidirectional module it is (2·L, B, H): for each layer, the forward carry, then the backward.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxgru.arguments import as_array, check_shapes
from jaxgru.cells import GRUCell, LSTMCell, ProjectedLSTMCell, RNNCell, sizes
from jaxgru.errors import LibraryError, import_torch
from jaxgru.layers import Layers
from jaxgru.layers.validate import check_stack
from jaxgru.libraries import common
from jaxgru.printing import shown, type_name

KINDS: dict[str, type] = {"gru": GRUCell, "lstm": LSTMCell, "rnn": RNNCell}
ORDERS = {GRUCell: "rzn", LSTMCell: "ifgo", ProjectedLSTMCell: "ifgo", RNNCell: "h"}
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
        raise LibraryError(
            f"the prefix {shown(prefix)} is for a state_dict; of a module, pass the part itself."
        )
    kind = _check_module(import_torch(), module)
    where = f"this {type(module).__name__}"
    if cell not in (None, kind):
        raise LibraryError(f"{where} is not that of cell={shown(cell)}; its cell is {kind}.")
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

    Raises:
      LibraryError: the layers are not all of one kind and size.
      ValueError: a layer does not take what the one below returns.
    """
    torch = import_torch()
    common.check_known(layers, "a PyTorch module")
    stacks = common.directions(layers)
    state: dict[str, Any] = {}
    for i, level in enumerate(zip(*stacks, strict=True)):
        for p, direction in zip(level, ("", "_reverse"), strict=False):
            for field, array in _arrays(p).items():
                state[f"{NAMES[field]}_l{i}{direction}"] = torch.from_numpy(array)
    _check_alike(stacks)
    module = _empty_module(torch, stacks, batch_first)
    module.load_state_dict(state, assign=True)
    return module


def _check_alike(stacks: Sequence[Sequence[Any]]) -> None:
    """Raise an error unless one module can have these layers."""
    layers = [*itertools.chain(*stacks)]
    kinds = {(type(p), sizes(p)[1], len(getattr(p, "P", ()))) for p in layers}
    if len(kinds) > 1:
        seen = ", ".join(map(repr, layers))
        raise LibraryError(
            f"the layers are {seen}; those of a PyTorch module are of one kind and size."
        )
    if len({p.activation for p in layers if isinstance(p, RNNCell)}) > 1:
        raise LibraryError("some layers have tanh, some ReLU; a torch.nn.RNN has one for all.")
    in_features, _ = sizes(layers[0])
    check_stack([*zip(*stacks, strict=True)], in_features)


def _empty_module(torch: ModuleType, stacks: Sequence[Sequence[Any]], batch_first: bool) -> Any:
    """Return the module of such layers, without weights."""
    p = stacks[0][0]
    E, H = sizes(p)
    options: dict[str, Any] = dict(num_layers=len(stacks[0]), bidirectional=len(stacks) == 2)
    if isinstance(p, ProjectedLSTMCell):
        options["proj_size"] = H
        H = len(p.P)
    if isinstance(p, RNNCell):
        options["nonlinearity"] = p.activation
    modules: dict[type, Any] = {GRUCell: torch.nn.GRU, RNNCell: torch.nn.RNN}
    make = modules.get(type(p), torch.nn.LSTM)
    # No weights are drawn, which would move PyTorch's random generator.
    with torch.device("meta"):
        return make(E, H, batch_first=batch_first, **options)


def _check_module(torch: ModuleType, module: Any) -> str:
    """Return the name of the module's cell. Raises LibraryError if it may compute another."""
    nn = torch.nn
    if (
        type(module) not in (nn.GRU, nn.LSTM, nn.RNN, nn.GRUCell, nn.LSTMCell, nn.RNNCell)
        or module._forward_pre_hooks
        or module._forward_hooks
        or nn.utils.parametrize.is_parametrized(module)
    ):
        raise LibraryError(
            f"{type_name(module)} cannot be converted: it must be a torch.nn.GRU, LSTM or RNN, or "
            "a cell of these, without hooks, parametrized weights or methods of its own (remove "
            "them first by remove_weight_norm, remove_spectral_norm, prune.remove or "
            "parametrize.remove_parametrizations in torch.nn.utils), or the state_dict of one."
        )
    # A module says "RNN_RELU"; a cell, which lacks modes, "relu".
    computes: str = getattr(module, "mode", getattr(module, "nonlinearity", ""))
    cell = type(module).__name__.removesuffix("Cell").lower()
    if computes.lower().endswith("relu"):
        cell += "_relu"
    return cell


def _below(prefix: str, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a larger model's state dict with this prefix, with or without its dot."""
    if not prefix:
        return state
    start = prefix.removesuffix(".") + "."
    part = {name[len(start) :]: w for name, w in state.items() if name.startswith(start)}
    if not part:
        raise LibraryError(
            f"the state_dict has no tensor at the prefix {shown(prefix)}; {_recurrent(state)}."
        )
    return part


def _recurrent(state: Mapping[str, Any]) -> str:
    """Say which parts of a state dict are recurrent modules."""
    paths = [name.rpartition(".") for name in state]
    parts = dict.fromkeys(part for part, dot, name in paths if dot and name.startswith("weight_ih"))
    return f"its recurrent modules are {', '.join(parts) or 'none'}"


def _layers(where: str, state: Mapping[str, Any], cell: str | None) -> Any:
    """Return the layers with the weights of a module or a cell, by PyTorch's names."""
    shapes: dict[str, tuple[int, ...]]
    shapes = {name: tuple(getattr(weight, "shape", ())) for name, weight in state.items()}
    module = _module(where, state, shapes, cell)
    check_shapes(where, shapes, module.shapes())

    options: dict[str, Any] = {}
    if cell == "rnn_relu":
        options["activation"] = "relu"
    layers: list[Any] = []
    for suffix in module.suffixes:
        arrays: dict[str, Any]
        arrays = {field: _array(state[NAMES[field] + suffix]).T for field in module.fields}
        if "P" in arrays:
            arrays["P"] = jnp.asarray(arrays["P"])
        order = ORDERS[module.cls]
        layers.append(common.layer_from_weights(module.cls, order, **arrays, **options))
    if module.is_cell:
        return layers[0]
    if module.directions == 2:
        return tuple(layers[::2]), tuple(layers[1::2])
    return tuple(layers)


@dataclasses.dataclass(frozen=True)
class _Module:
    """What a state dict's first shapes and its names tell of a module or a cell.

    Attributes:
      cls: the class of its layers.
      fields: those of our fields that a layer has: "WU", maybe with "bc" and "P".
      suffixes: with which the names of its layers' weights end: "_l0", "_l0_reverse", "_l1", …; of
        a cell "".
      directions: 1 or 2.
      in_features: E of the first layer.
      out_features: H, or the projection's size.
      units: those of a gate.
    """

    cls: type
    fields: str
    suffixes: Sequence[str]
    directions: int
    in_features: int
    out_features: int
    units: int

    @property
    def is_cell(self) -> bool:
        return self.suffixes[0] == ""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all weights by PyTorch's names."""
        rows = len(ORDERS[self.cls]) * self.units
        shapes: dict[str, tuple[int, ...]] = {}
        for i, suffix in enumerate(self.suffixes):
            in_features = self.in_features
            if i >= self.directions:
                in_features = self.out_features * self.directions
            shape_of_field = {
                "W": (rows, in_features),
                "U": (rows, self.out_features),
                "b": (rows,),
                "c": (rows,),
                "P": (self.out_features, self.units),
            }
            shapes |= {NAMES[field] + suffix: shape_of_field[field] for field in self.fields}
        return shapes


def _module(
    where: str,
    state: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    cell: str | None,
) -> _Module:
    """Return what the shapes in a state dict tell, if that is the cell that was named."""
    first = "" if "weight_ih" in shapes else "_l0"
    W = shapes.get(f"weight_ih{first}", ())
    U = shapes.get(f"weight_hh{first}", ())
    P = shapes.get(f"weight_hr{first}", ())
    H = U[1] if len(U) == 2 else 0
    units = P[1] if len(P) == 2 else H
    kind = _kind(W, units)
    if kind is None or not _is_cell_of(kind, cell):
        kinds = "a GRU, an LSTM or an RNN" if cell is None else f"cell={shown(cell)}"
        raise LibraryError(
            f"{where} is not that of {kinds}: weight_ih{first} has shape {W}, weight_hh{first} "
            f"{U}; of a larger model, pass the prefix of the recurrent module: {_recurrent(state)}."
        )
    if kind == "rnn" and cell is None:
        raise LibraryError(
            f"{where} is of an RNN and does not say its nonlinearity; if it is tanh, pass "
            'cell="rnn", and if it is ReLU, cell="rnn_relu".'
        )
    cls = KINDS[kind]
    fields = "WU"
    if f"bias_ih{first}" in shapes:
        fields += "bc"
    if P and kind == "lstm":
        cls = ProjectedLSTMCell
        fields += "P"
    directions = 2 if "weight_ih_l0_reverse" in shapes else 1
    return _Module(
        cls=cls,
        fields=fields,
        suffixes=_suffixes(shapes, directions),
        directions=directions,
        in_features=W[1],
        out_features=H,
        units=units,
    )


def _kind(W: tuple[int, ...], units: int) -> str | None:
    """Return the name of the cell whose W has this shape."""
    if len(W) != 2 or units == 0:
        return None
    for name, cls in KINDS.items():
        if W[0] == len(ORDERS[cls]) * units:
            return name
    return None


def _is_cell_of(kind: str, cell: str | None) -> bool:
    """Return whether a `cell` that was passed is of this kind."""
    return cell is None or cell == kind or (kind == "rnn" and cell == "rnn_relu")


def _suffixes(shapes: Mapping[str, Any], directions: int) -> list[str]:
    """Return how the names of the weights of each layer end; of a cell, they end at once."""
    if "weight_ih" in shapes:
        return [""]
    depth = 1
    while f"weight_ih_l{depth}" in shapes:
        depth += 1
    ends = ("", "_reverse")[:directions]
    return [f"_l{i}{end}" for i in range(depth) for end in ends]


def _array(weight: Any) -> np.ndarray:
    common.check_known(weight, "from_torch")
    dtype = str(weight.dtype).removeprefix("torch.")
    common.check_dtype("the module's weights", dtype, "convert the module with .float(), or ")
    if hasattr(weight, "detach"):
        weight = weight.detach().cpu().numpy()
    # A copy: JAX may share the memory, and PyTorch write to it.
    return np.array(as_array("a weight", weight))


def _arrays(p: Any) -> dict[str, np.ndarray]:
    """Return one layer's arrays by the names of our fields, (out, in) as PyTorch's."""
    has = "PyTorch has an LSTM, an RNN, and a GRU whose reset gate acts after the product"
    options = ("activation",) if isinstance(p, RNNCell) else ()
    order = common.counterpart(p, ORDERS, has, *options)
    arrays = common.weights_in_order(p, order)._asdict()
    if isinstance(p, ProjectedLSTMCell):
        arrays["P"] = p.P
    return {name: np.array(np.asarray(array).T, order="C") for name, array in arrays.items()}
