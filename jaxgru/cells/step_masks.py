"""What the steps of a layer need besides their input."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxgru.arrays import Tree


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


class StepMasks(NamedTuple):
    """What the steps of a layer need besides their input; arrays begin with T and B.

    reset: where True, the carry is set to `reset_carry` before the step.
    reset_carry: the carry that a reset sets, without T; None: zeros.
    valid: where False, the step is padding: the carry stays.
    zoneout: zoneout, in the form of the carry: the units that take their new value, or the share of
      it that they take.
    hidden: dropout of h', inside the recurrence.
    recurrent: dropout of h where it enters the products with weights, without T: at every step.
    input: dropout of the first layer's x. output: of what the layer above reads of h.
    """

    reset: Bool[Array, "*T B"] | None = None
    reset_carry: Tree = None
    valid: Bool[Array, "*T B"] | None = None
    zoneout: Tree = None
    hidden: Mask = NO_MASK
    recurrent: Mask = NO_MASK
    input: Mask = NO_MASK
    output: Mask = NO_MASK

    def each_step(self) -> StepMasks:
        """Return what a scan over time slices."""
        return StepMasks(self.reset, None, self.valid, self.zoneout, Mask(self.hidden.keep))

    def at(self, step: StepMasks) -> StepMasks:
        """Return the masks of one step, given its slice of `each_step`."""
        return self._replace(
            reset=step.reset,
            valid=step.valid,
            zoneout=step.zoneout,
            hidden=Mask(step.hidden.keep, self.hidden.scale),
        )

    def reversed(self) -> StepMasks:
        """Return the masks from the last step to the first."""
        backward = lambda tree: jax.tree.map(lambda leaf: leaf[::-1] if leaf.ndim else leaf, tree)
        return backward(self)._replace(reset_carry=self.reset_carry, recurrent=self.recurrent)

    def with_flags_of(self, other: StepMasks) -> StepMasks:
        """Return these masks of dropout with the resets and the padding of other masks."""
        return self._replace(reset=other.reset, reset_carry=other.reset_carry, valid=other.valid)


NO_MASKS = StepMasks()


def before_each(first: Array, after: Array) -> Array:
    """Return the state before each step, given the first state and the state after each step."""
    return jnp.concatenate([first[None], after[:-1]])


def mixed(zoneout: Array, new: Array, old: Array | float) -> Array:
    """Return the new values of the units that take them, else the old; or a mean of both."""
    if zoneout.dtype == bool:
        return jnp.where(zoneout, new, old)
    zoneout = zoneout.astype(new.dtype)
    return zoneout * new + (1 - zoneout) * old
