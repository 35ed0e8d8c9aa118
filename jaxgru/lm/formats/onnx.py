"""ONNX: a whole model as one graph of standard operators, as `jaxgru.libraries.onnx` makes them.

    inputs    tokens (B, T) int32; then the carry, such as carry.0.h
    outputs   logits (B, T, V); then the next carry, as carry_out.0.h

Tokens are int32, jaxgru's own dtype and JavaScript's `Int32Array`. In a file, the graph's metadata
have what is in `metadata.py`.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np

from jaxgru.cells import CellParams, sizes
from jaxgru.cells.pytrees import options_of
from jaxgru.errors import needs
from jaxgru.libraries import InteropError, common
from jaxgru.libraries.onnx import add_layers, check_layers, has_operator
from jaxgru.libraries.onnx_graph import B, Graph, T
from jaxgru.libraries.onnx_nodes import OPERATORS, layer_from_operator, operator_shapes, parsed
from jaxgru.lm.config import Config
from jaxgru.lm.data.tokenizers import Tokenizer
from jaxgru.lm.files import write_bytes
from jaxgru.lm.formats import open_model
from jaxgru.lm.formats.metadata import check_format, pack, unpack
from jaxgru.lm.model import Params, flatten, unflatten

with needs("onnx"):
    import onnx
    from onnx import TensorProto, helper


def save_onnx(
    path: str | Path, params: Params, config: Config, tokenizer: Tokenizer, text_sha256: str = ""
) -> None:
    """Write a whole model into one .onnx file, which `load_onnx` reads back bit for bit.

    Its arguments are as for `save_safetensors`. Raises as that does, and InteropError where the
    model cannot be exported (see `to_onnx`).
    """
    _, metadata = pack(f"{path} cannot be written", params, config, tokenizer, text_sha256)
    model = to_onnx(params)
    helper.set_model_props(model, metadata)
    write_bytes(Path(path), model.SerializeToString())


def load_onnx(path: str | Path) -> tuple[Params, Config, Tokenizer]:
    """Load a file that `save_onnx` wrote.

    Its weights and metadata are read and checked, its nodes are not. Files that it refers to, as
    the format allows, are not opened. Raises as `lm.load`.
    """
    where, metadata, stored = _contents(path)

    def array(name: str, *shape: int) -> np.ndarray:
        tensor = stored.get(name, TensorProto())
        have = tensor.data_type, tuple(tensor.dims), len(tensor.raw_data)
        if have != (TensorProto.FLOAT, shape, 4 * math.prod(shape)):
            raise InteropError(f"{where}: {name} must be a float32 tensor {shape} in the file.")
        return np.frombuffer(tensor.raw_data, "<f4").reshape(shape)

    def layer(i: int, p: CellParams) -> CellParams:
        (E, H), at = sizes(p), f"layers.{i}."
        if not has_operator(p):
            weights = {name: array(at + name, *leaf.shape) for name, leaf in flatten(p).items()}
            return unflatten(p, weights)
        op, _ = OPERATORS[type(p)]
        shapes = operator_shapes(op, 1, E, H)
        if getattr(p, "p", None) is None:
            del shapes["P"]
        stored_weights = {what: array(at + what, *shape)[0] for what, shape in shapes.items()}
        made = layer_from_operator(type(p), stored_weights, **options_of(p))
        return made.replace(c=None) if getattr(p, "c", made) is None else made

    def read(like: Params) -> dict[str, np.ndarray]:
        check_layers(like.layers)
        layers = {"layers": tuple(layer(i, p) for i, p in enumerate(like.layers))}
        others = flatten(dataclasses.replace(like, layers=()))
        tensors = {name: array(name, *leaf.shape) for name, leaf in others.items()}
        return tensors | {name: np.asarray(leaf) for name, leaf in flatten(layers).items()}

    return unpack(where, metadata, read)


def metadata_of(path: str | Path) -> dict[str, str]:
    """Return the metadata in such a file. Raises as `load_onnx`."""
    return _contents(path)[1]


def _contents(path: str | Path) -> tuple[str, dict[str, str], dict[str, TensorProto]]:
    """Return how an error begins, and a file's metadata and constants. Raises InteropError."""
    where = f"{path} cannot be used"
    with open_model(path) as file:
        model = parsed(where, file.read())
    # protobuf gives bytes where a text is not UTF-8
    metadata = {entry.key: str(entry.value) for entry in model.metadata_props}
    check_format(where, metadata)
    return where, metadata, {tensor.name: tensor for tensor in model.graph.initializer}


def to_onnx(params: Params) -> onnx.ModelProto:
    """Convert a model to a graph that computes `jaxgru.lm.apply`, without dropout and resets.

    A token outside the vocabulary, for which `apply` gives NaN, is an error there, but the last
    tokens can also be called −1, −2, …. Raises as `jaxgru.libraries.onnx.to_onnx`, which converts
    layers alone.
    """
    common.check_known(params, "an ONNX graph")
    check_layers(params.layers)
    V = len(params.embedding)
    graph = Graph(params)
    graph.output("logits", B, T, V)
    tokens = graph.transpose(graph.input("tokens", B, T, dtype=np.int32), 1, 0)
    embedding = graph.constant("embedding", params.embedding)
    x = graph.node("Gather", embedding, tokens)
    x = graph.transpose(add_layers(graph, [params.layers], x), 1, 0, 2)
    if params.norm is not None:
        norm = [graph.constant(f"norm.{name}", w) for name, w in vars(params.norm).items()]
        x = graph.node("LayerNormalization", x, *norm, axis=-1, epsilon=1e-5)
    tied = params.head.Wo is None
    Wo = graph.transpose(embedding, 1, 0) if tied else graph.constant("head.Wo", params.head.Wo)
    x = graph.node("MatMul", x, Wo)
    graph.node("Add", x, graph.constant("head.bo", params.head.bo), outputs=["logits"])
    return graph.model()
