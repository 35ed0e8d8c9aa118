"""What a figure was measured on, in words: every number in docs/ says so."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import jax


def describe_hardware() -> str:
    """The device that JAX computes on, and JAX's version; of a CPU its cores and model."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{device.device_kind}, JAX {jax.__version__}"
    model, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.is_file() and (found := re.search(r"model name\s*: (.*)", cpuinfo.read_text())):
        model = found[1]  # Linux knows it by a better name
    return f"{os.cpu_count()} cores of {model}, JAX {jax.__version__}"
