"""What the comparisons with foreign implementations share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgru.cells import CellParams, LSTMState
from jaxgru.cells.base import Steps
from jaxgru.layers.implementations import unroll_layer
from parity_tests.bridge import TOLERANCE, agree, random_array, random_cell

SIZES = [(3, 20, 7, 11), (1, 1, 1, 1), (2, 128, 64, 48)]
"""(B, T, E, H) of each comparison."""


class Case:
    """One layer or a stack: parameters, input (B, T, E), carry, and jaxgru's results.

    The gradient is that of a random linear function of all outputs and the final carries.
    """

    def __init__(
        self, cell: str, B: int, T: int, E: int, H: int, dtype: str, layers: int, reset_gate: str
    ):
        rng = np.random.default_rng(0)
        self.layers: tuple[CellParams, ...] = tuple(
            random_cell(rng, cell, H if i else E, H, False, dtype) for i in range(layers)
        )
        if reset_gate == "after":  # only this variant has a bias inside the reset
            self.layers = tuple(
                layer.replace(reset_gate=reset_gate, cn=random_array(rng, (H,), dtype, 0.5))
                for layer in self.layers
            )
        self.x = random_array(rng, (B, T, E), dtype)
        draw = lambda: random_array(rng, (B, H), dtype)
        self.carry = tuple(
            LSTMState(draw(), draw()) if cell == "lstm" else draw() for _ in range(layers)
        )
        self.of_output = random_array(rng, (B, T, H), dtype)
        self.of_carry = jax.tree.map(lambda _: draw(), self.carry)
        variant = ", reset after" if reset_gate == "after" else ""
        self.dtype, self.name = dtype, f"{cell}{variant}, {layers} layer{'s'[: layers > 1]}"

    def objective(self, output: jax.Array, carry: Any) -> jax.Array:
        """Return the linear function whose gradient is compared, for implementations in JAX."""
        terms = jax.tree.map(jnp.vdot, (self.of_output, self.of_carry), (output, carry))
        return sum(jax.tree.leaves(terms))

    @functools.cached_property
    def ours(self) -> tuple[Any, Any]:
        """(output (B, T, H), final carries) and the gradients of layers, input and carries."""

        @jax.jit
        def run(layers, x, carry):
            def value(layers, x, carry):
                h, new = x.swapaxes(0, 1), []
                for layer, state in zip(layers, carry, strict=True):
                    h, state = unroll_layer(layer, state, Steps(h))
                    new.append(state)
                results = h.swapaxes(0, 1), tuple(new)
                return self.objective(*results), results

            gradients, results = jax.grad(value, (0, 1, 2), has_aux=True)(layers, x, carry)
            return results, gradients

        return run(self.layers, self.x, self.carry)

    def check(self, implementation: str, results: Any, gradients: Any = None) -> None:
        """Compare with their (output, carries) and, if given, gradients (layers, x, carry).

        Arrays are in our order; gradients of layers are jaxgru's structs.
        """
        ours, our_gradients = self.ours
        tolerance = TOLERANCE[self.dtype]
        for part, a, b in zip(["outputs", "final carry"], ours, results, strict=True):
            agree(f"{self.name}: {part}", a, b, tolerance, implementation)
        if gradients is None:
            return
        parts = ["gradient of every parameter", "gradient of the input", "gradient of the carry"]
        for part, a, b in zip(parts, our_gradients, gradients, strict=True):
            agree(f"{self.name}: {part}", a, b, tolerance, implementation)


@functools.lru_cache
def case_of(
    cell: str,
    size: tuple[int, int, int, int],
    dtype: str,
    layers: int = 1,
    reset_gate: str = "before",
) -> Case:
    """Return a case, cached: several implementations are compared with the same results."""
    return Case(cell, *size, dtype, layers, reset_gate)


def struct_from_blocks(
    cls: type, gates: str, W: Any, U: Any, b: Any, sign: Callable[[str], int] = lambda gate: 1
) -> CellParams:
    """Return a cell's struct from arrays whose last axis is a concatenation of these gates.

    sign: −1 for a gate with the opposite meaning (their z is 1 − ours: σ(−a) = 1 − σ(a)).
    """
    fields = {}
    for name, blocks in [("W", W), ("U", U), ("b", b)]:
        for gate, block in zip(gates, np.split(np.asarray(blocks), len(gates), -1), strict=True):
            fields[name + gate] = sign(gate) * block
    return cls(**fields)


def blocks_from_struct(
    p: CellParams, gates: str, sign: Callable[[str], int] = lambda gate: 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Invert `struct_from_blocks`: return W (E, gates · H), U (H, gates · H), b (gates · H)."""
    join = lambda name: np.concatenate(
        [sign(gate) * np.asarray(getattr(p, name + gate)) for gate in gates], axis=-1
    )
    return join("W"), join("U"), join("b")


def z_reversed(gate: str) -> int:
    """Return the sign for implementations whose z weights the OLD state."""
    return -1 if gate == "z" else 1
