"""`flax.nnx`: its RNN at jaxgru's speed; its weights as layers.

    from jaxgru.libraries.flax_nnx import RNN       # in place of nnx.RNN
    rnn = RNN(nnx.GRUCell(in_features=8, hidden_features=16, rngs=nnx.Rngs(0)))

Flax's GRU has the reset gate after the product and, in nnx, no bias there. Its z weights the old
state. See https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/nn/recurrent.html.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from jaxtyping import Float, Integer, Shaped

from jaxgru.cells import CellParams, GRUParams, LSTMParams, RNNParams, sizes
from jaxgru.cells.carry import AnyArray
from jaxgru.cells.gated import ACTIVATIONS
from jaxgru.layers.dropout import Dropouts, each
from jaxgru.layers.stack import ResidualStack
from jaxgru.libraries import InteropError, common, flax_rnn
from jaxgru.libraries.common import Stored, UnknownCell
from jaxgru.printing import type_name

_IN, _STATE = ["dense_i"], ["dense_h"]
_II, _HH = ["ii", "if_", "ig", "io"], ["hi", "hf", "hg", "ho"]
CELLS: dict[type, Stored] = {
    nnx.GRUCell: flax_rnn.stored(GRUParams, "rzn", _IN, _STATE, _IN),
    nnx.LSTMCell: flax_rnn.stored(LSTMParams, "ifgo", _II, _HH, _HH),
    nnx.OptimizedLSTMCell: flax_rnn.stored(LSTMParams, "ifgo", _IN, _STATE, _STATE),
    nnx.SimpleCell: flax_rnn.stored(RNNParams, "h", _IN, _STATE, _IN),
}


class RNN(nnx.RNN):
    """An `nnx.RNN` that computes the same with `jaxgru.unroll`, whose gradient is hand-written.

    That is of a GRUCell, LSTMCell, OptimizedLSTMCell or SimpleCell; `unroll` then has no effect.
    Any other cell is computed by `nnx.RNN` itself. The parameters stay the cell's own `nnx.Param`s,
    so optimizers and checkpoints see no difference.
    """

    def __call__(
        self,
        inputs: Float[AnyArray, "..."],
        *,
        initial_carry: Any = None,
        seq_lengths: Integer[AnyArray, "..."] | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        reset: Shaped[AnyArray, "..."] | None = None,
        implementation: str = "auto",
    ) -> Any:
        """Run over a sequence; all arguments but the last two are those of `nnx.RNN`.

        Outputs in the padding are not zero, as in `nnx.RNN`; for zeros, see `jaxgru.unroll`.

        Args:
          reset: as for `jaxgru.unroll`, but it sets the cell's initial carry.
          implementation: as for `jaxgru.unroll`; forward mode needs "autodiff". Both are refused
            with a cell that `nnx.RNN` itself computes.
        """
        cell: Any = self.cell
        try:
            layer = from_nnx(cell)
        except UnknownCell as unknown:
            common.check_absent(unknown, reset=reset, implementation=implementation)
            theirs: Any = super().__call__
            return theirs(
                inputs,
                initial_carry=initial_carry,
                seq_lengths=seq_lengths,
                return_carry=return_carry,
                time_major=time_major,
                reverse=reverse,
                keep_order=keep_order,
                rngs=rngs,
            )
        options = flax_rnn.chosen(self, time_major, reverse, keep_order, return_carry)
        rngs = self.rngs if rngs is None else rngs
        rngs = rngs.carry.fork() if isinstance(rngs, nnx.Rngs) else rngs
        start = None
        if initial_carry is None or (reset is not None and cell.carry_init is not None):
            start = cell.initialize_carry(flax_rnn.step_shape(inputs, options["time_major"]), rngs)
        options |= dict(reset=reset, lengths=seq_lengths, implementation=implementation)
        initial = None if cell.carry_init is None else start
        carry = start if initial_carry is None else initial_carry
        return flax_rnn.rnn(layer, inputs, carry, dtype=cell.dtype, initial=initial, **options)


class Layer(nnx.Module):
    """jaxgru layers of any kind as an nnx module: each weight and bias is an `nnx.Param`.

    Their paths, in `layers`, have the names of the layers' fields and end in "kernel", "bias" or
    "scale", as those of nnx's own modules. In `nnx.data(init_gru(…))` they would be no parameters,
    and an optimizer would not train them.
    """

    def __init__(
        self,
        layers: CellParams | ResidualStack | Sequence[Any],
        dtype: DTypeLike | None = None,
        *,
        dropout: Dropouts = None,
        deterministic: bool = False,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
    ) -> None:
        """Take the layers and how they are computed.

        Args:
          layers: one layer's parameters, a list or `ResidualStack`, or a pair of these lists, for
            two directions.
          dtype: of the products with the weights, as for `jaxgru.round_weights`; None: the
            weights'.
          dropout: as for `jaxgru.unroll`, but without keys: `Dropout(None, 0.2, "between")`. Each
            call draws them from `rngs`.
          deterministic: whether units are not dropped, and zoneout takes the mean; `train()` and
            `eval()` set it.
          rngs: the streams of which "dropout" is read, as for `nnx.Dropout`.
        """
        self.dtype, self.deterministic = dtype, deterministic
        self.dropout = nnx.data(tuple(each(dropout)))
        rngs = rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
        self.rngs = nnx.data(None if rngs is None else rngs.fork())
        self.names, self.structure = flax_rnn.names(layers), jax.tree.structure(layers)
        params = map(nnx.Param, jax.tree.leaves(layers))
        self.layers = nnx.data(unflatten_dict(dict(zip(self.names, params, strict=True))))

    def layer(self) -> Any:
        """Return the parameters as they are now, in the structure of those that it was made of."""
        flax_rnn.check_names(self.layers, self.names)
        params: Any = flatten_dict(self.layers)
        return jax.tree.unflatten(self.structure, [params[path].get_value() for path in self.names])

    def __call__(
        self,
        x: Float[AnyArray, "*B T F"],
        carry: Any = None,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        **options: Any,
    ) -> Any:
        """Run `jaxgru.unroll` with these arguments or, for a pair, `jaxgru.bidirectional`.

        `deterministic` and `rngs` replace those of the constructor; so does `dropout` with keys, as
        for `jaxgru.unroll`.
        """
        if "dropout" not in options:
            fixed = self.deterministic if deterministic is None else deterministic
            options["dropout"] = self._drawn(fixed, self.rngs if rngs is None else rngs)
        return common.call(self, x, carry, **options)

    step = common.step

    def _drawn(self, fixed: bool, rngs: Any) -> Dropouts:
        """Return the dropouts of a call, with new keys."""
        if fixed:
            return [each.replace(key=None) for each in self.dropout if each.kind == "zoneout"]
        if self.dropout and rngs is None:
            raise InteropError(
                "the dropout of this Layer needs random numbers: give it, or this call, rngs, or "
                "deterministic=True."
            )
        draw = rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
        return [each.replace(key=draw()) for each in self.dropout]

    def initial_carry(self, batch_size: Any) -> Any:
        """Return `jaxgru.initial_carry` of the layers; for a pair, a pair."""
        return common.initial_carry(self.layer(), batch_size)


def from_nnx(cell: Any) -> CellParams:
    """Return the layer with the weights of a GRUCell, LSTMCell, OptimizedLSTMCell or SimpleCell.

    A GRU's `reset_gate` is "after", and it has no second biases. Values are copied; those of z
    change sign. The layer's carry is h, or (h, c) where the cell's is (c, h).
    """
    hint = "; jaxgru's own layers run in jaxgru.libraries.flax_nnx.Layer"
    flax_rnn.check_cell(cell, CELLS, hint)
    state = nnx.to_flat_state(nnx.state(cell, nnx.Not(nnx.RngState)))
    arrays = {".".join(map(str, path)): variable.get_value() for path, variable in state}
    return flax_rnn.from_cell(type_name(cell), cell, CELLS, arrays)


def to_nnx(layer: CellParams, lstm: Any = nnx.OptimizedLSTMCell) -> Any:
    """Return a GRUCell, a SimpleCell or an LSTM cell with the layer's weights.

    A GRU's second biases c are added to b; its cn, which must be known, unlike under `jit`, must be
    zeros. `from_nnx` returns the other values bit for bit.

    Args:
      lstm: the class for an LSTM: `nnx.OptimizedLSTMCell` or `nnx.LSTMCell`.
    """
    cells = common.by_layer(CELLS) | {LSTMParams: (lstm, CELLS[lstm])}
    make, stored = common.counterpart(layer, cells, flax_rnn.HAS, "activation")
    if isinstance(layer, GRUParams):
        common.check_known(layer.cn, "flax.nnx.GRUCell, which has no bias like cn,")
        if jnp.any(layer.cn != 0):
            raise InteropError(
                "flax.nnx.GRUCell has no bias like cn, so a GRU whose cn is not zero cannot be "
                "converted; it runs as it is in jaxgru.libraries.flax_nnx.Layer."
            )
    p: Any = layer
    # Without dtype, a SimpleCell computes in float32; the other cells, in the parameters' dtype
    options = dict(dtype=p.b.dtype) if make is nnx.SimpleCell else {}
    options |= dict[str, Any](param_dtype=p.b.dtype, activation_fn=ACTIVATIONS[p.activation])
    cell = nnx.eval_shape(lambda: make(*sizes(p), **options, rngs=nnx.Rngs(0)))  # draws nothing
    nnx.update(cell, unflatten_dict(common.to_arrays(layer, stored), sep="."))
    return cell
