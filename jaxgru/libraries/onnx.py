"""ONNX: layers as a graph of standard operators; the recurrent nodes of any graph as layers.

`to_onnx` makes a graph that computes `jaxgru.unroll` or, of two directions, `bidirectional`:

    inputs    x (B, T, F); with `lengths`, the steps of each row (B) int32; the carry: carry.0.h, …
    outputs   y (B, T, H), of two directions (B, T, 2·H); the next carry: carry_out.0.h, …

B and T are dynamic and at least 1; with 0, ONNX Runtime's GRU crashes the process. The carry's
arrays have jaxgru's shapes, h and c (B, H), and come in the same order on both sides, so that the
outputs of one call are inputs of the next. Zeros start a sequence. Of two directions they are
carry.forward.0.h, …, then carry.backward.0.h, ….

ONNX's weights have an axis for the directions: W (D, G·H, E), R (D, G·H, H), B (D, 2·G·H), where B
has an input bias and a recurrent bias for every gate. A GRU's z weights the old state, and its
`linear_before_reset` is our `reset_gate` "after". See
https://onnx.ai/onnx/operators/onnx__GRU.html, and likewise LSTM and RNN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
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
)  # fmt: skip
from jaxgru.errors import needs, shown
from jaxgru.layers.arguments import check_stack
from jaxgru.libraries import InteropError, check_shapes, common

with needs("onnx"):
    import onnx
    from google.protobuf.message import DecodeError  # onnx depends on protobuf
    from onnx import TensorProto, helper, numpy_helper
    from onnx.reference import ReferenceEvaluator

ORDER = {"gru": "zrn", "lstm": "iofg", "rnn": "h"}
"""The order of the gates in ONNX's operators; its names of n and g are h and c."""

_OPSET, _IR_VERSION = 17, 8
"""The oldest versions with all operators: LayerNormalization came with opset 17."""

_FUNCTIONS = {"gru": ["sigmoid", "tanh"], "lstm": ["sigmoid", "tanh", "tanh"], "rnn": ["tanh"]}
_INPUTS = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")
_MOVES = (
    "Cast", "Concat", "Dropout", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze",
)  # fmt: skip
"""What may stand between two layers of a stack."""


def to_onnx(
    layers: CellParams | Sequence[Any],
    backward: CellParams | Sequence[CellParams] | None = None,
    *,
    lengths: bool = False,
    reverse: bool = False,
) -> onnx.ModelProto:
    """Convert layers to a graph that computes `jaxgru.unroll`, without dropout and resets.

    `jaxgru.lm.formats.onnx.to_onnx` does so for a language model.

    Args:
      layers: a layer, or a list of layers; or, as from `from_torch`, a pair of lists, for a graph
        that computes `jaxgru.bidirectional`; float32, or float64, for which most runtimes lack the
        operators.
      backward: the layer, or the layers, of the backward direction; None: there is one direction.
      lengths: the graph takes the number of steps of each row; those after it are padding, as for
        `jaxgru.unroll`.
      reverse: read from the last step to the first.

    Raises:
      InteropError: there is no layer; ONNX has no operator for one of them; those of two directions
        differ in number, kind or size; the weights are not all of one such dtype, or not known, as
        under `jit`; or an MLP is to read backward or to take lengths.
      ValueError: one's output has another size than the next one's input.
    """
    common.check_known((layers, backward), "an ONNX graph")
    ahead, back = common.in_directions(layers, backward)
    if back and reverse:
        raise InteropError("the layers read in both directions already, so reverse must be False.")
    if (back or lengths or reverse) and any(isinstance(p, MLPParams) for p in ahead):
        raise InteropError(
            "an MLP reads whole sequences forward, so it takes neither lengths nor a direction."
        )
    check_layers(ahead, back)
    (features, _), (_, H) = sizes(ahead[0]), sizes(ahead[-1])
    check_stack([*zip(ahead, back, strict=True)] if back else ahead, features)
    graph = Graph((ahead, back))
    graph.output("y", "B", "T", H * (2 if back else 1))
    x = graph.transpose(graph.input("x", "B", "T", features), 1, 0, 2)
    steps = graph.input("lengths", "B", type=TensorProto.INT32) if lengths else ""
    x = graph.layers(ahead, x, back, steps, reverse)
    graph.transpose(x, 1, 0, 2, output="y")
    return graph.model()


@dataclasses.dataclass(frozen=True)
class RecurrentNode:
    """A GRU, LSTM or RNN node of a graph.

    Attributes:
      name: the node's name or, if it has none, that of its first output.
      direction: "forward", "reverse" or "bidirectional".
      layer: its layer; for a bidirectional node, the one that reads forward.
      backward: for a bidirectional node, the layer that reads backward; else None.
      reads: the names of the nodes whose outputs it reads: the layers below it in a stack.
    """

    name: str
    direction: str
    layer: CellParams
    backward: CellParams | None
    reads: tuple[str, ...]


def from_onnx(model: onnx.ModelProto | str | Path) -> tuple[RecurrentNode, ...]:
    """Read the GRU, LSTM and RNN nodes of any graph, in its order; those in subgraphs are not read.

    A node's weights are all that is read of it. Its lengths, and the state that it starts from, are
    the caller's arguments here, and its `layout` only concerns those, the input and the output.
    A GRU applies the reset gate before the product if its `linear_before_reset` is 0, and after it
    if that is 1. Its two biases of z and r are kept; those that act only as their sum are added.
    Of a graph that `to_onnx` made, these are its layers bit for bit (absent second biases of a GRU
    are zeros).

    Args:
      model: a graph, or the path of its file; weights in files beside it are then read, too.

    Returns:
      A node for each: `[node.layer for node in nodes]` is a stack for `jaxgru.unroll` where each
      node reads the one before, and so are the `node.backward` for `jaxgru.bidirectional`.

    Raises:
      InteropError: there is no recurrent node; a node has activations other than sigmoid and tanh,
        `clip`, `input_forget` or peepholes, which no layer has; its weights are not constants, have
        wrong shapes, or are neither float32 nor, where JAX has 64 bits enabled, float64.
      OSError: the file cannot be read.
    """
    where, folder = "the ONNX model cannot be used", None
    if not isinstance(model, onnx.ModelProto):
        where, folder = f"{model} cannot be used", Path(model).parent
        model = parsed(where, Path(model).read_bytes())
    graph = _Nodes(where, model, folder)
    found = [
        _read(graph, node)
        for node in model.graph.node
        if node.op_type.lower() in ORDER and node.domain in ("", "ai.onnx")
    ]
    if not found:
        raise InteropError(
            f"{where}: its graph contains no GRU, LSTM or RNN node (subgraphs are not read)."
        )
    return tuple(found)


def parsed(where: str, data: bytes) -> onnx.ModelProto:
    """Return what is in a file. Raises InteropError, whose message `where` begins."""
    try:
        return onnx.ModelProto.FromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise InteropError(f"{where}: it is not a whole ONNX file ({error}).") from error


# --- Out


class Graph:
    """A graph under construction, for weights of one dtype.

    Each method adds something to it and returns its name.
    """

    def __init__(self, weights: Any) -> None:
        """Raise InteropError if the weights are neither all float32 nor all float64."""
        dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(weights)}
        common.check_dtype("the weights", " and ".join(sorted(dtypes)))
        self.type = helper.np_dtype_to_tensor_dtype(np.dtype(*dtypes))
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

    def layers(
        self,
        ahead: Sequence[CellParams],
        x: str,
        back: Sequence[CellParams] | None = None,
        lengths: str = "",
        reverse: bool = False,
    ) -> str:
        """Add layers and their carries: x (T, B, E) → (T, B, H), of two directions (…, 2·H)."""
        D = 2 if back else 1
        for d, stack in enumerate((ahead, back)[:D]):
            for i, p in enumerate(stack or ()):
                for part, shape in _carry_parts(p).items():
                    self.input(f"carry.{_path(i, d, D)}.{part}", "B", *shape)
                    self.output(f"carry_out.{_path(i, d, D)}.{part}", "B", *shape)
        for i, pair in enumerate(zip(ahead, back, strict=True) if back else zip(ahead)):
            pair = jax.tree.map(np.asarray, pair)
            add = _add_mlp if isinstance(pair[0], MLPParams) else _add_recurrent
            x = add(self, i, pair, x, lengths, reverse)
        return x

    def model(self) -> onnx.ModelProto:
        """Return the model; the same weights always give the same bytes."""
        constants = [numpy_helper.from_array(c, name) for name, c in self.constants.items()]
        graph = helper.make_graph(self.nodes, "jaxgru", self.inputs, self.outputs, constants)
        opsets = [helper.make_opsetid("", _OPSET)]
        return helper.make_model(
            graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="jaxgru"
        )


def check_layers(ahead: Sequence[CellParams], back: Sequence[CellParams] | None = None) -> None:
    """Raise InteropError if ONNX lacks a layer, or two directions of one differ."""
    known = dict.fromkeys((GRUParams, ResetBeforeGRUParams, LSTMParams, RNNParams, MLPParams))
    has = "ONNX has a GRU, an LSTM and an RNN, and a convolution for an MLP"
    for p in (*ahead, *(back or ())):
        common.found(p, known, has)
        if not isinstance(p, MLPParams) and p.U.ndim == 3:
            raise InteropError(
                "ONNX has no block-diagonal weights, as num_blocks makes them; "
                "jaxgru.cells.products.dense returns the layer with matrices."
            )
    for i, (p, q) in enumerate(zip(ahead, back or (), strict=False)):
        if (type(p), sizes(p)) != (type(q), sizes(q)):
            raise InteropError(f"the two directions of layer {i} must be of one kind and size.")


def _carry_parts(p: CellParams) -> dict[str, tuple[int, ...]]:
    """Return the parts of a layer's carry, and their shapes without the batch."""
    E, H = sizes(p)
    if isinstance(p, MLPParams):
        return {"h": (H,), "context": (len(p.W) - 1, E)}
    return {"h": (H,), "c": (H,)} if isinstance(p, LSTMParams) else {"h": (H,)}


def _path(i: int, d: int, directions: int) -> str:
    """Return layer i's name in the inputs and outputs of the carry: "0", of two "backward.0"."""
    return f"{('forward', 'backward')[d]}.{i}" if directions == 2 else str(i)


def _add_recurrent(
    graph: Graph, i: int, layers: tuple[CellParams, ...], x: str, lengths: str, reverse: bool
) -> str:
    layer, p, cell = f"layers.{i}", layers[0], cell_of(layers[0]).name
    each = [common.stacked(p, ORDER[cell]) for p in layers]
    W, R, b, c = (np.stack(side) for side in zip(*each, strict=True))
    packed = {"W": W, "R": R, "B": np.concatenate([b, c], axis=1)}
    weights = [graph.constant(f"{layer}.{name}", value) for name, value in packed.items()]
    # ONNX's arrays have one more axis, for the directions of a layer
    axis_0 = graph.constant("axis_0", [0])
    paths = [_path(i, d, len(layers)) for d in range(len(layers))]
    states = []
    for part in _carry_parts(p):
        parts = [graph.node("Unsqueeze", f"carry.{path}.{part}", axis_0) for path in paths]
        states.append(parts[0] if len(parts) == 1 else graph.node("Concat", *parts, axis=0))
    options: dict[str, Any] = {"hidden_size": sizes(p)[1]}
    if cell == "gru":
        options["linear_before_reset"] = int(isinstance(p, GRUParams))
    if len(layers) == 2 or reverse:
        options["direction"] = "bidirectional" if len(layers) == 2 else "reverse"
    lasts = [f"{layer}.{part}_out" for part in _carry_parts(p)]
    y = graph.node(
        cell.upper(), x, *weights, lengths, *states, outputs=[f"{layer}.y", *lasts], **options
    )
    for part, last, state in zip(_carry_parts(p), lasts, states, strict=True):
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


def _add_mlp(graph: Graph, i: int, layers: tuple[MLPParams], x: str, *_: Any) -> str:
    """Add a convolution over time, whose padding is the carry; h in the carry is only returned."""
    (p,) = layers
    W = graph.constant(f"layers.{i}.W", p.W.transpose(2, 1, 0))  # (H, E, K)
    before, after = f"carry.{i}.context", f"carry_out.{i}.context"
    x_T, context_T = graph.transpose(x, 1, 2, 0), graph.transpose(before, 0, 2, 1)
    inputs = graph.node("Concat", context_T, x_T, axis=2)  # (B, E, K − 1 + T)
    T, end = graph.node("Shape", x, end=1), graph.constant("end", [2**63 - 1])
    last = graph.node("Slice", inputs, T, end, graph.constant("axis_2", [2]))
    graph.transpose(last, 0, 2, 1, output=after)
    a = graph.node("Conv", inputs, W, graph.constant(f"layers.{i}.b", p.b))
    h = graph.transpose(graph.node("Tanh", a), 2, 0, 1)
    graph.node("Gather", h, graph.constant("last", -1), outputs=[f"carry_out.{i}.h"])
    return h


# --- In


class _Nodes:
    """A model's nodes by what they make, and the values of its constants."""

    def __init__(self, where: str, model: onnx.ModelProto, folder: Path | None) -> None:
        self.where, self.folder, self.opsets = where, folder, model.opset_import
        self.stored = {tensor.name: tensor for tensor in model.graph.initializer}
        self.makers = {out: node for node in model.graph.node for out in node.output if out}

    def value(self, what: str, name: str) -> np.ndarray:
        """Return a constant, also one that other nodes compute from constants."""
        if (tensor := self.stored.get(name)) is not None:
            if tensor.data_location == TensorProto.EXTERNAL and self.folder is None:
                raise InteropError(
                    f"{what} is in a file beside the graph's; pass the graph's path."
                )
            return numpy_helper.to_array(tensor, str(self.folder or ""))
        if name not in self.makers:
            raise InteropError(
                f"{what} comes from {shown(name)}, an input of the graph, so it is not known."
            )
        node = self.makers[name]
        given = {n: self.value(what, n) for n in node.input if n}
        *inputs, output = (onnx.ValueInfoProto(name=n) for n in (*given, name))
        graph = helper.make_graph([node], "weights", inputs, [output])
        model = helper.make_model(graph, opset_imports=self.opsets)
        outputs: Any = ReferenceEvaluator(model).run([name], given)  # annotated as a dict
        return np.asarray(outputs[0])

    def below(self, name: str) -> tuple[str, ...]:
        """Return the recurrent nodes whose outputs of every step make this one, only moved."""
        node = self.makers.get(name)
        if node is None:
            return ()
        if node.op_type.lower() in ORDER:
            return (_name(node),) if name == node.output[0] else ()
        moved = node.input if node.op_type == "Concat" else node.input[:1]
        moved = moved if node.op_type in _MOVES else ()
        return tuple(dict.fromkeys(found for each in moved for found in self.below(each)))


def _name(node: onnx.NodeProto) -> str:
    return node.name or next(filter(None, node.output), "without a name")


def _read(graph: _Nodes, node: onnx.NodeProto) -> RecurrentNode:
    cell, at = node.op_type.lower(), f"{graph.where}: the {node.op_type} {shown(_name(node))}"
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    inputs = {what: n for what, n in zip(_INPUTS, node.input, strict=False) if n}
    direction = given.get("direction", b"forward").decode()
    D = 2 if direction == "bidirectional" else 1
    given["activations"] = [name.decode().lower() for name in given.get("activations", [])]
    activations = [_FUNCTIONS[cell] * D, []]
    options = SimpleNamespace(**given)
    common.check_options(at, options, activations=activations, clip=[None], input_forget=[0])
    values = {
        what: graph.value(f"{at}: its {what}", inputs[what]) for what in "WRBP" if what in inputs
    }
    if np.any(values.pop("P", 0)):
        raise InteropError(f"{at} has peepholes (P), which jaxgru's LSTM does not have.")
    for value in values.values():
        common.check_dtype(f"{at}: its weights", str(value.dtype))
    E, H = (values[side].shape[-1] if values[side].ndim else 0 for side in "WR")
    rows = len(ORDER[cell]) * H
    want = {"W": (D, rows, E), "R": (D, rows, H), "B": (D, 2 * rows)}
    have = {what: value.shape for what, value in values.items()}
    check_shapes(at, have, {what: want[what] for what in have})
    W, R, B = values["W"], values["R"], values.get("B", np.zeros(want["B"], values["W"].dtype))
    cls: type = {"lstm": LSTMParams, "rnn": RNNParams}.get(cell, ResetBeforeGRUParams)
    cls = GRUParams if cell == "gru" and given.get("linear_before_reset") else cls
    layers = [*(layer_of(cls, W[d], R[d], B[d]) for d in range(D)), None]
    return RecurrentNode(
        _name(node), direction, layers[0], layers[1], graph.below(inputs.get("X", ""))
    )


def layer_of(cls: type, W: np.ndarray, R: np.ndarray, B: np.ndarray) -> CellParams:
    """Return the layer of one direction's weights W (G·H, E), R (G·H, H) and B (2·G·H)."""
    order = ORDER[{LSTMParams: "lstm", RNNParams: "rnn"}.get(cls, "gru")]
    b, c = np.split(B, 2)
    return common.layer_of(cls, order, W.T, R.T, b, c)
