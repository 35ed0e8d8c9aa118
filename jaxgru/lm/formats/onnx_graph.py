"""The nodes of a graph of ONNX, layer by layer, and its weights as its operators have them.

ONNX's GRU weights the old state with z, so what feeds z has the other sign here; its
`linear_before_reset` is our `reset_gate` "after". Its operators have an input bias b and a
recurrent bias c for every gate. See https://onnx.ai/onnx/operators/onnx__GRU.html, and likewise
LSTM and RNN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxgru.cells import (
    CellParams,
    GRUParams,
    LSTMParams,
    MLPParams,
    ResetBeforeGRUParams,
    RNNParams,
    cell_of,
    sizes,
)
from jaxgru.cells.gru import AnyGRU
from jaxgru.errors import needs
from jaxgru.libraries import check_shapes, common
from jaxgru.libraries.onnx_nodes import ORDER

with needs("onnx"):
    import onnx
    from onnx import helper

_OPSET, _IR_VERSION = 17, 8
"""The oldest versions with all of these operators: LayerNormalization came with opset 17."""

KINDS: dict[str, type] = {
    "gru, reset before": ResetBeforeGRUParams,
    "gru, reset after": GRUParams,
    "lstm": LSTMParams,
    "rnn": RNNParams,
    "mlp": MLPParams,
}
"""The layers that can be exported, as the metadata name them."""

DIRECTIONS = ("forward", "backward")


class Graph:
    """A graph under construction. Each method adds something to it and returns its name."""

    def __init__(self, type: int) -> None:
        self.type = type  # of the weights
        self.nodes, self.constants, self.inputs, self.outputs = [], {}, [], []

    def input(self, name: str, *shape: int | str, type: int | None = None) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, type or self.type, shape))
        return name

    def output(self, name: str, *shape: int | str) -> str:
        self.outputs.append(helper.make_tensor_value_info(name, self.type, shape))
        return name

    def constant(self, name: str, value: Any) -> str:
        self.constants[name] = np.asarray(value)
        return name

    def node(self, op: str, *inputs: str, outputs: Sequence[str] = (), **attributes: Any) -> str:
        """Add a node. Without `outputs` it has one, of a new name; the first is returned."""
        name = f"{op}.{len(self.nodes)}"
        outputs = outputs or [f"{name}.out"]
        self.nodes.append(helper.make_node(op, inputs, outputs, name, **attributes))
        return outputs[0]

    def transpose(self, x: str, *axes: int, output: str = "") -> str:
        return self.node("Transpose", x, outputs=[output] if output else (), perm=axes)

    def model(self, **metadata: str) -> onnx.ModelProto:
        """Return the model; the same weights always give the same bytes."""
        constants = [onnx.numpy_helper.from_array(c, name) for name, c in self.constants.items()]
        graph = helper.make_graph(self.nodes, "jaxgru", self.inputs, self.outputs, constants)
        opsets = [helper.make_opsetid("", _OPSET)]
        model = helper.make_model(
            graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="jaxgru"
        )
        helper.set_model_props(model, metadata)
        return model


def carry_parts(p: CellParams) -> dict[str, tuple[int, ...]]:
    """Return the parts of a layer's carry, and their shapes without the batch."""
    E, H = sizes(p)
    if isinstance(p, MLPParams):
        return {"h": (H,), "context": (len(p.W) - 1, E)}
    return {"h": (H,), "c": (H,)} if isinstance(p, LSTMParams) else {"h": (H,)}


def layer_path(i: int, d: int, directions: int) -> str:
    """Return layer i's name in the inputs and outputs of the carry: "0", of two "backward.0"."""
    return f"{DIRECTIONS[d]}.{i}" if directions == 2 else str(i)


def add_layer(
    graph: Graph, i: int, layers: tuple[CellParams, ...], x: str, lengths: str, reverse: bool
) -> str:
    """Add a layer's nodes: x (T, B, E) → h of every step (T, B, H), or (T, B, 2·H) of two."""
    layer, p = f"layers.{i}", layers[0]
    for name, value in _packed(layers).items():
        graph.constant(f"{layer}.{name}", value)
    if isinstance(p, MLPParams):
        return _add_mlp(graph, i, p, x)
    # ONNX's arrays have one more axis, for the directions of a layer
    axis_0 = graph.constant("axis_0", [0])
    paths = [layer_path(i, d, len(layers)) for d in range(len(layers))]
    states = []
    for part in carry_parts(p):
        each = [graph.node("Unsqueeze", f"carry.{path}.{part}", axis_0) for path in paths]
        states.append(each[0] if len(each) == 1 else graph.node("Concat", *each, axis=0))
    options: dict[str, Any] = {"hidden_size": sizes(p)[1]}
    if isinstance(p, AnyGRU):
        options["linear_before_reset"] = int(isinstance(p, GRUParams))
    if len(layers) == 2 or reverse:
        options["direction"] = "bidirectional" if len(layers) == 2 else "reverse"
    weights = [f"{layer}.{name}" for name in "WRB"]
    lasts = [f"{layer}.{part}_out" for part in carry_parts(p)]
    y = graph.node(
        cell_of(p).name.upper(), x, *weights, lengths, *states,
        outputs=[f"{layer}.y", *lasts], **options,
    )  # fmt: skip
    for part, last, state in zip(carry_parts(p), lasts, states, strict=True):
        if lengths:  # of a row without steps, ONNX Runtime returns zeros
            some = graph.node("Greater", lengths, graph.constant("zero", np.int32(0)))
            some = graph.node("Unsqueeze", some, graph.constant("axis_1", [1]))
            last = graph.node("Where", some, last, state)
        for d, path in enumerate(paths):
            index, out = graph.constant(f"index_{d}", d), f"carry_out.{path}.{part}"
            graph.node("Gather", last, index, axis=0, outputs=[out])
    if len(layers) == 1:
        return graph.node("Squeeze", y, graph.constant("axis_1", [1]))
    # (T, 2, B, H) → (T, B, 2·H)
    return graph.node(
        "Reshape", graph.transpose(y, 0, 2, 1, 3), graph.constant("side_by_side", [0, 0, -1])
    )


def _add_mlp(graph: Graph, i: int, p: MLPParams, x: str) -> str:
    """Add a convolution over time, whose padding is the carry; h in the carry is only returned."""
    before, after = f"carry.{i}.context", f"carry_out.{i}.context"
    x_T, context_T = graph.transpose(x, 1, 2, 0), graph.transpose(before, 0, 2, 1)
    inputs = graph.node("Concat", context_T, x_T, axis=2)  # (B, E, K − 1 + T)
    T, end = graph.node("Shape", x, end=1), graph.constant("end", [2**63 - 1])
    last = graph.node("Slice", inputs, T, end, graph.constant("axis_2", [2]))
    graph.transpose(last, 0, 2, 1, output=after)
    a = graph.node("Conv", inputs, f"layers.{i}.W", f"layers.{i}.b")
    h = graph.transpose(graph.node("Tanh", a), 2, 0, 1)
    graph.node("Gather", h, graph.constant("last", -1), outputs=[f"carry_out.{i}.h"])
    return h


def _packed(layers: tuple[CellParams, ...]) -> dict[str, Any]:
    """Return the weights of a layer of D directions as ONNX has them.

    W (D, G·H, E), R (D, G·H, H) and B (D, 2·G·H), which has all b, then all c; absent ones are
    zeros. Of an MLP, a convolution's W (H, E, K) and b (H).
    """
    p = layers[0]
    if isinstance(p, MLPParams):
        return {"W": p.W.transpose(2, 1, 0), "b": p.b}
    order = ORDER[cell_of(p).name]
    each = [
        common.stacked(common.complement_z(p) if isinstance(p, AnyGRU) else p, order)
        for p in layers
    ]
    W, R, b, c = (np.stack(side) for side in zip(*each, strict=True))
    return {"W": W, "R": R, "B": np.concatenate([b, c], axis=1)}


def unpacked(
    where: str, i: int, kind: str, names: Mapping[str, Any], array: Callable[[str], Any]
) -> tuple[CellParams, ...]:
    """Invert `_packed`, given the names of our parameters and a function that reads a tensor."""
    at, cell = f"layers.{i}.", kind.partition(",")[0]
    if cell == "mlp":
        W, b = array(f"{at}W"), array(f"{at}b")
        return (MLPParams(W=W.transpose(2, 1, 0) if W.ndim == 3 else W, b=b),)
    order, paths = ORDER[cell], _prefixes(names)
    packed = {f"{at}{side}": array(f"{at}{side}") for side in "WRB"}
    (W, R, B), D, G = packed.values(), len(paths), len(order)
    E, H = W.shape[-1], R.shape[-1]
    want = {f"{at}W": (D, G * H, E), f"{at}R": (D, G * H, H), f"{at}B": (D, 2 * G * H)}
    check_shapes(where, {name: w.shape for name, w in packed.items()}, want)
    layers = []
    for d, path in enumerate(paths):
        b, c = np.split(B[d], 2)
        second = common.second_biases(c, order, R[d].T) if cell == "gru" else {}
        if f"{path}.{i}.c" not in names:
            second.pop("c", None)
        if KINDS[kind] is not GRUParams:
            second.pop("cn", None)
        p = common.layer_of(KINDS[kind], order, W=W[d].T, U=R[d].T, b=b, **second)
        layers.append(common.complement_z(p) if isinstance(p, AnyGRU) else p)
    return tuple(layers)


def _prefixes(names: Mapping[str, Any]) -> Sequence[str]:
    """Return what the names of the layers' parameters begin with, in each direction."""
    two = any(name.startswith(f"{DIRECTIONS[0]}.") for name in names)
    return DIRECTIONS if two else ("layers",)
