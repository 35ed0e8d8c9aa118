"""One layer of each cell over 128 steps, against torchref."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import torchref
from jaxgru import cells
from jaxgru.layers.implementations import unroll_autodiff, unroll_layer
from parity_tests import conversion
from parity_tests.conversion import REPEATED, TOLERANCE, VARIANTS, agree, to_torch


def random_state(rng: np.random.Generator, cell: str, B: int, H: int, dtype: str) -> cells.Carry:
    """Return a random carry of one layer."""
    h = conversion.random_array(rng, (B, H), dtype)
    return cells.LSTMState(h, conversion.random_array(rng, (B, H), dtype)) if cell == "lstm" else h


@pytest.mark.parametrize("dtype", REPEATED)
@pytest.mark.parametrize("run, B, T, E, H", [
    (unroll_layer, 4, 128, 24, 32), (unroll_layer, 1, 128, 3, 1), (unroll_autodiff, 4, 128, 24, 32),
])  # fmt: skip
@pytest.mark.parametrize("cell", VARIANTS)
def test_a_layer(cell, run, dtype, B, T, E, H):
    """Outputs, final carry, and the gradients of every weight, of the input and of the carry.

    The gradient is that of a random linear function of all outputs and the final carry, so that
    each takes part. `unroll_layer` has a hand-written backward pass; `unroll_autodiff` has JAX's.
    """
    rng = np.random.default_rng(0)
    params = conversion.random_cell(rng, cell, E, H, True, dtype)
    x = conversion.random_array(rng, (B, T, E), dtype)

    def of_carry():
        return jax.tree.leaves(random_state(rng, cell, B, H, dtype))

    weights = [conversion.random_array(rng, (B, T, H), dtype), *of_carry()]

    @jax.jit
    def results_and_gradients(params, x, state):
        def value(params, x, state):
            h, state = run(params, state, x.swapaxes(0, 1))
            results = [h.swapaxes(0, 1), *jax.tree.leaves(state)]
            return sum(jnp.vdot(w, r) for w, r in zip(weights, results, strict=True)), results

        return jax.grad(value, (0, 1, 2), has_aux=True)(params, x, state)

    states = {"zero": params.zero_carry(B), "a random": random_state(rng, cell, B, H, dtype)}
    for start, state in states.items():
        gradient, ours = results_and_gradients(params, x, state)

        module = conversion.torch_cell(params)
        theirs_x = to_torch(x).requires_grad_()
        (theirs_in,) = conversion.carry_to_torch((state,))
        for tensor in theirs_in:
            tensor.requires_grad_()
        h, theirs_out = torchref.models.unroll(module, theirs_x, theirs_in)
        results = [h, *theirs_out]
        sum((to_torch(w) * r).sum() for w, r in zip(weights, results, strict=True)).backward()

        gradients = {key: p.grad for key, p in module.named_parameters()}
        theirs = {
            "outputs": h,
            "final carry": theirs_out,
            "gradient of every parameter": conversion.from_state_dict(
                conversion.cell_keys(params), gradients
            ),
            "gradient of the input": theirs_x.grad,
            "gradient of the carry": [tensor.grad for tensor in theirs_in],
        }
        name = f"{cell}: a layer over {T} steps from {start} carry"
        for a, (quantity, b) in zip((ours[0], ours[1:], *gradient), theirs.items(), strict=True):
            agree(f"{name}, {quantity}", a, b, TOLERANCE[dtype])
