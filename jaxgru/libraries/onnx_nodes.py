"""ONNX: the recurrent nodes of any graph as layers, and what ONNX's operators are.

ONNX's weights have an axis for the directions: W (D, G·H, E), R (D, G·H, H), B (D, 2·G·H), where B
has an input bias and a recurrent bias for every gate. A GRU's z weights the old state, and its
`linear_before_reset` is our `reset_gate` "after". See
https://onnx.ai/onnx/operators/onnx__GRU.html, and likewise LSTM and RNN.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from jaxgru import cells
from jaxgru.arguments import check_shapes
from jaxgru.cells import ACTIVATIONS
from jaxgru.errors import LibraryError, UserError, needs
from jaxgru.libraries import common
from jaxgru.printing import shown

with needs("onnx"):
    import onnx
    from google.protobuf.message import DecodeError  # onnx depends on protobuf
    from onnx import TensorProto, helper, numpy_helper
    from onnx.reference import ReferenceEvaluator

ORDER = {"GRU": "zrn", "LSTM": "iofg", "RNN": "h"}
"""The order of the gates in ONNX's operators; its names of n and g are h and c."""
PEEPHOLES = "iof"


class Operator(NamedTuple):
    """An operator of ONNX's, and the attributes that tell one class of layers from others."""

    name: str
    attributes: dict[str, int]


OPERATORS: dict[type, Operator] = {
    cells.GRUCell: Operator("GRU", {"linear_before_reset": 1}),
    cells.ResetBeforeGRUCell: Operator("GRU", {"linear_before_reset": 0}),
    cells.RNNCell: Operator("RNN", {}),
    cells.CoupledLSTMCell: Operator("LSTM", {"input_forget": 1}),
    cells.LSTMCell: Operator("LSTM", {}),
    cells.PeepholeLSTMCell: Operator("LSTM", {}),
}
"""For each class of layers, its operator."""

_INPUTS = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")


def functions(op: str, activation: str) -> list[str]:
    """Return the functions of an operator, for one direction."""
    gates = {"GRU": ["sigmoid", activation], "LSTM": ["sigmoid", activation, activation]}
    return gates.get(op, [activation])


@dataclasses.dataclass(frozen=True)
class RecurrentNode:
    """A GRU, LSTM or RNN node of a graph.

    Attributes:
      name: the node's name or, if it has none, that of its first output.
      direction: "forward", "reverse" or "bidirectional".
      layer: its layer; for a bidirectional node, the one that reads forward.
      backward: for a bidirectional node, the layer that reads backward; else None.
    """

    name: str
    direction: str
    layer: cells.AnyCell
    backward: cells.AnyCell | None


def from_onnx(model: onnx.ModelProto | str | Path) -> tuple[RecurrentNode, ...]:
    """Read the GRU, LSTM and RNN nodes of any graph, in its order; those in subgraphs are not read.

    A node's weights are all that is read of it. Its lengths, and the state that it starts from, are
    the caller's arguments here, and its `layout` only concerns those, the input and the output.
    A GRU applies the reset gate before the product if its `linear_before_reset` is 0, and after it
    if that is 1. Its two biases of z and r are kept; those that act only as their sum are added.
    Of a graph that `to_onnx` made of such nodes, these are its layers bit for bit (absent second
    biases of a GRU are zeros).

    Args:
      model: a graph, or the path of its file; weights in files beside it are then read, too.

    Returns:
      A node for each, in the graph's order. Of a graph that is a stack, `[node.layer for node in
      nodes]` is one for `jaxgru.unroll`; so are the `node.backward` for `jaxgru.bidirectional`.

    Raises:
      LibraryError: there is no recurrent node, or one whose weights are not constants or whose
        functions are not sigmoid, tanh and ReLU.
    """
    where = "the ONNX model cannot be used"
    folder = None
    if not isinstance(model, onnx.ModelProto):
        where = f"{model} cannot be used"
        folder = Path(model).parent
        model = parsed(where, Path(model).read_bytes())
    graph = _Nodes(where, model, folder)
    nodes = [
        _read(graph, node)
        for node in model.graph.node
        if node.op_type in ORDER and node.domain in ("", "ai.onnx")
    ]
    if not nodes:
        raise LibraryError(
            f"{where}: its graph contains no GRU, LSTM or RNN node (subgraphs are not read)."
        )
    return tuple(nodes)


def parsed(where: str, data: bytes, kind: type[UserError] = LibraryError) -> onnx.ModelProto:
    """Return what is in a file, or raise an error of this kind, whose message `where` begins."""
    try:
        return onnx.ModelProto.FromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise kind(f"{where}: it is not a whole ONNX file ({error}).") from error


class _Nodes:
    """A model's nodes by what they make, and the values of its constants."""

    def __init__(self, where: str, model: onnx.ModelProto, folder: Path | None) -> None:
        self.where = where
        self.folder = folder
        self.opsets = model.opset_import
        self.initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        self.makers = {out: node for node in model.graph.node for out in node.output if out}

    def value(self, what: str, name: str) -> np.ndarray:
        """Return a constant, also one that other nodes compute from constants."""
        if name in self.initializers:
            return self._stored_value(what, self.initializers[name])
        if name in self.makers:
            return self._computed_value(what, name)
        raise LibraryError(
            f"{what} comes from {shown(name)}, an input of the graph, so it is not known."
        )

    def _stored_value(self, what: str, tensor: TensorProto) -> np.ndarray:
        if tensor.data_location == TensorProto.EXTERNAL and self.folder is None:
            raise LibraryError(f"{what} is in a file beside the graph's; pass the graph's path.")
        return numpy_helper.to_array(tensor, str(self.folder or ""))

    def _computed_value(self, what: str, name: str) -> np.ndarray:
        """Return an output of a node, computed by ONNX's own evaluator."""
        node = self.makers[name]
        reads = {source: self.value(what, source) for source in node.input if source}
        inputs = [onnx.ValueInfoProto(name=source) for source in reads]
        output = onnx.ValueInfoProto(name=name)
        graph = helper.make_graph([node], "weights", inputs, [output])
        model = helper.make_model(graph, opset_imports=self.opsets)
        outputs: Any = ReferenceEvaluator(model).run([name], reads)  # annotated as a dict
        return np.asarray(outputs[0])


def _name(node: onnx.NodeProto) -> str:
    return node.name or next(filter(None, node.output), "without a name")


def _read(graph: _Nodes, node: onnx.NodeProto) -> RecurrentNode:
    op = node.op_type
    at = f"{graph.where}: the {op} {shown(_name(node))}"
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    direction = attributes.get("direction", b"forward").decode()
    directions = 2 if direction == "bidirectional" else 1
    activations = _activations(at, op, attributes, directions)
    clip = attributes.get("clip")
    if clip is not None and not clip > 0:
        raise LibraryError(f"{at} has clip={clip}; it must be above 0.")
    weights = _weights(graph, at, node, directions)
    cls = _layer_class(op, attributes, has_peepholes="P" in weights)
    layers = [
        layer_from_operator(
            cls,
            {what: weight[d] for what, weight in weights.items()},
            activation=activations[d],
            clip=clip,
        )
        for d in range(directions)
    ]
    backward = layers[1] if directions == 2 else None
    return RecurrentNode(_name(node), direction, layers[0], backward)


def _activations(
    at: str, op: str, attributes: Mapping[str, Any], directions: int
) -> tuple[str, ...]:
    """Return the activation of each direction; raise LibraryError for other functions."""
    choices = list(itertools.product(ACTIVATIONS, repeat=directions))
    supported = [
        [function for activation in choice for function in functions(op, activation)]
        for choice in choices
    ]
    names = [name.decode().lower() for name in attributes.get("activations", [])]
    options = SimpleNamespace(activations=names or supported[0])
    common.check_options(at, options, activations=supported)
    return choices[supported.index(options.activations)]


def _weights(
    graph: _Nodes, at: str, node: onnx.NodeProto, directions: int
) -> dict[str, np.ndarray]:
    """Return a node's W, R, B, which is zeros where it has none, and any P."""
    inputs = {what: name for what, name in zip(_INPUTS, node.input, strict=False) if name}
    weights = {
        what: graph.value(f"{at}: its {what}", inputs[what]) for what in "WRBP" if what in inputs
    }
    for weight in weights.values():
        common.check_dtype(f"{at}: its weights", str(weight.dtype))
    E, H = (weights[what].shape[-1] if weights[what].ndim else 0 for what in "WR")
    shapes = operator_shapes(node.op_type, directions, E, H)
    check_shapes(
        at,
        {what: weight.shape for what, weight in weights.items()},
        {what: shapes[what] for what in weights},
    )
    weights.setdefault("B", np.zeros(shapes["B"], weights["W"].dtype))
    return weights


def _layer_class(op: str, attributes: Mapping[str, Any], has_peepholes: bool) -> Any:
    """Return the class of the layers that an operator with these attributes computes."""

    def computes(operator: Operator) -> bool:
        if operator.name != op:
            return False
        fixed = operator.attributes.items()
        return all(attributes.get(name, 0) == value for name, value in fixed)

    cls = next(cls for cls, operator in OPERATORS.items() if computes(operator))
    if cls is cells.LSTMCell and has_peepholes:
        return cells.PeepholeLSTMCell
    return cls


def operator_shapes(op: str, directions: int, E: int, H: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an operator's weights, with the axis for the directions."""
    rows = len(ORDER[op]) * H
    shapes = {"W": (rows, E), "R": (rows, H), "B": (2 * rows,), "P": (len(PEEPHOLES) * H,)}
    return {what: (directions, *shape) for what, shape in shapes.items()}


def layer_from_operator(
    cls: Any, weights: Mapping[str, np.ndarray], **options: Any
) -> cells.AnyCell:
    """Return a layer, given the weights of one direction: W, R, B and, with peepholes, P."""
    order = ORDER[OPERATORS[cls].name]
    W = weights["W"].T
    U = weights["R"].T
    b, c = np.split(weights["B"], 2)
    if hasattr(cls, "peepholes"):
        options["p"] = None
        if "P" in weights:
            options["p"] = common.reorder_gates(weights["P"], PEEPHOLES, cls.peepholes)
    return common.layer_from_weights(cls, order, W, U, b, c, **options)
