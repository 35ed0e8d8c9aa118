"""jaxgru's GRU against dm-haiku's, the same variant: reset before, z weights the NEW state."""

from __future__ import annotations

import jax
import pytest

from jaxgru.cells import GRUParams
from parity_tests.bridge import DTYPES
from parity_tests.foreign import SIZES, blocks_from_struct, case_of, struct_from_blocks

hk = pytest.importorskip("haiku")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_forward_and_gradients(size, dtype):
    """`hk.dynamic_unroll` of `hk.GRU`; its blocks are z, r and the candidate, in this order."""
    H, case = size[-1], case_of("gru", size, dtype)
    W, U, b = blocks_from_struct(case.layers[0], "zrn")

    def network(x, state):
        return hk.dynamic_unroll(hk.GRU(H), x, state, time_major=False)

    run = hk.without_apply_rng(hk.transform(network)).apply

    def value(params, x, carry):
        output, final = run(params, x, carry[0])
        return case.objective(output, (final,)), (output, (final,))

    params = {"gru": {"w_i": W, "w_h": U, "b": b}}
    gradients, results = jax.jit(jax.grad(value, (0, 1, 2), has_aux=True))(
        params, case.x, case.carry
    )
    by_params, *others = gradients
    blocks = by_params["gru"]
    struct = struct_from_blocks(GRUParams, "zrn", blocks["w_i"], blocks["w_h"], blocks["b"])
    struct = struct.replace(reset_gate="before")
    case.check("dm-haiku GRU", results, ((struct,), *others))
