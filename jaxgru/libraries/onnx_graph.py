"""Graphs of ONNX's operators, and JAX functions as such operators.

`Graph.add` traces a JAX function, such as the step of a cell, and adds the operators of each of its
primitives. So a new cell needs no code here, unless it computes what `_OPERATORS`, `_ELEMENTWISE`
and `_FORMULAS` lack. The sizes that a graph leaves open are symbolic while JAX traces.

The package jax2onnx (0.17) converts the same steps, but to graphs with up to twice as many nodes
and up to half again as slow; its log1p and expm1 lose all digits of small numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim, symbolic_shape
from jax.extend.core import Literal
from jax.typing import DTypeLike

from jaxgru.arrays import Size
from jaxgru.errors import LibraryError, needs
from jaxgru.libraries import common

with needs("onnx"):
    import onnx
    from onnx import helper, numpy_helper

# The oldest versions with all operators: LayerNormalization came with opset 17.
_OPSET = 17
_IR_VERSION = 8

B, T = symbolic_shape("B, T")
"""The rows of the batch and the steps, which a graph leaves open."""


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor of a graph, or an array, which enters the graph where it is read.

    Its size along an axis may be 1 where JAX repeats it: so do ONNX's elementwise operators.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: DTypeLike
    array: np.ndarray | None = None


def constant(name: str, array: Any) -> Value:
    """Return an array, of which only what is read enters the graph, under a name like this."""
    return Value(name, array.shape, array.dtype, array)


class Graph:
    """A graph under construction, for weights of one dtype.

    Each method adds something to it and returns its name.
    """

    def __init__(self, weights: Any) -> None:
        """Raise LibraryError if the weights are neither all float32 nor all float64."""
        dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(weights)}
        if len(dtypes) > 1:
            names = " and ".join(sorted(dtypes))
            raise LibraryError(f"the weights are {names}; they must be all float32 or all float64.")
        common.check_dtype("the weights", *dtypes)
        self.dtype = np.dtype(*dtypes)
        self.prefix = ""
        self.constants: dict[str, np.ndarray] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def body(self, name: str) -> Graph:
        """Return a new graph, the body of an operator; it adds its constants to this one's."""
        body = Graph(np.zeros((), self.dtype))
        body.constants = self.constants
        body.prefix = f"{name}."
        return body

    def input(self, name: str, *shape: Size, dtype: Any = None) -> str:
        self.inputs.append(_value_info(name, shape, dtype or self.dtype))
        return name

    def output(self, name: str, *shape: Size, dtype: Any = None) -> str:
        self.outputs.append(_value_info(name, shape, dtype or self.dtype))
        return name

    def constant(self, name: str, value: Any) -> str:
        """Add a constant; its name ends in a number if another constant has this name."""
        value = np.asarray(value)
        unique_name = name
        numbers = itertools.count(1)
        while not _are_same(self.constants.setdefault(unique_name, value), value):
            unique_name = f"{name}.{next(numbers)}"
        return unique_name

    def node(self, op: str, *inputs: str, outputs: Sequence[str] = (), **attributes: Any) -> str:
        """Add a node. Without `outputs` it has one, of a new name; the first is returned."""
        name = f"{self.prefix}{op}.{len(self.nodes)}"
        outputs = outputs or [f"{name}.out"]
        self.nodes.append(helper.make_node(op, inputs, outputs, name, **attributes))
        return outputs[0]

    def transpose(self, x: str, *axes: int, output: str = "") -> str:
        return self.node("Transpose", x, outputs=[output] if output else (), perm=axes)

    def value(self, name: str, *shape: Size, dtype: Any = None) -> Value:
        """Return a tensor of the graph as an argument of `add`."""
        return Value(name, shape, dtype or self.dtype)

    def add(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Add what a JAX function computes of pytrees of `Value`.

        Args:
          what: what computes it, which begins a message.

        Returns:
          Its result, in which a `Value` stands for each array.
        """
        values, tree = jax.tree.flatten(args)
        like = tree.unflatten([jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values])
        try:
            traced, result = jax.make_jaxpr(function, return_shape=True)(*like)
        except TypeError as error:
            if "_DimExpr" not in str(error):
                raise
            raise LibraryError(
                f"{what} needs the batch size as an int, as len(h) does, but a graph leaves it "
                "open; write h.shape[0]."
            ) from error
        results = _Operators(self, what, values).results(traced, values)
        return jax.tree.unflatten(jax.tree.structure(result), results)

    def proto(self, **contents: Any) -> onnx.GraphProto:
        return helper.make_graph(self.nodes, "jaxgru", self.inputs, self.outputs, **contents)

    def model(self) -> onnx.ModelProto:
        """Return the model; the same weights always give the same bytes."""
        constants = [numpy_helper.from_array(c, name) for name, c in self.constants.items()]
        opsets = [helper.make_opsetid("", _OPSET)]
        return helper.make_model(
            self.proto(initializer=constants),
            opset_imports=opsets,
            ir_version=_IR_VERSION,
            producer_name="jaxgru",
        )


def _are_same(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays are equal bit for bit."""
    if a is b:
        return True
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _value_info(name: str, shape: Sequence[Size], dtype: DTypeLike) -> onnx.ValueInfoProto:
    shape = [str(size) if is_symbolic_dim(size) else size for size in shape]
    return helper.make_tensor_value_info(name, _type(dtype), shape)


def _type(dtype: DTypeLike) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


# --- JAX's primitives as operators

_CALLS = {"jit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"}
"""Primitives that compute an inner program, which is added in their place."""

_NUMBERS = {"int32", "int64", "float32", "float64"}
"""For numbers of other dtypes, ONNX or ONNX Runtime lacks most operators."""

_COMPARISONS = {"ge", "gt", "le", "lt"}
_EXTREMES = {"clamp", "max", "min", "reduce_max", "reduce_min"}
_OF_BOOLS = {"and", "not", "or", "xor"}
_OF_NUMBERS = {"dot_general", *_COMPARISONS, *_EXTREMES}
"""Primitives whose operators take these only; those of any other take numbers and bools."""


class _Operators:
    """Adds one traced function to a graph; `values` are its arguments."""

    def __init__(self, graph: Graph, what: str, values: Sequence[Value]) -> None:
        self.graph = graph
        self.what = what
        self.open_sizes = {
            size: (x.name, axis)
            for x in values
            for axis, size in enumerate(x.shape)
            if is_symbolic_dim(size)
        }

    def results(self, program: Any, args: Sequence[Value]) -> list[Value]:
        """Add a program, and return its results, which are in the graph."""
        results: list[Value] = []
        for result, aval in zip(self.run(program, args), program.out_avals, strict=True):
            whole = self.broadcast(result, aval.shape)
            results.append(Value(self.name_of(whole), whole.shape, whole.dtype))
        return results

    def run(self, program: Any, args: Sequence[Value]) -> list[Value]:
        """Add a program; an array that is known enters the graph only where it is read."""
        jaxpr = getattr(program, "jaxpr", program)
        consts = [constant("constant", const) for const in getattr(program, "consts", ())]
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(var: Any) -> Value:
            if isinstance(var, Literal):
                aval: Any = var.aval
                return constant(str(var.val), np.asarray(var.val, aval.dtype))
            return values[var]

        for eqn in jaxpr.eqns:
            outputs = self.apply(eqn, [read(var) for var in eqn.invars])
            values |= zip(eqn.outvars, outputs, strict=True)
        return [read(var) for var in jaxpr.outvars]

    def apply(self, eqn: Any, inputs: Sequence[Value]) -> Sequence[Value]:
        """Add one primitive: computed here if its inputs are known, else as operators."""
        name = eqn.primitive.name
        params = eqn.params
        if name in _CALLS:
            program = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
            return self.run(program, inputs)
        if name == "broadcast_in_dim":
            return [self.add_axes(inputs[0], params["shape"], params["broadcast_dimensions"])]
        if _is_known(eqn, inputs):
            return self.compute(eqn, inputs)
        if params.get("axes") == ():
            # A reduction over no axes; ONNX would reduce over all.
            return inputs
        self.check_dtypes(eqn)
        if _is_where(eqn):
            return [self.apply_elementwise("where", eqn, inputs)]
        if name in _FORMULAS:
            return self.apply_formula(eqn, inputs)
        if name in _ELEMENTWISE:
            return [self.apply_elementwise(name, eqn, inputs)]
        if name in _OPERATORS:
            return self.apply_operators(eqn, inputs)
        raise self.refusal(f"JAX's {name}")

    def check_dtypes(self, eqn: Any) -> None:
        """Raise LibraryError if ONNX's operators do not take the dtypes of a primitive."""
        name = eqn.primitive.name
        dtypes = {var.aval.dtype.name for var in eqn.invars}
        others = dtypes - _dtypes_of(name)
        if others:
            raise self.refusal(f"JAX's {name} of {' and '.join(sorted(others))}")
        if name == "dot_general" and dtypes != {eqn.outvars[0].aval.dtype.name}:
            raise self.refusal("JAX's dot_general of several dtypes")

    def compute(self, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
        """Return what JAX computes of inputs that are known."""
        name = inputs[0].name if inputs else eqn.primitive.name
        arrays = [x.array for x in self.broadcast_all(eqn, inputs)]
        outputs = eqn.primitive.bind(*arrays, **eqn.params)
        if not eqn.primitive.multiple_results:
            outputs = [outputs]
        return [constant(name, output) for output in outputs]

    def apply_formula(self, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
        """Add a primitive as a formula of others."""
        formula = partial(_FORMULAS[eqn.primitive.name], **eqn.params)
        avals = [var.aval for var in eqn.invars]
        return self.run(jax.make_jaxpr(formula)(*avals), inputs)

    def apply_elementwise(self, name: str, eqn: Any, inputs: Sequence[Value]) -> Value:
        """Add a primitive as the row of `_ELEMENTWISE` with this name."""
        input_names = [self.name_of(x) for x in inputs]
        output = _ELEMENTWISE[name](self.graph, *input_names, **eqn.params)
        shape = _joint_shape([x.shape for x in inputs])
        return Value(output, shape, eqn.outvars[0].aval.dtype)

    def apply_operators(self, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
        """Add a primitive that is not elementwise."""
        add = _OPERATORS[eqn.primitive.name]
        outputs = add(self, *self.broadcast_all(eqn, inputs), **eqn.params)
        if not isinstance(outputs, list):
            outputs = [outputs]
        values: list[Value] = []
        for output, var in zip(outputs, eqn.outvars, strict=True):
            if isinstance(output, str):
                output = Value(output, var.aval.shape, var.aval.dtype)
            values.append(output)
        return values

    def broadcast_all(self, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
        """Return the inputs of a primitive, of the shapes that JAX sees."""
        shapes = [var.aval.shape for var in eqn.invars]
        return [self.broadcast(x, shape) for x, shape in zip(inputs, shapes, strict=True)]

    def refusal(self, computes: str) -> LibraryError:
        return LibraryError(f"{self.what} computes {computes}, which jaxgru cannot write as ONNX.")

    def name_of(self, x: Value) -> str:
        """Return the name of a tensor, which is now in the graph."""
        if x.array is None:
            return x.name
        return self.graph.constant(x.name, x.array)

    def node(self, op: str, *inputs: Value | str, **attributes: Any) -> str:
        """Add a node that reads tensors, some given by name; return the name of its output."""
        names = [x if isinstance(x, str) else self.name_of(x) for x in inputs]
        return self.graph.node(op, *names, **attributes)

    def sizes(self, *sizes: Size) -> str:
        """Return the name of a constant with these sizes, axes or indices."""
        for size in sizes:
            if is_symbolic_dim(size):
                raise self.refusal(f"an array of size {size}")
        name = "_".join(["sizes", *map(str, sizes)])
        return self.graph.constant(name, np.array(sizes, np.int64))

    def add_axes(self, x: Value, shape: Sequence[Size], axes: Sequence[int]) -> Value:
        """Add axes of size 1; elementwise operators repeat an array along them."""
        new_axes = [axis for axis in range(len(shape)) if axis not in axes]
        new_shape: list[Size] = [1] * len(shape)
        for size, axis in zip(x.shape, axes, strict=True):
            new_shape[axis] = size
        if x.array is not None:
            return constant(x.name, x.array.reshape(new_shape))
        name = x.name
        if new_axes:
            name = self.node("Unsqueeze", x, self.sizes(*new_axes))
        return Value(name, tuple(new_shape), x.dtype)

    def broadcast(self, x: Value, shape: Sequence[Size]) -> Value:
        """Return a tensor of the shape that JAX sees."""
        if x.shape == tuple(shape):
            return x
        if x.array is not None and not any(map(is_symbolic_dim, shape)):
            return constant(x.name, np.broadcast_to(x.array, shape))

        sizes = self.node("Concat", *[self.size(size) for size in shape], axis=0)
        return Value(self.node("Expand", x, sizes), tuple(shape), x.dtype)

    def size(self, size: Size) -> str:
        """Return the name of a tensor with this size, which may be that of an argument's axis."""
        if size not in self.open_sizes:
            return self.sizes(size)
        name, axis = self.open_sizes[size]
        return self.node("Shape", name, start=axis, end=axis + 1)

    # Of what is not elementwise. x has the shape that JAX sees.

    def transpose(self, x: Value, axes: Sequence[int]) -> Value:
        if x.array is not None:
            return constant(x.name, x.array.transpose(axes))
        if [*axes] == [*range(len(axes))]:
            return x
        shape = tuple(x.shape[axis] for axis in axes)
        return Value(self.graph.transpose(x.name, *axes), shape, x.dtype)

    def reshape(self, x: Value, shape: Sequence[Size]) -> Value:
        if x.array is not None:
            return constant(x.name, x.array.reshape(shape))
        if x.shape == tuple(shape):
            return x
        sizes: list[Size] = list(shape)
        for i, (size, own_size) in enumerate(zip(shape, x.shape, strict=False)):
            if size == own_size:
                sizes[i] = 0  # ONNX takes that of x
        open_axes = [i for i, size in enumerate(sizes) if is_symbolic_dim(size)]
        if len(open_axes) > 1:
            all_sizes = self.node("Concat", *[self.size(size) for size in shape], axis=0)
            return Value(self.node("Reshape", x, all_sizes), tuple(shape), x.dtype)
        if open_axes:
            sizes[open_axes[0]] = -1  # ONNX finds one size
        return Value(self.node("Reshape", x, self.sizes(*sizes)), tuple(shape), x.dtype)

    def slice(self, x: Value, starts: Sequence[int], ends: Sequence[Size]) -> Value:
        """Return x[start:end] along each axis."""
        cuts = [*zip(starts, ends, strict=True)]
        axes = [axis for axis, cut in enumerate(cuts) if cut != (0, x.shape[axis])]
        if not axes:
            return x
        name = self.node(
            "Slice",
            x,
            self.sizes(*(starts[axis] for axis in axes)),
            self.sizes(*(ends[axis] for axis in axes)),
            self.sizes(*axes),
        )
        return Value(name, tuple(end - start for start, end in cuts), x.dtype)


def _is_known(eqn: Any, inputs: Sequence[Value]) -> bool:
    """Return whether a primitive can be computed now."""
    if eqn.primitive.name == "dim_as_value" or any(x.array is None for x in inputs):
        return False
    shapes = [var.aval.shape for var in (*eqn.invars, *eqn.outvars)]
    return not any(is_symbolic_dim(size) for shape in shapes for size in shape)


def _is_where(eqn: Any) -> bool:
    """Return whether a primitive chooses by a bool between two arrays that are none of bools."""
    if eqn.primitive.name != "select_n":
        return False
    return [var.aval.dtype == bool for var in eqn.invars] == [True, False, False]


def _dtypes_of(name: str) -> set[str]:
    """Return the dtypes that the operators of a primitive take."""
    if name in _OF_BOOLS:
        return {"bool"}
    if name in _OF_NUMBERS:
        return _NUMBERS
    return _NUMBERS | {"bool"}


def _dot_general(ops: _Operators, x: Value, y: Value, *, dimension_numbers: Any, **_: Any) -> Value:
    """Add a MatMul of (…, rows, K) and (…, K, columns), where … are the axes of the batch."""
    (sum_x, sum_y), (batch_x, batch_y) = dimension_numbers
    free_x = [axis for axis in range(len(x.shape)) if axis not in (*sum_x, *batch_x)]
    free_y = [axis for axis in range(len(y.shape)) if axis not in (*sum_y, *batch_y)]
    batch = [x.shape[axis] for axis in batch_x]
    rows = [x.shape[axis] for axis in free_x]
    columns = [y.shape[axis] for axis in free_y]
    K = math.prod(x.shape[axis] for axis in sum_x)

    x = ops.transpose(x, [*batch_x, *free_x, *sum_x])
    if batch:
        x = ops.reshape(x, [*batch, math.prod(rows), K])
    else:
        # MatMul takes any number of axes of rows.
        x = ops.reshape(x, [*rows, K])
    y = ops.transpose(y, [*batch_y, *sum_y, *free_y])
    y = ops.reshape(y, [*batch, K, math.prod(columns)])
    xy = Value(ops.node("MatMul", x, y), (*x.shape[:-1], y.shape[-1]), x.dtype)
    return ops.reshape(xy, [*batch, *rows, *columns])


def _gather(
    ops: _Operators, x: Value, indices: Value, *, dimension_numbers: Any, slice_sizes: Any, **_: Any
) -> Value | str:
    """Add x[…, i, j:k], which JAX traces as this where a size of x is symbolic."""
    if indices.array is None or indices.array.ndim != 1:
        raise ops.refusal("an index that is an array")
    axes = dimension_numbers.start_index_map
    start_of_axis = dict(zip(axes, indices.array.tolist(), strict=True))
    starts = [start_of_axis.get(axis, 0) for axis in range(len(x.shape))]
    ends = [start + size for start, size in zip(starts, slice_sizes, strict=True)]
    for start, end, size in zip(starts, ends, x.shape, strict=True):
        if start < 0 or end > size:
            raise ops.refusal("an index outside of its axis")
    cut = ops.slice(x, starts, ends)
    collapsed = dimension_numbers.collapsed_slice_dims
    if not collapsed:
        return cut
    return ops.node("Squeeze", cut, ops.sizes(*collapsed))


def _slice(
    ops: _Operators, x: Value, *, start_indices: Any, limit_indices: Any, strides: Any
) -> Value:
    if strides is not None and {*strides} != {1}:
        raise ops.refusal("a slice with strides")
    return ops.slice(x, start_indices, limit_indices)


def _split(ops: _Operators, x: Value, *, sizes: Sequence[Size], axis: int) -> list[str]:
    parts = [f"{ops.graph.prefix}Split.{len(ops.graph.nodes)}.{i}" for i in range(len(sizes))]
    ops.node("Split", x, ops.sizes(*sizes), outputs=parts, axis=axis)
    return parts


def _unstack(ops: _Operators, x: Value, *, axis: int) -> list[str]:
    parts = _split(ops, x, sizes=[1] * x.shape[axis], axis=axis)
    return [ops.node("Squeeze", part, ops.sizes(axis)) for part in parts]


def _pad(ops: _Operators, x: Value, by: Value, *, padding_config: Any) -> str:
    low, high, inner = zip(*padding_config, strict=True)
    if any(inner) or min(*low, *high) < 0:
        raise ops.refusal("padding between elements, or less than none")
    return ops.node("Pad", x, ops.sizes(*low, *high), by)


def _reshape(ops: _Operators, x: Value, *, new_sizes: Any, dimensions: Any, **_: Any) -> Value:
    axes = dimensions or range(len(x.shape))
    return ops.reshape(ops.transpose(x, axes), new_sizes)


def _reduce(op: str) -> Callable[..., str]:
    return lambda ops, x, axes, **_: ops.node(op, x, axes=[*axes], keepdims=0)


_OPERATORS: dict[str, Callable[..., Value | str | list[str]]] = {
    "concatenate": lambda ops, *parts, dimension: ops.node("Concat", *parts, axis=dimension),
    "dot_general": _dot_general,
    "gather": _gather,
    "pad": _pad,
    "reduce_max": _reduce("ReduceMax"),
    "reduce_min": _reduce("ReduceMin"),
    "reduce_prod": _reduce("ReduceProd"),
    "reduce_sum": lambda ops, x, axes, **_: ops.node("ReduceSum", x, ops.sizes(*axes), keepdims=0),
    "reshape": _reshape,
    "slice": _slice,
    "split": _split,
    "squeeze": lambda ops, x, *, dimensions: ops.node("Squeeze", x, ops.sizes(*dimensions)),
    "tile": lambda ops, x, *, reps: ops.node("Tile", x, ops.sizes(*reps)),
    "transpose": lambda ops, x, *, permutation: ops.transpose(x, permutation),
    "unstack": _unstack,
}
"""(_Operators, inputs, the primitive's parameters) → the outputs, or their names."""


def _op(name: str) -> Callable[..., str]:
    return lambda graph, *inputs, **_: graph.node(name, *inputs)


def _cast(graph: Graph, x: str, *, new_dtype: DTypeLike, **_: Any) -> str:
    return graph.node("Cast", x, to=_type(new_dtype))


def _clamp(graph: Graph, low: str, x: str, high: str, **_: Any) -> str:
    return graph.node("Min", graph.node("Max", x, low), high)


def _integer_pow(graph: Graph, x: str, *, y: int, **_: Any) -> str:
    exponent = graph.constant(f"{y}.0", np.array(y, graph.dtype))
    return graph.node("Pow", x, exponent)


_ELEMENTWISE: dict[str, Callable[..., str]] = {
    **{name: _op(name.capitalize()) for name in (
        "abs", "add", "and", "ceil", "cos", "div", "erf", "exp", "floor", "log", "max", "min",
        "mul", "neg", "not", "or", "pow", "sign", "sin", "sqrt", "sub", "tanh", "xor",
    )},
    **{name: _op(op) for name, op in (
        ("add_any", "Add"), ("copy", "Identity"), ("eq", "Equal"), ("ge", "GreaterOrEqual"),
        ("gt", "Greater"), ("le", "LessOrEqual"), ("logistic", "Sigmoid"), ("lt", "Less"),
        ("name", "Identity"), ("stop_gradient", "Identity"),
    )},
    "clamp": _clamp,
    "convert_element_type": _cast,
    "integer_pow": _integer_pow,
    "ne": lambda graph, x, y, **_: graph.node("Not", graph.node("Equal", x, y)),
    "rsqrt": lambda graph, x, **_: graph.node("Reciprocal", graph.node("Sqrt", x)),
    "square": lambda graph, x, **_: graph.node("Mul", x, x),
    "where": lambda graph, flag, x, y, **_: graph.node("Where", flag, y, x),
}  # fmt: skip
"""(graph, names of inputs, the primitive's parameters) → the name of the output."""


def _log1p(x: jax.Array, **_: Any) -> jax.Array:
    """Return log (1 + x); the quotient makes up for the digits that 1 + x loses (Kahan)."""
    y = 1 + x
    correction = jnp.where(abs(x) < 1, x / (y - 1), 1)
    return jnp.where(y == 1, x, jnp.log(y) * correction)


def _select_n(which: jax.Array, *cases: jax.Array) -> jax.Array:
    if cases[0].dtype == bool:
        return _select_n(which, *(case.astype(np.int32) for case in cases)).astype(bool)
    *others, last = cases
    for i, case in reversed([*enumerate(others)]):
        last = jnp.where(which.astype(np.int32) > i, last, case)
    return last


_FORMULAS: dict[str, Callable[..., jax.Array]] = {
    "expm1": lambda x, **_: jnp.where(abs(x) < 1, 2 / (1 / jnp.tanh(x / 2) - 1), jnp.exp(x) - 1),
    "log1p": _log1p,
    "select_n": _select_n,
    "stack": lambda *x, axis: jnp.concatenate([jnp.expand_dims(y, axis) for y in x], axis),
}
"""Primitives as JAX functions of other primitives, which lose no digits."""


def _joint_shape(shapes: Sequence[tuple[Size, ...]]) -> tuple[Size, ...]:
    """Return the shape of an elementwise operator's output, for inputs of one rank or none."""

    def joint(sizes: Sequence[Size]) -> Size:
        """Return the size that is not repeated along an axis."""
        return next((size for size in sizes if size != 1), 1)

    with_axes = [shape for shape in shapes if shape]
    return tuple(joint(sizes) for sizes in zip(*with_axes, strict=True))
