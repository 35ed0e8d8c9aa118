"""The minGRU, whose steps can run in parallel.

The gates do not read h, so a step is h' = a ⊙ h + b with known a and b, and two steps in a row are
one such step. All of them can then be computed in log₂ T passes (`jax.lax.associative_scan`)
instead of T. Resets (a = 0), padding (a = 1, b = 0) and dropout inside the recurrence (a mask times
both) are such steps, too.

The passes move more memory than T steps, so a CPU, which has few units to fill, computes the steps
one after another. On 2 cores (E = 64), forward and backward, in ms:

    B   T      H      one by one   in parallel   a GRU
    1   4,096  64        8.9          18.9         24.1
    16  256    128       9.4          14.2         95.6
    64  128    512       546           727        1,324
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.nn import sigmoid
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxgru.cells.carry import Hidden, Size
from jaxgru.cells.contract import Cell, register
from jaxgru.cells.initial_weights import gates, initializers
from jaxgru.cells.layout import Layout
from jaxgru.cells.marks import Marks, before_each
from jaxgru.cells.products import Lookup, apply_to, dot
from jaxgru.cells.promotion import plus
from jaxgru.cells.pytrees import struct


@struct
class MinGRUParams(Cell[Hidden]):
    """A minGRU layer: W for the input, b the biases, of z and n side by side.

        z  = σ(x·Wz + bz)                update gate
        n  = x·Wn + bn                   candidate
        h' = (1 − z) ⊙ h + z ⊙ n

    See Feng et al. 2024 (arXiv 2410.01201, section 3.1). The paper's version in log space, with
    h > 0, is another cell.
    """

    W: Float[Array, "E GH"]
    b: Float[Array, "GH"]
    gates: ClassVar[str] = "zn"
    every_mark: ClassVar[bool] = True

    def sizes(self) -> tuple[int, int] | None:
        fits = self.W.ndim == 2 and not self.W.shape[1] % 2 and self.b.shape == self.W.shape[1:]
        return (len(self.W), len(self.b) // 2) if fits else None

    def inputs(self, x: Float[Array, "*n E"]) -> Float[Array, "*n GH"]:
        """Return x·W + b."""
        return plus(dot(x, self.W), self.b)

    def step(self, layout: Layout, h: Hidden, a: Float[Array, "B GH"]) -> Hidden:
        z, n = jnp.split(a, 2, axis=-1)
        z = sigmoid(z)
        return (1 - z) * h + z * n

    def all_steps(
        self, h: Hidden, x: Float[Array, "T B E"] | Lookup, marks: Marks
    ) -> tuple[Float[Array, "T B H"], Hidden]:
        """Compute all steps at once, with resets, padding and dropout."""
        z, n = jnp.split(apply_to(self.inputs, x).astype(h.dtype), 2, axis=-1)
        z = sigmoid(z)
        a, b = marks.state(1 - z), marks.state(z * n)
        if marks.real is not None:
            real = marks.real[..., None]
            a, b = jnp.where(real, a, 1), jnp.where(real, b, 0)
        if marks.reset is not None:  # also at a step of padding
            begins = marks.reset[..., None]
            if marks.initial is not None:
                b = jnp.where(begins, a * marks.initial.astype(h.dtype)[None] + b, b)
            a = jnp.where(begins, 0, a)
        after = linear_recurrence(a, b, h)
        return after, after[-1]


@register
def init_min_gru(
    key: PRNGKeyArray,
    in_features: int,
    hidden_dim: int,
    *,
    dtype: DTypeLike = jnp.float32,
    kernel_init: Initializer | None = None,
    bias_init: Initializer | None = None,
) -> MinGRUParams:
    """Draw the initial parameters of a minGRU layer.

    W and b are uniform in ±1/√E, as in PyTorch's `nn.Linear`, which the paper uses.

    Args:
      in_features: E, the size of the input at a step.
      hidden_dim: H, the size of the state.
      dtype: of the parameters, floating-point.
      kernel_init: as for `init_gru`.
      bias_init: as for `init_gru`.

    Raises:
      ValueError: an argument is not as described above, or two do not go together; the message says
        which and what would be right.
    """
    W, _, b = initializers(
        in_features, hidden_dim, dtype, "pytorch", kernel_init, bias_init=bias_init
    )
    k = jax.random.split(key, 4)
    return MinGRUParams(W=gates(map(W, k[::2])), b=gates(map(b, k[1::2])))


@jax.custom_vjp
def linear_recurrence(
    a: Float[Array, "T B H"], b: Float[Array, "T B H"], first: Float[Array, "B H"]
) -> Float[Array, "T B H"]:
    """Return h' = a ⊙ h + b of every step, given the first h. Its gradient has the same form."""
    return every_step(False, a, b, first)


def every_step(reverse: bool, a: Array, b: Array, first: Array) -> Array:
    """Compute `linear_recurrence`, differentiated by JAX."""
    T: Size = a.shape[0]
    if not isinstance(T, int):  # symbolic, within `jax.export`
        return one_by_one(reverse, a, b, first)
    ways = [partial(way, reverse) for way in (one_by_one, in_parallel)]
    return jax.lax.platform_dependent(a, b, first, cpu=ways[0], default=ways[1])


def one_by_one(reverse: bool, a: Array, b: Array, first: Array) -> Array:
    """Compute `linear_recurrence` in T steps."""
    step = lambda h, now: (now[0] * h + now[1],) * 2
    return jax.lax.scan(step, first, (a, b), reverse=reverse)[1]


def in_parallel(reverse: bool, a: Array, b: Array, first: Array) -> Array:
    """Compute `linear_recurrence` in log₂ T passes."""

    def two_steps(one: tuple[Array, Array], two: tuple[Array, Array]) -> tuple[Array, Array]:
        return two[0] * one[0], two[0] * one[1] + two[1]

    i = -1 if reverse else 0
    b = b.at[i].add(a[i] * first)
    return jax.lax.associative_scan(two_steps, (a, b), reverse=reverse)[1]


def _forward(a: Array, b: Array, first: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    h = every_step(False, a, b, first)
    return h, (a, h, first)


def _backward(residuals: tuple[Array, Array, Array], dh: Array) -> tuple[Array, Array, Array]:
    a, h, first = residuals
    zeros = jnp.zeros_like(first)
    of_later = jnp.concatenate([a[1:], zeros[None]])  # a of the step that reads this one's h
    db = every_step(True, of_later, dh, zeros)
    return db * before_each(first, h), db, a[0] * db[0]


linear_recurrence.defvjp(_forward, _backward)
