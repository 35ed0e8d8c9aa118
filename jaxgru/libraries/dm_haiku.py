"""dm-haiku: `hk.dynamic_unroll` at jaxgru's speed, also with `hk.ResetCore`; weights of the cores.

    from jaxgru.libraries.dm_haiku import dynamic_unroll      # in place of hk.dynamic_unroll

Haiku's GRU is jaxgru's with `reset_gate` "before". Its LSTM computes σ(f + 1), so the layer's
forget bias is Haiku's plus one. Its VanillaRNN has ReLU, where jaxgru's RNN has tanh. See
https://dm-haiku.readthedocs.io/en/latest/api.html#recurrent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxgru.cells import CellParams, GRUParams, LSTMParams, LSTMState, ResetBeforeGRUParams
from jaxgru.cells.base import AnyArray
from jaxgru.errors import a_type
from jaxgru.layers.arguments import as_array
from jaxgru.layers.unroll import unroll as unroll_layers
from jaxgru.libraries import InteropError, check_shapes, common


def dynamic_unroll(
    core: hk.RNNCore,
    input_sequence: Any,
    initial_state: Any,
    time_major: bool = True,
    reverse: bool = False,
    return_all_states: bool = False,
    unroll: int = 1,
    implementation: str = "auto",
) -> tuple[Array, Any]:
    """Compute `hk.dynamic_unroll` of an hk.GRU or hk.LSTM, with a hand-written gradient.

    The core's parameters stay its own, with the same names and initial values. Policies of
    `hk.mixed_precision` act as in Haiku, but do not round the state between the steps.

    Args:
      core: an hk.GRU, an hk.LSTM, or an `hk.ResetCore` of one.
      input_sequence: (T, B, F), or (T, F) for one sequence; for a ResetCore, a pair of it and
        `should_reset` (T, B). True sets the state to zeros before that step is read, also with
        `reverse`, as in Haiku.
      initial_state: before the first step, as from `core.initial_state`: (B, H), or an
        `hk.LSTMState` of two.
      time_major: if False, inputs and results have the batch before the time.
      reverse: read from the last step to the first.
      return_all_states: return the state after every step, not only the last.
      unroll: has no effect.
      implementation: as for `jaxgru.unroll`; forward mode needs "autodiff".

    Returns:
      The output of every step (T, B, H), and the last state or all states.

    Raises:
      InteropError: the core is of another class, the inputs or the state are not floating-point,
        there is no step, one sequence is not time-major, or an argument has another shape.
      ValueError: the implementation is unknown.
    """
    own, inputs, resets = _inputs(core, input_sequence, time_major)
    one, pair = inputs.ndim == 2, isinstance(own, hk.LSTM)
    batch = () if one else (inputs.shape[1 if time_major else 0],)
    state = common.as_state("initial_state", initial_state, pair, (*batch, own.hidden_size))
    state = hk.LSTMState(*state) if pair else state
    if hk.running_init():  # draws the parameters as Haiku does
        hk.dynamic_unroll(core, inputs if resets is None else (inputs, resets), state, time_major)
    if one:  # one sequence as a batch of one
        inputs = jnp.expand_dims(inputs, 1)
        resets = None if resets is None else resets.reshape(inputs.shape[:2])
        state = jax.tree.map(lambda s: s[None], state)
    if resets is not None and reverse:
        resets, state = _in_time(jnp.asarray(resets, bool), state, 0 if time_major else 1)
    _reserve_keys()

    def all_steps(inputs: AnyArray, state: Any) -> tuple[Array, Any]:
        """Compute what the core would, in its scope: in the dtypes of its precision policy."""
        layer, products = _layer_of(own, inputs, state.hidden if pair else state)
        dtype = jnp.result_type(products, *jax.tree.leaves(state))
        state = jax.tree.map(lambda s: s.astype(dtype), state)
        outputs, *states = unroll_layers(
            common.cast(layer, products, dtype),
            inputs,
            LSTMState(*state) if pair else state,
            reset=None if resets is None else jnp.asarray(resets, bool),
            reverse=reverse,
            time_major=time_major,
            return_carries=return_all_states,
            implementation=implementation,
        )
        return outputs, hk.LSTMState(*states[-1]) if pair else states[-1]

    run = partial(_in_scope, own, all_steps)
    run = run if own is core else partial(_in_scope, core, run)
    outputs, state = run(inputs, state)
    if one:
        outputs = outputs.squeeze(1)
        state = jax.tree.map(lambda s: s.squeeze(1 if return_all_states else 0), state)
    return outputs, state


def _inputs(core: Any, inputs: Any, time_major: bool) -> tuple[Any, AnyArray, Array | None]:
    """Return the GRU or LSTM in a core, its inputs, and where its state is reset."""
    own, resets = core, None
    if type(core) is hk.ResetCore:
        if not isinstance(inputs, tuple | list) or len(inputs) != 2:
            raise InteropError("an hk.ResetCore takes a pair: the inputs, and should_reset.")
        own, (inputs, resets) = core.core, inputs
    if type(own) not in (hk.GRU, hk.LSTM):
        raise InteropError(
            f"the core is {a_type(own)}; it must be an hk.GRU or hk.LSTM (an hk.VanillaRNN has "
            "ReLU where jaxgru's RNN has tanh)."
        )
    inputs = as_array("input_sequence", inputs)
    if inputs.ndim not in (2, 3) or not jnp.issubdtype(inputs.dtype, jnp.floating):
        raise InteropError(
            f"input_sequence is {inputs.dtype} {inputs.shape}; it must be floating-point, with "
            "steps and features, with or without a batch axis."
        )
    if inputs.ndim == 2 and not time_major:  # Haiku takes F for T
        raise InteropError(
            f"input_sequence is one sequence, {inputs.shape}; it has no batch axis that could come "
            "before the time, so it needs time_major=True."
        )
    common.with_steps("input_sequence", inputs, time_major)
    if resets is not None:
        resets = common.reshaped("should_reset", resets, inputs.shape[:-1])
    return own, inputs, resets


def _in_time(resets: Array, state: Any, axis: int) -> tuple[Array, Any]:
    """Return the resets before steps that are read backward as `jaxgru.unroll` takes them.

    To reset before step t − 1 is to begin an episode at step t. Nothing is read before the last
    step, so a reset there sets the state itself.
    """
    last = jax.lax.index_in_dim(resets, -1, axis, keepdims=False)[:, None]
    state = jax.tree.map(lambda s: jnp.where(last, 0, s), state)
    return jnp.roll(resets, 1, axis), state


class _Scope(hk.Module):
    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


_in_scope: Callable[..., Any] = _Scope.__call__
"""Call a function in a module's scope, as if it were the module's own `__call__`."""


def _reserve_keys() -> None:
    """Reserve random keys as `hk.scan` does, so that what is drawn afterwards is the same.

    It does so before it traces its body. A body that ended would make a loop, which would be
    compiled in every call outside `jit`.
    """

    def body(*_: Any) -> Any:
        raise _KeysReserved

    with suppress(_KeysReserved):
        hk.scan(body, None, None, 1)


class _KeysReserved(Exception):
    pass


def _layer_of(core: Any, x: AnyArray, h: Array) -> tuple[CellParams, Any]:
    """Return the layer of the core whose scope this is, and the dtype of its products.

    Its parameters are taken as custom getters and precision policies leave them.
    """
    pair, sizes = isinstance(core, hk.LSTM), (x.shape[-1], core.hidden_size)
    holder = hk.Linear(4 * core.hidden_size) if pair else core
    shapes = (_lstm_shapes if pair else _gru_shapes)(*sizes)
    parameters: dict[str, Array] = {}

    def product(x_and_h: Array) -> Array:
        for name, shape in shapes.items():  # there are parameters by now, so none is made
            parameters[name] = hk.get_parameter(name, shape, x_and_h.dtype, init=jnp.zeros)
        return jnp.zeros((), jnp.result_type(x_and_h, *parameters.values()))

    x_and_h = jnp.zeros((), jnp.result_type(x, h))
    dtype = (_in_scope(holder, product, x_and_h) if pair else product(x_and_h)).dtype
    return from_haiku(parameters), dtype


def from_haiku(params: Mapping[str, Array]) -> CellParams:
    """Return the layer with the parameters of an hk.GRU or hk.LSTM.

    Values are copied, except the forget bias, which is Haiku's plus one. The carry is h, or (h, c).

    Args:
      params: those of the module that holds them, such as params["gru"] (w_i, w_h, b) or
        params["lstm/linear"] (w, b).

    Raises:
      InteropError: they have other names, or their shapes do not fit together.
    """
    if set(params) not in ({"w_i", "w_h", "b"}, {"w", "b"}):
        names = ", ".join(sorted(map(str, params)))
        raise InteropError(
            f"the parameters {names} are not those of an hk.GRU (w_i, w_h, b) or of the hk.Linear "
            "in an hk.LSTM (w, b)."
        )
    weights = {name: as_array(name, weight) for name, weight in params.items()}
    shapes = {name: weight.shape for name, weight in weights.items()}
    if "w_h" in weights:
        E, H = (max(shapes[name][:1], default=1) for name in ("w_i", "w_h"))
        check_shapes("an hk.GRU's parameters", shapes, _gru_shapes(E, H))
        return common.layer_of(
            ResetBeforeGRUParams, "zrn", W=weights["w_i"], U=weights["w_h"], b=weights["b"]
        )
    H = weights["b"].size // 4
    E = max((*shapes["w"][:1], H + 1)) - H
    check_shapes("an hk.LSTM's parameters", shapes, _lstm_shapes(E, H))
    W, U = jnp.split(weights["w"], [E])
    p = common.layer_of(LSTMParams, "igfo", W=W, U=U, b=weights["b"])
    return dataclasses.replace(p, b=_forget_bias(p.b, 1))


def to_haiku(layer: CellParams) -> dict[str, Array]:
    """Return the parameters of an hk.GRU, or of the hk.Linear in an hk.LSTM.

    A GRU's c is added to b. The forget bias is the layer's minus one, which is
    exact from 0.5 to 2 and is rounded elsewhere, as Haiku rounds f + 1 in each step. `from_haiku`
    returns the other values bit for bit.

    Raises:
      InteropError: the layer is neither a GRU nor an LSTM, or a GRU's `reset_gate` is "after".
    """
    match layer:
        case GRUParams() | ResetBeforeGRUParams():
            common.check_reset_gate(layer, "before", "hk.GRU")
            W, U, b = (common.joined(common.single_bias(layer), side, "zrn") for side in "WUb")
            return {"w_i": W, "w_h": U, "b": b}
        case LSTMParams():
            W, U, b = (
                common.joined(dataclasses.replace(layer, b=_forget_bias(layer.b, -1)), side, "igfo")
                for side in "WUb"
            )
            return {"w": jnp.concatenate([W, U]), "b": b}
    raise common.refusal(layer, "Haiku has a GRU, an LSTM, and a VanillaRNN with ReLU")


def _gru_shapes(E: int, H: int) -> dict[str, tuple[int, ...]]:
    return {"w_i": (E, 3 * H), "w_h": (H, 3 * H), "b": (3 * H,)}


def _lstm_shapes(E: int, H: int) -> dict[str, tuple[int, ...]]:
    return {"w": (E + H, 4 * H), "b": (4 * H,)}


def _forget_bias(b: Array, change: int) -> Array:
    """Return the biases of an LSTM with those of the forget gate, the first, changed."""
    H = len(b) // 4
    return jnp.concatenate([b[:H] + change, b[H:]])
