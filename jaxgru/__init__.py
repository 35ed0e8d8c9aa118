"""jaxgru: GRU and LSTM language models in JAX as pure functions over an explicit carry."""

from jaxgru.config import Config, ModelConfig, config_names, load_config
from jaxgru.errors import UserError
from jaxgru.model import Dropout, Params, apply, init, initial_carry, num_params, step
from jaxgru.pretrained import load_pretrained
from jaxgru.runs.checkpoints import load_run
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
