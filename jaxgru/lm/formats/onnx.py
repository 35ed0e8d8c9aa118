"""ONNX: a whole model, or layers alone, as one graph of standard operators; and back.

    inputs    tokens (B, T) int32, of layers alone x (B, T, F); then the carry, such as carry.0.h
    outputs   logits (B, T, V), of layers alone y (B, T, H); then the next carry, as carry_out.0.h

B and T are dynamic and at least 1; with 0, ONNX Runtime's GRU crashes the process. The carry's
arrays have jaxgru's shapes, h and c (B, H), and come in the same order on both sides, so that the
outputs of one call are inputs of the next. Zeros start a text. Tokens are int32, jaxgru's own dtype
and JavaScript's `Int32Array`.

ONNX's GRU weights the old state with z, so what feeds z has the other sign here; its
`linear_before_reset` is our `reset_gate` "after". Its operators have an input bias b and a
recurrent bias c for every gate. See https://onnx.ai/onnx/operators/onnx__GRU.html, and likewise
LSTM and RNN.

The model's metadata has `format` ("jaxgru"), `layers` (the kind of each, JSON) and `tensors` (the
names and shapes of our parameters, JSON); a whole model's also what is in `metadata.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgru.cells import (
    CELLS,
    CellParams,
    GRUParams,
    LSTMParams,
    MLPParams,
    RNNParams,
    cell_of,
    sizes,
)
from jaxgru.cells.gru import check
from jaxgru.errors import needs, shown
from jaxgru.layers.arguments import is_pair
from jaxgru.libraries import InteropError, check_shapes, common
from jaxgru.lm.config import Config
from jaxgru.lm.data.tokenizers import Tokenizer
from jaxgru.lm.files import write_bytes
from jaxgru.lm.formats import open_model
from jaxgru.lm.formats.metadata import (
    METADATA,
    check_metadata,
    check_params,
    check_sha256,
    pack,
    read_config,
    read_tokenizer,
)
from jaxgru.lm.model import HeadParams, LayerNormParams, Params, flatten

with needs("onnx"):
    import onnx
    from google.protobuf.message import DecodeError  # onnx depends on protobuf
    from onnx import TensorProto, helper

_OPSET, _IR_VERSION = 17, 8
"""The oldest versions with all of these operators: LayerNormalization came with opset 17."""

_MAX_BYTES = 2**31 - 1  # in a file: protobuf's limit

_KINDS: dict[str, Callable[..., CellParams]] = {
    "gru, reset before": partial(GRUParams, reset_gate="before"),
    "gru, reset after": partial(GRUParams, reset_gate="after"),
    "lstm": LSTMParams,
    "rnn": RNNParams,
    "mlp": MLPParams,
}
"""The layers that can be exported, as the metadata name them."""

_ORDER = {"gru": "zrn", "lstm": "iofg", "rnn": ("",)}
"""The order of the gates in ONNX's operators."""

_DTYPES: dict[int, np.dtype] = {
    TensorProto.FLOAT: np.dtype("<f4"),
    TensorProto.DOUBLE: np.dtype("<f8"),
}


def save_onnx(path: str | Path, params: Params, config: Config, tokenizer: Tokenizer) -> None:
    """Write a whole model into one .onnx file, which `load_onnx` reads back bit for bit.

    The same model always gives the same file. Of the paths in the config, only the names of files
    are kept: see `metadata.pack`.

    Raises:
      InteropError: the parameters are not float32; the parameters, the config and the tokenizer do
        not fit together; or the model cannot be exported (see `to_onnx`).
      OSError: the file cannot be written; an older file is then untouched.
    """
    _, metadata = pack(f"{path} cannot be written", params, config, tokenizer)
    model = to_onnx(params)
    for name in METADATA[1:]:
        model.metadata_props.add(key=name, value=metadata[name])
    write_bytes(Path(path), model.SerializeToString())


def load_onnx(path: str | Path) -> tuple[Params, Config, Tokenizer]:
    """Load a file that `save_onnx` wrote.

    Its weights and metadata are read and checked, its nodes are not. Files that it refers to, as
    the format allows, are not opened.

    Raises:
      InteropError: there is no such file, it is not a whole model of this library, or it is
        damaged; the message names the tensor or metadata at fault.
      MissingPackage: its tokenizer needs SentencePiece, which is not installed.
    """
    where = f"{path} cannot be used"
    with open_model(path, at_most=_MAX_BYTES) as file:
        data = file.read()
    try:
        model = onnx.ModelProto.FromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise InteropError(f"{where}: it is not a whole ONNX file ({error}).") from error
    metadata, stored = _contents(where, model)
    check_metadata(where, metadata)
    config, tokenizer = read_config(where, metadata), read_tokenizer(where, metadata)
    params = _params(where, metadata, stored)
    if not isinstance(params, Params):
        raise InteropError(f"{where}: it has layers alone, without an embedding and a head.")
    tensors = check_params(where, params, config, tokenizer)
    check_sha256(where, tensors, {name: metadata[name] for name in METADATA})
    return params, config, tokenizer


def to_onnx(params: Params | CellParams | Sequence[CellParams]) -> onnx.ModelProto:
    """Convert a model to a graph that computes `jaxgru.lm.apply`, or layers to one for `unroll`.

    It has neither dropout nor resets. A token outside the vocabulary, for which `apply` gives NaN,
    is an error there, but the last tokens can also be called −1, −2, ….

    Args:
      params: a model's, a layer's, or those of a list of layers; float32, or float64, for which
        most runtimes lack the operators.

    Raises:
      InteropError: there is no layer, or they are of two directions; ONNX has no operator for one
        of them; one's output has another size than the next one's input; the weights are not all
        of one such dtype, or are too large for a file, which can have 2 GiB, or not known, as
        under `jit`.
    """
    common.check_known(params, "an ONNX graph")
    if is_pair(params):
        raise InteropError(
            "the layers are those of two directions, but a graph reads in one: export each layer "
            "alone, give the backward one the sequence reversed, and concatenate the outputs."
        )
    if isinstance(params, Params):
        model, layers = params, params.layers
    else:
        model, layers = None, tuple(params) if isinstance(params, Sequence) else (params,)
    if not layers:
        raise InteropError("there is no layer to make a graph of.")
    kinds = [_kind(layer) for layer in layers]
    tensors = _named(model or layers)
    dtypes = {tensor.dtype.name for tensor in tensors.values()}
    _check_dtypes("the weights", dtypes)
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > _MAX_BYTES:
        raise InteropError(f"the weights have {size:,} bytes; an ONNX file can have 2 GiB.")

    (features, _), (_, H) = sizes(layers[0]), sizes(layers[-1])
    graph = _Graph(helper.np_dtype_to_tensor_dtype(np.dtype(dtypes.pop())))
    if model:
        V, features = model.embedding.shape
        graph.output("logits", "B", "T", V)
        tokens = graph.transpose(graph.input("tokens", "B", "T", type=TensorProto.INT32), 1, 0)
        x = graph.node("Gather", graph.constant("embedding", model.embedding), tokens)
    else:
        graph.output("y", "B", "T", H)
        x = graph.transpose(graph.input("x", "B", "T", features), 1, 0, 2)
    for i, layer in enumerate(layers):
        E, H = sizes(layer)
        if E != features:
            raise InteropError(f"layer {i} has {E} input features, but is given {features}.")
        x, features = _add_layer(graph, i, jax.tree.map(np.asarray, layer), x), H
    if model:
        x = graph.transpose(x, 1, 0, 2)
        if model.norm is not None:
            norm = [graph.constant(f"norm.{name}", w) for name, w in vars(model.norm).items()]
            x = graph.node("LayerNormalization", x, *norm, axis=-1, epsilon=1e-5)
        x = graph.node("MatMul", x, graph.constant("head.Wo", model.head.Wo))
        graph.node("Add", x, graph.constant("head.bo", model.head.bo), outputs=["logits"])
    else:
        graph.transpose(x, 1, 0, 2, output="y")
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return graph.model(format="jaxgru", layers=json.dumps(kinds), tensors=json.dumps(shapes))


def from_onnx(model: onnx.ModelProto) -> Params | tuple[CellParams, ...]:
    """Convert a graph that `to_onnx` made back to the model or the layers, bit for bit.

    Raises:
      InteropError: the graph is not of this library, or its weights were changed; or they are
        float64, and JAX has not enabled 64 bits.
    """
    where = "the ONNX model cannot be used"
    return _params(where, *_contents(where, model))


class _Graph:
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


def _named(params: Params | tuple[CellParams, ...]) -> dict[str, np.ndarray]:
    """Return the weights by path: "embedding", "layers.0.Wz", …"""
    whole = params if isinstance(params, Params) else {"layers": params}
    return {name: np.asarray(leaf) for name, leaf in flatten(whole).items()}


def _kind(p: CellParams) -> str:
    """Return the layer's name in `_KINDS`. Raises InteropError if it has none."""
    kind = next((cell.name for cell in CELLS.values() if cell.params is type(p)), "")
    if isinstance(p, GRUParams):
        check(p)
        kind = f"{kind}, reset {p.reset_gate}"
    if not isinstance(p, MLPParams) and any(leaf.ndim == 3 for leaf in jax.tree.leaves(p)):
        raise InteropError(
            "ONNX has no block-diagonal weights, as num_blocks makes them; "
            "jaxgru.cells.products.dense returns the layer with matrices."
        )
    if kind not in _KINDS:
        raise common.refusal(p, "ONNX has a GRU, an LSTM and an RNN, and a convolution for an MLP")
    return kind


def _check_dtypes(name: str, dtypes: set[str]) -> None:
    """Raise InteropError if weights are neither all float32 nor all float64."""
    if len(dtypes) > 1:
        raise InteropError(
            f"{name} are {' and '.join(sorted(dtypes))}; they must be all float32 or all float64."
        )
    common.check_dtype(name, *dtypes)


def _add_layer(graph: _Graph, i: int, p: CellParams, x: str) -> str:
    """Add a layer's nodes and carry: x (T, B, E) → h of every step (T, B, H)."""
    layer, H = f"layers.{i}", sizes(p)[1]
    for name, value in _packed(p).items():
        graph.constant(f"{layer}.{name}", value)
    h_in, h_out = graph.input(f"carry.{i}.h", "B", H), graph.output(f"carry_out.{i}.h", "B", H)
    if isinstance(p, MLPParams):
        return _add_mlp(graph, i, p, x)
    carry = {h_in: h_out}
    if isinstance(p, LSTMParams):
        carry[graph.input(f"carry.{i}.c", "B", H)] = graph.output(f"carry_out.{i}.c", "B", H)
    # ONNX's arrays have one more axis, for the two directions of a layer
    first, second = graph.constant("axis_0", [0]), graph.constant("axis_1", [1])
    weights = [f"{layer}.{name}" for name in "WRB"]
    outputs = [f"{layer}.y", *(f"{name}.1" for name in carry.values())]
    options = (
        {"linear_before_reset": int(p.reset_gate == "after")} if isinstance(p, GRUParams) else {}
    )
    states = [graph.node("Unsqueeze", state, first) for state in carry]
    graph.node(
        cell_of(p).name.upper(), x, *weights, "", *states, outputs=outputs, hidden_size=H, **options
    )
    for state in carry.values():
        graph.node("Squeeze", f"{state}.1", first, outputs=[state])
    return graph.node("Squeeze", outputs[0], second)


def _add_mlp(graph: _Graph, i: int, p: MLPParams, x: str) -> str:
    """Add a convolution over time, whose padding is the carry; h in the carry is only returned."""
    K, E, H = p.W.shape
    before = graph.input(f"carry.{i}.context", "B", K - 1, E)
    after = graph.output(f"carry_out.{i}.context", "B", K - 1, E)
    x_T, context_T = graph.transpose(x, 1, 2, 0), graph.transpose(before, 0, 2, 1)
    inputs = graph.node("Concat", context_T, x_T, axis=2)  # (B, E, K − 1 + T)
    T, end = graph.node("Shape", x, end=1), graph.constant("end", [2**63 - 1])
    last = graph.node("Slice", inputs, T, end, graph.constant("axis_2", [2]))
    graph.transpose(last, 0, 2, 1, output=after)
    a = graph.node("Conv", inputs, f"layers.{i}.W", f"layers.{i}.b")
    h = graph.transpose(graph.node("Tanh", a), 2, 0, 1)
    graph.node("Gather", h, graph.constant("last", -1), outputs=[f"carry_out.{i}.h"])
    return h


def _packed(p: CellParams) -> dict[str, Any]:
    """Return a layer's weights as ONNX has them.

    W (1, G·H, E), R (1, G·H, H) and B (1, 2·G·H), which has all b, then all c; absent ones are
    zeros. Of an MLP, a convolution's W (H, E, K) and b (H).
    """
    if isinstance(p, MLPParams):
        return {"W": p.W.transpose(2, 1, 0), "b": p.b}
    p = common.complement_z(p) if isinstance(p, GRUParams) else p
    W, R, b, c = common.stacked(p, _ORDER[cell_of(p).name])
    return {"W": W[None], "R": R[None], "B": np.concatenate([b, c])[None]}


def _unpacked(
    where: str, i: int, kind: str, names: Mapping[str, Any], array: Callable[[str], Any]
) -> CellParams:
    """Invert `_packed`, given the names of our parameters and a function that reads a tensor."""
    at, cell = f"layers.{i}.", kind.partition(",")[0]
    if cell == "mlp":
        W, b = array(f"{at}W"), array(f"{at}b")
        return MLPParams(W=W.transpose(2, 1, 0) if W.ndim == 3 else W, b=b)
    order = _ORDER[cell]
    packed = {f"{at}{side}": array(f"{at}{side}") for side in "WRB"}
    (W, R, B), G = packed.values(), len(order)
    E, H = W.shape[-1], R.shape[-1]
    want = {f"{at}W": (1, G * H, E), f"{at}R": (1, G * H, H), f"{at}B": (1, 2 * G * H)}
    check_shapes(where, {name: w.shape for name, w in packed.items()}, want)
    b, c = np.split(B[0], 2)
    sides = {"W": W[0], "U": R[0], "b": b, "c": c}
    p = _KINDS[kind](
        **{
            side + gate: part.T
            for side, weights in sides.items()
            for gate, part in zip(order, np.split(weights, G), strict=True)
            if side != "c" or f"{at}c{gate}" in names
        }
    )
    return common.complement_z(p) if isinstance(p, GRUParams) else p


def _contents(where: str, model: onnx.ModelProto) -> tuple[dict[str, str], dict[str, TensorProto]]:
    """Return a model's metadata, and its constants by name."""
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    for name, text in metadata.items():
        if not isinstance(text, str):  # protobuf returns bytes where they are not UTF-8
            raise InteropError(f"{where}: its metadata {shown(name)} are not UTF-8.")
    return metadata, {tensor.name: tensor for tensor in model.graph.initializer}


def _params(
    where: str, metadata: Mapping[str, str], stored: Mapping[str, TensorProto]
) -> Params | tuple[CellParams, ...]:
    """Return the model or the layers. Raises InteropError where the parts do not fit together."""
    check_metadata(where, metadata, ("layers", "tensors"))
    try:
        kinds, shapes = (json.loads(metadata[name]) for name in ("layers", "tensors"))
    except (ValueError, RecursionError) as error:
        raise InteropError(f"{where}: its metadata are not JSON ({error}).") from error
    if not (isinstance(kinds, list) and kinds and isinstance(shapes, dict)):
        raise InteropError(f"{where}: its metadata name no layers or no tensors.")
    for kind in kinds:
        if kind not in list(_KINDS):
            names = "; ".join(_KINDS)
            raise InteropError(f"{where}: a layer is {shown(kind)}; it must be one of {names}.")
    array: Callable[[str], Any] = partial(_array, where, stored)
    params = tuple(_unpacked(where, i, kind, shapes, array) for i, kind in enumerate(kinds))
    if "embedding" in shapes:

        def part(name: str, cls: type[Any]) -> Any:
            return cls(*[array(f"{name}.{field.name}") for field in dataclasses.fields(cls)])

        norm = part("norm", LayerNormParams) if "norm.scale" in shapes else None
        params = Params(array("embedding"), params, norm, part("head", HeadParams))
    tensors = _named(params)
    if {name: [*tensor.shape] for name, tensor in tensors.items()} != shapes:
        raise InteropError(f"{where}: its tensors are not those that its metadata name.")
    dtypes = {tensor.dtype.name for tensor in tensors.values()}
    _check_dtypes(f"{where}: its weights", dtypes)
    return jax.tree.map(jnp.asarray, params)


def _array(where: str, stored: Mapping[str, TensorProto], name: str) -> Any:
    """Return a tensor whose bytes are in the file as a NumPy array."""
    if name not in stored:
        raise InteropError(f"{where}: the tensor {name} is missing.")
    tensor = stored[name]
    dtype, shape = _DTYPES.get(tensor.data_type), tuple(tensor.dims)
    if dtype is None:
        raise InteropError(f"{where}: {name} is neither FLOAT nor DOUBLE.")
    if not 1 <= len(shape) <= 3 or min(shape) < 1:  # the product of a million would take long
        raise InteropError(
            f"{where}: the tensor {name} has shape {shown(shape)}; it must have 1 to 3 axes, none "
            "of them empty."
        )
    size = math.prod(shape) * dtype.itemsize
    if len(tensor.raw_data) != size:
        raise InteropError(
            f"{where}: the tensor {name} has {len(tensor.raw_data):,} bytes in the file; its shape "
            f"needs {size:,}."
        )
    return np.frombuffer(tensor.raw_data, dtype).reshape(shape)
