"""The recurrences, one file each, and `CELLS`, a config's cell name → what draws its parameters.

To add a recurrence, write a file here with a `Cell` and the function that draws it, `register`ed.
"""

from __future__ import annotations

import importlib
import pkgutil

from jaxgru.cells.carry import Carry, Hidden, LSTMState, hidden
from jaxgru.cells.contract import (
    CELLS,
    Cell,
    CellParams,
    Recurrence,
    one_step,
    register,
    sizes,
    stepper,
)
from jaxgru.cells.gru import GRUParams, ResetBeforeGRUParams, init_gru
from jaxgru.cells.initial_weights import initializers
from jaxgru.cells.layer_norm_gru import LayerNormGRUParams
from jaxgru.cells.layer_norm_lstm import LayerNormLSTMParams
from jaxgru.cells.layout import Layout
from jaxgru.cells.linear_recurrence import LinearCell
from jaxgru.cells.lstm import LSTMParams, ProjectedLSTMParams, init_lstm
from jaxgru.cells.min_gru import MinGRUParams, init_min_gru
from jaxgru.cells.min_lstm import MinLSTMParams, init_min_lstm
from jaxgru.cells.mlp import MLPParams, init_mlp
from jaxgru.cells.mogrifier_gru import MogrifierGRUParams, init_mogrifier_gru
from jaxgru.cells.peephole_lstm import (
    CoupledLSTMParams,
    PeepholeLSTMParams,
    init_coupled_lstm,
    init_peephole_lstm,
)
from jaxgru.cells.products import Lookup, dot
from jaxgru.cells.promotion import plus
from jaxgru.cells.pytrees import struct
from jaxgru.cells.rg_lru import RGLRUParams, init_rg_lru
from jaxgru.cells.rnn import RNNParams, init_rnn
from jaxgru.cells.slstm import SLSTMParams, SLSTMState, init_slstm

__all__ = [
    "CELLS", "Carry", "Cell", "CellParams", "CoupledLSTMParams", "GRUParams", "Hidden",
    "LSTMParams", "LSTMState", "LayerNormGRUParams", "LayerNormLSTMParams", "Layout", "LinearCell",
    "Lookup", "MLPParams", "MinGRUParams", "MinLSTMParams", "MogrifierGRUParams",
    "PeepholeLSTMParams", "ProjectedLSTMParams", "RGLRUParams", "RNNParams", "Recurrence",
    "ResetBeforeGRUParams", "SLSTMParams", "SLSTMState", "dot", "hidden", "init_coupled_lstm",
    "init_gru", "init_lstm", "init_min_gru", "init_min_lstm", "init_mlp", "init_mogrifier_gru",
    "init_peephole_lstm", "init_rg_lru", "init_rnn", "init_slstm", "initializers", "one_step",
    "plus", "register", "sizes", "stepper", "struct",
]  # fmt: skip

for _module in pkgutil.iter_modules(__path__):  # each file registers its cell
    importlib.import_module(f"{__name__}.{_module.name}")
