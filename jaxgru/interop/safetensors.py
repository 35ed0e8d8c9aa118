"""A whole model in one .safetensors file: the format for sharing runs.

The tensors are float32 and named by their path in the parameters ("embedding", "layers.0.Wz", …,
"head.bo"), as in the checkpoints. The header's metadata holds the rest:

    format          "jaxgru"
    config          the config, as TOML
    tokenizer       its kind: characters or sentencepiece
    tokenizer_data  the content of its file: JSON for characters, base64 for SentencePiece
    sha256          of all of the above, because the format has no checksum

See https://huggingface.co/docs/safetensors for the format; nothing in it can run code.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tomli_w
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from jaxgru.config import Config, ConfigError, from_dict, parse_toml, to_dict
from jaxgru.data.tokenizers import (
    SentencePieceTokenizer,
    Tokenizer,
    TokenizerError,
    tokenizer_from_bytes,
)
from jaxgru.files import write_bytes
from jaxgru.interop import InteropError, check_shapes
from jaxgru.model import Params, flatten, init, unflatten

METADATA = ("format", "config", "tokenizer", "tokenizer_data", "sha256")


def save_safetensors(
    path: str | Path, params: Params, config: Config, tokenizer: Tokenizer
) -> None:
    """Write a whole model into one file, bit for bit.

    Raises:
      InteropError: the parameters are not float32, or the parameters, the config and the tokenizer
        do not fit together.
      OSError: the file cannot be written; an older file is then untouched.
    """
    where = f"{path} cannot be written"
    tensors = {name: np.ascontiguousarray(leaf) for name, leaf in flatten(params).items()}
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32:
            raise InteropError(f"{where}: {name} is {tensor.dtype}; it must be float32.")
    _check_model(where, {n: t.shape for n, t in tensors.items()}, config, tokenizer)
    metadata = {
        "format": "jaxgru",
        "config": tomli_w.dumps(to_dict(config)),
        "tokenizer": tokenizer.kind,
        "tokenizer_data": _encode(tokenizer.kind, tokenizer.to_bytes()),
    }
    metadata["sha256"] = _sha256(tensors, metadata)
    write_bytes(Path(path), save(tensors, metadata))


def load_safetensors(path: str | Path) -> tuple[Params, Config, Tokenizer]:
    """Load a file that `save_safetensors` wrote.

    Raises:
      InteropError: there is no such file, or it is damaged or incomplete; the message names the
        tensor or metadata at fault.
      MissingPackage: its tokenizer needs SentencePiece, which is not installed.
    """
    where = f"{path} cannot be used"
    if not os.path.isfile(path):
        raise InteropError(f"there is no file {path}.")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            _check_metadata(where, metadata)
            config, tokenizer = _config(where, metadata), _tokenizer(where, metadata)
            stored = {name: file.get_slice(name) for name in file.keys()}
            for name, tensor in stored.items():
                if tensor.get_dtype() != "F32":
                    raise InteropError(
                        f"{where}: {name} has dtype {tensor.get_dtype()}; it must be F32."
                    )
            shapes = {name: tuple(tensor.get_shape()) for name, tensor in stored.items()}
            like = _check_model(where, shapes, config, tokenizer)
            tensors = {name: file.get_tensor(name) for name in stored}
    except (SafetensorError, OSError) as error:
        raise InteropError(f"{where}: it is not a whole safetensors file ({error}).") from error
    if _sha256(tensors, metadata) != metadata["sha256"]:
        raise InteropError(f"{where}: it is damaged; its content does not have its SHA-256.")
    return unflatten(like, {n: jnp.asarray(t) for n, t in tensors.items()}), config, tokenizer


def load_safetensors_config(path: str | Path) -> Config:
    """Return the config in such a file, without its tensors. Raises as `load_safetensors`."""
    where = f"{path} cannot be used"
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise InteropError(f"{where}: it is not a whole safetensors file ({error}).") from error
    _check_metadata(where, metadata)
    return _config(where, metadata)


def _check_metadata(where: str, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != "jaxgru":
        raise InteropError(f"{where}: it is not a model of this library (no format = jaxgru).")
    for name in METADATA:
        if name not in metadata:
            raise InteropError(f"{where}: its metadata lack {name}.")


def _config(where: str, metadata: Mapping[str, str]) -> Config:
    try:
        return from_dict(parse_toml(metadata["config"].encode()))
    except ConfigError as error:
        raise InteropError(f"{where}: its config is broken: {error}") from error


def _tokenizer(where: str, metadata: Mapping[str, str]) -> Tokenizer:
    kind, text = metadata["tokenizer"], metadata["tokenizer_data"]
    try:
        data = _decode(kind, text)
    except ValueError as error:
        raise InteropError(f"{where}: its tokenizer_data is not base64: {error}.") from error
    try:
        return tokenizer_from_bytes(kind, data)
    except TokenizerError as error:
        raise InteropError(f"{where}: {error}") from error


def _check_model(
    where: str, shapes: Mapping[str, tuple[int, ...]], config: Config, tokenizer: Tokenizer
) -> Params:
    """Return the shapes of the config's parameters, once tensors and tokenizer are known to fit."""
    # A layer has several tensors; listing far more layers than tensors would take long.
    if config.model.num_layers > len(shapes):
        raise InteropError(
            f"{where}: its config has {config.model.num_layers} layers, but there are only "
            f"{len(shapes)} tensors."
        )
    like = jax.eval_shape(lambda: init(jax.random.key(0), config.model))
    check_shapes(where, shapes, {name: leaf.shape for name, leaf in flatten(like).items()})
    if tokenizer.vocab_size != config.model.vocab_size:
        raise InteropError(
            f"{where}: the tokenizer has {tokenizer.vocab_size} tokens, the config "
            f"{config.model.vocab_size}."
        )
    return like


def _encode(kind: str, data: bytes) -> str:
    if kind == SentencePieceTokenizer.kind:
        data = base64.b64encode(data)
    return data.decode()


def _decode(kind: str, text: str) -> bytes:
    if kind == SentencePieceTokenizer.kind:
        return base64.b64decode(text, validate=True)
    return text.encode()


def _sha256(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    """Hash the tensors' bytes in the order of their names, then the metadata as sorted JSON."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].tobytes())
    others = {name: text for name, text in metadata.items() if name != "sha256"}
    digest.update(json.dumps(others, sort_keys=True).encode())
    return digest.hexdigest()
