"""`equinox.nn`: its GRUCell and LSTMCell over time at jaxgru's speed; their weights as layers.

    from jaxgru.libraries.equinox_nn import unroll
    state, ys = unroll(cell, xs, state)      # in place of a lax.scan of the cell

Its weights are PyTorch's: (out, in), a GRU's gates in the order r, z, n, with the reset gate after
the product and z weighting the old state. See https://docs.kidger.site/equinox/api/nn/rnn/.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Float, Integer, Shaped

from jaxgru.arrays import AnyArray
from jaxgru.cells import AnyCell, GRUCell, LSTMCell, hidden, sizes
from jaxgru.errors import LibraryError
from jaxgru.layers import Implementation
from jaxgru.libraries import common
from jaxgru.libraries.common import Storage, UnknownCell
from jaxgru.printing import type_name

_GRU = Storage(GRUCell, "rzn", ["weight_ih"], ["weight_hh"], ["bias"], cn="bias_n", out_in=True)
_LSTM = Storage(LSTMCell, "ifgo", ["weight_ih"], ["weight_hh"], ["bias"], out_in=True)
CELLS: dict[type, Storage] = {eqx.nn.GRUCell: _GRU, eqx.nn.LSTMCell: _LSTM}


def unroll(
    cell: Callable[[Any, Any], Any],
    xs: Float[AnyArray, "... T F"],
    state: Any = None,
    *,
    reset: Shaped[AnyArray, "... T"] | None = None,
    lengths: Integer[AnyArray, "..."] | None = None,
    reverse: bool = False,
    return_states: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Any, ...]:
    """Run a cell over a sequence or a batch of sequences, with a hand-written gradient.

    For one sequence, this is `jax.lax.scan(lambda s, x: (s := cell(x, s), s), state, xs)`. Pass a
    batch as a whole: that is faster than `vmap`.

    Args:
      cell: it keeps its own arrays, so it is trained as it is. Any other than a GRUCell or
        LSTMCell is run by `jax.lax.scan`, from a given state.
      xs: (T, F), or (..., T, F) with batch axes.
      state: before the first step: h (..., H), or (h, c) for an LSTM; None: zeros.
      reset: (..., T), as for `jaxgru.unroll`, as are `reverse` and `implementation`.
      lengths: (...), the number of steps of each sequence; those after it are padding. With a cell
        that `jax.lax.scan` runs, it is refused, as are `reset` and `implementation`.
      return_states: also return the state after every step.

    Returns:
      The state after the last step, and h of every step (..., T, H). With `return_states`, also the
      state after every step, in the form of `state`, with the axis of the steps.
    """
    try:
        layer = from_equinox(cell)
    except UnknownCell as unknown:
        common.check_absent(unknown, reset=reset, lengths=lengths, implementation=implementation)
        return _scan(cell, xs, state, reverse, return_states)
    xs = common.with_steps("xs", xs)
    if state is not None:
        pair = isinstance(layer, LSTMCell)
        shape = (*xs.shape[:-2], sizes(layer)[1])
        state = common.as_state("the state", state, pair, shape)
    ys, *states = common.run_cell(
        layer,
        xs,
        state,
        jnp.result_type(xs, *jax.tree.leaves((layer, state))),
        reset=reset,
        lengths=lengths,
        reverse=reverse,
        return_carries=return_states,
        implementation=implementation,
    )
    last, *all_states = map(_their_state, states)
    return last, ys, *all_states


def _their_state(state: Any) -> Any:
    """Return our carry as a state of Equinox's, whose parts have no names."""
    return tuple(state) if isinstance(state, tuple) else state


def _scan(
    cell: Any, xs: AnyArray, state: Any, reverse: bool, return_states: bool
) -> tuple[Any, ...]:
    """Run a cell that jaxgru does not know, as `unroll` does one that it knows."""
    xs = common.with_steps("xs", xs)
    if state is None:
        raise LibraryError(
            f"the state is None; with {type_name(cell)}, whose state jaxgru does not know, it must "
            "be given."
        )

    def step(state: Any, x: AnyArray) -> tuple[Any, Any]:
        after = cell(x, state)
        return after, after

    def scan(xs: AnyArray, state: Any) -> tuple[Any, Any]:
        return jax.lax.scan(step, state, xs, reverse=reverse)

    run: Callable[..., Any] = scan
    for _ in xs.shape[:-2]:
        run = jax.vmap(run)
    last, states = run(xs, state)
    if return_states:
        return last, hidden(states), states
    return last, hidden(states)


class Layer(eqx.Module):
    """jaxgru layers of any kind as an Equinox module.

    Calling it is `jaxgru.unroll` of the layers with these arguments or, for a pair,
    `jaxgru.bidirectional`; `step` is `jaxgru.step`.

    Attributes:
      layers: one layer's parameters, a list or `ResidualStack`, or a pair of these lists, for two
        directions.
      dtype: of the products with the weights, as for `jaxgru.round_weights`; None: the weights'.
    """

    layers: Any
    dtype: Any = eqx.field(default=None, static=True)

    __call__ = common.call
    step = common.step

    def layer(self) -> Any:
        """Return the parameters."""
        return self.layers

    def initial_carry(self, batch_size: Any) -> Any:
        """Return `jaxgru.initial_carry` of the layers; for a pair, a pair."""
        return common.initial_carry(self.layers, batch_size)


def from_equinox(cell: Any) -> AnyCell:
    """Return the layer with the weights of a GRUCell or LSTMCell.

    A GRU's `reset_gate` is "after". Values are copied; those of z change sign. Missing biases
    become zeros. The carry is the same on both sides.
    """
    common.check_class("the cell", cell, CELLS, "Equinox")
    storage = CELLS[type(cell)]
    if not cell.use_bias:
        # Equinox ignores any that it has.
        storage = storage._replace(b=(), cn="")
    # Whatever else a cell has than these is compared with what is known.
    static = ("input_size", "hidden_size", "use_bias")
    weights = {
        name: weight
        for name, weight in vars(cell).items()
        if name not in static and weight is not None
    }
    for name, weight in weights.items():
        if not eqx.is_array_like(weight) and hasattr(weight, "__matmul__"):
            raise UnknownCell(
                f"the {name} of the cell is {type_name(weight)}; it must be an array."
            )
    return common.from_arrays(type_name(cell), storage, weights)


def to_equinox(layer: AnyCell) -> eqx.nn.GRUCell | eqx.nn.LSTMCell:
    """Return a GRUCell or LSTMCell with the layer's weights; it always has biases.

    A GRU's second biases c are added to b. `from_equinox` returns the other values bit for bit.
    """
    has = "Equinox has an LSTMCell, and a GRUCell whose reset gate acts after the product"
    make, storage = common.counterpart(layer, common.by_layer(CELLS), has)
    arrays = common.to_arrays(layer, storage)
    E, H = sizes(layer)
    dtype = arrays["bias"].dtype
    cell = eqx.filter_eval_shape(make, E, H, dtype=dtype, key=jax.random.key(0))
    where = lambda cell: [getattr(cell, name) for name in arrays]
    return eqx.tree_at(where, cell, list(arrays.values()))
