"""The Hopper kernel without a GPU: interpreted against a scan, and lowered for CUDA.

The scan rounds the products' operands to bfloat16 where the kernel does.
"""

import os
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from jaxgru.cells.base import Mask
from jaxgru.cells.gru import fast as fast_gru
from jaxgru.cells.gru import init_gru
from jaxgru.kernels import gru_hopper
from jaxgru.kernels.gru_hopper import clusters, gru, gru_forward, supports, supports_layer
from jaxgru.layers import unroll_layer

# The interpreter's warpgroups wait for each other in XLA's threads: as many as cores, or this
os.environ.setdefault("NPROC", "8")

in_a_cluster = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the interpreter has cluster barriers from JAX 0.11 on"
)


@pytest.fixture(autouse=True)
def float32():
    with jax.enable_x64(False):
        yield


def rounded(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


@jax.custom_vjp
def rounded_product(x, U):
    return rounded(x) @ rounded(U)


rounded_product.defvjp(
    lambda x, U: (rounded_product(x, U), (x, U)),
    lambda x_U, dy: (rounded(dy) @ rounded(x_U[1]).T, x_U[0].T @ dy),
)


def scan(product, Uzr, Un, h0, a, mask):
    """The recurrence with any product of state and weight, differentiated by JAX."""

    def step(h, a_keep):
        (az, ar, an), keep = jnp.split(a_keep[0], 3, axis=-1), a_keep[1]
        z, r = jnp.split(jax.nn.sigmoid(jnp.concatenate([az, ar], -1) + product(h, Uzr)), 2, -1)
        n = jnp.tanh(an + product(r * h, Un))
        h = (1 - z) * h + z * n
        h = h if mask is None else jnp.where(keep, h * mask.scale, 0)
        return h, h

    return jax.lax.scan(step, h0, (a, mask and mask.keep))[1]


def problem(T, B, H, masked):
    k = jax.random.split(jax.random.key(T + B + H), 6)
    Uzr, Un = (
        jax.random.uniform(k[i], (H, n * H), minval=-1) / H**0.5 for i, n in ((0, 2), (1, 1))
    )
    h0, a = jax.random.normal(k[2], (B, H)), jax.random.normal(k[3], (T, B, 3 * H))
    mask = Mask(jax.random.bernoulli(k[4], 0.7, (T, B, H)), jnp.float32(1 / 0.7))
    return (Uzr, Un, h0, a, mask if masked else None), jax.random.normal(k[5], (T, B, H))


@partial(jax.jit, static_argnums=0)
def value_and_gradients(f, arguments, dh):
    *arguments, mask = arguments
    h, backward = jax.vjp(lambda *x: f(*x, mask), *arguments)
    return h, *backward(dh)


def assert_equals_the_scan_that_rounds_alike(kernel, T, B, H, masked):
    """h and every gradient, in fractions of the array's largest number.

    Most differ by 1e-8 on average. Where a sum in another order rounds to the next bfloat16, a row
    of the batch and what is summed over it differ by 1e-6. The float32 scan is 1e-4 away.
    """
    arguments, dh = problem(T, B, H, masked)
    ours = value_and_gradients(kernel, arguments, dh)
    alike = value_and_gradients(partial(scan, rounded_product), arguments, dh)
    exact = value_and_gradients(
        partial(scan, partial(jnp.matmul, precision="highest")), arguments, dh
    )
    for x, y, z in zip(*map(jax.device_get, (ours, alike, exact)), strict=True):
        size = np.abs(z).max()
        assert np.abs(x - y).mean() < 1e-5 * size
        assert np.abs(x - y).max() < 3e-4 * size
        assert 2e-5 * size < np.abs(x - z).mean() < np.abs(x - z).max() < 4e-3 * size


@pytest.mark.parametrize(
    "T, B, H, cluster, masked",
    [
        (3, 66, 64, 1, False),
        (1, 3, 64, 1, True),
        (2, 5, 128, 1, True),
        pytest.param(3, 66, 128, 2, True, marks=in_a_cluster),
        pytest.param(1, 5, 384, 6, False, marks=in_a_cluster),  # more tiles than slots
    ],
)
def test_interpreted(T, B, H, cluster, masked):
    """And no warpgroup reads what another may still be writing, says the interpreter."""
    interpret = InterpretGPUParams(detect_races=True)
    kernel = lambda *x: gru(*x, cluster, interpret)
    assert_equals_the_scan_that_rounds_alike(kernel, T, B, H, masked)
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.skipif(not supports(64, 64), reason="needs a Hopper GPU")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("H", [64, 128, 256, 320, 512])
def test_on_a_gpu(H, masked):
    for cluster in clusters(H):
        kernel = lambda *x, cluster=cluster: gru(*x, cluster)
        assert_equals_the_scan_that_rounds_alike(kernel, 8, 130, H, masked)


@pytest.mark.parametrize("H, cluster, masked", [(128, 1, True), (256, 4, True), (512, 8, False)])
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
