"""Files of whole models: one file a format, and one table of them, FORMATS."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Generator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxgru.files import ModelFileError
from jaxgru.lm.config import Config
from jaxgru.lm.data.corpus import TINY_SHAKESPEARE_SHA256
from jaxgru.lm.data.tokenizers import Tokenizer
from jaxgru.lm.formats.metadata import config_in
from jaxgru.lm.model import Params

__all__ = [
    "FORMATS",
    "Format",
    "NAMES",
    "format_of",
    "format_to_write",
]


@dataclass(frozen=True)
class Format:
    """A kind of file that holds a whole model: a row of FORMATS.

    Its module in this folder, of the same name, has the functions `load_<name>` and `save_<name>`,
    and `metadata_of` if the format has metadata. It is imported only when it is used, because it
    may need a package that is not installed. Its methods raise as `lm.load` and `lm.save` do.

    Attributes:
      has_metadata: whether the file holds the tokenizer and the config, too, and not only weights.
    """

    name: str
    has_metadata: bool = True

    def load(self, path: str | Path) -> tuple[Params, Config, Tokenizer]:
        """Load a model."""
        return getattr(self.module(), f"load_{self.name}")(path)

    def config(self, path: str | Path) -> Config:
        """Return the config of a model; if the file has metadata, JAX is not started."""
        if not self.has_metadata:
            return self.load(path)[1]
        return config_in(f"{path} cannot be used", self.module().metadata_of(path))

    def text_sha256(self, path: str | Path) -> str:
        """Return the SHA-256 of the text that a model was trained on, or "" if unknown."""
        if not self.has_metadata:
            # Such files are the study's own.
            return TINY_SHAKESPEARE_SHA256
        return self.module().metadata_of(path)["text_sha256"]

    def save(self, path: str | Path, *model: Any) -> None:
        """Write a model, given as for `lm.save`."""
        getattr(self.module(), f"save_{self.name}")(path, *model)

    def module(self) -> ModuleType:
        """Import the format's module.

        Raises:
          MissingPackage: the package that it needs is not installed.
        """
        return importlib.import_module(f"{__name__}.{self.name}")


FORMATS = {
    ".safetensors": Format("safetensors"),
    ".onnx": Format("onnx"),
    ".pth": Format("pth", has_metadata=False),
}
"""Every format, by the suffix of its files."""

*_others, _last = FORMATS
NAMES = f"{', '.join(_others)} or {_last}"
"""The suffixes, for sentences."""


def format_of(path: str | Path) -> Format | None:
    """Return the format of a model's file; None for other files, and for every folder."""
    if os.path.isdir(path):
        return None
    return FORMATS.get(Path(path).suffix)


def format_to_write(path: str | Path) -> Format:
    """Return the format that a new file's suffix says.

    Raises:
      ModelFileError: no format has this suffix.
    """
    suffix = Path(path).suffix
    if suffix not in FORMATS:
        raise ModelFileError(f"{path} must end in {NAMES}, the format to write.")
    return FORMATS[suffix]


@contextlib.contextmanager
def open_model(path: str | Path) -> Generator[BufferedReader]:
    """Open a model's file.

    Raises:
      ModelFileError: there is none, or it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            yield file
    except FileNotFoundError:
        raise ModelFileError(f"there is no file {path}.") from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}.") from error
