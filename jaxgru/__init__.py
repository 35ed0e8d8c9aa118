"""jaxgru: fast, exact GRU, LSTM and RNN layers in JAX, as pure functions over an explicit carry.

`jaxgru` is the layer, for a model of your own; `jaxgru.lm` is the language model.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxgru import cells, libraries
from jaxgru.cells import (
    CoupledLSTMCell,
    GRUCell,
    LayerNormGRUCell,
    LayerNormLSTMCell,
    LSTMCell,
    LSTMState,
    MinGRUCell,
    MinLSTMCell,
    MogrifierGRUCell,
    PeepholeLSTMCell,
    ProjectedLSTMCell,
    ResetBeforeGRUCell,
    RGLRUCell,
    RNNCell,
    SLSTMCell,
    SLSTMState,
    init_coupled_lstm,
    init_gru,
    init_lstm,
    init_min_gru,
    init_min_lstm,
    init_mogrifier_gru,
    init_peephole_lstm,
    init_rg_lru,
    init_rnn,
    init_slstm,
    round_weights,
)
from jaxgru.errors import UserError
from jaxgru.layers import (
    Dropout,
    ResidualStack,
    bidirectional,
    drop_weights,
    init_stack,
    initial_carry,
    step,
    unroll,
    which_gradient,
)

if TYPE_CHECKING:
    from jaxgru import lm

__version__ = "0.1.0"

__all__ = [
    "CoupledLSTMCell", "Dropout", "GRUCell", "LSTMCell", "LSTMState", "LayerNormGRUCell",
    "LayerNormLSTMCell", "MinGRUCell", "MinLSTMCell", "MogrifierGRUCell",
    "PeepholeLSTMCell", "ProjectedLSTMCell", "RGLRUCell", "RNNCell", "ResetBeforeGRUCell",
    "ResidualStack", "SLSTMCell", "SLSTMState", "UserError", "bidirectional", "cells",
    "drop_weights", "init_coupled_lstm", "init_gru", "init_lstm", "init_min_gru", "init_min_lstm",
    "init_mogrifier_gru", "init_peephole_lstm", "init_rg_lru", "init_rnn", "init_slstm",
    "init_stack", "initial_carry", "libraries", "lm", "round_weights", "step", "unroll",
    "which_gradient",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the language model when it is first asked for: layers do not need it."""
    if name == "lm":
        return importlib.import_module("jaxgru.lm")
    raise AttributeError(f"module 'jaxgru' has no attribute {name!r}")
