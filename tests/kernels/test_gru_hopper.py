"""The Hopper kernel without a GPU: interpreted against a scan, and lowered for CUDA.

The scan rounds the products' operands to bfloat16 where the kernel does.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from gru_scan import (
    assert_twenty_equal_runs,
    distances,
    in_a_cluster,
    needs_a_gpu,
    problem,
    value_and_gradients,
)
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from jaxgru.cells.gru import fast as fast_gru
from jaxgru.cells.gru import init_gru
from jaxgru.kernels import gru_hopper
from jaxgru.kernels.gru_hopper import clusters, gru, gru_forward, supports, supports_layer
from jaxgru.layers import unroll_layer


@pytest.fixture(autouse=True)
def float32():
    with jax.enable_x64(False):
        yield


@pytest.mark.parametrize(
    "T, B, H, cluster, masked",
    [
        pytest.param(3, 66, 64, 1, False, marks=pytest.mark.slow),
        pytest.param(1, 3, 64, 1, True, marks=pytest.mark.slow),
        (2, 5, 128, 1, True),
        pytest.param(3, 66, 128, 2, True, marks=in_a_cluster),
        pytest.param(1, 5, 384, 6, False, marks=in_a_cluster),  # more tiles than slots
    ],
)
def test_interpreted(T, B, H, cluster, masked):
    """And no warpgroup reads what another may still be writing, says the interpreter.

    Most numbers differ by 1e-8 on average. Where a sum in another order rounds to the next
    bfloat16, a row of the batch and what is summed over it differ by 1e-6. The float32 scan is 1e-4
    away.
    """
    interpret = InterpretGPUParams(detect_races=True)
    kernel = lambda *x: gru(*x, cluster, interpret)
    for mean, most, rounding, most_rounding in distances(kernel, T, B, H, masked).values():
        assert mean < 1e-5 and most < 3e-4
        assert 2e-5 < rounding < most_rounding < 4e-3
    assert not gpu_callbacks.get_races().races_found


on_a_gpu = [
    (H, cluster, fenced)
    for H in (64, 128, 256, 320, 512)
    for cluster in clusters(H)
    for fenced in (False, True)[: 1 + (cluster > 1)]
]


@needs_a_gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("H, cluster, fenced", on_a_gpu)
def test_values_on_a_gpu(H, cluster, fenced, masked):
    """Tensor cores sum in an order of their own, so that more sums round to the next bfloat16.

    The scan with its products summed in another order, on a CPU, is up to 1e-5 away on average (dUn
    at 512 units) and 2e-4 at most; a wrong tile or step is 1e-2 away. What is rounded moves da by
    1.4e-5 only, but h by 2.8e-5 or more: the kernel must do that, too.
    """
    found = distances(lambda *x: gru(*x, cluster, False, fenced), 8, 130, H, masked)
    for name, numbers in found.items():
        print(f"H {H}, cluster {cluster}, {name}:", *(f"{x:.1e}" for x in numbers))
    for mean, most, _, most_rounding in found.values():
        assert mean < 1e-4 and most < 2e-3 and most_rounding < 4e-3
    assert found["h"][2] > 2e-5


@needs_a_gpu
@pytest.mark.parametrize("H, cluster, fenced", on_a_gpu)
def test_twenty_runs_are_equal_on_a_gpu(H, cluster, fenced):
    assert_twenty_equal_runs(lambda *x: gru(*x, cluster, False, fenced), 130, H)


@pytest.mark.parametrize(
    "H, cluster, masked",
    [(128, 1, True), pytest.param(256, 4, True, marks=pytest.mark.slow), (512, 8, False)],
)
def test_lowers_for_cuda(H, cluster, masked):
    """Types, layouts and shared memory of both kernels, for a Hopper that is not here."""
    arguments, dh = jax.eval_shape(lambda: problem(4, 64, H, masked))
    traced = value_and_gradients.trace(lambda *x: gru(*x, cluster), arguments, dh)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2") == 2


def test_what_is_supported():
    H = [0, 32, 64, 100, 128, 192, 256, 512, 576, 1024]
    assert [clusters(n) for n in H] == [[], [], [1], [], [1, 2], [3], [4], [8], [], []]
    hopper = SimpleNamespace(platform="gpu", compute_capability="9.0")
    blackwell = SimpleNamespace(platform="gpu", compute_capability="10.0")
    assert supports(1, 512, device=hopper) and supports(64, 128, jnp.float32, hopper)
    assert not supports(64, 128, device=blackwell)
    assert not supports(64, 128, device=jax.devices("cpu")[0])
    assert not supports(64, 100, device=hopper) and not supports(0, 128, device=hopper)
    assert not supports(64, 128, jnp.float64, hopper)
    arguments, _ = jax.eval_shape(lambda: problem(2, 4, 192, False))
    with pytest.raises(ValueError, match="H is 192, in 1 thread blocks; there is a kernel for .3."):
        jax.eval_shape(lambda *x: gru_forward(*x, cluster=1), *arguments)


def test_it_is_taken_where_it_is_asked_for_and_can_run(monkeypatch):
    """And nowhere else: float32 weights, other devices and sizes have the scan."""
    h0, key = jnp.zeros((2, 64)), jax.random.key(0)
    wide, after = (fast_gru(init_gru(key, 3, 64, reset=reset)) for reset in ("before", "after"))
    narrow = fast_gru(init_gru(key, 3, 64, dtype=jnp.bfloat16))
    assert not supports_layer(narrow, h0) or supports(2, 64)
    monkeypatch.setattr(gru_hopper, "supports", lambda B, H, dtype: (B, H) == (2, 64))
    assert supports_layer(narrow, h0) and not supports_layer(narrow, jnp.zeros((3, 64)))
    assert not supports_layer(wide, h0) and not supports_layer(after, h0)
    params, x = init_gru(key, 3, 64, dtype=jnp.bfloat16), jnp.zeros((1, 2, 3))
    monkeypatch.setattr(gru_hopper, "gru", lambda *_: jnp.full((1, 2, 64), 7.0))
    assert unroll_layer(params, x, h0, implementation="hopper")[1].max() == 7
    assert unroll_layer(params, x, h0)[1].max() < 7


def test_a_kernel_computes_in_the_carrys_dtype(monkeypatch):
    """Of a bfloat16 layer, too: each gradient then has the dtype of its argument."""

    def kernel(layer, h, a, mask):
        assert a.dtype == h.dtype == jnp.float32
        return a[..., :64], h

    monkeypatch.setattr(gru_hopper, "supports_layer", lambda layer, h: True)
    monkeypatch.setattr(gru_hopper, "over_time", kernel)
    loss = lambda p, x, h: unroll_layer(p, x, h, implementation="hopper")[0].sum()
    layer = jax.eval_shape(lambda: init_gru(jax.random.key(0), 3, 64, dtype=jnp.bfloat16))
    x, h = jax.ShapeDtypeStruct((2, 5, 3), "bfloat16"), jax.ShapeDtypeStruct((5, 64), "float32")
    seen = jax.eval_shape(jax.grad(loss, (0, 1, 2)), layer, x, h)
    dtypes = lambda tree: jax.tree.map(lambda leaf: leaf.dtype, tree)
    assert dtypes(seen) == dtypes((layer, x, h))
