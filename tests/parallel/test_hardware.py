"""What is asked of the C library is what it then does."""

import os
import platform
import subprocess
import sys
import types

import jax
import pytest

from jaxgru.parallel import hardware

FAULTS = """
import resource, runpy
if {kept}:
    runpy.run_path({file!r})["keep_freed_memory"]()  # without importing all of jaxgru

def work():
    return bytearray(b"x") * 2**26

for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is asked")
def test_freed_memory_is_kept():
    """64 MiB, made and freed five times: 16,384 pages each time, or none after the first.

    Up to 32 MiB glibc learns by itself (M_MMAP_THRESHOLD is dynamic); a step's buffer is larger.
    """

    def faults(kept):
        done = subprocess.run(
            [sys.executable, "-c", FAULTS.format(kept=kept, file=hardware.__file__)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return int(done.stdout)

    assert faults(False) > 5 * 16000 and faults(True) < 100


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_not_that_of_a_larger_parent(monkeypatch):
    """Whose ru_maxrss a process keeps, if it is larger than what that executes."""
    parents = types.SimpleNamespace(ru_maxrss=2**40)
    monkeypatch.setattr("resource.getrusage", lambda _: parents)
    filled = b"1" * 2**28
    assert len(filled) < hardware.peak_resident_bytes() < 2**40


@pytest.mark.parametrize(
    "cores, batch_size, devices", [(2, 64, 2), (16, 64, 2), (2, 63, 1), (1, 64, 1), (4, 128, 4),
                                   (6, 192, 6), (2, 4, 1)]
)  # fmt: skip
def test_a_cpus_cores_share_a_batch_of_32_rows_each(cores, batch_size, devices, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    chosen = {}
    config = types.SimpleNamespace(jax_num_cpu_devices=-1, update=chosen.__setitem__)
    monkeypatch.setattr(jax, "config", config)
    hardware.share_cpu(batch_size)
    assert chosen == {"jax_num_cpu_devices": devices}


def test_what_the_user_has_chosen_stays(monkeypatch):
    config = types.SimpleNamespace(jax_num_cpu_devices=-1, update=None)
    monkeypatch.setattr(jax, "config", config)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    hardware.share_cpu(64)
    monkeypatch.delenv("XLA_FLAGS")
    config.jax_num_cpu_devices = 5
    hardware.share_cpu(64)
