"""The published study's PyTorch checkpoints, .pth: reading them without running code; writing them.

A file is a dict of metadata and a `state_dict`, whose weights are PyTorch's (out, in), gate by
gate. It holds neither a tokenizer nor where dropout acts; the latter follows from the model's
class. The study's early stopping saves the `state_dict` alone. The sizes of a model are those of
its tensors.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgru.errors import import_torch
from jaxgru.files import ModelFileError, damage_as, write_bytes
from jaxgru.layers import Site
from jaxgru.lm.config import Config, ModelConfig, config_names, load_config
from jaxgru.lm.data.corpus import TINY_SHAKESPEARE_SHA256, load_corpus
from jaxgru.lm.data.tokenizers import CORPUS_TOKENIZERS, Tokenizer, learn_tokenizer
from jaxgru.lm.formats import open_model
from jaxgru.lm.formats.metadata import as_tensors, check_options, check_size
from jaxgru.lm.model import Params, flatten, shapes, unflatten
from jaxgru.printing import counted, shown, type_name

__all__ = [
    "load_pth",
    "load_pth_model",
    "save_pth",
]


class _Layout(NamedTuple):
    """How one of the study's classes names what it saves.

    Attributes:
      config: what is common to all models of the class.
      dropout_site: of `TrainingConfig`.
      sizes: the metadata's key → the field of `ModelConfig`.
      layer: the prefix of a layer's keys, with {} for its number.
      cell: our parameter of a layer → the key after that prefix, with {} for a gate.
      others: our parameter outside the layers → the key.
    """

    model_class: str
    config: ModelConfig
    dropout_site: Site
    sizes: dict[str, str]
    layer: str
    cell: dict[str, str]
    others: dict[str, str]


_GRU = _Layout(
    model_class="MyGRUModel",
    config=ModelConfig("gru", second_bias=True, reset_gate="before", init_scheme="pytorch"),
    dropout_site="state",
    sizes={
        "embd_dim": "embedding_dim",
        "hidden_dim": "hidden_dim",
        "vocab_size": "vocab_size",
        "n_classes": "vocab_size",
        "num_layers": "num_layers",
    },
    layer="layers.{}.grucell.",
    cell={
        "W": "W{}x.weight",
        "U": "W{}h.weight",
        "b": "W{}x.bias",
        "c": "bias_{}",
    },
    others={
        "embedding": "embedding.weight",
        "head.Wo": "fc.linear_projection.weight",
        "head.bo": "fc.linear_projection.bias",
    },
)

_LSTM = _Layout(
    model_class="MyLSTMModel",
    config=ModelConfig("lstm", final_norm=True, init_scheme="pytorch"),
    dropout_site="output",
    sizes={
        "in_features": "embedding_dim",
        "hidden_dim": "hidden_dim",
        "vocab_size": "vocab_size",
        "n_layers": "num_layers",
    },
    layer="lstm_layer.layers.{}.",
    cell={
        "W": "W_{}_x.weight",
        "U": "W_{}_h.weight",
        "b": "b_{}",
    },
    others={
        "embedding": "embeddings.weight",
        "norm.scale": "layer_norm.weight",
        "norm.shift": "layer_norm.bias",
        "head.Wo": "linear_projection.linear_projection.weight",
        "head.bo": "linear_projection.linear_projection.bias",
    },
)

_LAYOUTS = (_GRU, _LSTM)


def load_pth_model(path: str | Path) -> tuple[Params, ModelConfig]:
    """Load a .pth file's parameters, float32, and the config of its model.

    Raises:
      UserError: as `lm.load`.
      ModelFileError: the file holds more than tensors and plain values (none of it is run), or is
        not a model of the study in float32.
    """
    model = _load(Path(path))
    return model.params, model.config


def load_pth(
    path: str | Path, tokenizer: Tokenizer | None = None
) -> tuple[Params, Config, Tokenizer]:
    """Load a .pth file as a whole model, such as `lm.load` returns.

    A published model is recognised by its sizes, which are unique, whatever the file is called: the
    config is then the published one, with the file's dropout. Any other model has the name that the
    file says, in lower case. Without a tokenizer, 65 tokens mean Tiny Shakespeare's characters, and
    1,000 its SentencePiece pieces, learned again: they are the study's pieces if SentencePiece
    learns the same ones from the same text.

    Raises:
      UserError: as `load_pth_model`.
      ModelFileError: there is no tokenizer, or it has another size.
      CorpusError: Tiny Shakespeare is needed and cannot be found.
    """
    params, model, metadata = _load(Path(path))
    if tokenizer is None:
        if model.vocab_size not in CORPUS_TOKENIZERS:
            raise ModelFileError(
                f"{path} holds no tokenizer, and none is known for "
                f"{counted(model.vocab_size, 'token')}; give the one used in training "
                f"to jaxgru.lm.formats.pth.load_pth({os.fspath(path)!r}, tokenizer)."
            )
        kind = CORPUS_TOKENIZERS[model.vocab_size]
        tokenizer = learn_tokenizer(kind, load_corpus().text, model.vocab_size)
    check_size(f"{path} cannot be used", tokenizer, model)
    with damage_as(ModelFileError, f"{path} cannot be used"):
        config = _whole_config(Path(path), model, metadata, tokenizer.kind)
    return params, config, tokenizer


def save_pth(
    path: str | Path,
    params: Params,
    config: Config,
    tokenizer: Tokenizer | None = None,
    text_sha256: str = "",
) -> None:
    """Write a .pth file, version 1, that the study's classes load with `strict=True`.

    `load_pth_model` returns the same parameters, bit for bit. A GRU with one bias per gate gets the
    study's second one as zeros: the same function, with a larger parameter count. Of the config's
    training values, the file holds only the probability of dropout. It holds neither the tokenizer
    nor `text_sha256`. `load_pth` takes a model of 65 or 1,000 tokens for one of Tiny Shakespeare.

    Raises:
      UserError: as `lm.save`.
      OSError: as `lm.save`.
      ModelFileError: a model of 65 or 1,000 tokens is of another text, the parameters are not
        float32, or the study has no such model: a vanilla RNN, a GRU with LayerNorm or with the
        reset gate after the product, an LSTM without LayerNorm, or one with ReLU.
    """
    where = f"{path} cannot be written"
    layout = _layout_to_write(where, config.model)
    is_of_another_text = text_sha256 not in ("", TINY_SHAKESPEARE_SHA256)
    if is_of_another_text and config.model.vocab_size in CORPUS_TOKENIZERS:
        raise ModelFileError(
            f"{where}: it would not hold the tokenizer, and a .pth file with "
            f"{config.model.vocab_size} tokens is read as one of Tiny Shakespeare; choose "
            ".safetensors."
        )
    like = _like(config.model, layout)
    leaves = flatten(like)
    second_biases = {
        name: np.zeros(leaf.shape, np.float32)
        for name, leaf in leaves.items()
        if name.endswith(".c")
    }
    tensors = as_tensors(where, second_biases | flatten(params), leaves)
    check_options(where, params, like)
    torch = import_torch()
    state_dict = {
        name: torch.from_numpy(np.array(tensor, order="C"))
        for name, tensor in _split(tensors, _names(layout, like)).items()
    }
    file = io.BytesIO()
    torch.save(_checkpoint(layout, config, state_dict), file)
    write_bytes(Path(path), file.getvalue())


def _layout_to_write(where: str, model: ModelConfig) -> _Layout:
    """Return the layout of the study's class for a model.

    Raises:
      ModelFileError: the study has no such model.
    """
    kind = _kind(model)
    for layout in _LAYOUTS:
        if _kind(layout.config) == kind:
            return layout
    options = kind or {"reset_gate": model.reset_gate}
    has = " and ".join(f"model.{name} = {shown(value)}" for name, value in options.items())
    raise ModelFileError(
        f"{where}: the study has only GRUs with the reset gate before the product, and LSTMs "
        f"with a LayerNorm before the head, without other options; this model has {has}."
    )


def _checkpoint(layout: _Layout, config: Config, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return what the study saves of a model."""
    checkpoint: dict[str, Any] = {
        "state_dict": state_dict,
        "model_class": layout.model_class,
        "model_name": config.name[:1].upper() + config.name[1:],
        "dropout": config.training.dropouts.get(layout.dropout_site, 0.0),
        "timestamp": "",
        "version": 1,
    }
    for key, field in layout.sizes.items():
        checkpoint[key] = getattr(config.model, field)
    return checkpoint


class _Model(NamedTuple):
    """A model of a file; of a bare `state_dict`, there is no metadata."""

    params: Params
    config: ModelConfig
    metadata: dict[str, Any]


def _load(path: Path) -> _Model:
    where = f"{path} cannot be used"
    checkpoint = _read(path, where)
    metadata: dict[str, Any] = {}
    if isinstance(checkpoint, dict) and "state_dict" in checkpoint:
        metadata = checkpoint
    state_dict = metadata.get("state_dict", checkpoint)
    if not isinstance(state_dict, dict):
        raise ModelFileError(f"{where}: its state_dict is {type_name(state_dict)}, not a dict.")
    tensors = {str(name): tensor for name, tensor in state_dict.items()}
    layout = next((each for each in _LAYOUTS if each.others["embedding"] in tensors), None)
    if layout is None:
        raise ModelFileError(
            f"{where}: it is neither a checkpoint of the study (model_class, state_dict, …) nor a "
            f"state_dict of its {' or '.join(each.model_class for each in _LAYOUTS)}; its keys are "
            f"{shown(list(metadata or tensors))}; to convert a torch.nn.GRU, LSTM or RNN, see "
            "jaxgru.libraries.torch_nn.from_torch."
        )
    arrays = _arrays(where, tensors)
    config = _model_config(where, layout, arrays)
    return _Model(_params(where, layout, config, arrays), config, metadata)


def _arrays(where: str, tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    arrays = {}
    for name, tensor in tensors.items():
        # Not all that PyTorch calls a tensor is an array.
        with damage_as(ModelFileError, f"{where}: {shown(name)}"):
            arrays[name] = tensor.numpy(force=True)
    return arrays


def _model_config(where: str, layout: _Layout, arrays: Mapping[str, np.ndarray]) -> ModelConfig:
    """Return the config of a model, whose sizes are those of its tensors."""
    try:
        V, E = arrays[layout.others["embedding"]].shape
        _, H = arrays[layout.others["head.Wo"]].shape
    except (KeyError, ValueError):
        raise ModelFileError(f"{where}: its embedding or head is missing or no matrix.") from None
    L = 0
    while any(name.startswith(layout.layer.format(L)) for name in arrays):
        L += 1
    sizes = dict(vocab_size=V, embedding_dim=E, hidden_dim=H, num_layers=L)
    with damage_as(ModelFileError, where):
        return dataclasses.replace(layout.config, **sizes)


def _params(
    where: str, layout: _Layout, config: ModelConfig, arrays: Mapping[str, np.ndarray]
) -> Params:
    """Return the parameters of a model, given the study's arrays by their names."""
    like = _like(config, layout)
    names = _names(layout, like)
    like_study = jax.eval_shape(lambda tensors: _split(tensors, names), flatten(like))
    arrays = as_tensors(where, arrays, like_study)
    leaves = {}
    for ours, theirs in names.items():
        gates = [_transposed(ours, arrays[name]) for name in theirs]
        leaves[ours] = jax.device_put(np.concatenate(gates, axis=-1))
    return unflatten(like, leaves)


def _read(path: Path, where: str) -> Any:
    """Return what is in the file; `weights_only` refuses what could run code."""
    torch = import_torch()
    with open_model(path) as file:
        try:
            return torch.load(_verified(file), "cpu", weights_only=True)
        except Exception as error:
            # A damaged archive or a stranger's pickle can cause any error.
            raise ModelFileError(
                f"{where}: it is damaged, not a file of torch.save (PyTorch 1.6 or newer), or it "
                "holds more than tensors and plain values; nothing in it was run."
            ) from error


def _verified(file: io.BufferedReader) -> io.BytesIO:
    """Return a copy of an archive whose checksums are right.

    PyTorch verifies none of them, and reads some entries as empty.
    """
    copy = io.BytesIO()
    with zipfile.ZipFile(file) as archive, zipfile.ZipFile(copy, "w") as writer:
        for name in archive.namelist():
            writer.writestr(name, archive.read(name))
    copy.seek(0)
    return copy


def _whole_config(
    path: Path, model: ModelConfig, metadata: Mapping[str, Any], tokenizer: str
) -> Config:
    """Return the config of a file's model: the published one of its sizes, or else a new one."""
    configs = map(load_config, config_names())
    config = next((config for config in configs if config.model == model), None)
    if config is None:
        config = Config(_config_name(path, metadata), model)
    layout = next(each for each in _LAYOUTS if each.config.cell == model.cell)
    dropout = config.training.dropouts.get(layout.dropout_site, 0.0)
    training = {f"{layout.dropout_site}_dropout": metadata.get("dropout", dropout)}
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, tokenizer=tokenizer),
        training=dataclasses.replace(config.training, **training),
    )


def _config_name(path: Path, metadata: Mapping[str, Any]) -> str:
    """Return the name for the config of a model that is not published."""
    name = str(metadata.get("model_name", path.stem)).lower()
    return re.sub(r"[^a-z0-9_.-]", "_", name).lstrip(".-")[:200] or "custom"


def _kind(model: ModelConfig) -> dict[str, Any]:
    """Return what tells the study's models from each other and from all others, by field."""
    # Models of one class differ in their sizes, and the other two change nothing that is computed.
    ignored = (*_GRU.sizes.values(), "init_scheme", "second_bias")
    return {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(model)
        if field.name not in ignored and getattr(model, field.name) != field.default
    }


def _like(config: ModelConfig, layout: _Layout) -> Params:
    """Return the parameters of such a model in the study, as shapes."""
    sizes = {field: getattr(config, field) for field in layout.sizes.values()}
    return shapes(dataclasses.replace(layout.config, **sizes))


def _names(layout: _Layout, like: Params) -> dict[str, list[str]]:
    """Map our parameters' names to the study's: one for each gate, in the order of our gates."""
    names = {ours: [theirs] for ours, theirs in layout.others.items()}
    for i, layer in enumerate(like.layers):
        prefix = layout.layer.format(i)
        for field, theirs in layout.cell.items():
            gates = layer.gates[:2] if field == "c" else layer.gates
            # The study leaves out the candidate's letter: Wx, not Wnx.
            letters = [gate.replace("n", "") for gate in gates]
            names[f"layers.{i}.{field}"] = [prefix + theirs.format(letter) for letter in letters]
    return names


def _split(tensors: Mapping[str, Any], names: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the study's tensors, one for each of its names, of ours."""
    parts = {}
    for ours, theirs in names.items():
        gates = jnp.split(tensors[ours], len(theirs), axis=-1)
        for name, gate in zip(theirs, gates, strict=True):
            parts[name] = _transposed(ours, gate)
    return parts


def _transposed(name: str, weight: Any) -> Any:
    """Convert between our (in, out) and PyTorch's (out, in); the embedding is (V, E) in both."""
    if name == "embedding":
        return weight
    return weight.T
