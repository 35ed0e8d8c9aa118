"""The recurrences, one file each, and `CELLS`, the registry: a config's cell name → `Cell`.

To add a recurrence, write a file that defines its `Cell`, and call `register`.
"""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float

from jaxgru.cells.base import (
    Carry,
    Cell,
    CellParams,
    Hidden,
    LSTMState,
    Size,
    described,
    exportable,
    hidden,
    sizes_of_fields,
)
from jaxgru.cells.gru import GRU, AnyGRU, GRUParams, ResetBeforeGRUParams, gru_cell, init_gru
from jaxgru.cells.layer_norm_gru import LAYER_NORM_GRU, LayerNormGRUParams
from jaxgru.cells.layer_norm_lstm import LAYER_NORM_LSTM, LayerNormLSTMParams
from jaxgru.cells.lstm import LSTM, LSTMParams, init_lstm, lstm_cell
from jaxgru.cells.lstm_projection import PROJECTED_LSTM, ProjectedLSTMParams
from jaxgru.cells.min_gru import MIN_GRU, MinGRUParams, init_min_gru
from jaxgru.cells.mlp import MLP, MLPParams, init_mlp, mlp_cell
from jaxgru.cells.mogrifier_gru import MOGRIFIER_GRU, MogrifierGRUParams, init_mogrifier_gru
from jaxgru.cells.rnn import RNN, RNNParams, init_rnn, rnn_cell

__all__ = [
    "CELLS", "Carry", "Cell", "CellParams", "GRUParams", "Hidden", "LSTMParams", "LSTMState",
    "LayerNormGRUParams", "LayerNormLSTMParams", "MLPParams", "MinGRUParams",
    "MogrifierGRUParams", "ProjectedLSTMParams", "RNNParams",
    "ResetBeforeGRUParams", "cell", "cell_of", "gru_cell",
    "hidden", "init_gru", "init_lstm", "init_min_gru", "init_mlp", "init_mogrifier_gru", "init_rnn",
    "lstm_cell", "mlp_cell", "register", "rnn_cell", "sizes", "zero_carry",
]  # fmt: skip

CELLS: dict[str, Cell] = {}
"""Every cell, by its name in a config's `model.cell`."""


def _sizes_of_layer(params: CellParams) -> str:
    """Return a layer's `repr`: its sizes, dtypes and static fields, or the fields as they are."""
    arrays = jax.tree.leaves(params)
    if not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in arrays):
        return sizes_of_fields(params)
    if (known := cell_of(params).sizes(params)) is None:
        return sizes_of_fields(params)
    E, H = known
    hidden = f"hidden {H}"
    if isinstance(params, ProjectedLSTMParams):
        hidden = f"hidden {len(params.P)}, proj_size {H}"
    of_blocks = (AnyGRU, LSTMParams, LayerNormGRUParams, LayerNormLSTMParams)
    if isinstance(params, of_blocks) and (U := [leaf for leaf in arrays if leaf.ndim == 3]):
        hidden += f", num_blocks {len(U[0])}"
    parts = [f"in {E}", hidden, *sorted({str(leaf.dtype) for leaf in arrays})]
    static = [f.name for f in dataclasses.fields(params) if f.metadata.get("static")]
    parts += [f"{name}={getattr(params, name)!r}" for name in static]
    return f"{type(params).__name__}({', '.join(parts)})"


def register(cell: Cell) -> None:
    """Add a recurrence, so that a config's `model.cell` can name it.

    A cell that is defined again, as when a notebook's cell is rerun, replaces the earlier one; but
    `jax.export` then knows only the earlier class of parameters.

    Raises:
      ValueError: another cell has the same name or class of parameters.
    """
    place = lambda cell: (cell.name, *((c.__module__, c.__qualname__) for c in cell.classes))
    for other in CELLS.values():
        same = other.name == cell.name or not {*other.classes}.isdisjoint(cell.classes)
        if same and place(other) != place(cell):
            raise ValueError(f"the cell {other.name} has the same name or class of parameters.")
    for params in cell.classes:
        if cell.name not in CELLS:
            exportable(params)
        if params.__repr__ is sizes_of_fields:
            params.__repr__ = _sizes_of_layer  # pyright: ignore[reportAttributeAccessIssue]
    CELLS[cell.name] = cell


for _cell in (
    GRU,
    LAYER_NORM_GRU,
    MOGRIFIER_GRU,
    LSTM,
    LAYER_NORM_LSTM,
    PROJECTED_LSTM,
    RNN,
    MIN_GRU,
    MLP,
):
    register(_cell)


def cell_of(params: CellParams) -> Cell:
    """Return the cell that a layer's parameters belong to.

    Raises:
      TypeError: no cell has parameters of this class.
    """
    for cell in CELLS.values():
        if type(params) in cell.classes:
            return cell
    raise TypeError(f"no cell has parameters of type {type(params).__name__}.")


def cell(params: CellParams, carry: Carry, x: Float[Array, "B E"]) -> Carry:
    """Compute one step of the cell that the parameters belong to.

    Raises:
      TypeError: no cell has parameters of this class.
    """
    return cell_of(params).step(params, carry, x)


def sizes(params: CellParams) -> tuple[int, int]:
    """Return the sizes (E, H) of a layer's input and of its h.

    Raises:
      TypeError: no cell has parameters of this class.
      ValueError: the shapes of the parameters contradict each other.
    """
    if (known := cell_of(params).sizes(params)) is None:
        raise ValueError(f"the parameters of a layer do not fit together: {described(params)}.")
    return known


def zero_carry(params: CellParams, batch_size: Size) -> Carry:
    """Return a layer's carry before the first step: zeros in the biases' dtype."""
    return cell_of(params).zero_carry(params, batch_size)
