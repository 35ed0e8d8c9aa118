"""ONNX: the GRU, LSTM and RNN nodes of any graph, as layers.

ONNX's weights have an axis for the directions: W (D, G·H, E), R (D, G·H, H), B (D, 2·G·H), where B
has an input bias and a recurrent bias for every gate. The gates are in the order z, r, n (its h)
and i, o, f, g (its c). A GRU's z weights the old state, and `linear_before_reset` is our
`reset_gate` "after". See https://onnx.ai/onnx/operators/onnx__GRU.html, and likewise LSTM and RNN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxgru.cells import CellParams, GRUParams, LSTMParams, ResetBeforeGRUParams, RNNParams
from jaxgru.errors import needs, shown
from jaxgru.libraries import InteropError, check_shapes, common

with needs("onnx"):
    import onnx
    from onnx import helper, numpy_helper
    from onnx.reference import ReferenceEvaluator

ORDER = {"gru": "zrn", "lstm": "iofg", "rnn": "h"}
"""The order of the gates in ONNX's operators."""

_FUNCTIONS = {"gru": ["sigmoid", "tanh"], "lstm": ["sigmoid", "tanh", "tanh"], "rnn": ["tanh"]}
_INPUTS = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")
_MOVES = (
    "Cast", "Concat", "Dropout", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze",
)  # fmt: skip
"""What may stand between two layers of a stack."""


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


def recurrent_nodes(
    where: str, model: onnx.ModelProto, folder: Path | None = None
) -> tuple[RecurrentNode, ...]:
    """Return the recurrent nodes of a graph, in its order; those in subgraphs are not read.

    Args:
      where: begins the messages.
      folder: that of the graph's file, for weights in files beside it; None: there are none.

    Raises:
      InteropError: there is no such node; one computes something that no layer does; or its weights
        are not constants, have wrong shapes, or are neither float32 nor, if JAX has 64 bits
        enabled, float64.
    """
    graph = _Graph(where, model, folder)
    if not graph.recurrent:
        raise InteropError(
            f"{where}: its graph contains no GRU, LSTM or RNN node (subgraphs are not read)."
        )
    return tuple(_read(graph, i) for i in graph.recurrent)


class _Graph:
    """A model's nodes by what they make, and the values of its constants."""

    def __init__(self, where: str, model: onnx.ModelProto, folder: Path | None) -> None:
        self.where, self.model, self.folder = where, model, folder
        self.nodes = list(model.graph.node)
        self.stored = {tensor.name: tensor for tensor in model.graph.initializer}
        self.makers = {out: i for i, node in enumerate(self.nodes) for out in node.output if out}
        self.recurrent = [
            i
            for i, node in enumerate(self.nodes)
            if node.op_type.lower() in ORDER and node.domain in ("", "ai.onnx")
        ]

    def name(self, i: int) -> str:
        """Return the name of a node, or of its first output."""
        return self.nodes[i].name or next(filter(None, self.nodes[i].output), f"node {i}")

    def value(self, what: str, name: str) -> np.ndarray:
        """Return a constant, also one that other nodes compute from constants."""
        if name in self.stored:
            return self._stored(what, name)
        needed: set[int] = set()
        constants: set[str] = set()
        todo = [name]
        while todo:
            this = todo.pop()
            if this in self.stored:
                constants.add(this)
            elif this not in self.makers:
                raise InteropError(
                    f"{what} comes from {shown(this)}, an input of the graph, so it is not known."
                )
            elif (i := self.makers[this]) not in needed:
                needed.add(i)
                todo += filter(None, self.nodes[i].input)
        arrays = {constant: self._stored(what, constant) for constant in constants}
        inputs, nodes = [onnx.ValueInfoProto(name=n) for n in arrays], sorted(needed)
        graph = helper.make_graph(
            [self.nodes[i] for i in nodes], "weights", inputs, [onnx.ValueInfoProto(name=name)]
        )
        model = helper.make_model(graph, opset_imports=self.model.opset_import)
        outputs: Any = ReferenceEvaluator(model).run([name], arrays)  # annotated as a dict
        return np.asarray(outputs[0])

    def _stored(self, what: str, name: str) -> np.ndarray:
        tensor = self.stored[name]
        if tensor.data_location == onnx.TensorProto.EXTERNAL and self.folder is None:
            raise InteropError(f"{what} is in a file beside the graph's; pass the graph's path.")
        return numpy_helper.to_array(tensor, str(self.folder or ""))

    def below(self, name: str) -> tuple[str, ...]:
        """Return the recurrent nodes whose outputs of every step make this one, only moved."""
        found: list[str] = []
        todo, seen = [name], set()
        while todo:
            this = todo.pop(0)
            if this in seen or (i := self.makers.get(this)) is None:
                continue
            seen.add(this)
            node = self.nodes[i]
            if i in self.recurrent:
                found += [self.name(i)] if this == node.output[0] else []
            elif node.op_type in _MOVES:
                todo += node.input if node.op_type == "Concat" else node.input[:1]
        return tuple(dict.fromkeys(found))


def _read(graph: _Graph, i: int) -> RecurrentNode:
    node, name = graph.nodes[i], graph.name(i)
    cell, at = node.op_type.lower(), f"{graph.where}: the {node.op_type} {shown(name)}"
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    inputs = {what: n for what, n in zip(_INPUTS, node.input, strict=False) if n}
    direction = given.get("direction", b"forward").decode()
    directions = 2 if direction == "bidirectional" else 1
    _check_attributes(at, cell, given, directions)
    values = {
        what: graph.value(f"{at}: its {what}", inputs[what]) for what in "WRBP" if what in inputs
    }
    if np.any(values.pop("P", 0)):
        raise InteropError(f"{at} has peepholes (P), which jaxgru's LSTM does not have.")
    R = values.get("R", np.empty(()))
    E, H = values.get("W", R).shape[-1:], R.shape[-1:]
    rows = len(ORDER[cell]) * (H or (0,))[0]
    want = {"W": (directions, rows, *E), "R": (directions, rows, *H)}
    want |= {"B": (directions, 2 * rows)} if "B" in values else {}
    check_shapes(at, {what: value.shape for what, value in values.items()}, want)
    for value in values.values():
        common.check_dtype(f"{at}: its weights", str(value.dtype))
    reads = graph.below(inputs.get("X", ""))
    layers = [_layer(cell, given, values, d) for d in range(directions)]
    return RecurrentNode(name, direction, layers[0], layers[1] if directions == 2 else None, reads)


def _check_attributes(at: str, cell: str, given: Mapping[str, Any], directions: int) -> None:
    """Raise InteropError if a node computes something else than a layer."""
    functions = [name.decode().lower() for name in given.get("activations", [])]
    if functions not in ([], _FUNCTIONS[cell] * directions):
        raise InteropError(
            f"{at} has the activations {', '.join(functions)}; jaxgru's are "
            f"{', '.join(_FUNCTIONS[cell])}."
        )
    if "clip" in given:
        raise InteropError(f"{at} clips what enters its activations (clip), which jaxgru does not.")
    if given.get("input_forget"):
        raise InteropError(f"{at} couples its gates (input_forget), which jaxgru's LSTM does not.")


def _layer(
    cell: str, given: Mapping[str, Any], values: Mapping[str, np.ndarray], d: int
) -> CellParams:
    W, R, B = values["W"][d], values["R"][d], values.get("B")
    b, c = (None, None) if B is None else np.split(B[d], 2)
    weights, order = dict(W=W.T, U=R.T, b=b), ORDER[cell]
    if cell == "gru":
        second = common.second_biases(c, order, R.T)
        if given.get("linear_before_reset"):
            return common.complement_z(common.layer_of(GRUParams, order, **weights, **second))
        cn = second.pop("cn")
        p = common.layer_of(ResetBeforeGRUParams, order, **weights, **second)
        b = jnp.concatenate([p.b[: -len(cn)], common.added(p.b[-len(cn) :], cn)])
        return common.complement_z(p.replace(b=b))
    weights["b"] = None if b is None else np.asarray(common.added(b, c))
    return common.layer_of(LSTMParams if cell == "lstm" else RNNParams, order, **weights)
