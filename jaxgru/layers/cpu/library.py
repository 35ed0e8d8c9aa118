"""Load the kernel's shared library, if it is there and fits; say why not."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import jax
import jaxlib

PATH = Path(__file__).with_name("_kernel.so")


class Kernel:
    """The functions of the shared library that Python calls."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.jaxgru_saved_floats.restype = ctypes.c_long
        library.jaxgru_saved_floats.argtypes = [ctypes.c_int, ctypes.c_long]
        library.jaxgru_peak.restype = ctypes.c_double
        library.jaxgru_peak.argtypes = [ctypes.c_long]
        library.jaxgru_instructions.restype = ctypes.c_char_p
        self.saved_floats = library.jaxgru_saved_floats
        self.peak = library.jaxgru_peak
        self.gates = library.jaxgru_gates
        self.instructions = library.jaxgru_instructions().decode()


@cache
def _load() -> Kernel | str:
    """Return the kernel, or why there is none."""
    if os.environ.get("JAXGRU_CPU_KERNEL") == "none":
        return "JAXGRU_CPU_KERNEL is none"
    if not PATH.exists():
        return "it was not built when jaxgru was installed"
    try:
        library = ctypes.CDLL(str(PATH))
        library.jaxgru_jaxlib.restype = ctypes.c_char_p
        built_for = library.jaxgru_jaxlib().decode()
    except (OSError, AttributeError) as error:
        return f"{PATH} cannot be loaded: {error}"
    if built_for != jaxlib.__version__:
        return f"it was built for jaxlib {built_for}, and this is {jaxlib.__version__}"
    for name in ("jaxgru_forward", "jaxgru_backward"):
        capsule = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    return Kernel(library)


def kernel() -> Kernel:
    """Return the kernel.

    Raises:
      RuntimeError: there is none: see `why_not`.
    """
    loaded = _load()
    if isinstance(loaded, str):
        raise RuntimeError(f"there is no kernel for CPUs: {loaded}.")
    return loaded


def why_not() -> str | None:
    """Return why there is no kernel, or None if there is one."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None
