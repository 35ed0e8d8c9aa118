"""What cells with gates share: their input's part of the gates, their sizes, their functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxgru.arrays import AnyArray, Size, Tree, plus
from jaxgru.cells.carry import C, LSTMState
from jaxgru.cells.contract import Cell, Recurrence, Weights, sizes
from jaxgru.cells.layout import Layout
from jaxgru.cells.products import matmul
from jaxgru.errors import check_one_of
from jaxgru.printing import shown
from jaxgru.pytrees import options_of

StateWeights: TypeAlias = Float[Array, "H GH"] | Float[Array, "n k Gk"]  # or n diagonal blocks
Function: TypeAlias = Callable[[Array], Array]

ACTIVATIONS: dict[str, Function] = {"tanh": jnp.tanh, "relu": jax.nn.relu}
"""What a layer's `activation` can name."""


@dataclass(frozen=True)
class Equations(Recurrence[C]):
    """A recurrence whose functions have options; its gradients are those of the defaults."""

    phi: Function = jnp.tanh
    clip: float | None = None

    def clipped(self, a: Array) -> Array:
        """Return the argument of a function, within ±clip unless that is None."""
        return a if self.clip is None else jnp.clip(a, -self.clip, self.clip)

    def sigmoid(self, a: Array) -> Array:
        """Return σ of the clipped argument."""
        return jax.nn.sigmoid(self.clipped(a))


def num_blocks_of(weights: AnyArray | jax.ShapeDtypeStruct) -> str:
    """Return the number of diagonal blocks, for `repr`; "" of a whole matrix."""
    return f", num_blocks {len(weights)}" if weights.ndim == 3 else ""


class Gated(Cell[C]):
    """Cells with W for the input, U for the state and biases b, each with gates side by side."""

    W: Float[Array, "E GH"]
    U: StateWeights
    b: Float[Array, "GH"]
    recurrent: ClassVar[tuple[str, ...]] = ("U",)

    def inputs(self, x: Float[Array, "*n E"]) -> Float[Array, "*n GH"]:
        """Return x·W + b."""
        return plus(matmul(x, self.W), self.b)

    def hidden_sizes(self) -> str:
        return super().hidden_sizes() + num_blocks_of(self.U)


class Activated(Gated[C]):
    """Those whose functions have options."""

    activation: str
    clip: float | None

    def __post_init__(self) -> None:
        check_one_of("activation", self.activation, ACTIVATIONS)
        clip = cast(object, self.clip)
        is_positive = isinstance(clip, int | float) and 0 < clip < float("inf")
        if clip is not None and not is_positive:
            raise ValueError(f"clip is {shown(clip)}; it must be None or a positive number.")

    def functions(self) -> tuple[Function, float | None]:
        """Return φ, and what the arguments of the functions are clipped to."""
        return ACTIVATIONS[self.activation], self.clip


class ByHand(Gated[C]):
    """Those with a gradient written by hand, which is that without options."""

    def equations(self) -> tuple[Recurrence[C], Weights]:
        """Return the recurrence and its weights."""
        raise NotImplementedError

    def step(self, layout: Layout, carry: C, a: Float[Array, "B GH"]) -> C:
        return ByHand.prepared_step(self)(layout, carry, a)

    def prepared_step(self) -> Callable[[Layout, C, Array], C]:
        recurrence, U = self.equations()

        def step(layout: Layout, carry: C, a: Array) -> C:
            gates = layout.split(a, recurrence.num_gates)
            carry, _ = recurrence.step(layout, layout.weights(U), carry, gates)
            return carry

        return step

    def custom_gradient(self) -> tuple[Recurrence[C], Weights] | None:
        return None if options_of(self) else self.equations()


class AnyLSTM(Gated[LSTMState]):
    """What the LSTMs share: the carry and, unless they say otherwise, the gates f, i, o and g."""

    gates: ClassVar[str] = "fiog"

    def zero_carry(self, batch_size: Size) -> LSTMState:
        """Return the carry before the first step: zeros for h and c, in the biases' dtype."""
        zeros: Callable[[int], Array] = lambda units: jnp.zeros((batch_size, units), self.b.dtype)
        H = len(self.b) // len(self.gates)
        return LSTMState(zeros(sizes(self)[1]), zeros(H))  # each can be donated


def sizes_of_gates(
    G: int,
    W: Tree,
    U: Tree,
    vectors: Sequence[tuple[int, Tree]],
    state_size: int | None = None,
) -> tuple[int, int] | None:
    """Return (E, H) if W is (E, G·H), U (H, G·H) and each vector, if any, (its gates · H,).

    The leaves can be arrays or their shapes. U can also be n blocks (n, k, G·k), where H = n·k, or
    (S, G·H) with a `state_size` S. Returns
    None if the shapes contradict each other.
    """

    def shape(leaf: Tree) -> tuple[int, ...]:
        return getattr(leaf, "shape", ())

    if len(shape(W)) != 2 or shape(W)[1] % G:
        return None
    E = shape(W)[0]
    H = shape(W)[1] // G
    n = shape(U)[0] if len(shape(U)) == 3 else 1
    k = H / n
    fits = shape(U) in ((n, k, G * k), (H if state_size is None else state_size, G * H))
    fits &= all(shape(vector) == (count * H,) for count, vector in vectors if vector is not None)
    return (E, H) if fits else None
