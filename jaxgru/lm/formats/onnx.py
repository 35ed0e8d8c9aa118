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
from typing import NamedTuple

import numpy as np

from jaxgru.cells import AnyCell, sizes
from jaxgru.errors import needs
from jaxgru.files import ModelFileError, write_bytes
from jaxgru.libraries import common
from jaxgru.libraries.onnx import add_layers, check_layers, has_operator
from jaxgru.libraries.onnx_graph import B, Graph, T
from jaxgru.libraries.onnx_nodes import OPERATORS, layer_from_operator, operator_shapes, parsed
from jaxgru.lm.config import Config
from jaxgru.lm.data.tokenizers import Tokenizer
from jaxgru.lm.formats import open_model
from jaxgru.lm.formats.metadata import check_format, pack, unpack
from jaxgru.lm.model import Params, flatten, unflatten
from jaxgru.pytrees import options_of

with needs("onnx"):
    import onnx
    from onnx import TensorProto, helper

__all__ = [
    "load_onnx",
    "save_onnx",
]


def save_onnx(
    path: str | Path, params: Params, config: Config, tokenizer: Tokenizer, text_sha256: str = ""
) -> None:
    """Write a whole model into one .onnx file, which `load_onnx` reads back bit for bit.

    Its arguments are as for `save_safetensors`.

    Raises:
      UserError: as `save_safetensors`.
      OSError: as `save_safetensors`.
      LibraryError: the model cannot be exported: see `to_onnx`.
    """
    _, metadata = pack(f"{path} cannot be written", params, config, tokenizer, text_sha256)
    model = to_onnx(params)
    helper.set_model_props(model, metadata)
    write_bytes(Path(path), model.SerializeToString())


def load_onnx(path: str | Path) -> tuple[Params, Config, Tokenizer]:
    """Load a file that `save_onnx` wrote.

    Its weights and metadata are read and checked, its nodes are not. Files that it refers to, as
    the format allows, are not opened.

    Raises:
      UserError: as `lm.load`.
    """
    content = _read(path)
    return unpack(content.where, content.metadata, content.tensors)


def metadata_of(path: str | Path) -> dict[str, str]:
    """Return the metadata in such a file.

    Raises:
      UserError: as `load_onnx`.
    """
    return _read(path).metadata


class _Content(NamedTuple):
    """What is in a file: its metadata, and its graph's constants by name.

    `where` begins an error's message.
    """

    where: str
    metadata: dict[str, str]
    constants: dict[str, TensorProto]

    def tensors(self, like: Params) -> dict[str, np.ndarray]:
        """Return the model's tensors, given its parameters as shapes."""
        check_layers(like.layers)
        layers = {"layers": tuple(self._layer(i, layer) for i, layer in enumerate(like.layers))}
        others = flatten(dataclasses.replace(like, layers=()))
        tensors = {name: self._array(name, *leaf.shape) for name, leaf in others.items()}
        for name, leaf in flatten(layers).items():
            tensors[name] = np.asarray(leaf)
        return tensors

    def _layer(self, i: int, like: AnyCell) -> AnyCell:
        """Return layer number i, given it as shapes."""
        prefix = f"layers.{i}."
        if not has_operator(like):
            weights = {
                name: self._array(prefix + name, *leaf.shape)
                for name, leaf in flatten(like).items()
            }
            return unflatten(like, weights)
        E, H = sizes(like)
        op, _ = OPERATORS[type(like)]
        shapes = operator_shapes(op, 1, E, H)
        if getattr(like, "p", None) is None:
            del shapes["P"]
        # The first axis is that of the operator's directions.
        weights = {name: self._array(prefix + name, *shape)[0] for name, shape in shapes.items()}
        layer = layer_from_operator(type(like), weights, **options_of(like))
        # The operator has second biases in any case.
        if hasattr(like, "c") and getattr(like, "c", None) is None:
            return layer.replace(c=None)
        return layer

    def _array(self, name: str, *shape: int) -> np.ndarray:
        """Return a constant. Its data has to be in the file, and of this shape."""
        tensor = self.constants.get(name, TensorProto())
        is_float32 = tensor.data_type == TensorProto.FLOAT
        has_shape = tuple(tensor.dims) == shape
        is_whole = len(tensor.raw_data) == 4 * math.prod(shape)
        if not (is_float32 and has_shape and is_whole):
            raise ModelFileError(
                f"{self.where}: {name} must be a float32 tensor {shape} in the file."
            )
        return np.frombuffer(tensor.raw_data, "<f4").reshape(shape)


def _read(path: str | Path) -> _Content:
    """Return what is in a file.

    Raises:
      ModelFileError: it cannot be read, or is not a model of this library.
    """
    where = f"{path} cannot be used"
    with open_model(path) as file:
        model = parsed(where, file.read(), ModelFileError)
    # protobuf gives bytes where a text is not UTF-8.
    metadata = {entry.key: str(entry.value) for entry in model.metadata_props}
    check_format(where, metadata)
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    return _Content(where, metadata, constants)


def to_onnx(params: Params) -> onnx.ModelProto:
    """Convert a model to a graph that computes `jaxgru.lm.apply`, without dropout and resets.

    A token outside the vocabulary, for which `apply` gives NaN, is an error there, but the last
    tokens can also be called −1, −2, ….

    Raises:
      LibraryError: as `jaxgru.libraries.onnx.to_onnx`, which converts layers alone.
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
        norm = [
            graph.constant(f"norm.{name}", weight) for name, weight in vars(params.norm).items()
        ]
        x = graph.node("LayerNormalization", x, *norm, axis=-1, epsilon=1e-5)
    if params.head.Wo is None:
        Wo = graph.transpose(embedding, 1, 0)
    else:
        Wo = graph.constant("head.Wo", params.head.Wo)
    x = graph.node("MatMul", x, Wo)
    bo = graph.constant("head.bo", params.head.bo)
    graph.node("Add", x, bo, outputs=["logits"])
    return graph.model()
