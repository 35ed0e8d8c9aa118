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
from jaxtyping import Float, Integer, Shaped

from jaxgru.cells import CellParams, GRUParams, LSTMParams, ResetBeforeGRUParams, RNNParams, sizes
from jaxgru.cells.base import AnyArray
from jaxgru.errors import a_type, shown
from jaxgru.layers.arguments import as_stack, is_pair
from jaxgru.layers.stack import ResidualStack
from jaxgru.libraries import InteropError, check_shapes, common
from jaxgru.libraries.flax_rnn import check_cell, check_names, chosen, names, rnn, step_shape

_LAYOUTS: dict[type, tuple[type, str, list[str], list[str], str]] = {
    nnx.GRUCell: (GRUParams, "rzn", ["dense_i"], ["dense_h"], "W"),
    nnx.LSTMCell: (
        LSTMParams, "ifgo", ["ii", "if_", "ig", "io"], ["hi", "hf", "hg", "ho"], "U",
    ),
    nnx.OptimizedLSTMCell: (LSTMParams, "ifgo", ["dense_i"], ["dense_h"], "U"),
    nnx.SimpleCell: (RNNParams, "h", ["dense_i"], ["dense_h"], "W"),
}  # fmt: skip
"""The layer, the order of a cell's gates, its modules with W and with U; which have the biases."""

CELLS = tuple(_LAYOUTS)


class RNN(nnx.RNN):
    """An `nnx.RNN` that computes the same with `jaxgru.unroll`, whose gradient is hand-written.

    The cell is a GRUCell, LSTMCell, OptimizedLSTMCell or SimpleCell. Its parameters stay its own
    `nnx.Param`s, so optimizers and checkpoints see no difference. `unroll` has no effect.

    Raises:
      InteropError: the cell is of another class, has other functions than sigmoid and tanh, or is
        residual; or `state_axes` is given, which none of these cells needs.
    """

    def __init__(self, cell: nnx.RNNCellBase, **options: Any) -> None:
        """Take the arguments of `nnx.RNN`."""
        _check_cell(cell)
        if options.get("state_axes") is not None:
            raise InteropError("state_axes is given, but the cell's parameters are one per layer.")
        super().__init__(cell, **options)

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
          reset: (*batch, T) or, if time-major, (T, *batch); True at the first step of an episode,
            in time: the carry is set to the cell's initial carry before that step or, with
            `reverse`, after it.
          implementation: as for `jaxgru.unroll`; forward mode needs "autodiff".

        Returns:
          The outputs, or (carry, outputs) with `return_carry`.

        Raises:
          InteropError: an argument has another shape.
          ValueError: as `jaxgru.unroll`.
        """
        cell: Any = self.cell
        options = chosen(
            self,
            time_major=time_major,
            reverse=reverse,
            keep_order=keep_order,
            return_carry=return_carry,
        )
        rngs = self.rngs if rngs is None else rngs
        rngs = rngs.carry.fork() if isinstance(rngs, nnx.Rngs) else rngs
        start = None
        if initial_carry is None or (reset is not None and cell.carry_init is not None):
            start = cell.initialize_carry(step_shape(inputs, options["time_major"]), rngs)
        return rnn(
            from_nnx(cell),
            inputs,
            start if initial_carry is None else initial_carry,
            dtype=cell.dtype,
            reset=reset,
            initial=None if cell.carry_init is None else start,
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

    def __init__(self, layers: CellParams | ResidualStack | Sequence[Any]) -> None:
        """Take one layer's parameters, a list or `ResidualStack`, or a pair of these lists.

        Raises:
          ValueError: there is no layer, or something is not the parameters of a layer.
        """
        stacks: Any = layers if is_pair(layers) else [layers]
        for stack in stacks:
            as_stack("layers", stack)
        self.names, self.structure = names(layers), jax.tree.structure(layers)
        params = map(nnx.Param, jax.tree.leaves(layers))
        self.layers = nnx.data(unflatten_dict(dict(zip(self.names, params, strict=True))))

    def layer(self) -> Any:
        """Return the parameters as they are now, in the structure of those that it was made of.

        `jaxgru.step(module.layer(), x, carry)` is one step of the module.

        Raises:
          InteropError: `nnx.update` gave it the parameters of layers of another kind.
        """
        check_names(self.layers, self.names)
        params: Any = flatten_dict(self.layers)
        return jax.tree.unflatten(self.structure, [params[path][...] for path in self.names])

    def __call__(self, x: Float[AnyArray, "B T F"], carry: Any = None, **options: Any) -> Any:
        """Run `jaxgru.unroll` with these arguments or, for a pair, `jaxgru.bidirectional`."""
        return common.run_layers(self.layer(), x, carry, **options)


def from_nnx(cell: Any) -> CellParams:
    """Return the layer with the weights of a GRUCell, LSTMCell, OptimizedLSTMCell or SimpleCell.

    A GRU's `reset_gate` is "after", and it has no second biases. Values are copied; those of z
    change sign. The layer's carry is h, or (h, c) where the cell's is (c, h).

    Raises:
      InteropError: the cell is of another class, has other functions than sigmoid and tanh, is
        residual, or has weights of other names or shapes.
    """
    _check_cell(cell)
    cls, order, inputs, states, biased = _LAYOUTS[type(cell)]
    biased = {"W": inputs, "U": states}[biased]
    F, H = cell.in_features, cell.hidden_features
    width = len(order) * H // len(inputs)
    arrays: dict[str, Any] = {
        ".".join(map(str, path)): v[...]
        for path, v in nnx.to_flat_state(nnx.state(cell, nnx.Not(nnx.RngState)))
    }
    want = {f"{part}.kernel": (F, width) for part in inputs}
    want |= {f"{part}.kernel": (H, width) for part in states}
    want |= {f"{part}.bias": (width,) for part in biased}
    check_shapes(a_type(cell), {name: array.shape for name, array in arrays.items()}, want)
    side = lambda parts, what: jnp.concatenate([arrays[f"{n}.{what}"] for n in parts], axis=-1)
    W, U, b = side(inputs, "kernel"), side(states, "kernel"), side(biased, "bias")
    if cls is not GRUParams:
        return common.layer_of(cls, order, W=W, U=U, b=b)
    return common.complement_z(common.layer_of(cls, order, W=W, U=U, b=b, cn=jnp.zeros(H, U.dtype)))


def to_nnx(layer: CellParams, lstm: Any = nnx.OptimizedLSTMCell) -> Any:
    """Return a GRUCell, a SimpleCell or an LSTM cell with the layer's weights.

    A GRU's second biases c are added to b. `from_nnx` returns the other values bit
    for bit.

    Args:
      lstm: the class for an LSTM: `nnx.OptimizedLSTMCell` or `nnx.LSTMCell`.

    Raises:
      InteropError: the layer is none of these, or `lstm` is another class; or a GRU's `reset_gate`
        is "before", or its cn is not zeros, or not known, as under `jit`.
    """
    if lstm not in (nnx.OptimizedLSTMCell, nnx.LSTMCell):
        raise InteropError(
            f"lstm is {shown(lstm)}; it must be nnx.OptimizedLSTMCell or nnx.LSTMCell."
        )
    match p := layer:
        case GRUParams() | ResetBeforeGRUParams():
            common.check_reset_gate(layer, "after", "flax.nnx.GRUCell")
            hint = "; it runs as it is in jaxgru.libraries.flax_nnx.Layer"
            common.check_inner_bias(layer, "flax.nnx.GRUCell", hint)
            p, make = common.complement_z(common.single_bias(layer)), nnx.GRUCell
        case LSTMParams():
            make = lstm
        case RNNParams():
            make = nnx.SimpleCell
        case _:
            raise common.refusal(layer, "Flax has a GRUCell, LSTM cells and a SimpleCell")
    _, order, inputs, states, biased = _LAYOUTS[make]
    biased = {"W": inputs, "U": states}[biased]
    weights: dict[str, Any] = {part: {} for part in (*inputs, *states)}
    for parts, side, what in (
        (inputs, "W", "kernel"),
        (states, "U", "kernel"),
        (biased, "b", "bias"),
    ):
        arrays = jnp.split(common.joined(p, side, order), len(parts), axis=-1)
        for part, array in zip(parts, arrays, strict=True):
            weights[part][what] = array
    (E, H), dtype = sizes(layer), common.dtype_of_biases(layer)
    options: dict[str, Any] = dict(param_dtype=dtype)
    if make is nnx.SimpleCell:
        options["dtype"] = dtype  # float32 by default, where the other cells take the parameters'
    cell = nnx.eval_shape(lambda: make(E, H, **options, rngs=nnx.Rngs(0)))  # draws nothing
    nnx.update(cell, weights)
    return cell


def _check_cell(cell: Any) -> None:
    hint = "; jaxgru's own layers run in jaxgru.libraries.flax_nnx.Layer"
    check_cell(cell, CELLS, "flax.nnx", hint)
    for name, part in vars(cell).items():
        if isinstance(part, nnx.Module) and type(part) is not nnx.Linear:
            raise InteropError(
                f"{name} of this {type(cell).__name__} is {a_type(part)}; only an nnx.Linear is "
                "known to be a product with its kernel."
            )
