"""jaxgru: GRU and LSTM language models in JAX as pure functions over an explicit carry."""

import jaxgru.cli.startup  # noqa: F401  before JAX

# isort: split
from jaxgru.cells import GRUParams, LSTMParams, RNNParams, init_gru, init_lstm, init_rnn
from jaxgru.config import Config, ModelConfig, config_names, load_config
from jaxgru.dropout import Dropout
from jaxgru.errors import UserError
from jaxgru.layers import bidirectional, unroll
from jaxgru.model import Params, apply, init, initial_carry, num_params, step
from jaxgru.pretrained import load_pretrained
from jaxgru.runs import load_run
from jaxgru.sampling import generate

__version__ = "0.1.0"

__all__ = [
    "Config",
    "Dropout",
    "GRUParams",
    "LSTMParams",
    "ModelConfig",
    "Params",
    "RNNParams",
    "UserError",
    "apply",
    "bidirectional",
    "config_names",
    "generate",
    "init",
    "init_gru",
    "init_lstm",
    "init_rnn",
    "initial_carry",
    "load_config",
    "load_pretrained",
    "load_run",
    "num_params",
    "step",
    "unroll",
]
