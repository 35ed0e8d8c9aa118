"""ONNX: a whole model, or layers alone, as one graph of standard operators; and back.

    inputs    tokens (B, T) int32, of layers alone x (B, T, F); then the carry, such as carry.0.h
    outputs   logits (B, T, V), of layers alone y (B, T, H); then the next carry, as carry_out.0.h

Layers may also read backward, or in both directions: the carries are then carry.forward.0.h, …,
carry.backward.0.h, …, and y is (B, T, 2·H). With lengths (B) int32, an input after x, a row's
steps from its length on are padding, as for `jaxgru.unroll`.

B and T are dynamic and at least 1; with 0, ONNX Runtime's GRU crashes the process. The carry's
arrays have jaxgru's shapes, h and c (B, H), and come in the same order on both sides, so that the
outputs of one call are inputs of the next. Zeros start a text. Tokens are int32, jaxgru's own dtype
and JavaScript's `Int32Array`.

The model's metadata has `format` ("jaxgru"), `layers` (the kind of each, JSON) and `tensors` (the
names and shapes of our parameters, JSON); a whole model's also what is in `metadata.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgru.cells import CELLS, CellParams, MLPParams, sizes
from jaxgru.cells.gru import AnyGRU
from jaxgru.errors import needs, shown
from jaxgru.layers.arguments import is_pair
from jaxgru.libraries import InteropError, common
from jaxgru.libraries.onnx_nodes import recurrent_nodes
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
from jaxgru.lm.formats.onnx_graph import (
    DIRECTIONS,
    KINDS,
    Graph,
    add_layer,
    carry_parts,
    layer_path,
    unpacked,
)
from jaxgru.lm.model import HeadParams, LayerNormParams, Params, flatten

with needs("onnx"):
    import onnx
    from google.protobuf.message import DecodeError  # onnx depends on protobuf
    from onnx import TensorProto, helper

_MAX_BYTES = 2**31 - 1  # in a file: protobuf's limit

_DTYPES: dict[int, np.dtype] = {
    TensorProto.FLOAT: np.dtype("<f4"),
    TensorProto.DOUBLE: np.dtype("<f8"),
}


def save_onnx(
    path: str | Path, params: Params, config: Config, tokenizer: Tokenizer, text_sha256: str = ""
) -> None:
    """Write a whole model into one .onnx file, which `load_onnx` reads back bit for bit.

    The same model always gives the same file. Of the paths in the config, only the names of files
    are kept: see `metadata.pack`.

    Args:
      text_sha256: as for `save_safetensors`.

    Raises:
      InteropError: the parameters are not float32; the parameters, the config and the tokenizer do
        not fit together; or the model cannot be exported (see `to_onnx`).
      OSError: the file cannot be written; an older file is then untouched.
    """
    _, metadata = pack(f"{path} cannot be written", params, config, tokenizer, text_sha256)
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
    where, metadata, stored = _model_of(path)
    config, tokenizer = read_config(where, metadata), read_tokenizer(where, metadata)
    params = _params(where, metadata, stored)
    if not isinstance(params, Params):
        raise InteropError(f"{where}: it contains only layers, without an embedding and a head.")
    tensors = check_params(where, params, config, tokenizer)
    check_sha256(where, tensors, {name: metadata[name] for name in METADATA})
    return params, config, tokenizer


def metadata_of(path: str | Path) -> dict[str, str]:
    """Return the metadata in such a file. Raises as `load_onnx`."""
    return _model_of(path)[1]


def _model_of(path: str | Path) -> tuple[str, dict[str, str], dict[str, TensorProto]]:
    """Return how an error begins, and a file's metadata and constants. Raises InteropError."""
    where, model = _read(path)
    metadata, stored = _contents(where, model)
    check_metadata(where, metadata)
    return where, metadata, stored


def to_onnx(
    params: Params | CellParams | Sequence[Any],
    backward: CellParams | Sequence[CellParams] | None = None,
    *,
    lengths: bool = False,
    reverse: bool = False,
) -> onnx.ModelProto:
    """Convert a model to a graph that computes `jaxgru.lm.apply`, or layers to one for `unroll`.

    It has neither dropout nor resets. A token outside the vocabulary, for which `apply` gives NaN,
    is an error there, but the last tokens can also be called −1, −2, ….

    Args:
      params: a model's, a layer's, or those of a list of layers; or, as from `from_torch`, a pair
        of lists, for a graph that computes `jaxgru.bidirectional`; float32, or float64, for which
        most runtimes lack the operators.
      backward: the layer, or the layers, of the backward direction; None: there is one direction.
      lengths: of layers alone: the graph takes the number of steps of each row.
      reverse: of layers alone: they read from the last step to the first.

    Raises:
      InteropError: there is no layer; ONNX has no operator for one of them; one's output has
        another size than the next one's input; those of two directions are not as many, or a pair
        is not of one kind and size; the weights are not all of one such dtype, or are too large for
        a file, which can have 2 GiB, or not known, as under `jit`; or a model or an MLP is to read
        backward or to take lengths.
    """
    common.check_known((params, backward), "an ONNX graph")
    model = params if isinstance(params, Params) else None
    ahead, back = common.in_directions(model.layers if model else params, backward)
    pairs = [(p,) for p in ahead] if back is None else list(zip(ahead, back, strict=True))
    kinds = [_kind(i, *pair) for i, pair in enumerate(pairs)]
    if (back or lengths or reverse) and (model or "mlp" in kinds):
        raise InteropError(
            f"{'a language model' if model else 'an MLP'} reads whole sequences forward, so it "
            "takes neither lengths nor a direction."
        )
    if back and reverse:
        raise InteropError("the layers read in both directions already, so reverse must be False.")
    layers = (ahead, back) if back else ahead
    tensors = _named(model or layers)
    dtypes = {tensor.dtype.name for tensor in tensors.values()}
    _check_dtypes("the weights", dtypes)
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > _MAX_BYTES:
        raise InteropError(
            f"the weights take {size:,} bytes; an ONNX file can contain at most 2 GiB."
        )

    directions = len(pairs[0])
    (features, _), (_, H) = sizes(ahead[0]), sizes(ahead[-1])
    graph = Graph(helper.np_dtype_to_tensor_dtype(np.dtype(dtypes.pop())))
    if model:
        V, features = model.embedding.shape
        graph.output("logits", "B", "T", V)
        tokens = graph.transpose(graph.input("tokens", "B", "T", type=TensorProto.INT32), 1, 0)
        x = graph.node("Gather", graph.constant("embedding", model.embedding), tokens)
    else:
        graph.output("y", "B", "T", H * directions)
        x = graph.transpose(graph.input("x", "B", "T", features), 1, 0, 2)
    given = graph.input("lengths", "B", type=TensorProto.INT32) if lengths else ""
    for d, stack in enumerate(zip(*pairs, strict=True)):
        for i, p in enumerate(stack):
            for part, shape in carry_parts(p).items():
                graph.input(f"carry.{layer_path(i, d, directions)}.{part}", "B", *shape)
                graph.output(f"carry_out.{layer_path(i, d, directions)}.{part}", "B", *shape)
    for i, pair in enumerate(pairs):
        E, H = sizes(pair[0])
        if E != features:
            raise InteropError(f"layer {i} takes {E} features, but receives {features}.")
        pair = jax.tree.map(np.asarray, pair)
        x, features = add_layer(graph, i, pair, x, given, reverse), H * directions
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


def from_onnx(model: onnx.ModelProto | str | Path) -> Any:
    """Convert a graph that `to_onnx` made back, or read the GRU, LSTM and RNN nodes of any graph.

    A node's weights are all that is read of it. Its lengths, and the state that it starts from, are
    the caller's arguments here, and its `layout` only concerns those, the input and the output.
    A GRU applies the reset gate before the product if its `linear_before_reset` is 0, and after it
    if that is 1. Its two biases of z and r are kept; those that act only as their sum are added.

    Args:
      model: a graph, or the path of its file; weights in files beside it are then read, too.

    Returns:
      Of a graph that `to_onnx` made what `to_onnx` took, bit for bit: the model, or a tuple of
      layers, or a pair of tuples. Of any other a tuple with a `RecurrentNode` for each node:
      `[node.layer for node in nodes]` is a stack for `jaxgru.unroll` where each node reads the one
      before, and so are the `node.backward` for `jaxgru.bidirectional`.

    Raises:
      InteropError: the graph is ours, but its weights were changed; there is no recurrent node; a
        node has activations other than sigmoid and tanh, `clip`, `input_forget` or peepholes, which
        no layer has; its weights are not constants, have wrong shapes, or are neither float32 nor,
        where JAX has 64 bits enabled, float64; or there is no such file.
    """
    if isinstance(model, onnx.ModelProto):
        where, proto, folder = "the ONNX model cannot be used", model, None
    else:
        (where, proto), folder = _read(model), Path(model).parent
    metadata, stored = _contents(where, proto)
    if metadata.get("format") == "jaxgru":
        return _params(where, metadata, stored)
    return recurrent_nodes(where, proto, folder)


def _read(path: str | Path) -> tuple[str, onnx.ModelProto]:
    """Return how messages about a file begin, and what is in it."""
    where = f"{path} cannot be used"
    with open_model(path) as file:
        data = file.read()
    try:
        return where, onnx.ModelProto.FromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise InteropError(f"{where}: it is not a whole ONNX file ({error}).") from error


def _named(params: Any) -> dict[str, np.ndarray]:
    """Return the weights by path: "embedding", "layers.0.W", …; of a pair "forward.0.W", …"""
    if is_pair(params):
        params = dict(zip(DIRECTIONS, params, strict=True))
    elif not isinstance(params, Params):
        params = {"layers": params}
    return {name: np.asarray(leaf) for name, leaf in flatten(params).items()}


def _kind(i: int, p: CellParams, backward: CellParams | None = None) -> str:
    """Return layer i's name in `KINDS`. Raises InteropError if it has none."""
    kind = next((cell.name for cell in CELLS.values() if type(p) in cell.classes), "")
    if isinstance(p, AnyGRU):
        kind = f"{kind}, reset {p.reset_gate}"
    if kind not in KINDS:
        raise common.refusal(p, "ONNX has a GRU, an LSTM and an RNN, and a convolution for an MLP")
    if not isinstance(p, MLPParams) and any(leaf.ndim == 3 for leaf in jax.tree.leaves(p)):
        raise InteropError(
            "ONNX has no block-diagonal weights, as num_blocks makes them; "
            "jaxgru.cells.products.dense returns the layer with matrices."
        )
    if backward is not None and (_kind(i, backward), sizes(backward)) != (kind, sizes(p)):
        raise InteropError(f"the two directions of layer {i} must be of one kind and size.")
    return kind


def _check_dtypes(name: str, dtypes: set[str]) -> None:
    """Raise InteropError if weights are neither all float32 nor all float64."""
    if len(dtypes) > 1:
        raise InteropError(
            f"{name} are {' and '.join(sorted(dtypes))}; they must be all float32 or all float64."
        )
    common.check_dtype(name, *dtypes)


def _contents(where: str, model: onnx.ModelProto) -> tuple[dict[str, str], dict[str, TensorProto]]:
    """Return a model's metadata, and its constants by name."""
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    for name, text in metadata.items():
        if not isinstance(text, str):  # protobuf returns bytes where they are not UTF-8
            raise InteropError(f"{where}: its metadata {shown(name)} are not UTF-8.")
    return metadata, {tensor.name: tensor for tensor in model.graph.initializer}


def _params(where: str, metadata: Mapping[str, str], stored: Mapping[str, TensorProto]) -> Any:
    """Return the model or the layers. Raises InteropError where the parts do not fit together."""
    check_metadata(where, metadata, ("layers", "tensors"))
    try:
        kinds, shapes = (json.loads(metadata[name]) for name in ("layers", "tensors"))
    except (ValueError, RecursionError) as error:
        raise InteropError(f"{where}: its metadata are not JSON ({error}).") from error
    if not (isinstance(kinds, list) and kinds and isinstance(shapes, dict)):
        raise InteropError(f"{where}: its metadata do not name its layers and tensors.")
    for kind in kinds:
        if kind not in list(KINDS):
            names = "; ".join(KINDS)
            raise InteropError(f"{where}: a layer is {shown(kind)}; it must be one of {names}.")
    dtypes: set[str] = set()

    def array(name: str) -> Any:
        tensor = _array(where, stored, name)
        dtypes.add(tensor.dtype.name)
        _check_dtypes(f"{where}: its weights", dtypes)
        return tensor

    pairs = [unpacked(where, i, kind, shapes, array) for i, kind in enumerate(kinds)]
    if len({len(pair) for pair in pairs}) > 1:
        raise InteropError(f"{where}: some of its layers have one direction, others two.")
    directions = tuple(zip(*pairs, strict=True))
    params = directions if len(directions) == 2 else directions[0]
    if "embedding" in shapes:

        def part(name: str, cls: type[Any]) -> Any:
            return cls(*[array(f"{name}.{field.name}") for field in dataclasses.fields(cls)])

        norm = part("norm", LayerNormParams) if "norm.scale" in shapes else None
        params = Params(array("embedding"), params, norm, part("head", HeadParams))
    tensors = _named(params)
    if {name: [*tensor.shape] for name, tensor in tensors.items()} != shapes:
        raise InteropError(f"{where}: its tensors are not those that its metadata name.")
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
