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
from jaxgru.libraries import check_shapes, common
from jaxgru.libraries.common import Stored, UnknownCell

GRU = Stored(ResetBeforeGRUParams, "zrn", ["w_i"], ["w_h"], ["b"], old_z=False)
LSTM = Stored(LSTMParams, "igfo", ["W"], ["U"], ["b"])
"""An hk.LSTM has one array w, of which these W and U are the rows."""


def dynamic_unroll(
    core: hk.RNNCore,
    input_sequence: Any,
    initial_state: Any,
    time_major: bool = True,
    reverse: bool = False,
    return_all_states: bool = False,
    unroll: int = 1,
    implementation: str = "auto",
) -> tuple[Any, Any]:
    """Compute `hk.dynamic_unroll` of an hk.GRU or hk.LSTM, with a hand-written gradient.

    All arguments but the last are Haiku's. The core's parameters stay its own, with the same names
    and initial values. Policies of `hk.mixed_precision` act as in Haiku, but do not round the state
    between the steps.

    Args:
      core: an hk.GRU, an hk.LSTM, or an `hk.ResetCore` of one. Any other is computed by
        `hk.dynamic_unroll` itself.
      input_sequence: (T, B, F), or (T, F) for one sequence; for a ResetCore, a pair of it and
        `should_reset` (T, B), which acts before that step is read, also with `reverse`.
      unroll: has no effect on an hk.GRU or hk.LSTM.
      implementation: as for `jaxgru.unroll`; forward mode needs "autodiff". It is refused with a
        core that Haiku itself computes.
    """
    own = core.core if type(core) is hk.ResetCore else core
    try:
        common.check_class("the core", own, (hk.GRU, hk.LSTM), "Haiku")
    except UnknownCell as unknown:
        common.check_absent(unknown, implementation=implementation)
        order = time_major, reverse, return_all_states, unroll
        return hk.dynamic_unroll(core, input_sequence, initial_state, *order)
    resets = None
    if own is not core:
        input_sequence, resets = input_sequence
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

    options = dict(reverse=reverse, time_major=time_major, implementation=implementation)
    options["return_carries"] = return_all_states

    def all_steps(inputs: AnyArray, state: Any) -> tuple[Array, Any]:
        """Compute what the core would, in its scope: in the dtypes of its precision policy."""
        layer, products = _layer_from_core(own, inputs, state.hidden if pair else state)
        carry = LSTMState(*state) if pair else state
        outputs, *states = common.run_cell(layer, inputs, carry, products, reset=resets, **options)
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
    pair, E, H = isinstance(core, hk.LSTM), x.shape[-1], core.hidden_size
    holder = hk.Linear(4 * H) if pair else core
    gru = {"w_i": (E, 3 * H), "w_h": (H, 3 * H), "b": (3 * H,)}
    shapes = {"w": (E + H, 4 * H), "b": (4 * H,)} if pair else gru
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
    """
    weights = common.as_weights("Haiku's parameters", params)
    if "w" not in weights:
        return common.from_arrays("an hk.GRU's parameters", GRU, weights)
    where, shapes = "an hk.LSTM's parameters", {n: weight.shape for n, weight in weights.items()}
    H = max(shapes.get("b", ())[:1], default=0) // 4
    rows = max(*shapes["w"][:1], H, 0)
    check_shapes(where, shapes, {"w": (rows, 4 * H), "b": (4 * H,)})
    W, U = jnp.split(weights["w"], [rows - H])
    p: Any = common.from_arrays(where, LSTM, {"W": W, "U": U, "b": weights["b"]})
    return dataclasses.replace(p, b=p.b.at[:H].add(1))


def to_haiku(layer: CellParams) -> dict[str, Array]:
    """Return the parameters of an hk.GRU, or of the hk.Linear in an hk.LSTM.

    A GRU's c is added to b. The forget bias is the layer's minus one, which is exact from 0.5 to 2
    and is rounded elsewhere, as Haiku rounds f + 1 in each step. `from_haiku` returns the other
    values bit for bit.
    """
    has = "dm-haiku has an LSTM, and a GRU whose reset gate acts before the product"
    stored = common.counterpart(layer, {row.cls: row for row in (GRU, LSTM)}, has)
    if isinstance(layer, LSTMParams):
        layer = dataclasses.replace(layer, b=layer.b.at[: len(layer.b) // 4].add(-1))
    arrays = common.to_arrays(layer, stored)
    if stored is GRU:
        return arrays
    return {"w": jnp.concatenate([arrays["W"], arrays["U"]]), "b": arrays["b"]}
