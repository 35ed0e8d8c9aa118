"""jaxgru's GRU against Keras's `GRU(reset_after=False)`; its z weights the OLD state."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import pytest

from jaxgru.cells import GRUParams
from parity_tests.bridge import REPEATED
from parity_tests.foreign import (
    SIZES,
    blocks_from_struct,
    case_of,
    struct_from_blocks,
    z_reversed,
)

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras")
if keras.backend.backend() != "jax":
    pytest.skip("Keras was already imported with another backend", allow_module_level=True)


@pytest.mark.parametrize("dtype", REPEATED)
@pytest.mark.parametrize("size", SIZES)
def test_forward_and_gradients(size, dtype):
    """Blocks z, r, candidate; with the weights of z negated, their z is 1 minus ours."""
    B, T, E, H = size
    case = case_of("gru", size, dtype)
    tanh = jnp.tanh if dtype == "float64" else "tanh"  # Keras's own rounds float64 to float32
    layer = keras.layers.GRU(
        H, tanh, reset_after=False, return_sequences=True, return_state=True, dtype=dtype,
        kernel_initializer="zeros", recurrent_initializer="zeros",  # its own weights are not used
    )  # fmt: skip
    layer.build((B, T, E))

    seeds = [variable.value for variable in layer.non_trainable_variables]  # of its dropout, unused

    def value(variables, x, carry):
        (output, final), _ = layer.stateless_call(variables, seeds, x, initial_state=carry[0])
        return case.objective(output, (final,)), (output, (final,))

    assert [v.path.split("/")[-1] for v in layer.trainable_variables] == [
        "kernel", "recurrent_kernel", "bias",
    ]  # fmt: skip
    variables = list(map(jnp.asarray, blocks_from_struct(case.layers[0], "zrn", z_reversed)))
    gradients, results = jax.jit(jax.grad(value, (0, 1, 2), has_aux=True))(
        variables, case.x, case.carry
    )
    by_variables, *others = gradients
    struct = struct_from_blocks(GRUParams, "zrn", *by_variables, z_reversed)
    case.check("Keras GRU(reset_after=False)", results, ((struct,), *others))
