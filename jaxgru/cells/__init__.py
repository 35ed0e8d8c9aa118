"""The recurrences, one file each, and `CELLS`, a config's cell name → the parameters' class.

To add a recurrence, write a file here with a `Cell`, and `register` it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import partial

import jax
from jaxtyping import Array, Float

from jaxgru.cells.base import (
    CELLS,
    Carry,
    Cell,
    CellParams,
    Hidden,
    LSTMState,
    Recurrence,
    named,
    register,
)
from jaxgru.cells.gru import GRUParams, ResetBeforeGRUParams, init_gru
from jaxgru.cells.layer_norm_gru import LayerNormGRUParams
from jaxgru.cells.layer_norm_lstm import LayerNormLSTMParams
from jaxgru.cells.layout import IN_ROWS, PLAIN, Layout
from jaxgru.cells.lstm import LSTMParams, ProjectedLSTMParams, init_lstm
from jaxgru.cells.marks import hidden
from jaxgru.cells.min_gru import MinGRUParams, init_min_gru
from jaxgru.cells.mlp import MLPParams, init_mlp
from jaxgru.cells.mogrifier_gru import MogrifierGRUParams, init_mogrifier_gru
from jaxgru.cells.products import Lookup, rows
from jaxgru.cells.pytrees import described, struct
from jaxgru.cells.rnn import RNNParams, init_rnn

__all__ = [
    "CELLS", "Carry", "Cell", "CellParams", "GRUParams", "Hidden", "LSTMParams", "LSTMState",
    "LayerNormGRUParams", "LayerNormLSTMParams", "Layout", "Lookup", "MLPParams", "MinGRUParams",
    "MogrifierGRUParams", "ProjectedLSTMParams", "RNNParams", "Recurrence",
    "ResetBeforeGRUParams", "cell", "hidden",
    "init_gru", "init_lstm", "init_min_gru", "init_mlp", "init_mogrifier_gru", "init_rnn",
    "register", "sizes", "stepper", "struct",
]  # fmt: skip

for _module in pkgutil.iter_modules(__path__):  # each file registers its cell
    importlib.import_module(f"{__name__}.{_module.name}")


def cell(params: CellParams, carry: Carry, x: Float[Array, "B E"], layout: Layout = PLAIN) -> Carry:
    """Compute one step by its definition, in the carry's dtype, differentiated by JAX."""
    start = jax.eval_shape(lambda: params.zero_carry(1))
    carry = named("the carry", carry, type(start))
    dtype = hidden(carry).dtype
    params, x = jax.tree.map(lambda leaf: leaf.astype(dtype), (params, x))
    return params.step(layout, carry, params.inputs(x))


def sizes(params: CellParams) -> tuple[int, int]:
    """Return the sizes (E, H) of a layer's input and of its h."""
    if (known := params.sizes()) is None:
        raise ValueError(f"the parameters of a layer do not fit together: {described(params)}.")
    return known


def stepper(
    params: CellParams, table: Float[Array, "V E"] | None = None
) -> Callable[[Carry, Array], Carry]:
    """Return a function that computes one step: (carry, input) → the next carry.

    Args:
      params: one layer's parameters.
      table: if given, each step takes row numbers (B,) of this table in place of the input (B, E);
        what the layer's `inputs` makes of it is computed once.
    """
    inputs = params.inputs if table is None else partial(rows, params.inputs(table))
    return lambda carry, x: params.step(IN_ROWS, carry, inputs(x).astype(hidden(carry).dtype))
