"""What is asked of the C library is what it then does."""

import platform
import subprocess
import sys

import jax
import pytest

from jaxgru.parallel import hardware

FAULTS = """
import resource
if {kept}:
    from jaxgru.parallel.hardware import keep_freed_memory
    keep_freed_memory()

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
            [sys.executable, "-c", FAULTS.format(kept=kept)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return int(done.stdout)

    assert faults(False) > 5 * 16000 and faults(True) < 100


@pytest.mark.parametrize("number, says", [(1, "1 core of "), (2, "2 cores of ")])
def test_one_core_is_no_plural(number, says, monkeypatch):
    monkeypatch.setattr(hardware, "num_cores", lambda: number)
    cpus = jax.devices("cpu")  # the default may be a GPU
    monkeypatch.setattr(jax, "devices", lambda: cpus)
    assert hardware.describe_hardware().startswith(says)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_started_process_does_not_report_its_parents_peak():
    """If a process was larger than what it executes, ru_maxrss keeps its larger peak."""
    code = "from jaxgru.parallel.hardware import peak_resident_bytes as p; print(p())"
    filled = b"1" * 2**30
    assert len(filled) < hardware.peak_resident_bytes() < 2**40
    run = [sys.executable, "-c", code]
    child = subprocess.run(run, capture_output=True, text=True, check=True)
    assert 2**24 < int(child.stdout) < len(filled)
