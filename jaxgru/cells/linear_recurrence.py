"""Recurrences that are linear in their state: h' = a ⊙ h + b, with a and b of the input alone.

`LinearCell` is the contract: a cell says what a and b are, and the rest is written here, once.

Two steps in a row are one such step, so all of them can be computed in log₂ T passes
(`jax.lax.associative_scan`) instead of T. A step that begins an episode is one without h: its flag
selects b, so that nothing of the episode before passes, not even NaN.

The passes move more memory than T steps, so a CPU, which has few units to fill, computes the steps
in turn. On 2 cores, a minGRU (E = 64), forward and backward, in ms:

    B   T      H      in turn   in parallel   a GRU
    1   4,096  64        8.9          18.9         24.1
    16  256    128       9.4          14.2         95.6
    64  128    512       546           727        1,324
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxgru.arrays import Size, plus
from jaxgru.cells.carry import Hidden
from jaxgru.cells.contract import Cell
from jaxgru.cells.layout import Layout
from jaxgru.cells.products import Lookup, apply_to, matmul
from jaxgru.cells.step_masks import StepMasks, before_each, mixed


class LinearCell(Cell[Hidden]):
    """The base class of cells whose step is linear in h: h' = a ⊙ h + b.

    a and b depend on the input alone, and a subclass says in `coefficients` what they are. Steps in
    turn and in parallel, their gradient, resets, padding, dropout and zoneout follow from that.

    By default, `inputs` is x·W + b, with W (E, G·H) and biases b (G·H) of the G `gates`.
    """

    W: Float[Array, "E GH"]
    b: Float[Array, "GH"]
    parallel_masks: ClassVar[bool] = True

    def sizes(self) -> tuple[int, int] | None:
        G = len(self.gates)
        fits = self.W.ndim == 2 and not self.W.shape[1] % G and self.b.shape == self.W.shape[1:]
        return (len(self.W), len(self.b) // G) if fits else None

    def inputs(self, x: Float[Array, "*n E"]) -> Float[Array, "*n GH"]:
        """Return x·W + b."""
        return plus(matmul(x, self.W), self.b)

    def coefficients(
        self, inputs: Float[Array, "*n GH"]
    ) -> tuple[Float[Array, "*n H"], Float[Array, "*n H"]]:
        """Return a and b of any steps, given what `inputs` returns of them."""
        raise NotImplementedError

    def step(self, layout: Layout, h: Hidden, inputs: Float[Array, "B GH"]) -> Hidden:
        a, b = self.coefficients(inputs)
        return a * h + b

    def parallel(
        self, h: Hidden, x: Float[Array, "T B E"] | Lookup, masks: StepMasks
    ) -> tuple[Float[Array, "T B H"], Hidden]:
        """Compute all steps at once, with resets, padding, dropout and zoneout."""
        a, b = self.coefficients(apply_to(self.inputs, x).astype(h.dtype))
        after = linear_recurrence(with_masks(a, b, masks), h)
        return after, after[-1]


class LinearSteps(NamedTuple):
    """Steps h' = a ⊙ h + b or, where `begins`, h' = b. None: no step begins an episode."""

    a: Float[Array, "*T B H"]
    b: Float[Array, "*T B H"]
    begins: Bool[Array, "*T B 1"] | None = None

    def __call__(self, h: Array) -> Array:
        """Return the state after these steps."""
        after = self.a * h + self.b
        return after if self.begins is None else jnp.where(self.begins, self.b, after)

    def then(self, later: LinearSteps) -> LinearSteps:
        """Return the steps that compute these, and then the later ones."""
        a = later.a * self.a
        b = later(self.b)
        if self.begins is None or later.begins is None:
            return LinearSteps(a, b)
        return LinearSteps(a, b, self.begins | later.begins)


def with_masks(a: Float[Array, "T B H"], b: Float[Array, "T B H"], masks: StepMasks) -> LinearSteps:
    """Return the steps with their dropout, zoneout, padding and resets, each of which is linear.

    The order is that of `layers.over_time.advance`, but for a reset, which comes first there: here,
    it is a step that is taken from `reset_carry` and no longer reads h.
    """
    a = masks.hidden(a)
    b = masks.hidden(b)
    if masks.zoneout is not None:  # h' = 1 ⊙ h + 0 where a unit keeps its value
        a = mixed(masks.zoneout, a, 1)
        b = mixed(masks.zoneout, b, 0)
    if masks.valid is not None:
        valid = masks.valid[..., None]
        a = jnp.where(valid, a, 1)
        b = jnp.where(valid, b, 0)
    if masks.reset is None:
        return LinearSteps(a, b)
    begins = masks.reset[..., None]
    if masks.reset_carry is not None:
        # What no reset reads may be NaN, and a's gradient has it as a factor
        start = jnp.where(begins, masks.reset_carry.astype(b.dtype)[None], 0)
        b = a * start + b
    return LinearSteps(a, b, begins)


@jax.custom_vjp
def linear_recurrence(steps: LinearSteps, first: Float[Array, "B H"]) -> Float[Array, "T B H"]:
    """Return h after every step, given the first h. Its gradient has the same form."""
    return every_state(False, steps, first)


def every_state(reverse: bool, steps: LinearSteps, first: Array) -> Array:
    """Compute `linear_recurrence`, differentiated by JAX."""
    T: Size = steps.a.shape[0]
    if not isinstance(T, int):  # symbolic, within `jax.export`
        return in_turn(reverse, steps, first)
    return jax.lax.platform_dependent(
        steps, first, cpu=partial(in_turn, reverse), default=partial(in_parallel, reverse)
    )


def in_turn(reverse: bool, steps: LinearSteps, first: Array) -> Array:
    """Compute `linear_recurrence` in T steps."""

    def step(h: Array, now: LinearSteps) -> tuple[Array, Array]:
        after = now(h)
        return after, after

    return jax.lax.scan(step, first, steps, reverse=reverse)[1]


def in_parallel(reverse: bool, steps: LinearSteps, first: Array) -> Array:
    """Compute `linear_recurrence` in log₂ T passes."""
    i = -1 if reverse else 0
    step = jax.tree.map(lambda leaf: leaf[i], steps)
    steps = steps._replace(b=steps.b.at[i].set(step(first)))
    return jax.lax.associative_scan(LinearSteps.then, steps, reverse=reverse).b


def _forward(steps: LinearSteps, first: Array) -> tuple[Array, tuple[LinearSteps, Array, Array]]:
    h = every_state(False, steps, first)
    return h, (steps, h, first)


def _backward(residuals: tuple[LinearSteps, Array, Array], dh: Array) -> tuple[LinearSteps, Array]:
    steps, h, first = residuals
    after_each = lambda leaf: jnp.concatenate([leaf[1:], jnp.zeros_like(leaf[:1])])
    later = jax.tree.map(after_each, steps)  # of each step, the one that reads its h
    db = every_state(True, later._replace(b=dh), jnp.zeros_like(first))
    da = db * before_each(first, h)
    d_first = steps.a[0] * db[0]
    if steps.begins is not None:
        da = jnp.where(steps.begins, 0, da)
        d_first = jnp.where(steps.begins[0], 0, d_first)
    return LinearSteps(da, db), d_first


linear_recurrence.defvjp(_forward, _backward)
