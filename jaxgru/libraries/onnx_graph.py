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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim, symbolic_shape
from jax.extend.core import Literal
from jax.typing import DTypeLike

from jaxgru.cells.carry import Size
from jaxgru.errors import needs
from jaxgru.libraries import InteropError, common

with needs("onnx"):
    import onnx
    from onnx import helper, numpy_helper

_OPSET, _IR_VERSION = 17, 8
"""The oldest versions with all operators: LayerNormalization came with opset 17."""

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
        """Raise InteropError if the weights are neither all float32 nor all float64."""
        dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(weights)}
        if len(dtypes) > 1:
            names = " and ".join(sorted(dtypes))
            raise InteropError(f"the weights are {names}; they must be all float32 or all float64.")
        common.check_dtype("the weights", *dtypes)
        self.dtype, self.constants, self.prefix = np.dtype(*dtypes), {}, ""
        self.nodes, self.inputs, self.outputs = [], [], []

    def body(self, name: str) -> Graph:
        """Return a new graph, the body of an operator; it adds its constants to this one's."""
        body = Graph(np.zeros((), self.dtype))
        body.constants, body.prefix = self.constants, f"{name}."
        return body

    def input(self, name: str, *shape: Size, dtype: Any = None) -> str:
        self.inputs.append(_described(name, shape, dtype or self.dtype))
        return name

    def output(self, name: str, *shape: Size, dtype: Any = None) -> str:
        self.outputs.append(_described(name, shape, dtype or self.dtype))
        return name

    def constant(self, name: str, value: Any) -> str:
        """Add a constant; its name ends in a number if another constant has this name."""
        value = np.asarray(value)
        names = itertools.chain([name], (f"{name}.{i}" for i in itertools.count(1)))
        return next(n for n in names if _same(self.constants.setdefault(n, value), value))

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
            raise InteropError(
                f"{what} needs the batch size as an int, as len(h) does, but a graph leaves it "
                "open; write h.shape[0]."
            ) from error
        made = _Operators(self, what, values).results(traced, values)
        return jax.tree.unflatten(jax.tree.structure(result), made)

    def proto(self, **stored: Any) -> onnx.GraphProto:
        return helper.make_graph(self.nodes, "jaxgru", self.inputs, self.outputs, **stored)

    def model(self) -> onnx.ModelProto:
        """Return the model; the same weights always give the same bytes."""
        constants = [numpy_helper.from_array(c, name) for name, c in self.constants.items()]
        opsets = [helper.make_opsetid("", _OPSET)]
        return helper.make_model(
            self.proto(initializer=constants),
            opset_imports=opsets, ir_version=_IR_VERSION, producer_name="jaxgru",
        )  # fmt: skip


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a is b or (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def _described(name: str, shape: Sequence[Size], dtype: DTypeLike) -> onnx.ValueInfoProto:
    shape = [str(size) if is_symbolic_dim(size) else size for size in shape]
    return helper.make_tensor_value_info(name, _type(dtype), shape)


def _type(dtype: DTypeLike) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


# --- JAX's primitives as operators

_CALLS = {"jit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"}
"""Primitives that compute an inner program, which is added in their place."""

_NUMBERS = {"int32", "int64", "float32", "float64"}
"""For numbers of other dtypes, ONNX or ONNX Runtime lacks most operators."""

_DTYPES = dict.fromkeys(["and", "not", "or", "xor"], {"bool"}) | dict.fromkeys(
    ["clamp", "dot_general", "ge", "gt", "le", "lt", "max", "min", "reduce_max", "reduce_min"],
    _NUMBERS,
)
"""What the operators of a primitive take; of any other, numbers and bools."""


class _Operators:
    """Adds one traced function to a graph; `values` are its arguments."""

    def __init__(self, graph: Graph, what: str, values: Sequence[Value]) -> None:
        self.graph, self.what = graph, what
        self.open_sizes = {
            size: (x.name, axis)
            for x in values
            for axis, size in enumerate(x.shape)
            if is_symbolic_dim(size)
        }

    def results(self, program: Any, args: Sequence[Value]) -> list[Value]:
        """Add a program, and return its results, which are in the graph."""
        made = zip(self.run(program, args), program.out_avals, strict=True)
        whole = (self.whole(x, aval.shape) for x, aval in made)
        return [Value(self.named(x), x.shape, x.dtype) for x in whole]

    def run(self, program: Any, args: Sequence[Value]) -> list[Value]:
        inner = getattr(program, "jaxpr", program)
        consts = [constant("constant", const) for const in getattr(program, "consts", ())]
        values = dict(zip([*inner.constvars, *inner.invars], [*consts, *args], strict=True))

        def read(var: Any) -> Value:
            if isinstance(var, Literal):
                aval: Any = var.aval
                return constant(str(var.val), np.asarray(var.val, aval.dtype))
            return values[var]

        for eqn in inner.eqns:
            made = self.apply(eqn, [read(var) for var in eqn.invars])
            values |= zip(eqn.outvars, made, strict=True)
        return [read(var) for var in inner.outvars]

    def apply(self, eqn: Any, inputs: Sequence[Value]) -> Sequence[Value]:
        """Add one primitive: computed here if its inputs are known, else as operators."""
        name, params, out = eqn.primitive.name, eqn.params, [var.aval for var in eqn.outvars]
        if name in _CALLS:
            return self.run(params["jaxpr" if "jaxpr" in params else "call_jaxpr"], inputs)
        if name == "broadcast_in_dim":
            return [self.repeated(inputs[0], params["shape"], params["broadcast_dimensions"])]
        in_shapes = [var.aval.shape for var in eqn.invars]
        sizes = [size for shape in (*in_shapes, *(aval.shape for aval in out)) for size in shape]
        is_known = all(x.array is not None for x in inputs) and name != "dim_as_value"
        if is_known and not any(map(is_symbolic_dim, sizes)):
            whole = [self.whole(x, s).array for x, s in zip(inputs, in_shapes, strict=True)]
            made = eqn.primitive.bind(*whole, **params)
            made = made if eqn.primitive.multiple_results else [made]
            return [constant(inputs[0].name if inputs else name, each) for each in made]
        if params.get("axes") == ():  # a reduction; ONNX would reduce over all axes
            return inputs
        dtypes = [var.aval.dtype.name for var in eqn.invars]
        if others := {*dtypes} - _DTYPES.get(name, _NUMBERS | {"bool"}):
            raise self.refused(f"JAX's {name} of {' and '.join(sorted(others))}")
        if name == "dot_general" and {*dtypes} != {out[0].dtype.name}:
            raise self.refused("JAX's dot_general of several dtypes")
        if [x == "bool" for x in dtypes] == [True, False, False] and name == "select_n":
            name = "where"
        if name in _FORMULAS:
            formula = lambda *x: _FORMULAS[name](*x, **params)
            return self.run(jax.make_jaxpr(formula)(*(var.aval for var in eqn.invars)), inputs)
        if name in _ELEMENTWISE:
            made = _ELEMENTWISE[name](self.graph, *map(self.named, inputs), **params)
            return [Value(made, _joint([x.shape for x in inputs]), out[0].dtype)]
        if name not in _OPERATORS:
            raise self.refused(f"JAX's {name}")
        whole = [self.whole(x, shape) for x, shape in zip(inputs, in_shapes, strict=True)]
        made = _OPERATORS[name](self, *whole, **params)
        made = zip(made if isinstance(made, list) else [made], out, strict=True)
        return [Value(x, aval.shape, aval.dtype) if isinstance(x, str) else x for x, aval in made]

    def refused(self, computes: str) -> InteropError:
        return InteropError(f"{self.what} computes {computes}, which jaxgru cannot write as ONNX.")

    def named(self, x: Value) -> str:
        """Return the name of a tensor, which is now in the graph."""
        return x.name if x.array is None else self.graph.constant(x.name, x.array)

    def node(self, op: str, *inputs: Value | str, **attributes: Any) -> str:
        """Add a node that reads tensors, some given by name; return the name of its output."""
        names = [x if isinstance(x, str) else self.named(x) for x in inputs]
        return self.graph.node(op, *names, **attributes)

    def sizes(self, *sizes: Size) -> str:
        """Return the name of a constant with these sizes, axes or indices."""
        if symbolic := [size for size in sizes if is_symbolic_dim(size)]:
            raise self.refused(f"an array of size {symbolic[0]}")
        return self.graph.constant("_".join(["sizes", *map(str, sizes)]), np.array(sizes, np.int64))

    def repeated(self, x: Value, shape: Sequence[Size], axes: Sequence[int]) -> Value:
        """Add axes of size 1; elementwise operators repeat an array along them."""
        new = [axis for axis in range(len(shape)) if axis not in axes]
        kept = tuple(1 if i in new else x.shape[axes.index(i)] for i in range(len(shape)))
        if x.array is not None:
            return constant(x.name, x.array.reshape(kept))
        name = self.node("Unsqueeze", x, self.sizes(*new)) if new else x.name
        return Value(name, kept, x.dtype)

    def whole(self, x: Value, shape: Sequence[Size]) -> Value:
        """Return a tensor of the shape that JAX sees."""
        if x.shape == tuple(shape):
            return x
        if x.array is not None and not any(map(is_symbolic_dim, shape)):
            return constant(x.name, np.broadcast_to(x.array, shape))

        def size(size: Size) -> str:
            if size not in self.open_sizes:
                return self.sizes(size)
            name, axis = self.open_sizes[size]
            return self.node("Shape", name, start=axis, end=axis + 1)

        sizes = self.node("Concat", *map(size, shape), axis=0)
        return Value(self.node("Expand", x, sizes), tuple(shape), x.dtype)

    # Of what is not elementwise. x has the shape that JAX sees

    def transposed(self, x: Value, axes: Sequence[int]) -> Value:
        if x.array is not None:
            return constant(x.name, x.array.transpose(axes))
        if [*axes] == [*range(len(axes))]:
            return x
        shape = tuple(x.shape[axis] for axis in axes)
        return Value(self.graph.transpose(x.name, *axes), shape, x.dtype)

    def reshaped(self, x: Value, shape: Sequence[Size]) -> Value:
        if x.array is not None:
            return constant(x.name, x.array.reshape(shape))
        if x.shape == tuple(shape):
            return x
        sizes = [0 if size in x.shape[i : i + 1] else size for i, size in enumerate(shape)]
        if open_sizes := [*filter(is_symbolic_dim, sizes)]:  # ONNX finds one size; 0 is that of x
            sizes[sizes.index(open_sizes[0])] = -1
        return Value(self.node("Reshape", x, self.sizes(*sizes)), tuple(shape), x.dtype)

    def sliced(self, x: Value, starts: Sequence[int], ends: Sequence[Size]) -> Value:
        """Return x[start:end] along each axis."""
        axes = [i for i, cut in enumerate(zip(starts, ends, strict=True)) if cut != (0, x.shape[i])]
        if not axes:
            return x
        at = lambda of: self.sizes(*(of[axis] for axis in axes))
        cuts = at(starts), at(ends), self.sizes(*axes)
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Value(self.node("Slice", x, *cuts), shape, x.dtype)


def _dot_general(ops: _Operators, x: Value, y: Value, *, dimension_numbers: Any, **_: Any) -> Value:
    (of_x, of_y), (batch_x, batch_y) = dimension_numbers
    free = lambda v, *used: [i for i in range(len(v.shape)) if i not in (*used[0], *used[1])]
    sizes = lambda v, axes: [v.shape[i] for i in axes]
    free_x, free_y = free(x, of_x, batch_x), free(y, of_y, batch_y)
    batch, rows, columns = sizes(x, batch_x), sizes(x, free_x), sizes(y, free_y)
    K = math.prod(sizes(x, of_x))
    x = ops.transposed(x, [*batch_x, *free_x, *of_x])
    x = ops.reshaped(x, [*batch, *([math.prod(rows)] if batch else rows), K])
    y = ops.transposed(y, [*batch_y, *of_y, *free_y])
    y = ops.reshaped(y, [*batch, K, math.prod(columns)])
    xy = Value(ops.node("MatMul", x, y), (*x.shape[:-1], y.shape[-1]), x.dtype)
    return ops.reshaped(xy, [*batch, *rows, *columns])


def _gather(
    ops: _Operators, x: Value, indices: Value, *, dimension_numbers: Any, slice_sizes: Any, **_: Any
) -> Value | str:
    """Add x[…, i, j:k], which JAX traces as this where a size of x is symbolic."""
    if indices.array is None or indices.array.ndim != 1:
        raise ops.refused("an index that is an array")
    at = dict(zip(dimension_numbers.start_index_map, indices.array.tolist(), strict=True))
    starts = [at.get(axis, 0) for axis in range(len(x.shape))]
    ends = [start + size for start, size in zip(starts, slice_sizes, strict=True)]
    if any(i < 0 or i + n > size for i, n, size in zip(starts, slice_sizes, x.shape, strict=True)):
        raise ops.refused("an index outside of its axis")
    cut = ops.sliced(x, starts, ends)
    axes = dimension_numbers.collapsed_slice_dims
    return ops.node("Squeeze", cut, ops.sizes(*axes)) if axes else cut


def _slice(
    ops: _Operators, x: Value, *, start_indices: Any, limit_indices: Any, strides: Any
) -> Value:
    if strides is not None and {*strides} != {1}:
        raise ops.refused("a slice with strides")
    return ops.sliced(x, start_indices, limit_indices)


def _split(ops: _Operators, x: Value, *, sizes: Sequence[Size], axis: int) -> list[str]:
    parts = [f"{ops.graph.prefix}Split.{len(ops.graph.nodes)}.{i}" for i in range(len(sizes))]
    ops.node("Split", x, ops.sizes(*sizes), outputs=parts, axis=axis)
    return parts


def _pad(ops: _Operators, x: Value, by: Value, *, padding_config: Any) -> str:
    low, high, inner = zip(*padding_config, strict=True)
    if any(inner) or min(*low, *high) < 0:
        raise ops.refused("padding between elements, or less than none")
    return ops.node("Pad", x, ops.sizes(*low, *high), by)


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
    "reshape": lambda ops, x, *, new_sizes, dimensions, **_: ops.reshaped(
        ops.transposed(x, dimensions or range(len(x.shape))), new_sizes
    ),
    "slice": _slice,
    "split": _split,
    "squeeze": lambda ops, x, *, dimensions: ops.node("Squeeze", x, ops.sizes(*dimensions)),
    "tile": lambda ops, x, *, reps: ops.node("Tile", x, ops.sizes(*reps)),
    "transpose": lambda ops, x, *, permutation: ops.transposed(x, permutation),
}
"""(_Operators, inputs, the primitive's parameters) → the outputs, or their names."""


def _op(name: str) -> Callable[..., str]:
    return lambda graph, *inputs, **_: graph.node(name, *inputs)


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
    "clamp": lambda graph, low, x, high, **_: graph.node("Min", graph.node("Max", x, low), high),
    "convert_element_type": lambda graph, x, *, new_dtype, **_: graph.node(
        "Cast", x, to=_type(new_dtype)
    ),
    "integer_pow": lambda graph, x, *, y, **_: graph.node(
        "Pow", x, graph.constant(f"{y}.0", np.array(y, graph.dtype))
    ),
    "ne": lambda graph, x, y, **_: graph.node("Not", graph.node("Equal", x, y)),
    "rsqrt": lambda graph, x, **_: graph.node("Reciprocal", graph.node("Sqrt", x)),
    "square": lambda graph, x, **_: graph.node("Mul", x, x),
    "where": lambda graph, flag, x, y, **_: graph.node("Where", flag, y, x),
}  # fmt: skip
"""(graph, names of inputs, the primitive's parameters) → the name of the output."""


def _log1p(x: jax.Array, **_: Any) -> jax.Array:
    """Return log (1 + x); the quotient makes up for the digits that 1 + x loses (Kahan)."""
    y = 1 + x
    return jnp.where(y == 1, x, jnp.log(y) * jnp.where(abs(x) < 1, x / (y - 1), 1))


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


def _joint(shapes: Sequence[tuple[Size, ...]]) -> tuple[Size, ...]:
    """Return the shape of an elementwise operator's output, for inputs of one rank or none."""
    columns = zip(*filter(None, shapes), strict=True)
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in columns)
