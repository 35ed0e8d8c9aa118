"""Trained models that ship with the package: NAME.safetensors, and its card NAME.md.

`scripts/maintain/release.py RUN` adds one.
"""

from __future__ import annotations

from pathlib import Path

from jaxgru.config import Config
from jaxgru.data.tokenizers import Tokenizer
from jaxgru.errors import UserError
from jaxgru.interop.safetensors import load_safetensors
from jaxgru.model import Params

FOLDER = Path(__file__).parent


def pretrained_names() -> list[str]:
    """Return the names that `load_pretrained` accepts, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.safetensors"))


def load_pretrained(name: str) -> tuple[Params, Config, Tokenizer]:
    """Load parameters, config and tokenizer of a model that ships with the package.

    Raises:
      UserError: the name is unknown; the message lists the known ones.
    """
    if name not in pretrained_names():
        raise UserError(
            f"no pretrained model is called {name!r}; there are {', '.join(pretrained_names())}."
        )
    return load_safetensors(FOLDER / f"{name}.safetensors")
