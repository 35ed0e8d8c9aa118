"""dm-haiku: `hk.dynamic_unroll` at jaxgru's speed, also with `hk.ResetCore`; weights of the cores.

    from jaxgru.libraries.dm_haiku import dynamic_unroll      # in place of hk.dynamic_unroll

Haiku's GRU is jaxgru's with `reset_gate` "before". Its LSTM computes σ(f + 1), so the layer's
forget bias is Haiku's plus one. Its VanillaRNN is not converted. See
https://dm-haiku.readthedocs.io/en/latest/api.html#recurrent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxgru.arguments import check_shapes
from jaxgru.arrays import AnyArray
from jaxgru.cells import AnyCell, LSTMCell, LSTMState, ResetBeforeGRUCell
from jaxgru.layers import Implementation
from jaxgru.libraries import common
from jaxgru.libraries.common import Storage, UnknownCell

GRU = Storage(ResetBeforeGRUCell, "zrn", ["w_i"], ["w_h"], ["b"], old_z=False)
LSTM = Storage(LSTMCell, "igfo", ["W"], ["U"], ["b"])
"""An hk.LSTM has one array w, of which these W and U are the rows."""

# Haiku's own, even if somebody then sets `hk.dynamic_unroll` to the one below.
_haikus_unroll = hk.dynamic_unroll


def dynamic_unroll(
    core: Callable[[Any, Any], tuple[Any, Any]],
    input_sequence: Any,
    initial_state: Any,
    time_major: bool = True,
    reverse: bool = False,
    return_all_states: bool = False,
    unroll: int = 1,
    implementation: Implementation = "auto",
) -> tuple[Any, Any]:
    """Compute `hk.dynamic_unroll` of an hk.GRU or hk.LSTM, with a hand-written gradient.

    All arguments but the last are Haiku's. The core's parameters stay its own, with the same names
    and initial values. Policies of `hk.mixed_precision` act as in Haiku, but do not round the state
    between the steps.

    Args:
      core: an hk.GRU, an hk.LSTM, or an `hk.ResetCore` of one. Any other, such as a
        function, is computed by `hk.dynamic_unroll` itself.
      input_sequence: (T, B, F), or (T, F) for one sequence; for a ResetCore, a pair of it and
        `should_reset` (T, B), which acts before that step is read, also with `reverse`.
      unroll: has no effect on an hk.GRU or hk.LSTM.
      implementation: as for `jaxgru.unroll`; forward mode needs "autodiff". It is refused with a
        core that Haiku itself computes.
    """
    is_reset_core = type(core) is hk.ResetCore
    inner: Any = core
    if is_reset_core:
        inner = inner.core
    try:
        common.check_class("the core", inner, (hk.GRU, hk.LSTM), "Haiku")
    except UnknownCell as unknown:
        common.check_absent(unknown, implementation=implementation)
        return _haikus_unroll(
            core, input_sequence, initial_state, time_major, reverse, return_all_states, unroll
        )

    resets = None
    if is_reset_core:
        input_sequence, resets = input_sequence
    inputs = common.with_steps("input_sequence", input_sequence)
    if time_major or inputs.ndim == 2:
        axis = 0
        batch = inputs.shape[1:-1]
    else:
        axis = 1
        batch = inputs.shape[:1]
    shape = (*batch, inner.hidden_size)
    state = common.as_state("initial_state", initial_state, isinstance(inner, hk.LSTM), shape)
    state = _their_state(state)
    if resets is not None:
        resets = jnp.asarray(common.of_shape("should_reset", resets, inputs.shape[:-1]), bool)
    if hk.running_init():
        # This draws the parameters as Haiku does.
        sequence = inputs if resets is None else (inputs, resets)
        _haikus_unroll(core, sequence, state, axis == 0)
    if resets is not None and reverse:
        state, resets = _reverse_resets(state, resets, axis)

    run = partial(
        _unroll_in_scope,
        inner,
        reset=resets,
        reverse=reverse,
        time_major=time_major,
        implementation=implementation,
        return_carries=return_all_states,
    )
    run = partial(_in_scope, inner, run)
    if is_reset_core:
        run = partial(_in_scope, core, run)
    return run(inputs, state)


def _reverse_resets(state: Any, resets: Array, axis: int) -> tuple[Any, Array]:
    """Return the state and the resets with which `jaxgru.unroll` computes Haiku's in reverse.

    To reset before step t − 1 is to begin an episode at step t. Nothing is read before the last
    step, so a reset there sets the state itself.
    """
    last = jax.lax.index_in_dim(resets, -1, axis, keepdims=False)[..., None]
    state = jax.tree.map(lambda part: jnp.where(last, 0, part), state)
    return state, jnp.roll(resets, 1, axis)


def _unroll_in_scope(core: Any, inputs: AnyArray, state: Any, **options: Any) -> tuple[Array, Any]:
    """Compute what the core would, in its scope: in the dtypes of its precision policy."""
    h = state
    carry = state
    if isinstance(core, hk.LSTM):
        h = state.hidden
        carry = LSTMState(*state)
    layer, product_dtype = _layer_from_core(core, inputs, h)
    outputs, *states = common.run_cell(layer, inputs, carry, product_dtype, **options)
    return outputs, _their_state(states[-1])


def _their_state(state: Any) -> Any:
    """Return our carry as a state of Haiku's."""
    if isinstance(state, LSTMState):
        return hk.LSTMState(hidden=state.h, cell=state.c)
    return state


class _Scope(hk.Module):
    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


_in_scope: Callable[..., Any] = _Scope.__call__
"""Call a function in a module's scope, as if it were the module's own `__call__`."""


def _layer_from_core(core: Any, x: AnyArray, h: Array) -> tuple[AnyCell, Any]:
    """Return the layer of the core whose scope this is, and the dtype of its products.

    Its parameters are taken as custom getters and precision policies leave them.
    """
    E = x.shape[-1]
    H = core.hidden_size
    is_lstm = isinstance(core, hk.LSTM)
    if is_lstm:
        shapes = {"w": (E + H, 4 * H), "b": (4 * H,)}
    else:
        shapes = {"w_i": (E, 3 * H), "w_h": (H, 3 * H), "b": (3 * H,)}
    parameters: dict[str, Array] = {}

    def product(x_and_h: Array) -> Array:
        """Find the parameters, and return a zero of the dtype that the product with them has."""
        for name, shape in shapes.items():
            # There are parameters by now, so none is drawn.
            parameters[name] = hk.get_parameter(name, shape, x_and_h.dtype, init=jnp.zeros)
        return jnp.zeros((), jnp.result_type(x_and_h, *parameters.values()))

    x_and_h = jnp.zeros((), jnp.result_type(x, h))
    if is_lstm:
        # An LSTM's parameters are those of a Linear in it.
        result = _in_scope(hk.Linear(4 * H), product, x_and_h)
    else:
        result = product(x_and_h)
    return from_haiku(parameters), result.dtype


def from_haiku(params: Mapping[str, Array]) -> AnyCell:
    """Return the layer with the parameters of an hk.GRU or hk.LSTM.

    Values are copied, except the forget bias, which is Haiku's plus one. The carry is h, or (h, c).

    Args:
      params: those of the module that holds them, such as params["gru"] (w_i, w_h, b) or
        params["lstm/linear"] (w, b).
    """
    weights = common.as_weights("Haiku's parameters", params)
    if "w" not in weights:
        return common.from_arrays("an hk.GRU's parameters", GRU, weights)
    where = "an hk.LSTM's parameters"
    shapes = {name: weight.shape for name, weight in weights.items()}
    w_shape = shapes["w"]
    b_shape = shapes.get("b", ())
    H = b_shape[0] // 4 if b_shape else 0
    rows = max(w_shape[0], H) if w_shape else H
    check_shapes(where, shapes, {"w": (rows, 4 * H), "b": (4 * H,)})
    W, U = jnp.split(weights["w"], [rows - H])
    p: Any = common.from_arrays(where, LSTM, {"W": W, "U": U, "b": weights["b"]})
    return dataclasses.replace(p, b=p.b.at[:H].add(1))


def to_haiku(layer: AnyCell) -> dict[str, Array]:
    """Return the parameters of an hk.GRU, or of the hk.Linear in an hk.LSTM.

    A GRU's c is added to b. The forget bias is the layer's minus one, which is exact from 0.5 to 2
    and is rounded elsewhere, as Haiku rounds f + 1 in each step. `from_haiku` returns the other
    values bit for bit.
    """
    has = "dm-haiku has an LSTM, and a GRU whose reset gate acts before the product"
    storage = common.counterpart(layer, {row.cls: row for row in (GRU, LSTM)}, has)
    if isinstance(layer, LSTMCell):
        H = len(layer.b) // 4
        layer = dataclasses.replace(layer, b=layer.b.at[:H].add(-1))
    arrays = common.to_arrays(layer, storage)
    if storage is GRU:
        return arrays
    return {"w": jnp.concatenate([arrays["W"], arrays["U"]]), "b": arrays["b"]}
