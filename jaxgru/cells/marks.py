"""What the steps of a layer need besides their input."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxgru.cells.carry import Tree


class Mask(NamedTuple):
    """A dropout mask: which units are kept, and the factor 1/(1 − rate) that scales them."""

    keep: Bool[Array, "... B H"] | None = None
    scale: Float[Array, ""] | None = None

    def __call__(self, h: Array) -> Array:
        """Return h with dropped units set to zero and the others scaled."""
        if self.keep is None or self.scale is None:
            return h
        return jnp.where(self.keep, h * self.scale.astype(h.dtype), 0)


NO_MASK = Mask()


class Marks(NamedTuple):
    """What the steps of a layer need besides their input; arrays begin with T and B.

    reset: where True, the carry is set to `initial` before the step.
    initial: the carry that a reset sets, without T; None: zeros.
    real: where False, the step is padding: the carry stays.
    update: zoneout, in the form of the carry: the units that take their new value, or the share of
      it that they take.
    state: dropout of h', inside the recurrence.
    product: dropout of h where it enters the products with weights, without T: at every step.
    input: dropout of the first layer's x. output: of what the layer above reads of h.
    """

    reset: Bool[Array, "*T B"] | None = None
    initial: Tree = None
    real: Bool[Array, "*T B"] | None = None
    update: Tree = None
    state: Mask = NO_MASK
    product: Mask = NO_MASK
    input: Mask = NO_MASK
    output: Mask = NO_MASK

    def each_step(self) -> Marks:
        """Return what a scan over time slices."""
        return Marks(self.reset, None, self.real, self.update, Mask(self.state.keep))

    def at(self, step: Marks) -> Marks:
        """Return the marks of one step, given its slice of `each_step`."""
        return self._replace(
            reset=step.reset,
            real=step.real,
            update=step.update,
            state=Mask(step.state.keep, self.state.scale),
        )

    def reversed(self) -> Marks:
        """Return the marks from the last step to the first."""
        backward = lambda tree: jax.tree.map(lambda leaf: leaf[::-1] if leaf.ndim else leaf, tree)
        return backward(self)._replace(initial=self.initial, product=self.product)

    def marked(self, other: Marks) -> Marks:
        """Return these masks of dropout with the resets and the padding of other marks."""
        return self._replace(reset=other.reset, initial=other.initial, real=other.real)


NO_MARKS = Marks()


def before_each(first: Array, after: Array) -> Array:
    """Return the state before each step, given the first state and the state after each step."""
    return jnp.concatenate([first[None], after[:-1]])


def mixed(update: Array, new: Array, old: Array | float) -> Array:
    """Return the new values of the units that are updated, else the old; or a mean of both."""
    if update.dtype == bool:
        return jnp.where(update, new, old)
    update = update.astype(new.dtype)
    return update * new + (1 - update) * old
