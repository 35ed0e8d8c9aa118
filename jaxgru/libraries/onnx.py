"""ONNX: layers as a graph of standard operators; the recurrent nodes of any graph as layers.

`to_onnx` makes a graph that computes `jaxgru.unroll` or, of two directions, `bidirectional`:

    inputs    x (B, T, F); with `lengths`, the steps of each row (B) int32; with `reset`, where
              an episode begins (B, T) bool; the carry: carry.0.h, …
    outputs   y (B, T, H), of two directions (B, T, 2·H); the next carry: carry_out.0.h, …

B and T are dynamic and at least 1; with 0, ONNX Runtime's GRU crashes the process. The carry's
arrays have jaxgru's shapes, h and c (B, H), and come in the same order on both sides, so that the
outputs of one call are inputs of the next; parts of a carry without names are numbered. Zeros start
a sequence. Of two directions they are carry.forward.0.h, …, then carry.backward.0.h, …. With
`form="step"` the graph computes `jaxgru.step`, and nothing has the axis T.

A GRU, LSTM or RNN is ONNX's operator of that name, and an MLP a convolution over time. For other
cells, and for resets, `onnx_graph.py` writes the cell's step with plain operators, such as MatMul,
Add and Sigmoid, and the operator Scan repeats it. A graph of one step has plain operators only.

ONNX's weights have an axis for the directions: W (D, G·H, E), R (D, G·H, H), B (D, 2·G·H), where B
has an input bias and a recurrent bias for every gate. A GRU's z weights the old state, and its
`linear_before_reset` is our `reset_gate` "after". See
https://onnx.ai/onnx/operators/onnx__GRU.html, and likewise LSTM and RNN.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgru.cells import (
    Cell,
    CellParams,
    GRUParams,
    LSTMParams,
    MLPParams,
    ResetBeforeGRUParams,
    RNNParams,
    cell_of,
    hidden,
    sizes,
)  # fmt: skip
from jaxgru.cells.base import ACTIVATIONS
from jaxgru.cells.layout import PLAIN
from jaxgru.cells.marks import Marks
from jaxgru.errors import a_type, needs, shown
from jaxgru.layers.arguments import as_initial, carry_like, check_stack
from jaxgru.layers.over_time import advance
from jaxgru.layers.stack import ResidualStack
from jaxgru.libraries import InteropError, check_shapes, common
from jaxgru.libraries.onnx_graph import B, Graph, T, Value, constant

with needs("onnx"):
    import onnx
    from google.protobuf.message import DecodeError  # onnx depends on protobuf
    from onnx import TensorProto, helper, numpy_helper
    from onnx.reference import ReferenceEvaluator

ORDER = {"gru": "zrn", "lstm": "iofg", "rnn": "h"}
"""The order of the gates in ONNX's operators; its names of n and g are h and c."""

_INPUTS = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")
_MOVES = (
    "Cast", "Concat", "Dropout", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze",
)  # fmt: skip
"""What may stand between two layers of a stack."""


def to_onnx(
    layers: CellParams | Sequence[Any],
    backward: CellParams | Sequence[CellParams] | None = None,
    *,
    form: str = "sequence",
    lengths: bool = False,
    reset: bool = False,
    initial: Any = None,
    reverse: bool = False,
) -> onnx.ModelProto:
    """Convert layers to a graph that computes `jaxgru.unroll` or `jaxgru.step`, without dropout.

    `jaxgru.lm.formats.onnx.to_onnx` does so for a language model.

    Args:
      layers: a layer, a list of layers or a `ResidualStack`; or, as from `from_torch`, a pair of
        lists, for a graph that computes `jaxgru.bidirectional`; float32, or float64, for which most
        runtimes lack the operators.
      backward: the layer, or the layers, of the backward direction; None: there is one direction.
      form: "sequence"; or "step", for a graph of one step, which has no axis T.
      lengths: the graph takes the number of steps of each row; those after it are padding, as for
        `jaxgru.unroll`.
      reset: the graph takes flags; where one is True, the carry is set to `initial` before the
        step.
      initial: as for `jaxgru.unroll`, without the axis B; it is stored in the graph.
      reverse: read from the last step to the first.

    Raises:
      InteropError: there is no layer; those of two directions differ in number, kind or size; the
        weights are not all of one such dtype, or not known, as under `jit`; a cell of your own
        computes what jaxgru cannot write as ONNX; or the options contradict each other.
      ValueError: one's output has another size than the next one's input, or `initial` does not
        fit the layers.
    """
    common.check_known((layers, backward, initial), "an ONNX graph")
    ahead, back = common.in_directions(layers, backward)
    residual = [isinstance(side[0], ResidualStack) for side in (ahead, back) if side]
    if all(residual):
        ahead, back = common.in_directions(ahead[0].layers, back and back[0].layers)
    elif any(residual):
        raise InteropError("only one direction is a ResidualStack; both must be, or neither.")
    if form not in ("sequence", "step"):
        raise InteropError(f"form is {shown(form)}; it must be sequence or step.")
    if form == "step" and (back or lengths or reverse):
        raise InteropError("a step reads neither backward nor lengths; form must be sequence.")
    if back and reverse:
        raise InteropError("the layers read in both directions already, so reverse must be False.")
    if reset and (back or reverse):
        raise InteropError("layers that read backward take no resets, so reset must be False.")
    if initial is not None and not reset:
        raise InteropError("initial is what a reset sets, so reset must be True.")
    check_layers(ahead, back)
    (features, _), (_, H) = sizes(ahead[0]), sizes(ahead[-1])
    check_stack([*zip(ahead, back, strict=True)] if back else ahead, features, all(residual))
    if initial is not None:
        initial = as_initial(initial, carry_like(ahead, 1), isinstance(layers, Cell), None, (1,))
    graph, axes = Graph((ahead, back)), (B,) if form == "step" else (B, T)
    graph.output("y", *axes, H * (2 if back else 1))
    x = graph.input("x", *axes, features)
    given = Given(
        form,
        graph.input("lengths", B, dtype=np.int32) if lengths else "",
        graph.input("reset", *axes, dtype=bool) if reset else "",
        initial,
        reverse,
        all(residual),
    )
    if form == "step":
        graph.node("Identity", add_layers(graph, ahead, x, None, given), outputs=["y"])
        return graph.model()
    given = given._replace(reset=graph.transpose("reset", 1, 0) if reset else "")
    y = add_layers(graph, ahead, graph.transpose(x, 1, 0, 2), back, given)
    graph.transpose(y, 1, 0, 2, output="y")
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
    Of a graph that `to_onnx` made of such nodes, these are its layers bit for bit (absent second
    biases of a GRU are zeros).

    Args:
      model: a graph, or the path of its file; weights in files beside it are then read, too.

    Returns:
      A node for each: `[node.layer for node in nodes]` is a stack for `jaxgru.unroll` where each
      node reads the one before, and so are the `node.backward` for `jaxgru.bidirectional`.

    Raises:
      InteropError: there is no recurrent node; a node has activations other than sigmoid, and
        tanh or ReLU, `input_forget` or peepholes, which no layer has; its
        weights are not constants, have wrong shapes, or are neither float32 nor, where JAX has 64
        bits enabled, float64.
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


class Given(NamedTuple):
    """How layers are computed, see `to_onnx`; `lengths` and `reset` are names of inputs, or ""."""

    form: str = "sequence"
    lengths: str = ""
    reset: str = ""
    initial: Sequence[Any] | None = None
    reverse: bool = False
    residual: bool = False


_FORWARD = Given()


def add_layers(
    graph: Graph,
    ahead: Sequence[CellParams],
    x: str,
    back: Sequence[CellParams] | None = None,
    given: Given = _FORWARD,
) -> str:
    """Add layers and their carries: x (T, B, E) → (T, B, H), of two directions (…, 2·H).

    T is absent in a step.
    """
    D = 2 if back else 1
    for d, stack in enumerate((ahead, back)[:D]):
        for i, p in enumerate(stack or ()):
            for part, shape in _carry_parts(p).items():
                graph.input(f"carry.{_path(i, d, D)}.{part}", B, *shape)
                graph.output(f"carry_out.{_path(i, d, D)}.{part}", B, *shape)
    for i, pair in enumerate(zip(ahead, back, strict=True) if back else zip(ahead)):
        pair = jax.tree.map(np.asarray, pair)
        marked = given.lengths or given.reset or given.reverse or back
        if given.form == "step":
            add = _add_step
        elif has_operator(pair[0]) and not given.reset:
            add = _add_recurrent
        elif isinstance(pair[0], MLPParams) and not marked:
            add = _add_mlp
        else:
            add = _add_scan
        y = add(graph, i, pair, x, given)
        x = graph.node("Add", y, x) if given.residual and i else y
    return x


def check_layers(ahead: Sequence[Any], back: Sequence[Any] | None = None) -> None:
    """Raise InteropError if one is not a layer, or two directions of one differ."""
    for p in (*ahead, *(back or ())):
        if not isinstance(p, Cell):
            raise InteropError(
                f"{a_type(p)} cannot be converted; a layer is what init_gru returns."
            )
    for i, (p, q) in enumerate(zip(ahead, back or (), strict=False)):
        of_both = lambda p: (type(p), sizes(p), getattr(p, "clip", None))
        if of_both(p) != of_both(q):
            raise InteropError(
                f"the two directions of layer {i} must be of one kind, size and clip."
            )


def _functions(cell: str, activation: str) -> list[str]:
    """Return the functions of an operator, for one direction."""
    of_cell = {"gru": ["sigmoid", activation], "lstm": ["sigmoid", activation, activation]}
    return of_cell.get(cell, [activation])


def has_operator(p: CellParams) -> bool:
    """Return whether ONNX has an operator for such a layer over a sequence."""
    known_fields = {"W", "U", "b", "c", "cn", "activation", "clip"}  # others: another cell
    plain = {*vars(p)} <= known_fields
    known = type(p) in (GRUParams, ResetBeforeGRUParams, LSTMParams, RNNParams)
    return known and plain and p.U.ndim == 2


def _carry_parts(p: CellParams) -> dict[str, tuple[int, ...]]:
    """Return the parts of a layer's carry, and their shapes without the batch."""
    (carry,) = carry_like([p], 1)
    others = ("context",) if isinstance(p, MLPParams) else map(str, itertools.count(1))
    names = getattr(carry, "_fields", ("h", *itertools.islice(others, len(carry) - 1)))
    return {name: part.shape[1:] for name, part in zip(names, jax.tree.leaves(carry), strict=True)}


def _path(i: int, d: int, directions: int) -> str:
    """Return layer i's name in the inputs and outputs of the carry: "0", of two "backward.0"."""
    return f"{('forward', 'backward')[d]}.{i}" if directions == 2 else str(i)


def _add_recurrent(
    graph: Graph, i: int, layers: tuple[CellParams, ...], x: str, given: Given
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
    options |= {} if p.clip is None else {"clip": float(p.clip)}
    if cell == "gru":
        options["linear_before_reset"] = int(isinstance(p, GRUParams))
    if any(p.activation != "tanh" for p in layers):
        names = [name for p in layers for name in _functions(cell, p.activation)]
        options["activations"] = [name.capitalize() for name in names]
    if len(layers) == 2 or given.reverse:
        options["direction"] = "bidirectional" if len(layers) == 2 else "reverse"
    lasts = [f"{layer}.{part}_out" for part in _carry_parts(p)]
    y = graph.node(
        cell.upper(), x, *weights, given.lengths, *states, outputs=[f"{layer}.y", *lasts], **options
    )
    for part, last, state in zip(_carry_parts(p), lasts, states, strict=True):
        if given.lengths:  # of a row without steps, ONNX Runtime returns zeros
            some = graph.node("Greater", given.lengths, graph.constant("zero", np.int32(0)))
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


def _add_step(graph: Graph, i: int, layers: tuple[CellParams], x: str, given: Given) -> str:
    """Add one step of a layer, as its cell's equations have it."""
    (p,) = layers
    weights, carry = _named(f"layers.{i}", p, constant), _carry(graph, p, f"carry.{i}.")
    reset: Any = graph.value(given.reset, B, dtype=bool) if given.reset else None
    marks = Marks(reset, _initial(given, i))
    step = lambda p, carry, x, marks: _step(p, carry, p.inputs(x), marks)
    h, after = graph.add(
        type(p).__name__, step, weights, carry, graph.value(x, B, sizes(p)[0]), marks
    )
    for part, value in zip(_carry_parts(p), jax.tree.leaves(after), strict=True):
        graph.node("Identity", value.name, outputs=[f"carry_out.{i}.{part}"])
    return h.name


def _add_scan(graph: Graph, i: int, layers: tuple[CellParams, ...], x: str, given: Given) -> str:
    """Add a loop over the steps of a layer, each as its cell's equations have it.

    The weights are in the graph as they are, so that a file of them can be read back.
    """
    sides = []
    for d, p in enumerate(layers):
        path, what, parts = _path(i, d, len(layers)), type(p).__name__, _carry_parts(p)
        stored = lambda name, leaf: graph.value(graph.constant(name, leaf), *leaf.shape)
        weights = _named(f"layers.{path}", p, stored)
        x_TB = graph.value(x, T, B, sizes(p)[0])
        scanned = {"a": graph.add(what, lambda p, x: p.inputs(x), weights, x_TB)}
        reset, real = given.reset, _real(graph, x, given.lengths) if given.lengths else ""
        if reset and real:  # a reset in the padding does not count
            reset = graph.node("And", reset, real)
        flags = {"reset": reset, "real": real}
        scanned |= {n: graph.value(flag, T, B, dtype=bool) for n, flag in flags.items() if flag}
        body = graph.body(f"scan.{path}")
        carry = _carry(body, p, body.prefix)
        for value in jax.tree.leaves(carry):
            body.input(value.name, *value.shape)
        now: Any = {
            name: body.value(f"{body.prefix}{name}", *value.shape[1:], dtype=value.dtype)
            for name, value in scanned.items()
        }
        for value in now.values():
            body.input(value.name, *value.shape, dtype=value.dtype)
        marks = Marks(now.get("reset"), _initial(given, i), now.get("real"))
        h, after = body.add(what, _step, weights, carry, now["a"], marks)
        for part, value in zip([*parts, "y"], [*jax.tree.leaves(after), h], strict=True):
            output = body.output(f"{body.prefix}{part}_out", *value.shape)
            body.node("Identity", value.name, outputs=[output])
        reads, back = [f"carry.{path}.{part}" for part in parts], int(d or given.reverse)
        reads += [value.name for value in scanned.values()]
        outputs = [*(f"carry_out.{path}.{part}" for part in parts), f"layers.{path}.y"]
        graph.node(
            "Scan", *reads, outputs=outputs, body=body.proto(), num_scan_inputs=len(scanned),
            scan_input_directions=[back] * len(scanned), scan_output_directions=[back],
        )  # fmt: skip
        sides.append(outputs[-1])
    return sides[0] if len(sides) == 1 else graph.node("Concat", *sides, axis=2)


def _step(p: CellParams, carry: Any, a: Any, marks: Marks) -> tuple[Any, Any]:
    """Compute one step: h, zeros where it is padding, and the next carry."""
    equations = lambda carry: (p.step(PLAIN, carry, a), None)
    after, _, _ = advance(PLAIN, equations, carry, marks)
    h = hidden(after)
    return h if marks.real is None else PLAIN.choose(marks.real, h), after


def _named(name: str, p: CellParams, value: Callable[[str, Any], Value]) -> CellParams:
    """Return a layer of what `value` makes of each weight's name, as "layers.0.W", and array."""
    named = lambda path, leaf: value(f"{name}.{jax.tree_util.keystr(path, simple=True)}", leaf)
    return jax.tree_util.tree_map_with_path(named, p)


def _carry(graph: Graph, p: CellParams, prefix: str) -> Any:
    """Return a layer's carry, of the tensors with these names."""
    values = [graph.value(f"{prefix}{part}", B, *shape) for part, shape in _carry_parts(p).items()]
    return jax.tree.unflatten(jax.tree.structure(carry_like([p], 1)[0]), values)


def _initial(given: Given, i: int) -> Any:
    """Return what a reset of layer i sets; None: zeros."""
    return given.initial and jax.tree.map(lambda leaf: constant("initial", leaf), given.initial[i])


def _real(graph: Graph, x: str, lengths: str) -> str:
    """Add (T, B): whether a step is none of the padding. x is (T, B, F)."""
    zero, one = (graph.constant(name, np.int64(name)) for name in "01")
    T = graph.node("Squeeze", graph.node("Shape", x, end=1))
    steps = graph.node(
        "Unsqueeze", graph.node("Range", zero, T, one), graph.constant("axis_1", [1])
    )
    return graph.node("Less", steps, graph.node("Cast", lengths, to=TensorProto.INT64))


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
    phi = list(itertools.product(ACTIVATIONS, repeat=D))
    activations = [[name for each in of for name in _functions(cell, each)] for of in phi]
    names = [name.decode().lower() for name in given.get("activations", [])]
    given["activations"] = names = names or activations[0]
    options = SimpleNamespace(**given)
    common.check_options(at, options, activations=activations, input_forget=[0])
    phi, clip = phi[activations.index(names)], given.get("clip")
    if not (clip is None or clip > 0):
        raise InteropError(f"{at} has clip={clip}; it must be above 0.")
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
    layers: list[Any] = [
        *(layer_of(cls, W[d], R[d], B[d]).replace(activation=phi[d], clip=clip) for d in range(D)),
        None,
    ]
    return RecurrentNode(
        _name(node), direction, layers[0], layers[1], graph.below(inputs.get("X", ""))
    )


def layer_of(cls: type, W: np.ndarray, R: np.ndarray, B: np.ndarray) -> CellParams:
    """Return the layer of one direction's weights W (G·H, E), R (G·H, H) and B (2·G·H)."""
    order = ORDER[{LSTMParams: "lstm", RNNParams: "rnn"}.get(cls, "gru")]
    b, c = np.split(B, 2)
    return common.layer_of(cls, order, W.T, R.T, b, c)
