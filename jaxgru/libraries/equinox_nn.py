"""`equinox.nn`: its GRUCell and LSTMCell over time at jaxgru's speed; their weights as layers.

    from jaxgru.libraries.equinox_nn import unroll
    state, ys = unroll(cell, xs, state)      # in place of a lax.scan of the cell

Its weights are PyTorch's: (out, in), a GRU's gates in the order r, z, n, with the reset gate after
the product and z weighting the old state. See https://docs.kidger.site/equinox/api/nn/rnn/.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Float, Integer, Shaped

from jaxgru.cells import CellParams, GRUParams, LSTMParams, LSTMState, sizes
from jaxgru.cells.carry import AnyArray
from jaxgru.errors import type_name
from jaxgru.layers.api import step
from jaxgru.layers.api import unroll as unroll_layers
from jaxgru.libraries import InteropError, check_shapes, common


def unroll(
    cell: eqx.nn.GRUCell | eqx.nn.LSTMCell,
    xs: Float[AnyArray, "... T F"],
    state: Any = None,
    *,
    reset: Shaped[AnyArray, "... T"] | None = None,
    lengths: Integer[AnyArray, "..."] | None = None,
    reverse: bool = False,
    return_states: bool = False,
    implementation: str = "auto",
) -> tuple[Any, ...]:
    """Run a cell over a sequence or a batch of sequences, with a hand-written gradient.

    For one sequence, this is `jax.lax.scan(lambda s, x: (s := cell(x, s), s), state, xs)`. Pass a
    batch as a whole: that is faster than `vmap`.

    Args:
      cell: it keeps its own arrays, so it is trained as it is.
      xs: (T, F), or (..., T, F) with batch axes.
      state: before the first step: h (..., H), or (h, c) for an LSTM; None: zeros.
      reset: (..., T); True at the first step of an episode, in time: the state is set to zeros
        before that step or, with `reverse`, after it.
      lengths: (...), the number of steps of each sequence; those after it are padding, as for
        `jaxgru.unroll`.
      reverse: read from the last step to the first.
      return_states: also return the state after every step.
      implementation: as for `jaxgru.unroll`; forward mode needs "autodiff".

    Returns:
      The state after the last step, and h of every step (..., T, H). With `return_states`, also the
      state after every step, in the form of `state`, with the axis of the steps.

    Raises:
      InteropError: the cell is neither an `equinox.nn.GRUCell` nor an `LSTMCell`, or has no
        weights; or the state has another shape.
      ValueError: as `jaxgru.unroll`.
    """
    layer = from_equinox(cell)
    xs = common.with_steps("xs", xs)
    if state is not None:
        pair = isinstance(layer, LSTMParams)
        state = common.as_state("the state", state, pair, (*xs.shape[:-2], cell.hidden_size))
        state = LSTMState(*state) if pair else state
    dtype = jnp.result_type(xs, *jax.tree.leaves((layer, state)))
    ys, *states = unroll_layers(
        common.cast(layer, dtype, dtype),
        xs,
        jax.tree.map(lambda leaf: leaf.astype(dtype), state),
        reset=reset,
        lengths=lengths,
        reverse=reverse,
        return_carries=return_states,
        implementation=implementation,
    )
    # without names, as Equinox's
    state, *each = [tuple(part) if isinstance(part, tuple) else part for part in states]
    return state, ys, *each


class Layer(eqx.Module):
    """jaxgru layers of any kind as an Equinox module.

    Attributes:
      layers: one layer's parameters, a list or `ResidualStack`, or a pair of these lists, for two
        directions.
      dtype: of the products with the weights, as for `jaxgru.round_weights`; None: the weights'.
    """

    layers: Any
    dtype: Any = eqx.field(default=None, static=True)

    def __call__(self, x: Float[AnyArray, "*B T F"], carry: Any = None, **options: Any) -> Any:
        """Run `jaxgru.unroll` with these arguments or, for a pair, `jaxgru.bidirectional`."""
        return common.run_layers(common.rounded(self.layers, self.dtype), x, carry, **options)

    def step(self, x: Float[AnyArray, "*B F"], carry: Any, **options: Any) -> Any:
        """Compute `jaxgru.step` with these arguments."""
        return step(common.rounded(self.layers, self.dtype), x, carry, **options)

    def initial_carry(self, batch_size: Any) -> Any:
        """Return `jaxgru.initial_carry` of the layers; for a pair, a pair."""
        return common.initial_carry(self.layers, batch_size)


def from_equinox(cell: eqx.nn.GRUCell | eqx.nn.LSTMCell) -> CellParams:
    """Return the layer with the weights of a cell.

    A GRU's `reset_gate` is "after". Values are copied; those of z change sign. Missing biases
    become zeros. The carry is the same on both sides.

    Raises:
      InteropError: the cell is neither an `equinox.nn.GRUCell` nor an `LSTMCell`, or has no
        weights, or of other names or shapes.
    """
    if type(cell) not in (eqx.nn.GRUCell, eqx.nn.LSTMCell):
        raise InteropError(
            f"the cell is {type_name(cell)}; it must be an equinox.nn.GRUCell or LSTMCell."
        )
    # whatever else a cell has than these is compared with what is known
    static = ("input_size", "hidden_size", "use_bias")
    weights = {n: w for n, w in vars(cell).items() if n not in static and w is not None}
    weights = common.as_weights(type_name(cell), weights)
    lstm, E, H = isinstance(cell, eqx.nn.LSTMCell), cell.input_size, cell.hidden_size
    rows = (4 if lstm else 3) * H
    want: dict[str, tuple[int, ...]] = {"weight_ih": (rows, E), "weight_hh": (rows, H)}
    if cell.use_bias:  # or Equinox ignores them
        want |= {"bias": (rows,)} | ({} if lstm else {"bias_n": (H,)})
    check_shapes(type_name(cell), {name: weight.shape for name, weight in weights.items()}, want)
    cls, order = (LSTMParams, "ifgo") if lstm else (GRUParams, "rzn")
    cn: dict[str, Any] = {"cn": jnp.asarray(weights["bias_n"])} if "bias_n" in weights else {}
    return common.layer_from_weights(
        cls, order, weights["weight_ih"].T, weights["weight_hh"].T, weights.get("bias"), **cn
    )


def to_equinox(layer: CellParams) -> eqx.nn.GRUCell | eqx.nn.LSTMCell:
    """Return a GRUCell or LSTMCell with the layer's weights; it always has biases.

    A GRU's second biases c are added to b. `from_equinox` returns the other values bit for bit.

    Raises:
      InteropError: Equinox has no cell of this kind, or none with the layer's options.
    """
    cells = {GRUParams: (eqx.nn.GRUCell, "rzn"), LSTMParams: (eqx.nn.LSTMCell, "ifgo")}
    has = "Equinox has an LSTMCell, and a GRUCell whose reset gate acts after the product"
    make, order = common.counterpart(layer, cells, has)
    p: Any = layer
    (E, H), dtype = sizes(p), p.b.dtype
    cell = eqx.filter_eval_shape(make, E, H, dtype=dtype, key=jax.random.key(0))
    W, U, b = common.sides(layer, order)
    arrays = {"weight_ih": W.T, "weight_hh": U.T, "bias": b}
    if isinstance(layer, GRUParams):
        arrays["bias_n"] = layer.cn
    fields = lambda cell: [getattr(cell, name) for name in arrays]
    return eqx.tree_at(fields, cell, list(arrays.values()))
