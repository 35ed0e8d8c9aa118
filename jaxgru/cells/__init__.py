"""The recurrences, one file each, and `CELLS`, a config's cell name → what draws its parameters.

To add a recurrence, write a file here with a `Cell` and the function that draws it, `register`ed.
"""

from __future__ import annotations

import importlib
import pkgutil

from jaxgru.arrays import plus
from jaxgru.cells.carry import Carry, Hidden, LSTMState, hidden
from jaxgru.cells.contract import (
    CELLS,
    AnyCell,
    Cell,
    CellName,
    Init,
    Recurrence,
    one_step,
    options_of_cell,
    register,
    sizes,
    starts_at_zero,
    stepper,
)
from jaxgru.cells.gated import ACTIVATIONS
from jaxgru.cells.gru import GRUCell, ResetBeforeGRUCell, init_gru
from jaxgru.cells.initial_weights import initializers
from jaxgru.cells.layer_norm import layer_norm
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
from jaxgru.cells.products import Lookup, embed, matmul, round_weights
from jaxgru.cells.rg_lru import RGLRUCell, init_rg_lru
from jaxgru.cells.rnn import RNNCell, init_rnn
from jaxgru.cells.slstm import SLSTMCell, SLSTMState, init_slstm
from jaxgru.cells.step_masks import StepMasks
from jaxgru.pytrees import struct

__all__ = [
    "ACTIVATIONS",
    "AnyCell",
    "CELLS",
    "CellName",
    "Carry",
    "Cell",
    "CoupledLSTMCell",
    "GRUCell",
    "Hidden",
    "Init",
    "LSTMCell",
    "LSTMState",
    "LayerNormGRUCell",
    "LayerNormLSTMCell",
    "Layout",
    "LinearCell",
    "Lookup",
    "MLPCell",
    "MinGRUCell",
    "MinLSTMCell",
    "MogrifierGRUCell",
    "PeepholeLSTMCell",
    "ProjectedLSTMCell",
    "RGLRUCell",
    "RNNCell",
    "Recurrence",
    "ResetBeforeGRUCell",
    "SLSTMCell",
    "SLSTMState",
    "StepMasks",
    "embed",
    "hidden",
    "init_coupled_lstm",
    "init_gru",
    "init_lstm",
    "init_min_gru",
    "init_min_lstm",
    "init_mlp",
    "init_mogrifier_gru",
    "init_peephole_lstm",
    "init_rg_lru",
    "init_rnn",
    "init_slstm",
    "initializers",
    "layer_norm",
    "matmul",
    "one_step",
    "options_of_cell",
    "plus",
    "register",
    "round_weights",
    "sizes",
    "starts_at_zero",
    "stepper",
    "struct",
]

for _module in pkgutil.iter_modules(__path__):  # each file registers its cell
    importlib.import_module(f"{__name__}.{_module.name}")
