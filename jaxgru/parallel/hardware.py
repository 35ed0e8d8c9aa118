"""The machine: the use of its cores and memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from pathlib import Path

import jax

MIN_ROWS = 32  # the fewest rows per device of a CPU; with fewer, matrix products are slow


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share_cpu(batch_size: int) -> None:
    """Make a CPU's cores several devices, so that each takes its share of a batch's rows.

    XLA's CPU back end runs the elementwise half of a small step on one core. There are at most as
    many devices as cores; each has at least 32 rows, and the rows divide evenly. Call this before
    JAX starts. After that, or if the user has set the number of devices, it changes nothing.
    """
    chosen = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]  JAX adds it
    if chosen > 0 or "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    divisors = [n for n in range(1, num_cores() + 1) if batch_size % n == 0]
    num_devices = max(n for n in divisors if n == 1 or batch_size // n >= MIN_ROWS)
    with contextlib.suppress(RuntimeError):  # JAX has started
        jax.config.update("jax_num_cpu_devices", num_devices)


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory for the next step; without glibc, do nothing.

    By default, glibc returns large freed blocks to the system, which must supply each step's
    buffers again as zeroed pages: a step of astra_beta takes 1.1 times as long on 2 cores.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    # Numbers of malloc.h
    M_TRIM_THRESHOLD = -1
    M_MMAP_MAX = -4
    # Blocks of any size are in heaps, and heaps do not shrink
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def peak_memory_mb() -> float | None:
    """Return the peak memory in MB of 10⁶ bytes: of the device, or on a CPU of the process.

    None: the operating system does not say.
    """
    statistics = jax.local_devices()[0].memory_stats() or {}
    peak = statistics.get("peak_bytes_in_use") or peak_resident_bytes()
    if not peak:
        return None
    return round(peak / 1e6, 1)


def peak_resident_bytes() -> int:
    """Return the peak of this process's resident memory; 0 if it is unknown."""
    # On Linux, ru_maxrss is the parent's peak, if that is larger
    status = Path("/proc/self/status")
    if status.is_file():
        match = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
        if match:
            return 1024 * int(match[1])
    with contextlib.suppress(ImportError):  # Windows has no such module
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
    return 0
