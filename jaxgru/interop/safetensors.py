"""A whole model in one .safetensors file: the format for sharing runs.

The tensors are float32 and named by their path in the parameters ("embedding", "layers.0.Wz", …,
"head.bo"), as in the checkpoints. The header's metadata holds the rest: see `interop/metadata.py`.

See https://huggingface.co/docs/safetensors for the format; nothing in it can run code.
"""

from __future__ import annotations

import os
from pathlib import Path

import jax
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from jaxgru.config import Config
from jaxgru.data.tokenizers import Tokenizer
from jaxgru.files import write_bytes
from jaxgru.interop import InteropError
from jaxgru.interop.metadata import (
    check_metadata,
    check_model,
    check_sha256,
    pack,
    read_config,
    read_tokenizer,
)
from jaxgru.model import Params, unflatten


def save_safetensors(
    path: str | Path, params: Params, config: Config, tokenizer: Tokenizer
) -> None:
    """Write a whole model into one file, bit for bit.

    Raises:
      InteropError: the parameters are not float32, or the parameters, the config and the tokenizer
        do not fit together.
      OSError: the file cannot be written; an older file is then untouched.
    """
    tensors, metadata = pack(f"{path} cannot be written", params, config, tokenizer)
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
            check_metadata(where, metadata)
            config, tokenizer = read_config(where, metadata), read_tokenizer(where, metadata)
            stored = {name: file.get_slice(name) for name in file.keys()}
            for name, tensor in stored.items():
                if tensor.get_dtype() != "F32":
                    raise InteropError(
                        f"{where}: {name} has dtype {tensor.get_dtype()}; it must be F32."
                    )
            shapes = {name: tuple(tensor.get_shape()) for name, tensor in stored.items()}
            like = check_model(where, shapes, config, tokenizer)
            tensors = {name: file.get_tensor(name) for name in stored}
    except (SafetensorError, OSError) as error:
        raise InteropError(f"{where}: it is not a whole safetensors file ({error}).") from error
    check_sha256(where, tensors, metadata)
    return unflatten(like, jax.device_put(tensors)), config, tokenizer


def load_safetensors_config(path: str | Path) -> Config:
    """Return the config in such a file, without its tensors. Raises as `load_safetensors`."""
    where = f"{path} cannot be used"
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise InteropError(f"{where}: it is not a whole safetensors file ({error}).") from error
    check_metadata(where, metadata)
    return read_config(where, metadata)
