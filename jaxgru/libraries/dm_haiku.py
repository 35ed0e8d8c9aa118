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

from jaxgru.cells import CellParams, LSTMParams, LSTMState, ResetBeforeGRUParams
from jaxgru.cells.carry import AnyArray
from jaxgru.errors import type_name
from jaxgru.layers.api import unroll as unroll_layers
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
      InteropError: the core is of another class, or an argument has another shape.
      ValueError: as `jaxgru.unroll`.
    """
    own, resets = core, None
    if type(core) is hk.ResetCore:
        own, (input_sequence, resets) = core.core, input_sequence
    if type(own) not in (hk.GRU, hk.LSTM):
        raise InteropError(f"the core is {type_name(own)}; it must be an hk.GRU or hk.LSTM.")
    inputs, pair = common.with_steps("input_sequence", input_sequence), isinstance(own, hk.LSTM)
    axis = 0 if time_major or inputs.ndim == 2 else 1
    batch = inputs.shape[:1] if axis else inputs.shape[1:-1]
    state = common.as_state("initial_state", initial_state, pair, (*batch, own.hidden_size))  # pyright: ignore[reportAttributeAccessIssue]
    state = hk.LSTMState(*state) if pair else state
    if resets is not None:
        resets = jnp.asarray(common.of_shape("should_reset", resets, inputs.shape[:-1]), bool)
    if hk.running_init():  # draws the parameters as Haiku does
        hk.dynamic_unroll(core, inputs if resets is None else (inputs, resets), state, axis == 0)
    if resets is not None and reverse:
        # To reset before step t − 1 is to begin an episode at step t. Nothing is read before the
        # last step, so a reset there sets the state itself.
        last = jax.lax.index_in_dim(resets, -1, axis, keepdims=False)[..., None]
        state = jax.tree.map(lambda s: jnp.where(last, 0, s), state)
        resets = jnp.roll(resets, 1, axis)

    def all_steps(inputs: AnyArray, state: Any) -> tuple[Array, Any]:
        """Compute what the core would, in its scope: in the dtypes of its precision policy."""
        layer, products = _layer_from_core(own, inputs, state.hidden if pair else state)
        dtype = jnp.result_type(products, *jax.tree.leaves(state))
        state = jax.tree.map(lambda s: s.astype(dtype), state)
        outputs, *states = unroll_layers(
            common.cast(layer, products, dtype),
            inputs,
            LSTMState(*state) if pair else state,
            reset=resets,
            reverse=reverse,
            time_major=time_major,
            return_carries=return_all_states,
            implementation=implementation,
        )
        return outputs, hk.LSTMState(*states[-1]) if pair else states[-1]

    run = partial(_in_scope, own, all_steps)
    run = run if own is core else partial(_in_scope, core, run)
    return run(inputs, state)


class _Scope(hk.Module):
    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


_in_scope: Callable[..., Any] = _Scope.__call__
"""Call a function in a module's scope, as if it were the module's own `__call__`."""


def _layer_from_core(core: Any, x: AnyArray, h: Array) -> tuple[CellParams, Any]:
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
    weights = common.as_weights("Haiku's parameters", params)
    shapes = {name: weight.shape for name, weight in weights.items()}
    rows = lambda name: max(shapes.get(name, ())[:1], default=0)
    if "w" not in shapes:
        check_shapes("an hk.GRU's parameters", shapes, _gru_shapes(rows("w_i"), rows("b") // 3))
        W, U, b = (weights[name] for name in ("w_i", "w_h", "b"))
        return common.layer_from_weights(ResetBeforeGRUParams, "zrn", W, U, b, old_z=False)
    H = rows("b") // 4
    check_shapes("an hk.LSTM's parameters", shapes, _lstm_shapes(rows("w") - H, H))
    W, U = jnp.split(weights["w"], [weights["w"].shape[0] - H])
    p: Any = common.layer_from_weights(LSTMParams, "igfo", W, U, weights["b"])
    return p.replace(b=_forget_bias(p.b, 1))


def to_haiku(layer: CellParams) -> dict[str, Array]:
    """Return the parameters of an hk.GRU, or of the hk.Linear in an hk.LSTM.

    A GRU's c is added to b. The forget bias is the layer's minus one, which is
    exact from 0.5 to 2 and is rounded elsewhere, as Haiku rounds f + 1 in each step. `from_haiku`
    returns the other values bit for bit.

    Raises:
      InteropError: Haiku has no core of this kind, or none with the layer's options.
    """
    has = "dm-haiku has an LSTM, and a GRU whose reset gate acts before the product"
    order = common.counterpart(layer, {ResetBeforeGRUParams: "zrn", LSTMParams: "igfo"}, has)
    if not isinstance(layer, LSTMParams):
        return dict(zip(("w_i", "w_h", "b"), common.sides(layer, order, old_z=False), strict=True))
    layer = dataclasses.replace(layer, b=_forget_bias(layer.b, -1))
    W, U, b = common.sides(layer, order)
    return {"w": jnp.concatenate([W, U]), "b": b}


def _gru_shapes(E: int, H: int) -> dict[str, tuple[int, ...]]:
    return {"w_i": (E, 3 * H), "w_h": (H, 3 * H), "b": (3 * H,)}


def _lstm_shapes(E: int, H: int) -> dict[str, tuple[int, ...]]:
    return {"w": (E + H, 4 * H), "b": (4 * H,)}


def _forget_bias(b: Array, change: int) -> Array:
    """Return the biases of an LSTM with those of the forget gate, the first, changed."""
    H = len(b) // 4
    return jnp.concatenate([b[:H] + change, b[H:]])
