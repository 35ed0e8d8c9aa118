"""Trained models that ship with the package: NAME.safetensors, and NAME.md, how it was made.

`scripts/maintain/release.py RUN` puts a model here.
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
    """The names that `load_pretrained` knows, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.safetensors"))


def load_pretrained(name: str) -> tuple[Params, Config, Tokenizer]:
    """Parameters, config and tokenizer of a model that ships with the package.

    Raises:
      UserError: there is no model of that name; the message lists those that there are.
    """
    if name not in pretrained_names():
        raise UserError(
            f"no pretrained model is called {name!r}; there are {', '.join(pretrained_names())}."
        )
    return load_safetensors(FOLDER / f"{name}.safetensors")
