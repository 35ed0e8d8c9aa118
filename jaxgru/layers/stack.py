"""Layers for `unroll` and `bidirectional`, drawn in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, overload

import jax
from jaxtyping import PRNGKeyArray

from jaxgru.arrays import Tree
from jaxgru.cells.contract import CELLS, AnyCell, CellName, Init, sizes
from jaxgru.errors import check_flags, check_whole
from jaxgru.printing import shown
from jaxgru.pytrees import struct


@struct
class ResidualStack:
    """Layers of which each above the first adds its input to its output.

    See Wu et al. 2016 (arXiv 1609.08144, section 3.1). `unroll`, `bidirectional`, `step` and
    `initial_carry` take it in place of a list. The next layer reads the sum; the carries do not
    contain it. Dropout of an output comes before the addition.
    """

    layers: tuple[AnyCell, ...]


Stack: TypeAlias = ResidualStack | Sequence[AnyCell]
"""Several layers, of which each reads the output of the one below."""
Layers: TypeAlias = AnyCell | Stack
"""What users call with: one layer, or a stack: a list or tuple of layers, or a `ResidualStack`."""
Cells: TypeAlias = tuple[AnyCell, ...]


@overload
def init_stack(
    cell: CellName | Init,
    key: PRNGKeyArray,
    in_features: int,
    hidden_dim: int,
    num_layers: int = 1,
    *,
    bidirectional: Literal[False] = False,
    residual: Literal[False] = False,
    **options: Any,
) -> Cells: ...


@overload
def init_stack(
    cell: CellName | Init,
    key: PRNGKeyArray,
    in_features: int,
    hidden_dim: int,
    num_layers: int = 1,
    *,
    bidirectional: Literal[True],
    residual: Literal[False] = False,
    **options: Any,
) -> tuple[Cells, Cells]: ...


@overload
def init_stack(
    cell: CellName | Init,
    key: PRNGKeyArray,
    in_features: int,
    hidden_dim: int,
    num_layers: int = 1,
    *,
    bidirectional: Literal[False] = False,
    residual: Literal[True],
    **options: Any,
) -> ResidualStack: ...


@overload
def init_stack(
    cell: CellName | Init,
    key: PRNGKeyArray,
    in_features: int,
    hidden_dim: int,
    num_layers: int = 1,
    *,
    bidirectional: Literal[True],
    residual: Literal[True],
    **options: Any,
) -> tuple[ResidualStack, ResidualStack]: ...


def init_stack(
    cell: str | Init,
    key: PRNGKeyArray,
    in_features: int,
    hidden_dim: int,
    num_layers: int = 1,
    *,
    bidirectional: bool = False,
    residual: bool = False,
    **options: Any,
) -> Cells | ResidualStack | tuple[Cells, Cells] | tuple[ResidualStack, ResidualStack]:
    """Draw the layers of a stack: the input of each is the output of the one below.

    Args:
      cell: a name in `jaxgru.cells.CELLS`; or a function with the arguments of `init_gru`. Type
        checkers know the names of jaxgru's own cells, and take another cell as its function.
      in_features: the size of the input at a step.
      hidden_dim: H, the size of the state of each layer, in each direction.
      bidirectional: draw layers for two directions, each of which reads the outputs of both.
      residual: return a `ResidualStack`: each layer above the first adds its input to its output.
      options: for each layer, those of `init_gru` or the function that draws the cell.

    Returns:
      The layers, a tuple or a `ResidualStack`, for `unroll(layers, x)`; or a pair of these, for
      `bidirectional(*pair, x)`.

    Raises:
      ValueError: the cell is unknown; the number of layers is not a positive whole number; a flag
        is not a bool; or `init_gru` (or the other function) refuses an argument.

    Example:
      ```python
      layers = jaxgru.init_stack("gru", jax.random.key(0), 3, 4, num_layers=2, reset_gate="before")
      y, (first, second) = jaxgru.unroll(layers, jnp.ones((2, 5, 3)))  # y (2, 5, 4)
      ```
    """
    check_flags(bidirectional=bidirectional, residual=residual)
    init = CELLS.get(cell) if isinstance(cell, str) else cell
    if not callable(init):
        raise ValueError(
            f"the cell is {shown(cell)}; it must be one of {', '.join(CELLS)}, or a function like "
            "init_gru."
        )
    check_whole("num_layers", num_layers)
    directions = 1 + bidirectional
    keys = jax.random.split(key, (directions, num_layers))

    def draw(direction: int) -> tuple[AnyCell, ...]:
        layers: list[AnyCell] = []
        for i in range(num_layers):
            # with proj_size, an output is smaller than hidden_dim
            features = directions * sizes(layers[-1])[1] if layers else in_features
            layers.append(init(keys[direction, i], features, hidden_dim, **options))
        return tuple(layers)

    stacks: Tree = tuple(map(draw, range(directions)))
    if residual:
        stacks = tuple(map(ResidualStack, stacks))
    return stacks if bidirectional else stacks[0]
