"""`flax.linen`: its RNN, and purejaxrl's ScannedRNN, at jaxgru's speed; its weights as layers.

    from jaxgru.libraries.flax_linen import RNN           # in place of nn.RNN
    from jaxgru.libraries.flax_linen import ScannedRNN    # in place of purejaxrl's class

Names, shapes and initial values of the parameters are Flax's, so checkpoints fit. Its GRU has the
reset gate after the product, with a bias there (`hn`); its z weights the old state. See
https://flax-linen.readthedocs.io/en/latest/api_reference/flax.linen/layers.html.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Integer, Shaped

from jaxgru.arguments import as_array
from jaxgru.arrays import AnyArray
from jaxgru.cells import AnyCell, GRUCell, LSTMCell, RNNCell
from jaxgru.errors import LibraryError
from jaxgru.layers import Implementation
from jaxgru.libraries import common, flax_rnn
from jaxgru.libraries.common import Storage, UnknownCell
from jaxgru.printing import counted, type_name

_GRU_IN = ["ir", "iz", "in"]
_GRU_STATE = ["hr", "hz", "hn"]
_LSTM_IN = ["ii", "if", "ig", "io"]
_LSTM_STATE = ["hi", "hf", "hg", "ho"]
_LSTM = flax_rnn.storage(LSTMCell, "ifgo", _LSTM_IN, _LSTM_STATE, b=_LSTM_STATE)
CELLS: dict[type, Storage] = {
    nn.GRUCell: flax_rnn.storage(GRUCell, "rzn", _GRU_IN, _GRU_STATE, b=_GRU_IN, cn="hn"),
    nn.LSTMCell: _LSTM,
    nn.OptimizedLSTMCell: _LSTM,
    nn.SimpleCell: flax_rnn.storage(RNNCell, "h", ["i"], ["h"], b=["i"]),
}


class RNN(nn.RNN):
    """An `nn.RNN` that computes the same with `jaxgru.unroll`, whose gradient is hand-written.

    That is of a GRUCell, LSTMCell, OptimizedLSTMCell or SimpleCell; the options of `nn.scan`
    (`unroll`, `variable_axes`, …) then act only when parameters are initialized. Any other cell is
    computed by `nn.RNN` itself.
    """

    def __call__(
        self,
        inputs: Float[AnyArray, "..."],
        *,
        initial_carry: Any = None,
        init_key: Array | None = None,
        seq_lengths: Integer[AnyArray, "..."] | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        reset: Shaped[AnyArray, "..."] | None = None,
        implementation: Implementation = "auto",
    ) -> Any:
        """Run over a sequence; all arguments but the last two are those of `nn.RNN`.

        Outputs in the padding are not zero, as in `nn.RNN`; for zeros, see `jaxgru.unroll`.

        Args:
          reset: as for `jaxgru.unroll`, but it sets the cell's initial carry.
          implementation: as for `jaxgru.unroll`; forward mode needs "autodiff". Both are refused
            with a cell that `nn.RNN` itself computes.
        """
        options = flax_rnn.call_options(
            self,
            time_major=time_major,
            reverse=reverse,
            keep_order=keep_order,
            return_carry=return_carry,
        )
        try:
            flax_rnn.check_cell(self.cell, CELLS)
        except UnknownCell as unknown:
            common.check_absent(unknown, reset=reset, implementation=implementation)
            theirs: Any = super().__call__
            return theirs(
                inputs,
                initial_carry=initial_carry,
                init_key=init_key,
                seq_lengths=seq_lengths,
                **options,
            )
        if init_key is None:
            init_key = jax.random.key(0)
        step_shape = flax_rnn.step_shape(inputs, options["time_major"])
        start = self.cell.initialize_carry(init_key, step_shape)
        if initial_carry is None:
            initial_carry = start
        if "params" not in self.cell.variables:
            # This initializes them.
            super().__call__(jnp.asarray(inputs), time_major=options["time_major"])
        return _run(
            self.cell,
            inputs,
            initial_carry,
            start,
            reset=reset,
            lengths=seq_lengths,
            implementation=implementation,
            **options,
        )


class ScannedRNN(nn.Module):
    """The `ScannedRNN` of purejaxrl: a cell over time whose carry is reset at each episode's start.

    It takes the place of a class that wraps `nn.GRUCell` in `nn.scan`
    (https://github.com/luchris429/purejaxrl/blob/main/purejaxrl/ppo_rnn.py). Existing parameters
    keep their name. H is the carry's size.

    Attributes:
      cell: a class of cells, a `functools.partial` of one, or a cell. One that jaxgru does not
        know is computed as in purejaxrl, by `nn.scan`.
      cell_name: the name of new parameters. None: for a GRUCell "GRUCell_1", as in purejaxrl,
        where "GRUCell_0" is the cell that makes the carry. Classes that make the carry otherwise
        name it "GRUCell_0".
    """

    cell: Callable[..., nn.RNNCellBase] | nn.RNNCellBase = nn.GRUCell
    cell_name: str | None = None

    @nn.compact
    def __call__(
        self,
        carry: Any,
        x: tuple[Float[AnyArray, "T B F"], Shaped[AnyArray, "T B"]],
        *,
        implementation: Implementation = "auto",
    ) -> tuple[Any, Float[Array, "T B H"]]:
        """Run over a sequence; return the carry after the last step, and the outputs.

        Args:
          carry: the state before the first step, (B, H), or (c, h) for an LSTM.
          x: the inputs, and the resets: where they are True, or numbers other than 0, the carry is
            set to the cell's initial carry before the step.
          implementation: as for `jaxgru.unroll`; forward mode needs "autodiff". It is refused with
            a cell that jaxgru does not know.
        """
        inputs = common.with_steps("inputs", x[0])
        resets = x[1]
        cell = _cell_of(self, carry)
        start = cell.initialize_carry(jax.random.key(0), inputs.shape[1:])
        _check_number_of_arrays(cell, carry, start)
        if "params" not in cell.variables:
            # This initializes them.
            cell(start, inputs[0])
        reset = jnp.asarray(as_array("resets", resets), bool)
        try:
            flax_rnn.check_cell(cell, CELLS)
        except UnknownCell as unknown:
            common.check_absent(unknown, implementation=implementation)
            return _scan(cell, inputs, carry, start, reset)
        return _run(
            cell,
            inputs,
            carry,
            start,
            reset=reset,
            time_major=True,
            implementation=implementation,
            carry_name="the carry",
        )

    @staticmethod
    def initialize_carry(
        batch_size: int,
        hidden_size: int,
        cell: Callable[..., nn.RNNCellBase] | nn.RNNCellBase = nn.GRUCell,
    ) -> Any:
        """Return the carry before the first step: (batch_size, hidden_size), or a pair of these.

        Args:
          cell: that of the module.
        """
        module = _make_cell(cell, hidden_size)
        return module.initialize_carry(jax.random.key(0), (batch_size, hidden_size))


def _cell_of(module: ScannedRNN, carry: Any) -> Any:
    """Return the cell that has such a carry, as a part of the module."""
    h = carry[0] if isinstance(carry, tuple | list) else carry
    cell = _make_cell(module.cell, as_array("the carry", h).shape[-1])
    new_name = module.cell_name or f"{type(cell).__name__}_1"
    # Existing parameters keep their name.
    name = next(iter(module.variables.get("params", ())), new_name)
    return cell.clone(parent=module, name=name)


def _make_cell(cell: Any, features: int) -> Any:
    """Return the cell of a class with so many features; a cell as it is, but of no module."""
    if isinstance(cell, nn.RNNCellBase):
        return cell.clone(parent=None)
    return cell(features=features, parent=None)


def _check_number_of_arrays(cell: Any, carry: Any, start: Any) -> None:
    """Raise LibraryError if a carry has more or fewer arrays than the cell's initial one."""
    number = len(jax.tree.leaves(carry))
    expected = len(jax.tree.leaves(start))
    if number != expected:
        raise LibraryError(
            f"the carry has {counted(number, 'array')}; that of this {type_name(cell)} has "
            f"{expected}, as ScannedRNN.initialize_carry(batch_size, hidden_size, cell) returns it."
        )


def _scan(cell: Any, inputs: AnyArray, carry: Any, start: Any, reset: Array) -> Any:
    """Scan a cell as purejaxrl does; a reset sets the carry `start`."""

    def step(cell: Any, carry: Any, x: tuple[Any, Array]) -> tuple[Any, Any]:
        x_now, is_reset = x

        def choose(first: Array, old: Array) -> Array:
            axes = range(is_reset.ndim, old.ndim)
            return jnp.where(jnp.expand_dims(is_reset, tuple(axes)), first, old)

        return cell(jax.tree.map(choose, start, carry), x_now)

    scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})
    return scan(cell, carry, (inputs, reset))


def _run(cell: Any, inputs: AnyArray, carry: Any, start: Any, **options: Any) -> Any:
    """Compute `flax_rnn.rnn` of a cell that has parameters; a reset sets the carry `start`."""
    where = f"the parameters of this {type(cell).__name__}"
    layer = flax_rnn.from_cell(where, cell, CELLS, _arrays(cell.variables["params"]))
    reset_carry = None if cell.carry_init is jax.nn.initializers.zeros else start
    return flax_rnn.rnn(layer, inputs, carry, dtype=cell.dtype, reset_carry=reset_carry, **options)


class Layer(nn.Module):
    """jaxgru layers of any kind as a linen module, whose parameter `layers` holds their weights.

    It is a nested dict with the names of the layers' fields and, at the end of each path, "kernel",
    "bias" or "scale", as in linen's own modules. Calling it is `jaxgru.unroll` of the layers with
    these arguments or, for a pair, `jaxgru.bidirectional`; `step` is `jaxgru.step`.

    Attributes:
      layers: one layer's parameters, a list or `ResidualStack`, or a pair of these lists, for two
        directions; or a function from a key to these, with which `init` draws them:
        `Layer(lambda key: init_gru(key, 8, 16))`.
      dtype: of the products with the weights, as for `jaxgru.round_weights`; None: the weights'.

    Raises:
      LibraryError: the parameters are of layers of another kind.
      ScopeParamShapeError: Flax's, for parameters of another size.
    """

    layers: Any
    dtype: Any = None

    __call__ = common.call  # pyright: ignore[reportAssignmentType]
    step = common.step

    def __post_init__(self) -> None:
        """Make `layers` a function: a module with arrays has no hash, which `jax.jit` needs."""
        layers = self.layers
        if not callable(layers):
            object.__setattr__(self, "layers", lambda key: layers)
        super().__post_init__()

    def setup(self) -> None:
        """Draw or find the parameters."""
        like = _shapes(self.layers)
        paths = flax_rnn.names(like)
        if self.has_variable("params", "layers"):
            flax_rnn.check_names(self.get_variable("params", "layers"), paths)

        def draw(key: Array) -> dict[str, Any]:
            weights = jax.tree.leaves(self.layers(key), is_leaf=_is_boxed)
            return unflatten_dict(dict(zip(paths, weights, strict=True)))

        weights = flatten_dict(self.param("layers", draw))
        self._layers = jax.tree.unflatten(jax.tree.structure(like), map(weights.get, paths))

    def layer(self) -> Any:
        """Return the parameters as they are now: one layer, or tuples of them."""
        return self._layers

    def initial_carry(self, batch_size: Any) -> Any:
        """Return `jaxgru.initial_carry` of the layers; for a pair, a pair.

        Without variables, what a cell of your own learns of its start is zeros.
        """
        if self.scope is not None:
            return common.initial_carry(self.layer(), batch_size)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), _shapes(self.layers))
        return common.initial_carry(zeros, batch_size)


def _is_boxed(part: Any) -> bool:
    """Return whether a part has Flax's metadata, such as names of its axes."""
    return isinstance(part, meta.AxisMetadata)


def _shapes(draw: Callable[[Array], Any]) -> Any:
    return meta.unbox(jax.eval_shape(draw, jax.random.key(0)))


def from_linen(params: Mapping[str, Any]) -> AnyCell:
    """Return the layer with the parameters of a GRUCell, an LSTM cell or a SimpleCell.

    A GRU's `reset_gate` is "after". Values are copied; those of z change sign. The layer's carry
    is h, or (h, c) where the cell's is (c, h). The parameters do not tell a cell's
    `activation_fn`: for ReLU, take `from_linen(params).replace(activation="relu")`.

    Args:
      params: those of one cell, such as `variables["params"]["cell"]` of an `nn.RNN`.
    """
    for storage in CELLS.values():
        parts = {name.partition(".")[0] for name in (*storage.W, *storage.U)}
        if parts == set(params):
            return common.from_arrays("a cell's parameters", storage, _arrays(params))
    raise LibraryError(
        f"the parameters {', '.join(sorted(map(str, params)))} are not those of a flax.linen "
        f"{', '.join(cell.__name__ for cell in CELLS)}."
    )


def to_linen(layer: AnyCell) -> dict[str, dict[str, Array]]:
    """Return the parameters of a GRUCell, of either LSTM cell, or of a SimpleCell.

    A GRU's second biases c are added to b. `from_linen` returns the other values bit for bit. The
    cell of a layer with ReLU needs `activation_fn=nn.relu`.
    """
    cells = common.by_layer(CELLS)
    _, storage = common.counterpart(layer, cells, flax_rnn.HAS, "activation")
    return unflatten_dict(common.to_arrays(layer, storage), sep=".")


def _arrays(params: Mapping[str, Any]) -> dict[str, Any]:
    return flatten_dict(meta.unbox(params), sep=".")
