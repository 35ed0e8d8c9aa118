"""The second Hopper kernel without a GPU: interpreted against a scan, and lowered for CUDA.

The interpreter copies between thread blocks through global memory. What it does not run is the
inline PTX: barriers in shared memory, their phases, and the copies that they count.
"""

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
from jaxgru.kernels import gru_hopper, gru_hopper_rows
from jaxgru.kernels.gru_hopper_rows import BUFFERS, gru, gru_backward, gru_forward
from jaxgru.layers import unroll_layer


@pytest.fixture(autouse=True)
def float32():
    with jax.enable_x64(False):
        yield


@pytest.mark.parametrize(
    "T, B, H, masked",
    [
        (3, 18, 64, True),
        pytest.param(1, 1, 64, False, marks=pytest.mark.slow),
        pytest.param(3, 18, 128, True, marks=in_a_cluster),
        pytest.param(2, 5, 192, False, marks=in_a_cluster),
    ],
)
def test_interpreted(T, B, H, masked):
    """With the bounds of the first kernel's test, and no races."""
    interpret = InterpretGPUParams(detect_races=True)
    found = distances(lambda *x: gru(*x, interpret), T, B, H, masked)
    for mean, most, rounding, most_rounding in found.values():
        assert mean < 1e-5 and most < 3e-4
        assert 2e-5 < rounding < most_rounding < 4e-3
    assert not gpu_callbacks.get_races().races_found


class _Recorded(Exception):
    """Ends a call once its steps have been recorded."""


@pytest.mark.parametrize("T", [1, 4, 7])
@pytest.mark.parametrize("backward", [False, True])
def test_a_buffer_is_sent_received_multiplied_and_released_in_turn(backward, T, monkeypatch):
    """And `count`, from which the kernel waits for a phase, is how often it was received before."""
    (Uzr, Un, h0, a, _), dh = problem(T, 1, 64, False)
    calls = [[] for _ in range(BUFFERS)]

    def record(body, U, state, inputs, outputs, interpret):
        def called(name):
            def call(buffer, *arguments):
                count = [int(arguments[0])] if name == "receive" else []
                calls[int(buffer)].append((name, *count))
                return jnp.zeros_like(h0)

            return call

        zeros = lambda *_, **__: jnp.zeros_like(h0)
        four = map(called, ("send", "receive", "product", "release"))
        with jax.disable_jit():
            body(gru_hopper_rows._Block(zeros, zeros, *four), h0, inputs, outputs)
        raise _Recorded

    monkeypatch.setattr(gru_hopper_rows, "_run", record)
    with pytest.raises(_Recorded):
        if backward:
            gru_backward(Uzr, Un, dh, a[..., :128], dh, None, dh)
        else:
            gru_forward(Uzr, Un, h0, a, None)
    lengths = []
    for of_buffer in calls:
        of_buffer = [x for x in of_buffer if x != ("product",)]
        lengths.append(len(of_buffer) // 3)
        in_turn = [[("send",), ("receive", n), ("release",)] for n in range(lengths[-1])]
        assert of_buffer == sum(in_turn, [])
    # Forward: h0 and each h', and each r·h. Backward: 3 values a step
    assert sum(lengths) == (3 * T if backward else 2 * T + 1)
    products = [calls[i].count(("product",)) for i in range(BUFFERS)]
    assert sum(products) == 3 * T


@needs_a_gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("H, B", [(H, B) for H in (64, 128, 256, 320, 512) for B in (1, 130)])
def test_values_on_a_gpu(H, B, masked):
    """With the bounds of the first kernel's test, which says where they come from."""
    found = distances(gru, 8, B, H, masked)
    for name, numbers in found.items():
        print(f"H {H}, B {B}, {name}:", *(f"{x:.1e}" for x in numbers))
    for mean, most, _, most_rounding in found.values():
        assert mean < 1e-4 and most < 2e-3 and most_rounding < 4e-3
    assert found["h"][2] > 2e-5


@needs_a_gpu
@pytest.mark.parametrize("H, B", [(H, B) for H in (64, 128, 256, 320, 512) for B in (1, 130)])
def test_twenty_runs_are_equal_on_a_gpu(H, B):
    assert_twenty_equal_runs(gru, B, H)


@pytest.mark.parametrize("H, masked", [(64, True), (512, False)])
def test_lowers_for_cuda(H, masked):
    """Types, layouts and shared memory of both kernels, for a Hopper that is not here."""
    arguments, dh = jax.eval_shape(lambda: problem(4, 64, H, masked))
    traced = value_and_gradients.trace(gru, arguments, dh)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2") == 2


@pytest.mark.parametrize("H", [100, 576])
def test_what_does_not_fit_is_refused(H):
    arguments, _ = jax.eval_shape(lambda: problem(2, 4, H, False))
    with pytest.raises(ValueError, match=f"H is {H}; there is a kernel for multiples of 64 up to"):
        jax.eval_shape(gru_forward, *arguments)


def test_it_is_taken_only_where_it_is_asked_for(monkeypatch):
    params = init_gru(jax.random.key(0), 3, 64, dtype=jnp.bfloat16)
    x, h0 = jnp.zeros((1, 2, 3)), jnp.zeros((2, 64))
    monkeypatch.setattr(gru_hopper, "supports", lambda B, H, dtype: True)
    assert gru_hopper.supports_layer(fast_gru(params), h0)
    monkeypatch.setattr(gru_hopper, "gru", lambda *_: jnp.full((1, 2, 64), 6.0))
    monkeypatch.setattr(gru_hopper_rows, "gru", lambda *_: jnp.full((1, 2, 64), 7.0))
    for implementation, value in (("hopper_rows", 7), ("hopper", 6)):
        assert unroll_layer(params, x, h0, implementation=implementation)[1].max() == value
    assert unroll_layer(params, x, h0)[1].max() < 6
