"""What a file with a whole model holds besides its tensors: metadata, as text by name.

format          "jaxgru"
format_number   NUMBER, which rises where a file comes to hold other things; none: the first
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tomli_w

from jaxgru.arguments import check_shapes
from jaxgru.files import ModelFileError, damage_as
from jaxgru.lm.config import Config, ModelConfig, from_dict, parse_toml, to_dict
from jaxgru.lm.data.corpus import TINY_SHAKESPEARE, TINY_SHAKESPEARE_SHA256
from jaxgru.lm.data.tokenizers import TOKENIZERS, Tokenizer, saved_bytes, tokenizer_from_bytes
from jaxgru.lm.model import Params, flatten, shapes, unflatten
from jaxgru.printing import counted, shown
from jaxgru.pytrees import options_of

NUMBER = "1"
HASHED = ("format", "format_number", "config", "tokenizer", "tokenizer_data", "text_sha256")


def pack(
    where: str, params: Params, config: Config, tokenizer: Tokenizer, text_sha256: str
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return a model's tensors by name, and its metadata; `where` begins an error's message.

    Files are shared, and folders can tell who wrote them, so only the last name of each path in the
    config (`data.corpus`, `training.init_from`, …) is kept, as "./text.txt".

    Raises:
      ModelFileError: the parts do not fit together, or the parameters are not float32.
      TokenizerError: the tokenizer could not be loaded again.
    """
    like = shapes(config.model)
    tensors = as_tensors(where, flatten(params), flatten(like))
    check_options(where, params, like)
    data = saved_bytes(tokenizer)
    if not TOKENIZERS[tokenizer.kind].is_text:
        data = base64.b64encode(data)
    check_size(where, tokenizer, config.model)
    # There is only one text of that name.
    if config.data.corpus == TINY_SHAKESPEARE and not config.data.validation:
        text_sha256 = TINY_SHAKESPEARE_SHA256
    metadata = {
        "format": "jaxgru",
        "format_number": NUMBER,
        "config": tomli_w.dumps(to_dict(_without_folders(config))),
        "tokenizer": tokenizer.kind,
        "tokenizer_data": data.decode(),
        "text_sha256": text_sha256,
    }
    return tensors, metadata | {"sha256": _sha256(tensors, metadata)}


def unpack(
    where: str, metadata: Mapping[str, str], read: Callable[[Params], dict[str, np.ndarray]]
) -> tuple[Params, Config, Tokenizer]:
    """Return the model that `pack` took apart.

    Args:
      read: returns the tensors, given the parameters as shapes.

    Raises:
      ModelFileError: the file is damaged, or its parts do not fit together.
    """
    config = config_in(where, metadata)
    like = shapes(config.model)
    tensors = read(like)
    as_tensors(where, tensors, flatten(like))
    if _sha256(tensors, metadata) != metadata["sha256"]:
        raise ModelFileError(f"{where}: it is damaged; its content does not match its SHA-256.")
    kind = metadata["tokenizer"]
    data = metadata["tokenizer_data"].encode()
    is_base64 = kind in TOKENIZERS and not TOKENIZERS[kind].is_text
    with damage_as(ModelFileError, where):
        if is_base64:
            data = base64.b64decode(data)
        tokenizer = tokenizer_from_bytes(kind, data)
    check_size(where, tokenizer, config.model)
    return unflatten(like, jax.device_put(tensors)), config, tokenizer


def config_in(where: str, metadata: Mapping[str, str]) -> Config:
    """Return the config in the metadata.

    Raises:
      ModelFileError: it is broken, or of another version.
    """
    with damage_as(ModelFileError, f"{where}: its config is broken"):
        return from_dict(parse_toml(metadata["config"].encode()))


def check_format(where: str, metadata: Mapping[str, str]) -> None:
    """Raise ModelFileError if the metadata are not of a whole model that this library reads."""
    is_ours = metadata.get("format") == "jaxgru"
    number = metadata.get("format_number", NUMBER)
    if is_ours and number != NUMBER:
        raise ModelFileError(
            f"{where}: its format_number is {shown(number)}, and this version of jaxgru reads no "
            f"newer one than {NUMBER}; update jaxgru."
        )
    required = {*HASHED, "sha256"} - {"format_number"}
    is_whole = metadata.keys() >= required
    if not is_ours or not is_whole:
        raise ModelFileError(
            f"{where}: it is not a model of this library, whose metadata are format = jaxgru, "
            f"{', '.join(HASHED[1:])} and sha256."
        )


def check_size(where: str, tokenizer: Tokenizer, model: ModelConfig) -> None:
    """Raise ModelFileError unless a tokenizer has as many tokens as a model."""
    have = counted(tokenizer.vocab_size, "token")
    want = counted(model.vocab_size, "token")
    if have != want:
        raise ModelFileError(f"{where}: the tokenizer has {have}, but the model has {want}.")


def check_options(where: str, params: Params, like: Params) -> None:
    """Raise ModelFileError if a layer has other options than the config, which tensors do not tell.

    For example an RNN's activation. `params` and `like` have the same tensors.
    """
    for i, (layer, wanted) in enumerate(zip(params.layers, like.layers, strict=True)):
        if options_of(layer) != options_of(wanted):
            raise ModelFileError(f"{where}: layer {i} is {layer}; the config says {wanted}.")


def as_tensors(
    where: str, leaves: Mapping[str, Any], like: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Return a model's tensors, in C's order.

    Raises:
      ModelFileError: they are not float32, or do not have the names and shapes of `like`.
    """
    tensors = {name: np.asarray(leaf, order="C") for name, leaf in leaves.items()}
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32:
            raise ModelFileError(f"{where}: {name} is {tensor.dtype}; it must be float32.")
    check_shapes(where, _shapes(tensors), _shapes(like), ModelFileError)
    return tensors


def _shapes(leaves: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: leaf.shape for name, leaf in leaves.items()}


def _without_folders(config: Config) -> Config:
    """Return the config with the last name of each path."""
    data = dataclasses.replace(
        config.data,
        corpus=_last_name(config.data.corpus),
        validation=_last_name(config.data.validation),
        tokenizer_file=_last_name(config.data.tokenizer_file),
    )
    training = dataclasses.replace(config.training, init_from=_last_name(config.training.init_from))
    return dataclasses.replace(config, data=data, training=training)


def _last_name(path: str) -> str:
    """Return a path's last name after "./", by which it is told from a name that is no path."""
    name = Path(path).name
    if path == name:
        return path
    return f"./{name}"


def _sha256(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    """Hash the tensors' bytes in the order of their names, then the metadata as sorted JSON."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].tobytes())
    values = {name: metadata[name] for name in HASHED if name in metadata}
    digest.update(json.dumps(values, sort_keys=True).encode())
    return digest.hexdigest()
