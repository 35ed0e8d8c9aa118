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

from jaxgru.cells import AnyCell, Cell, MLPCell, StepMasks, hidden, sizes, starts_at_zero
from jaxgru.cells.layout import PLAIN
from jaxgru.errors import LibraryError, check_one_of, needs
from jaxgru.layers import Layers, ResidualStack
from jaxgru.layers.over_time import advance
from jaxgru.layers.validate import as_reset_carry, carry_like, check_stack
from jaxgru.libraries import common, onnx_nodes
from jaxgru.libraries.onnx_graph import B, Graph, T, Value, constant
from jaxgru.libraries.onnx_nodes import OPERATORS, ORDER, RecurrentNode, from_onnx
from jaxgru.printing import type_name
from jaxgru.pytrees import options_of

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
    reset_carry: Any = None,
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
      reset: the graph takes flags; where one is True, the carry is set to `reset_carry` before the
        step.
      reset_carry: as for `jaxgru.unroll`, without the axis B; it is stored in the graph.
      reverse: read from the last step to the first.

    Raises:
      LibraryError: a cell of your own computes what jaxgru cannot write as ONNX; the weights are
        not known, as under `jit`, or of several dtypes; or the options contradict each other.
    """
    common.check_known((layers, reset_carry), "an ONNX graph")
    stacks, residual = _stacks(layers)
    check_one_of("form", form, ("sequence", "step"))
    _check_options(form, len(stacks), lengths, reset, reset_carry, reverse)
    check_layers(*stacks)
    graph = Graph(stacks)
    axes = (B,) if form == "step" else (B, T)
    in_features, _ = sizes(stacks[0][0])
    _, hidden_dim = sizes(stacks[0][-1])
    check_stack([*zip(*stacks, strict=True)], in_features, residual)
    if reset_carry is not None:
        like = carry_like(stacks[0], 1)
        reset_carry = as_reset_carry(reset_carry, like, isinstance(layers, Cell), None, (1,), (1,))
    elif reset:
        reset_carry = [None if starts_at_zero(p) else p.zero_carry(1) for p in stacks[0]]

    graph.output("y", *axes, hidden_dim * len(stacks))
    x = graph.input("x", *axes, in_features)
    mode = Mode(form, reset_carry=reset_carry, reverse=reverse, residual=residual)
    if lengths:
        mode = mode._replace(lengths=graph.input("lengths", B, dtype=np.int32))
    if reset:
        mode = mode._replace(reset=graph.input("reset", *axes, dtype=bool))
    if form == "step":
        y = add_layers(graph, stacks, x, mode)
        graph.node("Identity", y, outputs=["y"])
        return graph.model()

    # Inside, the steps come first, as in the operators of ONNX.
    if reset:
        mode = mode._replace(reset=graph.transpose("reset", 1, 0))
    y = add_layers(graph, stacks, graph.transpose(x, 1, 0, 2), mode)
    graph.transpose(y, 1, 0, 2, output="y")
    return graph.model()


def _stacks(layers: Any) -> tuple[tuple[tuple[Any, ...], ...], bool]:
    """Return the layers of each direction, and whether they are residual stacks."""
    stacks = common.directions(layers)
    are_residual = [isinstance(stack[0], ResidualStack) for stack in stacks]
    if not any(are_residual):
        return stacks, False
    if not all(are_residual):
        raise LibraryError("only one direction is a ResidualStack; both must be, or neither.")
    parts = [stack[0].layers for stack in stacks]
    if len(parts) == 1:
        return common.directions(parts[0]), True
    return common.directions(parts), True


def _check_options(
    form: str, directions: int, lengths: bool, reset: bool, reset_carry: Any, reverse: bool
) -> None:
    """Raise LibraryError if options of `to_onnx` contradict each other."""
    two = directions == 2
    if form == "step" and (two or lengths or reverse):
        raise LibraryError("a step reads neither backward nor lengths; form must be sequence.")
    if two and reverse:
        raise LibraryError("the layers read in both directions already, so reverse must be False.")
    if reset and (two or reverse):
        raise LibraryError("layers that read backward take no resets, so reset must be False.")
    if reset_carry is not None and not reset:
        raise LibraryError("reset_carry is what a reset sets, so reset must be True.")


class Mode(NamedTuple):
    """How layers are computed, see `to_onnx`; `lengths` and `reset` are names of inputs, or ""."""

    form: str = "sequence"
    lengths: str = ""
    reset: str = ""
    reset_carry: Sequence[Any] | None = None
    reverse: bool = False
    residual: bool = False


_FORWARD = Mode()


class Level(NamedTuple):
    """Layer i of a stack, in each direction."""

    i: int
    layers: tuple[Any, ...]

    @property
    def paths(self) -> list[str]:
        """Its names in the inputs and outputs of the carry: "0"; of two directions "forward.0"."""
        if len(self.layers) == 1:
            return [str(self.i)]
        return [f"forward.{self.i}", f"backward.{self.i}"]


def add_layers(
    graph: Graph, stacks: Sequence[Sequence[AnyCell]], x: str, mode: Mode = _FORWARD
) -> str:
    """Add layers and their carries: x (T, B, E) → (T, B, H), of two directions (…, 2·H).

    T is absent in a step.
    """
    levels = [
        Level(i, jax.tree.map(np.asarray, layers))
        for i, layers in enumerate(zip(*stacks, strict=True))
    ]
    for d in range(len(stacks)):
        for level in levels:
            _declare_carry(graph, level.paths[d], level.layers[d])
    for level in levels:
        y = _add_level(graph, level, x, mode)
        if mode.residual and level.i > 0:
            y = graph.node("Add", y, x)
        x = y
    return x


def _declare_carry(graph: Graph, path: str, p: AnyCell) -> None:
    """Make a layer's carry inputs and outputs of the graph."""
    for name, part in _carry_parts(p).items():
        graph.input(f"carry.{path}.{name}", *part.shape, dtype=part.dtype)
        graph.output(f"carry_out.{path}.{name}", *part.shape, dtype=part.dtype)


def _add_level(graph: Graph, level: Level, x: str, mode: Mode) -> str:
    """Add a layer: x (T, B, E) → (T, B, H), without the axis T in a step."""
    if mode.form == "step":
        return _add_step(graph, level, x, mode)
    if has_operator(level.layers[0]) and not mode.reset:
        return _add_recurrent(graph, level, x, mode)
    return _add_scan(graph, level, x, mode)


def check_layers(*stacks: Sequence[Any]) -> None:
    """Raise LibraryError if one is not a layer, or two directions of one differ."""
    for p in itertools.chain(*stacks):
        if not isinstance(p, Cell):
            raise LibraryError(
                f"{type_name(p)} cannot be converted; a layer is what init_gru returns."
            )
    for i, layers in enumerate(zip(*stacks, strict=True)):
        kinds = [(type(p), sizes(p), options_of(p) | {"activation": ""}) for p in layers]
        if kinds[0] != kinds[-1]:
            raise LibraryError(
                f"the two directions of layer {i} must be of one kind and size, with the same "
                "options except the activation."
            )


def has_operator(p: Any) -> bool:
    """Return whether ONNX has an operator for such a layer over a sequence."""
    if type(p) not in OPERATORS:
        return False
    return p.U.ndim == 2 and options_of(p).keys() <= {"activation", "clip"}


def _carry_parts(p: AnyCell) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the parts of a layer's carry by name: "1.0" is the first part of its second part."""
    names = {"": "h", "0": "h"}
    if isinstance(p, MLPCell):
        names["1"] = "context"
    parts: dict[str, jax.ShapeDtypeStruct] = {}
    for path, part in jax.tree.leaves_with_path(carry_like([p], 1)[0]):
        name = _dotted(path)
        parts[names.get(name, name)] = part.update(shape=(B, *part.shape[1:]))
    return parts


def _dotted(path: Any) -> str:
    """Return the name of a leaf of a pytree, such as "1.0"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


# --- ONNX's own recurrent operators


def _add_recurrent(graph: Graph, level: Level, x: str, mode: Mode) -> str:
    """Add ONNX's operator, whose arrays have one more axis, for the directions."""
    p = level.layers[0]
    name = f"layers.{level.i}"
    arrays = _operator_weights(level.layers)
    weights = [graph.constant(f"{name}.{what}", array) for what, array in arrays.items()]
    peepholes: list[str] = []
    if any(getattr(layer, "p", None) is not None for layer in level.layers):
        P = np.stack([_operator_peepholes(layer) for layer in level.layers])
        peepholes.append(graph.constant(f"{name}.P", P))
    parts = list(_carry_parts(p))
    states = [_operator_state(graph, level, part) for part in parts]
    last_states = [f"{name}.{part}_out" for part in parts]
    y = graph.node(
        OPERATORS[type(p)].name,
        *[x, *weights, mode.lengths, *states, *peepholes],
        outputs=[f"{name}.y", *last_states],
        **_operator_attributes(level.layers, mode),
    )
    for part, last, state in zip(parts, last_states, states, strict=True):
        if mode.lengths:
            last = _keep_empty_rows(graph, mode.lengths, last, state)
        for d, path in enumerate(level.paths):
            index = graph.constant(f"index_{d}", d)
            graph.node("Gather", last, index, axis=0, outputs=[f"carry_out.{path}.{part}"])
    if len(level.layers) == 1:
        return graph.node("Squeeze", y, _axis(graph, 1))
    # (T, 2, B, H) → (T, B, 2·H)
    shape = graph.constant("side_by_side", [0, 0, -1])
    return graph.node("Reshape", graph.transpose(y, 0, 2, 1, 3), shape)


def _operator_weights(layers: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """Return the operator's W, R and B."""
    order = ORDER[OPERATORS[type(layers[0])].name]
    # As NumPy's arrays, for which nothing is compiled.
    directions = [jax.tree.map(np.asarray, common.weights_in_order(p, order)) for p in layers]
    return {
        "W": np.stack([weights.W.T for weights in directions]),
        "R": np.stack([weights.U.T for weights in directions]),
        "B": np.stack([np.concatenate([weights.b, weights.c]) for weights in directions]),
    }


def _operator_peepholes(p: Any) -> jax.Array:
    """Return a direction's peepholes in ONNX's order, zeros if only the other direction has any."""
    peepholes = p.p
    if peepholes is None:
        _, H = sizes(p)
        peepholes = np.zeros(len(p.peepholes) * H, p.b.dtype)
    return common.reorder_gates(peepholes, p.peepholes, onnx_nodes.PEEPHOLES)


def _operator_attributes(layers: tuple[Any, ...], mode: Mode) -> dict[str, Any]:
    p = layers[0]
    operator = OPERATORS[type(p)]
    _, H = sizes(p)
    attributes: dict[str, Any] = {"hidden_size": H, **operator.attributes}
    if p.clip is not None:
        attributes["clip"] = float(p.clip)
    if any(layer.activation != "tanh" for layer in layers):
        attributes["activations"] = [
            function.capitalize()
            for layer in layers
            for function in onnx_nodes.functions(operator.name, layer.activation)
        ]
    if len(layers) == 2:
        attributes["direction"] = "bidirectional"
    elif mode.reverse:
        attributes["direction"] = "reverse"
    return attributes


def _operator_state(graph: Graph, level: Level, part: str) -> str:
    """Add the state that the operator starts from, (directions, B, H), and return its name."""
    states = [
        graph.node("Unsqueeze", f"carry.{path}.{part}", _axis(graph, 0)) for path in level.paths
    ]
    if len(states) == 1:
        return states[0]
    return graph.node("Concat", *states, axis=0)


def _keep_empty_rows(graph: Graph, lengths: str, last: str, state: str) -> str:
    """Keep the state of a row without steps, for which ONNX Runtime returns zeros."""
    has_steps = graph.node("Greater", lengths, graph.constant("zero", np.int32(0)))
    has_steps = graph.node("Unsqueeze", has_steps, _axis(graph, 1))
    return graph.node("Where", has_steps, last, state)


def _axis(graph: Graph, axis: int) -> str:
    return graph.constant(f"axis_{axis}", [axis])


# --- The equations of a cell


def _add_step(graph: Graph, level: Level, x: str, mode: Mode) -> str:
    """Add one step of a layer, as its cell's equations have it."""
    (p,) = level.layers
    (path,) = level.paths
    weights = _map_named(f"layers.{path}", p, constant)
    carry = _carry(p, f"carry.{path}.")
    x_B = graph.value(x, B, sizes(p)[0])
    masks = StepMasks(reset_carry=_reset_carry(mode, level.i))
    if mode.reset:
        reset: Any = graph.value(mode.reset, B, dtype=bool)
        masks = masks._replace(reset=reset)
    h, after = graph.add(type(p).__name__, _step_of_input, weights, carry, x_B, masks)
    for part, value in zip(_carry_parts(p), jax.tree.leaves(after), strict=True):
        graph.node("Identity", value.name, outputs=[f"carry_out.{path}.{part}"])
    return h.name


def _add_scan(graph: Graph, level: Level, x: str, mode: Mode) -> str:
    """Add a loop over the steps of a layer, each as its cell's equations have it.

    The weights are in the graph as they are, so that a file of them can be read back.
    """
    flags: dict[str, Value] = {}
    valid = _valid(graph, x, mode.lengths) if mode.lengths else ""
    if mode.reset:
        # A reset in the padding does not count.
        reset = graph.node("And", mode.reset, valid) if valid else mode.reset
        flags["reset"] = graph.value(reset, T, B, dtype=bool)
    if valid:
        flags["valid"] = graph.value(valid, T, B, dtype=bool)
    outputs = [_add_direction(graph, level, d, x, flags, mode) for d in range(len(level.layers))]
    if len(outputs) == 1:
        return outputs[0]
    return graph.node("Concat", *outputs, axis=2)


def _add_direction(
    graph: Graph, level: Level, d: int, x: str, flags: dict[str, Value], mode: Mode
) -> str:
    """Add the loop over one direction's steps; `flags` are the arrays of `StepMasks` to scan."""
    p = level.layers[d]
    path = level.paths[d]
    cell = type(p).__name__

    def add_weight(name: str, leaf: Any) -> Value:
        return graph.value(graph.constant(name, leaf), *leaf.shape)

    weights = _map_named(f"layers.{path}", p, add_weight)
    x_TB = graph.value(x, T, B, sizes(p)[0])
    scanned = {"a": graph.add(cell, lambda p, x: p.inputs(x), weights, x_TB)} | flags

    body = graph.body(f"scan.{path}")
    carry = _carry(p, body.prefix)
    inputs: Any = {
        name: body.value(f"{body.prefix}{name}", *value.shape[1:], dtype=value.dtype)
        for name, value in scanned.items()
    }
    for value in [*jax.tree.leaves(carry), *inputs.values()]:
        body.input(value.name, *value.shape, dtype=value.dtype)
    masks = StepMasks(inputs.get("reset"), _reset_carry(mode, level.i), inputs.get("valid"))
    h, after = body.add(cell, _step, weights, carry, inputs["a"], masks)
    parts = list(_carry_parts(p))
    for part, value in zip([*parts, "y"], [*jax.tree.leaves(after), h], strict=True):
        output = body.output(f"{body.prefix}{part}_out", *value.shape, dtype=value.dtype)
        body.node("Identity", value.name, outputs=[output])

    y = f"layers.{path}.y"
    carries = [f"carry.{path}.{part}" for part in parts]
    is_backward = int(mode.reverse or d == 1)
    graph.node(
        "Scan",
        *[*carries, *(value.name for value in scanned.values())],
        outputs=[*(f"carry_out.{path}.{part}" for part in parts), y],
        body=body.proto(),
        num_scan_inputs=len(scanned),
        scan_input_directions=[is_backward] * len(scanned),
        scan_output_directions=[is_backward],
    )
    return y


def _step(p: AnyCell, carry: Any, a: Any, masks: StepMasks) -> tuple[Any, Any]:
    """Compute one step: h, zeros where it is padding, and the next carry."""
    equations = lambda carry: (p.step(PLAIN, carry, a), None)
    after, _, _ = advance(PLAIN, equations, carry, masks)
    h = hidden(after)
    if masks.valid is not None:
        h = PLAIN.choose(masks.valid, h)
    return h, after


def _step_of_input(p: AnyCell, carry: Any, x: Any, masks: StepMasks) -> tuple[Any, Any]:
    """Compute `_step` of an input x."""
    return _step(p, carry, p.inputs(x), masks)


def _map_named(name: str, p: AnyCell, value: Callable[[str, Any], Value]) -> AnyCell:
    """Return a layer of what `value` makes of each weight's name, as "layers.0.W", and array."""
    named = lambda path, leaf: value(f"{name}.{_dotted(path)}", leaf)
    return jax.tree_util.tree_map_with_path(named, p)


def _carry(p: AnyCell, prefix: str) -> Any:
    """Return a layer's carry, of the tensors with these names."""
    values = [
        Value(prefix + name, part.shape, part.dtype) for name, part in _carry_parts(p).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(carry_like([p], 1)[0]), values)


def _reset_carry(mode: Mode, i: int) -> Any:
    """Return what a reset of layer i sets; None: zeros."""
    if mode.reset_carry is None:
        return None
    return jax.tree.map(lambda leaf: constant("reset_carry", leaf), mode.reset_carry[i])


def _valid(graph: Graph, x: str, lengths: str) -> str:
    """Add (T, B): whether a step is none of the padding. x is (T, B, F)."""
    zero = graph.constant("0", np.int64(0))
    one = graph.constant("1", np.int64(1))
    num_steps = graph.node("Squeeze", graph.node("Shape", x, end=1))
    steps = graph.node("Range", zero, num_steps, one)
    steps = graph.node("Unsqueeze", steps, _axis(graph, 1))
    lengths = graph.node("Cast", lengths, to=TensorProto.INT64)
    return graph.node("Less", steps, lengths)
