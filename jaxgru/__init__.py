"""jaxgru: GRU and LSTM language models in JAX as pure functions over an explicit carry."""

from typing import Any

from jaxgru.config import Config, ModelConfig, config_names, load_config
from jaxgru.errors import UserError
from jaxgru.model import Dropout, Params, apply, init, initial_carry, num_params, step
from jaxgru.sampling import generate

__version__ = "0.1.0"

__all__ = [
    "Config",
    "Dropout",
    "ModelConfig",
    "Params",
    "UserError",
    "apply",
    "config_names",
    "generate",
    "init",
    "initial_carry",
    "load_config",
    "load_pretrained",
    "load_run",
    "num_params",
    "step",
]


def load_pretrained(name: str) -> Any:
    """See `jaxgru.pretrained.load_pretrained`, which is imported when it is called."""
    from jaxgru import pretrained

    return pretrained.load_pretrained(name)


def load_run(path: Any) -> Any:
    """See `jaxgru.checkpointing.load_run`, which is imported when it is called."""
    from jaxgru import checkpointing

    return checkpointing.load_run(path)
