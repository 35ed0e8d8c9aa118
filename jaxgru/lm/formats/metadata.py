"""What a file with a whole model holds besides its tensors: metadata, as text by name.

format          "jaxgru"
config          the config, as TOML
tokenizer       its kind, as `data.tokenizer`
tokenizer_data  the content of its file: JSON as it is, SentencePiece's models in base64
text_sha256     of the text that the model was trained on; empty: unknown
sha256          of the tensors and all of the above, because the formats have no checksum
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import tomli_w

from jaxgru.errors import counted
from jaxgru.libraries import InteropError, check_shapes
from jaxgru.lm.config import Config, ConfigError, from_dict, parse_toml, to_dict
from jaxgru.lm.data.corpus import TINY_SHAKESPEARE, TINY_SHAKESPEARE_SHA256
from jaxgru.lm.data.tokenizers import (
    TOKENIZERS,
    Tokenizer,
    TokenizerError,
    saved_bytes,
    tokenizer_from_bytes,
)
from jaxgru.lm.model import Params, flatten, init

METADATA = ("format", "config", "tokenizer", "tokenizer_data", "text_sha256", "sha256")


def pack(
    where: str, params: Params, config: Config, tokenizer: Tokenizer, text_sha256: str
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return a model's tensors by name, and its metadata; `where` begins an error's message.

    Files are shared, and folders can tell who wrote them, so only the last name of each path in the
    config (`data.corpus`, `training.init`, …) is kept, as "./text.txt".

    Raises:
      InteropError: the parameters are not float32; the parameters, the config and the tokenizer do
        not fit together; or loading would not know the tokenizer.
    """
    try:
        data = saved_bytes(tokenizer)
    except TokenizerError as error:
        raise InteropError(f"{where}: {error}") from error
    tensors = check_params(where, params, config, tokenizer)
    # There is only one text of that name
    if config.data.corpus == TINY_SHAKESPEARE and not config.data.validation:
        text_sha256 = TINY_SHAKESPEARE_SHA256
    metadata = {
        "format": "jaxgru",
        "config": tomli_w.dumps(to_dict(_without_folders(config))),
        "tokenizer": tokenizer.kind,
        "tokenizer_data": _encode(tokenizer.kind, data),
        "text_sha256": text_sha256,
    }
    read_config(where, metadata)  # so that nothing is written that cannot be loaded
    return tensors, metadata | {"sha256": _sha256(tensors, metadata)}


def check_params(
    where: str, params: Params, config: Config, tokenizer: Tokenizer
) -> dict[str, np.ndarray]:
    """Return the tensors by name. Raises as `pack`."""
    tensors = {name: np.ascontiguousarray(leaf) for name, leaf in flatten(params).items()}
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32:
            raise InteropError(f"{where}: {name} is {tensor.dtype}; it must be float32.")
    like = check_model(where, {n: t.shape for n, t in tensors.items()}, config, tokenizer)
    if jax.tree.structure(params) != jax.tree.structure(like):
        raise InteropError(
            f"{where}: the parameters have the names and shapes that the config gives, but differ "
            "in a field that is not an array."
        )
    return tensors


def check_metadata(
    where: str, metadata: Mapping[str, str], names: Sequence[str] = METADATA
) -> None:
    """Raise InteropError if the metadata are not of this library, or lack one of these names."""
    if metadata.get("format") != "jaxgru":
        raise InteropError(f"{where}: it is not a model of this library (no format = jaxgru).")
    for name in names:
        if name not in metadata:
            raise InteropError(f"{where}: its metadata lack {name}.")


def check_sha256(
    where: str, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Raise InteropError if the SHA-256 is not that of the tensors and the other metadata."""
    if _sha256(tensors, metadata) != metadata["sha256"]:
        raise InteropError(f"{where}: it is damaged; its content does not match its SHA-256.")


def read_config(where: str, metadata: Mapping[str, str]) -> Config:
    """Return the config. Raises InteropError where it is broken."""
    try:
        return from_dict(parse_toml(metadata["config"].encode()))
    except ConfigError as error:
        raise InteropError(f"{where}: its config is broken: {error}") from error


def read_tokenizer(where: str, metadata: Mapping[str, str]) -> Tokenizer:
    """Return the tokenizer.

    Raises:
      InteropError: it is broken.
      MissingPackage: it needs SentencePiece, which is not installed.
    """
    kind, text = metadata["tokenizer"], metadata["tokenizer_data"]
    try:
        data = _decode(kind, text)
    except ValueError as error:
        raise InteropError(f"{where}: its tokenizer_data is not base64: {error}.") from error
    try:
        return tokenizer_from_bytes(kind, data)
    except TokenizerError as error:
        raise InteropError(f"{where}: {error}") from error


def check_model(
    where: str, shapes: Mapping[str, tuple[int, ...]], config: Config, tokenizer: Tokenizer
) -> Params:
    """Return the shapes of the config's parameters, once tensors and tokenizer are known to fit.

    Raises:
      InteropError: they do not.
    """
    # A layer has several tensors; listing far more layers than tensors would take long.
    if config.model.num_layers > len(shapes):
        raise InteropError(
            f"{where}: its config has {counted(config.model.num_layers, 'layer')}, but there are "
            "only "
            f"{len(shapes)} tensors."
        )
    like = jax.eval_shape(lambda: init(jax.random.key(0), config.model))
    check_shapes(where, shapes, {name: leaf.shape for name, leaf in flatten(like).items()})
    if tokenizer.vocab_size != config.model.vocab_size:
        raise InteropError(
            f"{where}: the tokenizer has {counted(tokenizer.vocab_size, 'token')}, but the "
            f"config has {config.model.vocab_size}."
        )
    return like


def _without_folders(config: Config) -> Config:
    """Return the config with the last name of each path, unlike a name that is not a path."""

    def last(path: str) -> str:
        name = Path(path).name
        return path if path == name else f"./{name}"

    paths = ("corpus", "validation", "tokenizer_file")
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, **{n: last(getattr(config.data, n)) for n in paths}),
        training=dataclasses.replace(config.training, init=last(config.training.init)),
    )


def _encode(kind: str, data: bytes) -> str:
    return data.decode() if _is_text(kind) else base64.b64encode(data).decode()


def _decode(kind: str, text: str) -> bytes:
    return text.encode() if _is_text(kind) else base64.b64decode(text, validate=True)


def _is_text(kind: str) -> bool:
    return kind not in TOKENIZERS or TOKENIZERS[kind].is_text


def _sha256(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    """Hash the tensors' bytes in the order of their names, then the metadata as sorted JSON."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].tobytes())
    others = {name: text for name, text in metadata.items() if name != "sha256"}
    digest.update(json.dumps(others, sort_keys=True).encode())
    return digest.hexdigest()
