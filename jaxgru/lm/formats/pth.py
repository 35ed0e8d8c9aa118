"""The published study's PyTorch checkpoints, .pth: loading them safely, and writing them.

A file is a dict of metadata and a `state_dict`, whose weights are PyTorch's (out, in). It holds
neither a tokenizer nor where dropout acts; the latter follows from the model's class. The study's
early stopping saves the `state_dict` alone; then the sizes are taken from its tensors.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import math
import os
import re
import unicodedata
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgru.cells import CellParams
from jaxgru.cells.gru import AnyGRU
from jaxgru.errors import a_type, command, counted, shown, warn
from jaxgru.libraries import InteropError, check_shapes, import_torch
from jaxgru.lm.config import Config, ConfigError, ModelConfig, config_names, load_config
from jaxgru.lm.data.corpus import load_corpus
from jaxgru.lm.data.tokenizers import CORPUS_TOKENIZERS, Tokenizer, learn_tokenizer
from jaxgru.lm.files import write_bytes
from jaxgru.lm.formats import open_model
from jaxgru.lm.formats.pickles import check_pickle
from jaxgru.lm.model import Params, flatten, init, unflatten


class _Layout(NamedTuple):
    """How one of the study's classes names what it saves."""

    config: ModelConfig  # common to all models of the class
    dropout_site: str  # whose rate in `TrainingConfig` is a file's dropout
    integers: dict[str, str]  # metadata key: field of ModelConfig
    layer: str  # a layer's prefix, with {} for its number
    cell: dict[str, str]  # our parameter: the key after that prefix
    others: dict[str, str]  # our parameter: the key, outside the layers


_GRU = _Layout(
    config=ModelConfig(cell="gru", second_bias=True, reset_gate="before"),
    dropout_site="state",
    integers={
        "embd_dim": "embedding_dim",
        "hidden_dim": "hidden_dim",
        "vocab_size": "vocab_size",
        "n_classes": "vocab_size",
        "num_layers": "num_layers",
    },
    layer="layers.{}.grucell.",
    cell={
        "Wz": "Wzx.weight", "bz": "Wzx.bias", "Uz": "Wzh.weight", "cz": "bias_z",
        "Wr": "Wrx.weight", "br": "Wrx.bias", "Ur": "Wrh.weight", "cr": "bias_r",
        "Wn": "Wx.weight", "bn": "Wx.bias", "Un": "Wh.weight",
    },
    others={
        "embedding": "embedding.weight",
        "head.Wo": "fc.linear_projection.weight",
        "head.bo": "fc.linear_projection.bias",
    },
)  # fmt: skip

_LSTM = _Layout(
    config=ModelConfig(cell="lstm", final_norm=True),
    dropout_site="output",
    integers={
        "in_features": "embedding_dim",
        "hidden_dim": "hidden_dim",
        "vocab_size": "vocab_size",
        "n_layers": "num_layers",
    },
    layer="lstm_layer.layers.{}.",
    cell={
        ours + gate: theirs.format(gate)
        for gate in "fiog"
        for ours, theirs in (("W", "W_{}_x.weight"), ("U", "W_{}_h.weight"), ("b", "b_{}"))
    },
    others={
        "embedding": "embeddings.weight",
        "norm.scale": "layer_norm.weight",
        "norm.shift": "layer_norm.bias",
        "head.Wo": "linear_projection.linear_projection.weight",
        "head.bo": "linear_projection.linear_projection.bias",
    },
)

_LAYOUTS = {"MyGRUModel": _GRU, "MyLSTMModel": _LSTM}
_SHARED = ("state_dict", "model_class", "model_name", "dropout", "timestamp", "version")


def load_pth_model(path: str | Path) -> tuple[Params, ModelConfig]:
    """Load a .pth file's parameters, float32, and the config of its model.

    Raises:
      InteropError: PyTorch is not installed; there is no such file, or it is damaged; it holds more
        than tensors and plain values (none of it is run); its metadata are missing, wrong or
        contradict its tensors; a tensor is missing, extra, of another shape or not float32.
    """
    return _load(Path(path))[:2]


def load_pth(
    path: str | Path, tokenizer: Tokenizer | None = None
) -> tuple[Params, Config, Tokenizer]:
    """Load a .pth file as a whole model, such as `lm.load` returns.

    A published model is recognised by its sizes, which are unique: the config then has its data and
    training values. It has the published name if the file uses one of the study's names (`Astra-α`,
    `Leviathan-LSTM`), else the file's own name in lower case. A warning on stderr says when a name
    of the study contradicts the sizes. Without a tokenizer, 65 tokens mean Tiny Shakespeare's
    characters, and 1,000 its SentencePiece pieces, learned again: they are the study's pieces if
    SentencePiece learns the same ones from the same text.

    Raises:
      InteropError: as `load_pth_model`; or there is no tokenizer, or it has another size.
      CorpusError: Tiny Shakespeare is needed and cannot be found.
    """
    params, model, checkpoint = _load(Path(path))
    if tokenizer is None:
        if model.vocab_size not in CORPUS_TOKENIZERS:
            raise InteropError(
                f"{path} holds no tokenizer, and none is known for "
                f"{counted(model.vocab_size, 'token')}; "
                "give the one used in training "
                f"({command('convert')} {path} OUT.safetensors --tokenizer RUN_OR_FILE)."
            )
        kind = CORPUS_TOKENIZERS[model.vocab_size]
        tokenizer = learn_tokenizer(kind, load_corpus().text, model.vocab_size)
    if tokenizer.vocab_size != model.vocab_size:
        raise InteropError(
            f"the tokenizer has {counted(tokenizer.vocab_size, 'token')}, but {path} has "
            f"{model.vocab_size}."
        )
    return params, _whole_config(Path(path), model, checkpoint, tokenizer.kind), tokenizer


def save_pth(
    path: str | Path, params: Params, config: Config, tokenizer: Tokenizer | None = None
) -> None:
    """Write a .pth file, version 1, that the study's classes load with `strict=True`.

    `load_pth_model` returns the same parameters, bit for bit. A GRU with one bias per gate gets the
    study's second one as zeros: the same function, with a larger parameter count. Of the config's
    training values, the file holds only the probability of dropout; it holds no tokenizer, and the
    argument `tokenizer` is ignored.

    Raises:
      InteropError: PyTorch is not installed; the study has no such model (a vanilla RNN, a GRU with
        LayerNorm or with the reset gate after the product, an LSTM without LayerNorm); the
        parameters are not float32 or do not fit the config.
      OSError: the file cannot be written.
    """
    where = f"{path} cannot be written"
    model_class, layout = _layout_for(where, config.model)
    params = dataclasses.replace(params, layers=tuple(map(_with_second_bias, params.layers)))
    want = _shapes(layout, _like(config.model, layout))
    names = _names(layout, config.model.num_layers)
    tensors, leaves = {}, flatten(params)
    for name, gates in _gates(params).items():
        if leaves[name].dtype != np.float32:
            raise InteropError(f"{where}: {name} is {leaves[name].dtype}; it must be float32.")
        parts = np.split(np.asarray(leaves[name]), len(gates), axis=-1)
        for gate, part in zip(gates, parts, strict=True):
            tensors[names.get(gate, gate)] = np.array(_turned(name, part), order="C")
    check_shapes(where, {name: tensor.shape for name, tensor in tensors.items()}, want)
    torch = import_torch()
    checkpoint = {
        "state_dict": {name: torch.from_numpy(tensor) for name, tensor in tensors.items()},
        "model_class": model_class,
        "model_name": config.name[:1].upper() + config.name[1:],
        "dropout": config.training.dropouts.get(layout.dropout_site, 0.0),
        "timestamp": "",
        "version": 1,
    } | {key: getattr(config.model, field) for key, field in layout.integers.items()}
    file = io.BytesIO()
    torch.save(checkpoint, file)
    write_bytes(Path(path), file.getvalue())


def _load(path: Path) -> tuple[Params, ModelConfig, dict[str, Any]]:
    """Return parameters, config and what else the file holds."""
    where = f"{path} cannot be used"
    checkpoint = _read(path, where)
    if not checkpoint.keys() & {"state_dict", "model_class"}:
        checkpoint = _with_metadata(path, where, checkpoint)
    model_class = checkpoint.get("model_class")
    if not isinstance(model_class, str) or model_class not in _LAYOUTS:
        raise InteropError(
            f"{where}: model_class is {shown(model_class)}; it must be {' or '.join(_LAYOUTS)}."
        )
    layout = _LAYOUTS[model_class]
    tensors = _tensors(where, checkpoint, path.stat().st_size)
    config = _config(where, checkpoint, layout, tensors)
    like = _like(config, layout)
    check_shapes(where, {n: tuple(t.shape) for n, t in tensors.items()}, _shapes(layout, like))
    names = _names(layout, config.num_layers)
    array = lambda gate: _turned(gate, tensors[names[gate]].numpy(force=True))
    leaves = {
        name: jax.device_put(np.concatenate([array(gate) for gate in gates], axis=-1))
        for name, gates in _gates(like).items()
    }
    return unflatten(like, leaves), config, checkpoint


def _read(path: Path, where: str) -> dict[str, Any]:
    """Return the dict in the file; nothing in it is run."""
    torch = import_torch()
    with open_model(path) as file:
        try:
            _check_archive(file, where)
            file.seek(0)
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        except InteropError:
            raise
        except zipfile.BadZipFile as error:
            raise InteropError(
                f"{where}: it is damaged, or not a file of torch.save (PyTorch 1.6 or newer)."
            ) from error
        except Exception as error:  # a hostile or damaged pickle can fail in any way
            # EINVAL: the archive names a place before its beginning
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            raise InteropError(
                f"{where}: it is damaged, or holds more than tensors and plain values; nothing in "
                "it was run."
            ) from error
    if not isinstance(checkpoint, dict):
        raise InteropError(f"{where}: it holds {a_type(checkpoint)}, not a dict.")
    return checkpoint


def _check_archive(file: BinaryIO, where: str) -> None:
    """Raise InteropError, or any error, if the archive or its pickle is not one of PyTorch's."""
    with zipfile.ZipFile(file) as archive:
        # PyTorch writes uncompressed members; a compressed one could fill the memory.
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise InteropError(f"{where}: it is compressed, unlike any file of PyTorch.")
        # Thousands of entries for one and the same member would take very long to check.
        size = os.fstat(file.fileno()).st_size
        if sum(member.file_size for member in archive.infolist()) > size:
            raise InteropError(f"{where}: its members claim to be larger than the file.")
        damaged = archive.testzip()  # PyTorch does not verify the checksums
        for member in archive.infolist():
            if member.filename.endswith("data.pkl"):
                check_pickle(archive.read(member))
    if damaged is not None:
        raise InteropError(f"{where}: it is damaged; {damaged} does not match its checksum.")


def _tensors(where: str, checkpoint: Mapping[str, Any], file_size: int) -> dict[str, Any]:
    """Return the state_dict, if its tensors are dense, float32 and not larger than the file."""
    torch = import_torch()
    tensors = checkpoint.get("state_dict")
    if not isinstance(tensors, dict):
        raise InteropError(f"{where}: it contains no state_dict.")
    for name, tensor in tensors.items():
        dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        if not isinstance(name, str) or not dense or tensor.device.type != "cpu":
            raise InteropError(f"{where}: {shown(name)} in its state_dict is not a dense tensor.")
        if tensor.dtype != torch.float32:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise InteropError(f"{where}: the tensor {name} is {dtype}; it must be float32.")
    if sum(tensor.nbytes for tensor in tensors.values()) > file_size:
        raise InteropError(f"{where}: its tensors claim to be larger than the file.")
    return tensors


def _config(
    where: str, checkpoint: Mapping[str, Any], layout: _Layout, tensors: Mapping[str, Any]
) -> ModelConfig:
    """Return the config in the metadata, if they are valid and agree with the number of layers."""
    for key in (*_SHARED, *layout.integers):
        if key not in checkpoint:
            raise InteropError(f"{where}: its metadata lack {key}.")
    fields: dict[str, int] = {}
    for key, field in layout.integers.items():
        value = checkpoint[key]
        if type(value) is not int or not 1 <= value < 2**31:
            raise InteropError(
                f"{where}: {key} is {shown(value)}; it must be a whole number, at least 1 "
                "and below 2**31."
            )
        if fields.setdefault(field, value) != value:
            raise InteropError(
                f"{where}: {key} is {value}, but it must be the {field}, {fields[field]}."
            )
    dropout = checkpoint["dropout"]
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:  # NaN is refused here, too
        raise InteropError(
            f"{where}: dropout is {shown(dropout)}; it must be at least 0 and below 1."
        )
    for key in ("model_name", "timestamp", "version"):
        value = checkpoint[key]
        number = type(value) is int or type(value) is float and math.isfinite(value)
        if not (isinstance(value, str) or number and key != "model_name"):
            wanted = "a text" if key == "model_name" else "a text or a finite number"
            raise InteropError(f"{where}: {key} is {shown(value)}; it must be {wanted}.")
    num_layers = _num_layers(layout, tensors)
    if num_layers != fields["num_layers"]:
        raise InteropError(
            f"{where}: its metadata say {counted(fields['num_layers'], 'layer')}, but there are "
            f"{num_layers}."
        )
    try:
        return dataclasses.replace(layout.config, **fields)
    except ConfigError as error:
        raise InteropError(f"{where}: {error}") from error


def _num_layers(layout: _Layout, tensors: Mapping[str, Any]) -> int:
    """Count the layers in the tensors' names."""
    pattern = re.escape(layout.layer).replace(r"\{\}", r"(\d+)")
    return len({match[1] for name in tensors if (match := re.match(pattern, name))})


def _with_metadata(path: Path, where: str, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a bare `state_dict` as a checkpoint, with metadata from its tensors and file name."""
    embeddings = {layout.others["embedding"]: cls for cls, layout in _LAYOUTS.items()}
    embedding = next(iter(embeddings.keys() & state_dict.keys()), None)
    if embedding is None:
        raise InteropError(
            f"{where}: it is neither a checkpoint of the study (model_class, state_dict, …) nor a "
            f"state_dict of its {' or '.join(_LAYOUTS)}; its keys are {shown(list(state_dict))}; "
            "to convert a torch.nn.GRU, LSTM or RNN, see jaxgru.libraries.torch_nn.from_torch."
        )
    model_class = embeddings[embedding]
    layout = _LAYOUTS[model_class]
    head = layout.others["head.Wo"]
    checkpoint = {"state_dict": state_dict, "model_class": model_class}
    tensors = _tensors(where, checkpoint, path.stat().st_size)
    for name in (embedding, head):
        if name not in tensors or tensors[name].ndim != 2:
            raise InteropError(f"{where}: the tensor {name} is missing or is not a matrix.")
    (V, E), (_, H) = tensors[embedding].shape, tensors[head].shape
    sizes = dict(vocab_size=V, embedding_dim=E, hidden_dim=H)
    sizes["num_layers"] = _num_layers(layout, tensors)
    checkpoint |= {key: sizes[field] for key, field in layout.integers.items()}
    checkpoint |= {"model_name": _file_name(path), "dropout": 0, "timestamp": "", "version": 1}
    published = _published(_config(where, checkpoint, layout, tensors))
    if published is not None:
        checkpoint["dropout"] = published.training.dropouts.get(layout.dropout_site, 0.0)
    return checkpoint


def _whole_config(
    path: Path, model: ModelConfig, checkpoint: Mapping[str, Any], tokenizer: str
) -> Config:
    """Return the config of a file's model: the published one of its sizes, or else a new one."""
    published, model_name = _published(model), checkpoint["model_name"]
    stated = _study_name(model_name)
    names = {name for name in (stated, _study_name(_file_name(path))) if name is not None}
    for name in sorted(names - {published and published.name}):
        taken = (
            "of none of the study's models: its config has the default training values"
            if published is None
            else f"those of {published.name}, so it is taken for {published.name}"
        )
        warn(f"{str(path)!r} calls its model {name}, but its sizes are {taken}.")
    own = re.sub(r"[^a-z0-9_.-]", "_", _spelled(model_name)).lstrip(".-")[:200] or "custom"
    config = Config(stated or own, model) if published is None else published
    site = _LAYOUTS[checkpoint["model_class"]].dropout_site
    return dataclasses.replace(
        config,
        name=own if stated is None else config.name,
        data=dataclasses.replace(config.data, tokenizer=tokenizer),
        training=dataclasses.replace(config.training, **{f"{site}_dropout": checkpoint["dropout"]}),
    )


def _published(model: ModelConfig) -> Config | None:
    """Return the published config with a model of these sizes, if there is one."""
    configs = map(load_config, config_names())
    return next((config for config in configs if config.model == model), None)


def _study_name(name: str) -> str | None:
    """Return the published config that a name stands for (Astra-α, Astra_alpha, Leviathan-LSTM)."""
    name = _spelled(name).replace("-", "_").removesuffix("_lstm")
    return name if name in config_names() else None


def _spelled(name: str) -> str:
    """Return a name in lower case with Greek letters spelled out, as a folder's name needs."""
    return re.sub("[α-ω]", lambda c: unicodedata.name(c[0]).split()[-1].lower(), name.lower())


def _file_name(path: Path) -> str:
    """Return the model's name from a file's, without the version that the study appends."""
    return re.sub(r"_(v\d+|latest|best)$", "", path.stem)


def _layout_for(where: str, config: ModelConfig) -> tuple[str, _Layout]:
    """Return the study's class for such a model, and its layout."""
    for model_class, layout in _LAYOUTS.items():
        ours = (config.cell, config.final_norm, config.reset_gate)
        if ours == (layout.config.cell, layout.config.final_norm, layout.config.reset_gate):
            return model_class, layout
    raise InteropError(
        f"{where}: the study has only GRUs without LayerNorm and with the reset gate "
        "before the product, and LSTMs with LayerNorm."
    )


def _with_second_bias(p: CellParams) -> CellParams:
    """Return a GRU with zeros for missing second biases, and any other layer unchanged."""
    if not isinstance(p, AnyGRU) or p.c is not None:
        return p
    return dataclasses.replace(p, c=jnp.zeros_like(p.b[: len(p.b) // 3 * 2]))


def _gates(params: Params) -> dict[str, list[str]]:
    """Map our parameters' names to those of their gates: layers.0.W to layers.0.Wz, …."""
    found = {}
    for name in flatten(params):
        _, _, field = path = name.split(".") if name.startswith("layers.") else ["", "", ""]
        gates = params.layers[int(path[1])].gates if field else ("",)
        found[name] = [name + gate for gate in (gates[:2] if field == "c" else gates)]
    return found


def _like(config: ModelConfig, layout: _Layout) -> Params:
    """Return the parameters of such a model in the study, as shapes."""
    sizes = {field: getattr(config, field) for field in layout.integers.values()}
    config = dataclasses.replace(layout.config, **sizes)
    return jax.eval_shape(lambda: init(jax.random.key(0), config))


def _names(layout: _Layout, num_layers: int) -> dict[str, str]:
    """Map our parameters' names to the study's."""
    return layout.others | {
        f"layers.{i}.{ours}": layout.layer.format(i) + theirs
        for i in range(num_layers)
        for ours, theirs in layout.cell.items()
    }


def _shapes(layout: _Layout, like: Params) -> dict[str, tuple[int, ...]]:
    """Map the study's names to the shapes there."""
    names, leaves, shapes = _names(layout, len(like.layers)), flatten(like), {}
    for name, gates in _gates(like).items():
        *rows, columns = leaves[name].shape
        shape = *rows, columns // len(gates)
        for gate in gates:
            shapes[names[gate]] = tuple(reversed(shape)) if name != "embedding" else shape
    return shapes


def _turned(name: str, weight: np.ndarray) -> np.ndarray:
    """Convert between our (in, out) and PyTorch's (out, in); the embedding is (V, E) in both."""
    return weight if name == "embedding" else weight.T
