"""A whole model in one .safetensors file: the format for sharing runs.

The tensors are float32 and named by their path in the parameters ("embedding", "layers.0.W", …,
"head.bo"), as in the checkpoints. The header's metadata holds the rest: see `metadata.py`.

See https://huggingface.co/docs/safetensors for the format; nothing in it can run code.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxgru.files import ModelFileError, write_bytes
from jaxgru.lm.config import Config
from jaxgru.lm.data.tokenizers import Tokenizer
from jaxgru.lm.formats import open_model
from jaxgru.lm.formats.metadata import check_format, pack, unpack
from jaxgru.lm.model import Params

__all__ = [
    "load_safetensors",
    "save_safetensors",
]


def save_safetensors(
    path: str | Path, params: Params, config: Config, tokenizer: Tokenizer, text_sha256: str = ""
) -> None:
    """Write a whole model into one file, bit for bit.

    The same model always gives the same file. Of the paths in the config, only the names of files
    are kept: see `metadata.pack`.

    Args:
      text_sha256: as for `lm.save`.

    Raises:
      UserError: as `lm.save`.
      OSError: as `lm.save`.
      ModelFileError: the parameters are not float32.
    """
    tensors, metadata = pack(f"{path} cannot be written", params, config, tokenizer, text_sha256)
    write_bytes(Path(path), _to_bytes(tensors, metadata))


def load_safetensors(path: str | Path) -> tuple[Params, Config, Tokenizer]:
    """Load a file that `save_safetensors` wrote.

    Raises:
      UserError: as `lm.load`.
    """
    with _open(path) as content:
        file = content.file
        # NumPy lacks some of the dtypes, so this comes before the tensors are read.
        for name in file.keys():
            dtype = file.get_slice(name).get_dtype()
            if dtype != "F32":
                raise ModelFileError(
                    f"{content.where}: {name} is {dtype}; it must be F32, float32."
                )
        return unpack(content.where, content.metadata, lambda _: _tensors(file))


def metadata_of(path: str | Path) -> dict[str, str]:
    """Return the metadata in such a file, without its tensors.

    Raises:
      UserError: as `lm.load`.
    """
    with _open(path) as content:
        return content.metadata


class _Content(NamedTuple):
    """An open file: how an error begins, the file in `safetensors`, and its metadata."""

    where: str
    file: Any
    metadata: dict[str, str]


@contextlib.contextmanager
def _open(path: str | Path) -> Generator[_Content]:
    """Open a file.

    Raises:
      ModelFileError: it cannot be read, or is not a model of this library.
    """
    where = f"{path} cannot be used"
    try:
        # `safe_open` calls every failure "No such file"; `open_model` says what it is.
        with open_model(path), safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            check_format(where, metadata)
            yield _Content(where, file, metadata)
    except SafetensorError as error:
        raise ModelFileError(f"{where}: it is not a whole safetensors file ({error}).") from error


def _tensors(file: Any) -> dict[str, np.ndarray]:
    return {name: file.get_tensor(name) for name in file.keys()}


def _to_bytes(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """Return the file: the header's length, the header in JSON, the data.

    `safetensors` itself writes the metadata in another order each time.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    # With these spaces, the data is aligned.
    text += b" " * (-len(text) % 8)
    data = [tensor.astype("<f4", copy=False).tobytes() for tensor in tensors.values()]
    return b"".join([struct.pack("<Q", len(text)), text, *data])
