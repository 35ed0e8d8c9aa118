"""What is read from compilers' reports. The compilation itself needs wheels that tests do not."""

import pytest
from jax.experimental import topologies

from maintain import compile_for_gpu as gpu

REPORT = """\
Resources(smem_scratch_bytes=229376, tmem_scratch_cols=0, barrier_counts=Counter({\
Barrier(arrival_count=1, num_barriers=4, orders_tensor_core=False): 1, \
ClusterBarrier(collective_dims=(<Dimension.x: 0>,), arrival_count=1, num_barriers=2): 3}), x={})
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'forward_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for forward_mosaic_gpu_kernel
    680 bytes stack frame, 760 bytes spill stores, 764 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 680 bytes cumulative stack size, 1 bytes smem
Resources(smem_scratch_bytes=1024, tmem_scratch_cols=0, barrier_counts=Counter({}), x={})
ptxas info    : Compiling entry function 'backward_mosaic_gpu_kernel' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 211 registers, used 2 barriers, 1 bytes smem
"""
SASS = """\
.text.forward_mosaic_gpu_kernel:
        /*0000*/                   MEMBAR.ALL.GPU ;
        /*0010*/                   MEMBAR.ALL.CTA ;
.text.backward_mosaic_gpu_kernel:
        /*0000*/                   MEMBAR.SC.GPU ;
        /*0010*/                   MEMBAR.ALL.GPU ;
"""


def test_the_report_on_kernels_is_read():
    first, second = gpu.read_kernels(REPORT + SASS)
    assert first == gpu.Kernel("forward", 255, 760 + 764, 229376 + 8 * (4 + 3 * 2), fences=1)
    assert second == gpu.Kernel("backward", 211, 0, 1024, fences=2)
    assert [kernel.fences for kernel in gpu.read_kernels(REPORT)] == [None, None]
    assert second.problems() == []
    assert first.problems() == ["255 registers, more than 240", "1,524 bytes spilled, more than 0"]
    (problem,) = gpu.Kernel("", 1, 0, 227 * 1024 + 1, None).problems()
    assert problem == "232,449 bytes of shared memory, more than 232,448"
    waits = "Performance Loss: wgmma.mma_async instructions are serialized due to this in function"
    first, second = gpu.read_kernels(f"{REPORT}{waits} 'backward_mosaic_gpu_kernel'\n")
    assert not first.serialized and second.problems() == ["each wgmma waits for the one before"]
    for text in ("", "Compiling nothing", REPORT.replace("Resources", "")):
        with pytest.raises(ValueError, match="printed no report of this form"):
            gpu.read_kernels(text)


PROGRAM = """\
HloModule jit_step

%body.2 (p: (s32[], f32[2]{0})) -> (s32[], f32[2]{0}) {
  %p = (s32[], /*index=1*/f32[2]{0}) parameter(0)
  %x = f32[2]{0} get-tuple-element(%p), index=1
  %wrapped.fusion = f32[2]{0:T(256)} fusion(%x), kind=kLoop, calls=%add
  %fusion-start = ((f32[2]{0}), f32[2]{0}) fusion-start(%x), calls=%slice
  %fusion-done = f32[2]{0} fusion-done(%fusion-start)
  ROOT %t = (s32[], f32[2]{0}) tuple(%i, %wrapped.fusion)
}

%body.1 (p: (s32[], f32[2]{0})) -> (s32[], f32[2]{0}) {
  %product = (f32[2]{0}, s8[4]{0}) custom-call(%x), custom_call_target="__cublas$gemm"
  ROOT %w = (s32[], f32[2]{0}) while(%t), condition=%c, body=%body.2, \
backend_config={"known_trip_count":{"n":"5"}}
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %c = f32[] constant(0)
  %copy.1 = f32[2]{0} copy(%x)
  %k = f32[2]{0} custom-call(%x), custom_call_target="mosaic_gpu_v2"
  %w = (s32[], f32[2]{0}) while(%t), condition=%c, body=%body.1, \
backend_config={"known_trip_count":{"n":"3"}}
  ROOT %r = f32[2]{0} fusion(%x), kind=kLoop, calls=%add
}
"""


def test_launches_are_counted_as_often_as_loops_run():
    """5 fusions in each of the outer loop's 3 runs, which launch a product each."""
    found = gpu.count_launches(PROGRAM)
    assert found == gpu.Launches(in_loops=3 * (5 + 1), outside=2, copies=3 * 5 + 1, pallas=1)
    with pytest.raises(ValueError, match="this loop does not say how often it runs:   ROOT %w"):
        gpu.count_launches(PROGRAM.replace('{"n":"5"}', "{}"))


def test_a_training_step_may_not_launch_more_than_it_did():
    assert gpu.Launches(6144, 152, 390, 0).problems("scan") == []
    assert gpu.Launches(6145, 152, 390, 0).problems("scan") == [
        "6,145 kernels launched in loops, more than 6,144"
    ]
    for how in ("hopper", "hopper_rows"):
        assert gpu.Launches(0, 149, 1, 6).problems(how) == []
    assert gpu.Launches(0, 149, 1, 5).problems("hopper") == ["5 Pallas kernels, not 6"]


def test_bad_requests_are_one_sentence(script, monkeypatch):
    def absent(*_, **__):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", absent)
    done = script("maintain/compile_for_gpu")
    assert done.code == 2 and done.err.count("\n") == 1
    assert "python -m pip install jax-cuda13-plugin==" in done.err
    done = script("maintain/compile_for_gpu", "--sizes", "100")
    assert done.err.startswith("compile_for_gpu.py: there is no kernel for 100 units.")
    done = script("maintain/compile_for_gpu", "--steps", "plain")
    assert "--steps knows no 'plain'; it knows scan, wavefront, hopper, hopper_rows." in done.err
