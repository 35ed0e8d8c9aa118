"""The recurrences, one file each, and `CELLS`, a config's cell name → what draws its parameters.

To add a recurrence, write a file here with a `Cell` and the function that draws it, `register`ed.
"""

from __future__ import annotations

import importlib
import pkgutil

from jaxgru.cells.carry import Carry, Hidden, LSTMState, hidden
from jaxgru.cells.contract import (
    CELLS,
    AnyCell,
    Cell,
    Recurrence,
    one_step,
    register,
    sizes,
    stepper,
)
from jaxgru.cells.gru import GRUCell, ResetBeforeGRUCell, init_gru
from jaxgru.cells.initial_weights import initializers
from jaxgru.cells.layer_norm_gru import LayerNormGRUCell
from jaxgru.cells.layer_norm_lstm import LayerNormLSTMCell
from jaxgru.cells.layout import Layout
from jaxgru.cells.linear_recurrence import LinearCell
from jaxgru.cells.lstm import LSTMCell, ProjectedLSTMCell, init_lstm
from jaxgru.cells.min_gru import MinGRUCell, init_min_gru
from jaxgru.cells.min_lstm import MinLSTMCell, init_min_lstm
from jaxgru.cells.mlp import MLPCell, init_mlp
from jaxgru.cells.mogrifier_gru import MogrifierGRUCell, init_mogrifier_gru
from jaxgru.cells.peephole_lstm import (
    CoupledLSTMCell,
    PeepholeLSTMCell,
    init_coupled_lstm,
    init_peephole_lstm,
)
from jaxgru.cells.products import Lookup, matmul
from jaxgru.cells.promotion import plus
from jaxgru.cells.pytrees import struct
from jaxgru.cells.rg_lru import RGLRUCell, init_rg_lru
from jaxgru.cells.rnn import RNNCell, init_rnn
from jaxgru.cells.slstm import SLSTMCell, SLSTMState, init_slstm

__all__ = [
    "CELLS", "Carry", "Cell", "AnyCell", "CoupledLSTMCell", "GRUCell", "Hidden",
    "LSTMCell", "LSTMState", "LayerNormGRUCell", "LayerNormLSTMCell", "Layout", "LinearCell",
    "Lookup", "MLPCell", "MinGRUCell", "MinLSTMCell", "MogrifierGRUCell",
    "PeepholeLSTMCell", "ProjectedLSTMCell", "RGLRUCell", "RNNCell", "Recurrence",
    "ResetBeforeGRUCell", "SLSTMCell", "SLSTMState", "matmul", "hidden", "init_coupled_lstm",
    "init_gru", "init_lstm", "init_min_gru", "init_min_lstm", "init_mlp", "init_mogrifier_gru",
    "init_peephole_lstm", "init_rg_lru", "init_rnn", "init_slstm", "initializers", "one_step",
    "plus", "register", "sizes", "stepper", "struct",
]  # fmt: skip

for _module in pkgutil.iter_modules(__path__):  # each file registers its cell
    importlib.import_module(f"{__name__}.{_module.name}")
