"""The state that a layer carries from step to step: h, or a tuple that begins with h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
from jax import export
from jaxtyping import Array, Float

from jaxgru.arrays import Tree
from jaxgru.printing import shown, type_name

Hidden: TypeAlias = Float[Array, "B H"]
"""The output h of one step."""
Carry: TypeAlias = Hidden | tuple[Any, ...]
"""The state of one layer, of any cell: h, or a tuple that begins with h."""
C = TypeVar("C", bound=Array | tuple[Any, ...])
"""The carry of one cell: `Hidden`, `LSTMState` …; or of many steps, with an axis T."""


class LSTMState(NamedTuple):
    """The carry of an LSTM: the output h and the cell state c, (B, H) each.

    With a projection, h is (B, p). PyTorch, Keras and Haiku have the same order, Flax has (c, h).
    """

    h: Array
    c: Array


export.register_namedtuple_serialization(LSTMState, serialized_name="jaxgru.LSTMState")


def hidden(carry: Tree) -> Float[Array, "*T B H"]:
    """Return what the layer above reads of a carry: the first entry of a tuple, else the carry."""
    return carry[0] if isinstance(carry, tuple) else carry


def besides_hidden(carry: Tree) -> list[Array]:
    """Return the other parts of a carry: c of an LSTM."""
    return jax.tree.leaves(carry)[1:]


def with_hidden(carry: C, h: Array, others: Sequence[Array] | None = None) -> C:
    """Return the carry with its h, and maybe its other parts, replaced."""
    parts = [h, *(besides_hidden(carry) if others is None else others)]
    return jax.tree.unflatten(jax.tree.structure(carry), parts)


def named(name: str, state: Tree, wanted: type) -> Tree:
    """Return a layer's state; one with named parts may be a dict, as checkpoints return it.

    Parts without names are refused: by position, a pair in Flax's order, (c, h), would be taken
    for (h, c). So is a dict for a state whose parts have no names.
    """
    fields: tuple[str, ...] = getattr(wanted, "_fields", ())
    if isinstance(state, wanted) or not (fields or isinstance(state, dict)):
        return state
    if isinstance(state, dict):
        if fields and state.keys() == set(fields):
            return wanted(**state)
        seen = f"a dict with the keys {', '.join(map(shown, state))}"
    else:
        seen = f"an array {state.shape}" if hasattr(state, "shape") else type_name(state)
    if not fields:
        kind = "a tuple" if issubclass(wanted, tuple) else "an array"
        raise ValueError(f"{name} of a layer is {seen}; it must be {kind}, as from initial_carry.")
    parts = ", ".join(f"{field}=…" for field in fields)
    keys = " and ".join(fields)
    raise ValueError(
        f"{name} of a layer is {seen}; it must be {wanted.__name__}({parts}), or a dict with the "
        f"keys {keys}."
    )
