"""The machine: in words, for every number in docs/; and how its cores are shared out."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import sys
from pathlib import Path

import jax

MIN_ROWS = 32  # of a batch for each device of a CPU: fewer, and matrix products suffer


def describe_hardware() -> str:
    """The device that JAX computes on, and JAX's version; of a CPU its cores and model."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{device.device_kind}, JAX {jax.__version__}"
    model, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.is_file() and (found := re.search(r"model name\s*: (.*)", cpuinfo.read_text())):
        model = found[1]  # Linux knows it by a better name
    return f"{os.cpu_count()} cores of {model}, JAX {jax.__version__}"


def no_device() -> str | None:
    """Why JAX has no device to compute on, in one sentence; None where it has one."""
    try:
        jax.devices()
    except Exception as error:  # where there is no CUDA, an AssertionError without a word
        asked, reason = jax.config.jax_platforms, ""
        if isinstance(error, RuntimeError):
            reason = f" ({str(error).partition(' (set JAX_PLATFORMS')[0].rstrip('.')})"
        if not asked:
            return f"JAX has no device to compute on{reason}."
        return (
            f"JAX_PLATFORMS is {asked!r}, but JAX has no such device here{reason}; unset it, and "
            "JAX uses what there is."
        )
    return None


def share_cpu(batch_size: int) -> None:
    """Makes a CPU's cores count as several devices, each to take its share of a batch's rows.

    XLA's CPU back end runs the elementwise half of a small step on one core. As many devices as
    there are cores, while each has 32 rows or more and the batch divides. To be called before JAX
    has started; later, or where the user has set a number of devices, it changes nothing.
    """
    chosen = jax.config.jax_num_cpu_devices
    if chosen > 0 or "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    shares = [n for n in range(1, (cores or 1) + 1) if batch_size % n == 0]
    with contextlib.suppress(RuntimeError):  # JAX has started
        jax.config.update(
            "jax_num_cpu_devices", max(n for n in shares if n == 1 or batch_size // n >= MIN_ROWS)
        )


def keep_freed_memory() -> None:
    """Makes glibc's malloc keep what is freed, for the next step to use; elsewhere does nothing.

    By default large blocks go back to the system when they are freed, and a step's buffers come
    anew, as pages to be zeroed: 53,000 page faults a step of astra_beta, a sixth of its time.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of malloc.h
        libc.mallopt(M_ARENA_MAX, 1)  # one heap for all threads, that of brk …
        libc.mallopt(M_MMAP_MAX, 0)  # … for blocks of any size …
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)  # … and never made smaller


def peak_resident_bytes() -> int:
    """Return the most memory that this process has held so far; 0 where that is unknown."""
    status = Path("/proc/self/status")
    if status.is_file() and (found := re.search(r"VmHWM:\s*(\d+) kB", status.read_text())):
        return 1024 * int(found[1])  # ru_maxrss would be our parent's, were that larger
    try:
        import resource
    except ImportError:  # Windows has none
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
