"""ONNX: layers as a graph of standard operators.

`to_onnx` makes a graph that computes `jaxgru.unroll` or, of two directions, `bidirectional`:

    inputs    x (B, T, F); with `lengths`, the steps of each row (B) int32; with `reset`, where
              an episode begins (B, T) bool; the carry: carry.0.h, …
    outputs   y (B, T, H), of two directions (B, T, 2·H); the next carry: carry_out.0.h, …

B and T are dynamic and at least 1; with 0, ONNX Runtime's GRU crashes the process. The carry's
arrays have jaxgru's shapes, h and c (B, H), and come in the same order on both sides, so that the
outputs of one call are inputs of the next; parts without names are numbered, within a part as 1.0.
Zeros start a sequence. Of two directions they are carry.forward.0.h, …, then carry.backward.0.h, ….
With `form="step"` the graph computes `jaxgru.step`, and nothing has the axis T.

A GRU, LSTM or RNN is ONNX's operator of that name. For other cells, and for resets,
`onnx_graph.py` writes the cell's step with plain operators, such as MatMul, Add and Sigmoid, and
the operator Scan repeats it. A graph of one step has plain operators only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgru.cells import Cell, CellParams, MLPParams, hidden, sizes
from jaxgru.cells.contract import starts_at_zero
from jaxgru.cells.layout import PLAIN
from jaxgru.cells.marks import Marks
from jaxgru.cells.pytrees import options_of
from jaxgru.errors import check_one_of, needs
from jaxgru.layers.over_time import advance
from jaxgru.layers.stack import Layers, ResidualStack
from jaxgru.layers.validate import as_initial, carry_like, check_stack
from jaxgru.libraries import InteropError, common, onnx_nodes
from jaxgru.libraries.onnx_graph import B, Graph, T, Value, constant
from jaxgru.libraries.onnx_nodes import OPERATORS, ORDER, RecurrentNode, from_onnx
from jaxgru.printing import type_name

with needs("onnx"):
    import onnx
    from onnx import TensorProto

__all__ = ["RecurrentNode", "from_onnx", "to_onnx"]


def to_onnx(
    layers: Layers | Sequence[Any],
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
      form: "sequence"; or "step", for a graph of one step, which has no axis T.
      lengths: the graph takes the number of steps of each row; those after it are padding, as for
        `jaxgru.unroll`.
      reset: the graph takes flags; where one is True, the carry is set to `initial` before the
        step.
      initial: as for `jaxgru.unroll`, without the axis B; it is stored in the graph.
      reverse: read from the last step to the first.

    Raises InteropError where a cell of your own computes what jaxgru cannot write as ONNX, the
    weights are not known, as under `jit`, or of several dtypes, or the options contradict each
    other.
    """
    common.check_known((layers, initial), "an ONNX graph")
    sides = common.directions(layers)
    residual = all(isinstance(side[0], ResidualStack) for side in sides)
    if residual:
        parts = [side[0].layers for side in sides]
        sides = common.directions(parts if len(parts) == 2 else parts[0])
    elif any(isinstance(side[0], ResidualStack) for side in sides):
        raise InteropError("only one direction is a ResidualStack; both must be, or neither.")
    two = len(sides) == 2
    check_one_of("form", form, ("sequence", "step"))
    if form == "step" and (two or lengths or reverse):
        raise InteropError("a step reads neither backward nor lengths; form must be sequence.")
    if two and reverse:
        raise InteropError("the layers read in both directions already, so reverse must be False.")
    if reset and (two or reverse):
        raise InteropError("layers that read backward take no resets, so reset must be False.")
    if initial is not None and not reset:
        raise InteropError("initial is what a reset sets, so reset must be True.")
    check_layers(*sides)
    graph, axes = Graph(sides), (B,) if form == "step" else (B, T)
    (features, _), (_, H) = sizes(sides[0][0]), sizes(sides[0][-1])
    check_stack([*zip(*sides, strict=True)], features, residual)
    if initial is not None:
        like, is_single = carry_like(sides[0], 1), isinstance(layers, Cell)
        initial = as_initial(initial, like, is_single, None, (1,), (1,))
    elif reset:
        initial = [None if starts_at_zero(p) else p.zero_carry(1) for p in sides[0]]
    graph.output("y", *axes, H * len(sides))
    x = graph.input("x", *axes, features)
    mode = Mode(
        form,
        graph.input("lengths", B, dtype=np.int32) if lengths else "",
        graph.input("reset", *axes, dtype=bool) if reset else "",
        initial,
        reverse,
        residual,
    )
    if form == "step":
        graph.node("Identity", add_layers(graph, sides, x, mode), outputs=["y"])
        return graph.model()
    mode = mode._replace(reset=graph.transpose("reset", 1, 0) if reset else "")
    y = add_layers(graph, sides, graph.transpose(x, 1, 0, 2), mode)
    graph.transpose(y, 1, 0, 2, output="y")
    return graph.model()


class Mode(NamedTuple):
    """How layers are computed, see `to_onnx`; `lengths` and `reset` are names of inputs, or ""."""

    form: str = "sequence"
    lengths: str = ""
    reset: str = ""
    initial: Sequence[Any] | None = None
    reverse: bool = False
    residual: bool = False


_FORWARD = Mode()


def add_layers(
    graph: Graph, sides: Sequence[Sequence[CellParams]], x: str, mode: Mode = _FORWARD
) -> str:
    """Add layers and their carries: x (T, B, E) → (T, B, H), of two directions (…, 2·H).

    T is absent in a step.
    """
    for d, stack in enumerate(sides):
        for i, p in enumerate(stack):
            for name, part in _carry_parts(p).items():
                path = f"{_path(i, d, len(sides))}.{name}"
                graph.input(f"carry.{path}", *part.shape, dtype=part.dtype)
                graph.output(f"carry_out.{path}", *part.shape, dtype=part.dtype)
    for i, level in enumerate(zip(*sides, strict=True)):
        level = jax.tree.map(np.asarray, level)
        if mode.form == "step":
            add = _add_step
        elif has_operator(level[0]) and not mode.reset:
            add = _add_recurrent
        else:
            add = _add_scan
        y = add(graph, i, level, x, mode)
        x = graph.node("Add", y, x) if mode.residual and i else y
    return x


def check_layers(*sides: Sequence[Any]) -> None:
    """Raise InteropError if one is not a layer, or two directions of one differ."""
    for p in itertools.chain(*sides):
        if not isinstance(p, Cell):
            raise InteropError(
                f"{type_name(p)} cannot be converted; a layer is what init_gru returns."
            )
    for i, level in enumerate(zip(*sides, strict=True)):
        kinds = [(type(p), sizes(p), options_of(p) | {"activation": ""}) for p in level]
        if kinds[0] != kinds[-1]:
            raise InteropError(
                f"the two directions of layer {i} must be of one kind and size, with the same "
                "options except the activation."
            )


def has_operator(p: Any) -> bool:
    """Return whether ONNX has an operator for such a layer over a sequence."""
    if type(p) not in OPERATORS:
        return False
    return p.U.ndim == 2 and options_of(p).keys() <= {"activation", "clip"}


def _carry_parts(p: CellParams) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the parts of a layer's carry by name: "1.0" is the first part of its second part."""
    names = {"": "h", "0": "h"} | ({"1": "context"} if isinstance(p, MLPParams) else {})
    at = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    parts = jax.tree.leaves_with_path(carry_like([p], 1)[0])
    of_B_rows = lambda part: part.update(shape=(B, *part.shape[1:]))
    return {names.get(at(path), at(path)): of_B_rows(part) for path, part in parts}


def _path(i: int, d: int, directions: int) -> str:
    """Return layer i's name in the inputs and outputs of the carry: "0", of two "backward.0"."""
    return f"{('forward', 'backward')[d]}.{i}" if directions == 2 else str(i)


def _add_recurrent(graph: Graph, i: int, layers: tuple[Any, ...], x: str, mode: Mode) -> str:
    """Add ONNX's operator, whose arrays have one more axis, for the directions."""
    layer, p, (op, fixed) = f"layers.{i}", layers[0], OPERATORS[type(layers[0])]
    paths = [_path(i, d, len(layers)) for d in range(len(layers))]
    stored = lambda name, arrays: graph.constant(f"{layer}.{name}", np.stack([*arrays]))
    of_sides = [[np.asarray(side) for side in common.sides(p, ORDER[op])] for p in layers]
    W, R, b, c = zip(*of_sides, strict=True)
    weights = [stored("W", (side.T for side in W)), stored("R", (side.T for side in R))]
    weights.append(stored("B", map(np.concatenate, zip(b, c, strict=True))))
    peepholes = []
    if any(getattr(p, "p", None) is not None for p in layers):
        zeros = np.zeros(len(p.peepholes) * sizes(p)[1], p.b.dtype)
        each = [zeros if side.p is None else side.p for side in layers]
        each = [common.reordered(P, p.peepholes, onnx_nodes.PEEPHOLES) for P in each]
        peepholes = [stored("P", each)]
    axis = lambda i: graph.constant(f"axis_{i}", [i])
    states = []
    for part in _carry_parts(p):
        parts = [graph.node("Unsqueeze", f"carry.{path}.{part}", axis(0)) for path in paths]
        states.append(parts[0] if len(parts) == 1 else graph.node("Concat", *parts, axis=0))
    options: dict[str, Any] = {"hidden_size": sizes(p)[1], **fixed}
    options |= {} if p.clip is None else {"clip": float(p.clip)}
    if any(p.activation != "tanh" for p in layers):
        names = [name for p in layers for name in onnx_nodes.functions(op, p.activation)]
        options["activations"] = [name.capitalize() for name in names]
    if len(layers) == 2 or mode.reverse:
        options["direction"] = "bidirectional" if len(layers) == 2 else "reverse"
    lasts = [f"{layer}.{part}_out" for part in _carry_parts(p)]
    inputs, outputs = [x, *weights, mode.lengths, *states, *peepholes], [f"{layer}.y", *lasts]
    y = graph.node(op, *inputs, outputs=outputs, **options)
    for part, last, state in zip(_carry_parts(p), lasts, states, strict=True):
        if mode.lengths:  # of a row without steps, ONNX Runtime returns zeros
            some = graph.node("Greater", mode.lengths, graph.constant("zero", np.int32(0)))
            last = graph.node("Where", graph.node("Unsqueeze", some, axis(1)), last, state)
        for d, path in enumerate(paths):
            index, out = graph.constant(f"index_{d}", d), f"carry_out.{path}.{part}"
            graph.node("Gather", last, index, axis=0, outputs=[out])
    if len(layers) == 1:
        return graph.node("Squeeze", y, axis(1))
    # (T, 2, B, H) → (T, B, 2·H)
    joined = graph.constant("side_by_side", [0, 0, -1])
    return graph.node("Reshape", graph.transpose(y, 0, 2, 1, 3), joined)


def _add_step(graph: Graph, i: int, layers: tuple[CellParams], x: str, mode: Mode) -> str:
    """Add one step of a layer, as its cell's equations have it."""
    (p,) = layers
    weights, carry = _named(f"layers.{i}", p, constant), _carry(p, f"carry.{i}.")
    reset: Any = graph.value(mode.reset, B, dtype=bool) if mode.reset else None
    marks = Marks(reset, _initial(mode, i))
    step = lambda p, carry, x, marks: _step(p, carry, p.inputs(x), marks)
    x_B = graph.value(x, B, sizes(p)[0])
    h, after = graph.add(type(p).__name__, step, weights, carry, x_B, marks)
    for part, value in zip(_carry_parts(p), jax.tree.leaves(after), strict=True):
        graph.node("Identity", value.name, outputs=[f"carry_out.{i}.{part}"])
    return h.name


def _add_scan(graph: Graph, i: int, layers: tuple[CellParams, ...], x: str, mode: Mode) -> str:
    """Add a loop over the steps of a layer, each as its cell's equations have it.

    The weights are in the graph as they are, so that a file of them can be read back.
    """
    real = _real(graph, x, mode.lengths) if mode.lengths else ""
    # a reset in the padding does not count
    reset = graph.node("And", mode.reset, real) if mode.reset and real else mode.reset
    flags = {"reset": reset, "real": real}
    flags = {n: graph.value(flag, T, B, dtype=bool) for n, flag in flags.items() if flag}
    stored = lambda name, leaf: graph.value(graph.constant(name, leaf), *leaf.shape)
    sides = []
    for d, p in enumerate(layers):
        path, what, parts = _path(i, d, len(layers)), type(p).__name__, _carry_parts(p)
        weights, x_TB = _named(f"layers.{path}", p, stored), graph.value(x, T, B, sizes(p)[0])
        scanned = {"a": graph.add(what, lambda p, x: p.inputs(x), weights, x_TB)} | flags
        body = graph.body(f"scan.{path}")
        carry = _carry(p, body.prefix)
        now: Any = {
            name: body.value(f"{body.prefix}{name}", *value.shape[1:], dtype=value.dtype)
            for name, value in scanned.items()
        }
        for value in [*jax.tree.leaves(carry), *now.values()]:
            body.input(value.name, *value.shape, dtype=value.dtype)
        marks = Marks(now.get("reset"), _initial(mode, i), now.get("real"))
        h, after = body.add(what, _step, weights, carry, now["a"], marks)
        for part, value in zip([*parts, "y"], [*jax.tree.leaves(after), h], strict=True):
            output = body.output(f"{body.prefix}{part}_out", *value.shape, dtype=value.dtype)
            body.node("Identity", value.name, outputs=[output])
        reads, back = [f"carry.{path}.{part}" for part in parts], int(d or mode.reverse)
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
    at = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    named = lambda path, leaf: value(f"{name}.{at(path)}", leaf)
    return jax.tree_util.tree_map_with_path(named, p)


def _carry(p: CellParams, prefix: str) -> Any:
    """Return a layer's carry, of the tensors with these names."""
    values = [Value(prefix + name, x.shape, x.dtype) for name, x in _carry_parts(p).items()]
    return jax.tree.unflatten(jax.tree.structure(carry_like([p], 1)[0]), values)


def _initial(mode: Mode, i: int) -> Any:
    """Return what a reset of layer i sets; None: zeros."""
    return mode.initial and jax.tree.map(lambda leaf: constant("initial", leaf), mode.initial[i])


def _real(graph: Graph, x: str, lengths: str) -> str:
    """Add (T, B): whether a step is none of the padding. x is (T, B, F)."""
    start, step = (graph.constant(name, np.int64(name)) for name in "01")
    T = graph.node("Squeeze", graph.node("Shape", x, end=1))
    steps = graph.node(
        "Unsqueeze", graph.node("Range", start, T, step), graph.constant("axis_1", [1])
    )
    return graph.node("Less", steps, graph.node("Cast", lengths, to=TensorProto.INT64))
