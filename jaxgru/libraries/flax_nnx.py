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
from flax.nnx.nn.dtypes import promote_dtype
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from jaxtyping import Float, Integer, Shaped

from jaxgru.arrays import AnyArray
from jaxgru.cells import ACTIVATIONS, AnyCell, GRUCell, LSTMCell, RNNCell, sizes
from jaxgru.errors import LibraryError
from jaxgru.layers import Dropouts, Implementation, ResidualStack
from jaxgru.layers.dropout import each
from jaxgru.libraries import common, flax_rnn
from jaxgru.libraries.common import Storage, UnknownCell
from jaxgru.printing import type_name

_IN = ["dense_i"]
_STATE = ["dense_h"]
_LSTM_IN = ["ii", "if_", "ig", "io"]
_LSTM_STATE = ["hi", "hf", "hg", "ho"]
CELLS: dict[type, Storage] = {
    nnx.GRUCell: flax_rnn.storage(GRUCell, "rzn", _IN, _STATE, b=_IN),
    nnx.LSTMCell: flax_rnn.storage(LSTMCell, "ifgo", _LSTM_IN, _LSTM_STATE, b=_LSTM_STATE),
    nnx.OptimizedLSTMCell: flax_rnn.storage(LSTMCell, "ifgo", _IN, _STATE, b=_STATE),
    nnx.SimpleCell: flax_rnn.storage(RNNCell, "h", _IN, _STATE, b=_IN),
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
        implementation: Implementation = "auto",
    ) -> Any:
        """Run over a sequence; all arguments but the last two are those of `nnx.RNN`.

        Outputs in the padding are not zero, as in `nnx.RNN`; for zeros, see `jaxgru.unroll`.

        Args:
          reset: as for `jaxgru.unroll`, but it sets the cell's initial carry.
          implementation: as for `jaxgru.unroll`; forward mode needs "autodiff". Both are refused
            with a cell that `nnx.RNN` itself computes.
        """
        options = flax_rnn.call_options(
            self,
            time_major=time_major,
            reverse=reverse,
            keep_order=keep_order,
            return_carry=return_carry,
        )
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
                rngs=rngs,
                **options,
            )
        if rngs is None:
            rngs = self.rngs
        if isinstance(rngs, nnx.Rngs):
            rngs = rngs.carry.fork()
        start = None
        if initial_carry is None or (reset is not None and cell.carry_init is not None):
            start = cell.initialize_carry(flax_rnn.step_shape(inputs, options["time_major"]), rngs)
        if initial_carry is None:
            initial_carry = start
        return flax_rnn.rnn(
            layer,
            inputs,
            initial_carry,
            dtype=cell.dtype,
            reset=reset,
            # Without a `carry_init`, a cell starts at zeros.
            reset_carry=None if cell.carry_init is None else start,
            lengths=seq_lengths,
            implementation=implementation,
            **options,
        )


class Layer(nnx.Module):
    """jaxgru layers of any kind as an nnx module: each weight and bias is an `nnx.Param`.

    Their paths, in `layers`, have the names of the layers' fields and end in "kernel", "bias" or
    "scale", as those of nnx's own modules. In `nnx.data(init_gru(…))` they would be no parameters,
    and an optimizer would not train them.
    """

    def __init__(
        self,
        layers: AnyCell | ResidualStack | Sequence[Any],
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
        self.dtype = dtype
        self.deterministic = deterministic
        self.dropout = nnx.data(tuple(each(dropout)))
        stream = _dropout_stream(rngs)
        if stream is not None:
            stream = stream.fork()
        self.rngs = nnx.data(stream)
        self.names = flax_rnn.names(layers)
        self.structure = jax.tree.structure(layers)
        params = [nnx.Param(weight) for weight in jax.tree.leaves(layers)]
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
            if deterministic is None:
                deterministic = self.deterministic
            if rngs is None:
                rngs = self.rngs
            options["dropout"] = self._dropouts_of_call(deterministic, rngs)
        return common.call(self, x, carry, **options)

    step = common.step

    def _dropouts_of_call(self, deterministic: bool, rngs: Any) -> Dropouts:
        """Return the dropouts of a call, with new keys."""
        if deterministic:
            zoneouts = [dropout for dropout in self.dropout if dropout.kind == "zoneout"]
            return [zoneout.replace(key=None) for zoneout in zoneouts]
        if self.dropout and rngs is None:
            raise LibraryError(
                "the dropout of this Layer needs random numbers: give it, or this call, rngs, or "
                "deterministic=True."
            )
        draw_key = _dropout_stream(rngs)
        return [dropout.replace(key=draw_key()) for dropout in self.dropout]

    def initial_carry(self, batch_size: Any) -> Any:
        """Return `jaxgru.initial_carry` of the layers; for a pair, a pair."""
        return common.initial_carry(self.layer(), batch_size)


def _dropout_stream(rngs: Any) -> Any:
    """Return the stream of which dropout draws, given it or several."""
    return rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs


def from_nnx(cell: Any) -> AnyCell:
    """Return the layer with the weights of a GRUCell, LSTMCell, OptimizedLSTMCell or SimpleCell.

    A GRU's `reset_gate` is "after", and it has no second biases. Values are copied; those of z
    change sign. The layer's carry is h, or (h, c) where the cell's is (c, h).
    """
    hint = "; jaxgru's own layers run in jaxgru.libraries.flax_nnx.Layer"
    flax_rnn.check_cell(cell, CELLS, hint)
    state = nnx.to_flat_state(nnx.state(cell, nnx.Not(nnx.RngState)))
    arrays = {".".join(map(str, path)): variable.get_value() for path, variable in state}
    try:
        layer = flax_rnn.from_cell(type_name(cell), cell, CELLS, arrays)
    except LibraryError as error:
        # A part of the cell was replaced, and nnx may well compute with the new one.
        raise UnknownCell(str(error)) from error
    _check_parts(cell)
    return layer


def _check_parts(cell: Any) -> None:
    """Raise UnknownCell if a part of a cell may compute something else than x·W + b."""
    for name, part in vars(cell).items():
        if isinstance(part, nnx.Module):
            what = f"{name} of this {type(cell).__name__}"
            common.check_class(what, part, [nnx.Linear], "Flax")
            common.check_options(
                what,
                part,
                dot_general=[jax.lax.dot_general],
                promote_dtype=[promote_dtype],
                preferred_element_type=[None],
            )


def to_nnx(layer: AnyCell, lstm: Any = nnx.OptimizedLSTMCell) -> Any:
    """Return a GRUCell, a SimpleCell or an LSTM cell with the layer's weights.

    A GRU's second biases c are added to b; its cn, which must be known, unlike under `jit`, must be
    zeros. `from_nnx` returns the other values bit for bit.

    Args:
      lstm: the class for an LSTM: `nnx.OptimizedLSTMCell` or `nnx.LSTMCell`.
    """
    cells = common.by_layer(CELLS) | {LSTMCell: (lstm, CELLS[lstm])}
    make, storage = common.counterpart(layer, cells, flax_rnn.HAS, "activation")
    if isinstance(layer, GRUCell):
        _check_cn(layer)
    p: Any = layer
    options: dict[str, Any]
    options = dict(param_dtype=p.b.dtype, activation_fn=ACTIVATIONS[p.activation])
    if make is nnx.SimpleCell:
        # Without dtype, it computes in float32; the other cells, in the parameters' dtype.
        options["dtype"] = p.b.dtype
    # Its shapes alone: no weights are drawn.
    cell = nnx.eval_shape(lambda: make(*sizes(p), **options, rngs=nnx.Rngs(0)))
    nnx.update(cell, unflatten_dict(common.to_arrays(layer, storage), sep="."))
    return cell


def _check_cn(layer: GRUCell) -> None:
    """Raise LibraryError unless cn is known and zeros."""
    common.check_known(layer.cn, "flax.nnx.GRUCell, which has no bias like cn,")
    if jnp.any(layer.cn != 0):
        raise LibraryError(
            "flax.nnx.GRUCell has no bias like cn, so a GRU whose cn is not zero cannot be "
            "converted; it runs as it is in jaxgru.libraries.flax_nnx.Layer."
        )
