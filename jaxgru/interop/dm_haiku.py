"""dm-haiku: `hk.dynamic_unroll` at jaxgru's speed, also with `hk.ResetCore`; weights of the cores.

    from jaxgru.interop.dm_haiku import dynamic_unroll      # in place of hk.dynamic_unroll

Haiku's GRU is jaxgru's by default: the reset before the product, z weighting the new value. Its
LSTM computes σ(f + 1), so the layer's forget bias is Haiku's plus one. Its VanillaRNN has ReLU,
where jaxgru's has tanh. See https://dm-haiku.readthedocs.io/en/latest/api.html#recurrent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxgru.cells import CellParams, GRUParams, LSTMParams
from jaxgru.interop import InteropError
from jaxgru.interop.gates import (
    cast,
    check_carry,
    check_reset,
    joined,
    layer_of,
    refusal,
    single_bias,
    with_steps,
)
from jaxgru.layers import unroll as unroll_layers


def dynamic_unroll(
    core: hk.RNNCore,
    input_sequence: Any,
    initial_state: Any,
    time_major: bool = True,
    reverse: bool = False,
    return_all_states: bool = False,
    unroll: int = 1,
) -> tuple[Array, Any]:
    """Compute `hk.dynamic_unroll` of an hk.GRU or hk.LSTM, with a hand-written gradient.

    The core's parameters stay its own, with the same names and initial values.

    Args:
      core: an hk.GRU, an hk.LSTM, or an `hk.ResetCore` of one.
      input_sequence: (T, B, F), or (T, F) for one sequence; for a ResetCore a pair of it and
        `should_reset` (T, B), where True sets the state to zeros before that step.
      initial_state: before the first step, as from `core.initial_state`.
      time_major: if False, inputs and results have the batch before the time.
      reverse: read from the last step to the first.
      return_all_states: return the state of every step, not only the last.
      unroll: has no effect.

    Returns:
      The output of every step, and the last state or all states.

    Raises:
      InteropError: the core is of another class, `should_reset` is a structure, or an argument has
        another shape.
    """
    own: Any = core
    inputs, resets = input_sequence, None
    if type(core) is hk.ResetCore:
        if not isinstance(input_sequence, tuple | list) or len(input_sequence) != 2:
            raise InteropError("an hk.ResetCore takes a pair: the inputs, and should_reset.")
        own, (inputs, resets) = core.core, input_sequence
        if not hasattr(resets, "dtype"):
            raise InteropError("should_reset has more than one part; it must be one array.")
    if type(own) not in (hk.GRU, hk.LSTM):
        raise InteropError(
            f"the core is a {type(own).__name__}; it must be an hk.GRU or hk.LSTM (an "
            "hk.VanillaRNN has ReLU where jaxgru's RNN has tanh)."
        )
    inputs = with_steps("the inputs", inputs)
    input_sequence = inputs if resets is None else (inputs, resets)
    batch = inputs.shape[1:-1] if time_major else inputs.shape[:-2]
    parts = 2 if isinstance(own, hk.LSTM) else 1
    check_carry("the state", initial_state, parts, (*batch, own.hidden_size))
    if hk.running_init():  # draws the parameters as Haiku does
        hk.dynamic_unroll(core, input_sequence, initial_state, time_major)
    state, one = jax.tree.map(jnp.asarray, initial_state), inputs.ndim == 2
    if one:  # one sequence as a batch of one
        inputs = jnp.expand_dims(inputs, 1 if time_major else 0)
        resets = None if resets is None else resets.reshape(inputs.shape[:2])
        state = jax.tree.map(lambda s: s[None], state)
    hk.scan(lambda carry, _: (carry, None), None, None, 1)  # reserves random keys as Haiku's does

    E, H, holder = inputs.shape[-1], own.hidden_size, own
    shapes: dict[str, tuple[int, ...]] = dict(w_i=(E, 3 * H), w_h=(H, 3 * H), b=(3 * H,))
    if isinstance(own, hk.LSTM):
        holder = _in_scope(own, lambda: hk.Linear(4 * H))
        shapes = dict(w=(E + H, 4 * H), b=(4 * H,))

    def parameters() -> dict[str, Array]:  # as custom getters leave them
        return {name: hk.get_parameter(name, s, inputs.dtype) for name, s in shapes.items()}

    layer = from_haiku(_in_scope(holder, parameters))
    dtype = jnp.result_type(inputs, *jax.tree.leaves((layer, state)))
    state = jax.tree.map(lambda s: s.astype(dtype), state)
    outputs, *states = unroll_layers(
        cast(layer, dtype, dtype),
        inputs,
        tuple(state) if isinstance(own, hk.LSTM) else state,
        reset=None if resets is None else jnp.asarray(resets, bool),
        reverse=reverse,
        time_major=time_major,
        return_carries=return_all_states,
    )
    state = hk.LSTMState(*states[-1]) if isinstance(own, hk.LSTM) else states[-1]
    if one:
        batch = 1 if time_major else 0
        outputs = outputs.squeeze(batch)
        state = jax.tree.map(lambda s: s.squeeze(batch if return_all_states else 0), state)
    return outputs, state


class _Scope(hk.Module):
    def __call__(self, function: Callable[[], Any]) -> Any:
        return function()


_in_scope: Callable[[Any, Callable[[], Any]], Any] = _Scope.__call__
"""Run a function in a module's scope, as if it were the module's own `__call__`."""


def from_haiku(params: Mapping[str, Array]) -> CellParams:
    """Return the layer with the parameters of an hk.GRU or hk.LSTM.

    Values are copied, except the forget bias, which is Haiku's plus one. The carry is h, or (h, c).

    Args:
      params: of the module that holds them: params["gru"] (w_i, w_h, b), or params["lstm/linear"]
        (w, b).

    Raises:
      InteropError: they have other names, or the shapes of a GRU's do not fit together.
    """
    if set(params) == {"w_i", "w_h", "b"}:
        H = len(params["w_h"])
        if wrong := [name for name, w in params.items() if w.shape[-1] != 3 * H]:
            raise InteropError(
                f"w_h has {H} rows, so {wrong[0]} must have {3 * H} columns; its shape is "
                f"{params[wrong[0]].shape}."
            )
        return layer_of(GRUParams, "zrn", W=params["w_i"], U=params["w_h"], b=params["b"])
    if set(params) != {"w", "b"}:
        raise InteropError(
            f"the parameters {', '.join(sorted(params))} are not those of an hk.GRU (w_i, w_h, b) "
            "or of the hk.Linear in an hk.LSTM (w, b)."
        )
    w, b = params["w"], params["b"]
    W, U = jnp.split(w, [len(w) - len(b) // 4])
    p = layer_of(LSTMParams, "igfo", W=W, U=U, b=b)
    return dataclasses.replace(p, bf=p.bf + 1)


def to_haiku(layer: CellParams) -> dict[str, Array]:
    """Return the parameters of an hk.GRU, or of the hk.Linear in an hk.LSTM.

    A GRU's second biases are added to bz and br. The forget bias is the layer's minus one, which
    is exact from 0.5 to 2 and is rounded elsewhere, as Haiku rounds f + 1 in each step.
    `from_haiku` returns the other values bit for bit.

    Raises:
      InteropError: a GRU resets after the product, or the layer is an RNN, whose tanh Haiku's
        VanillaRNN does not have.
    """
    match layer:
        case GRUParams():
            check_reset(layer, "before", "hk.GRU")
            W, U, b = (joined(single_bias(layer), side, "zrn") for side in "WUb")
            return {"w_i": W, "w_h": U, "b": b}
        case LSTMParams():
            W, U, b = (
                joined(dataclasses.replace(layer, bf=layer.bf - 1), side, "igfo") for side in "WUb"
            )
            return {"w": jnp.concatenate([W, U]), "b": b}
    raise refusal(layer, "Haiku has a GRU, an LSTM, and a VanillaRNN with ReLU")
