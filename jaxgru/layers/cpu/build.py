"""Compile the kernel for CPUs: `python jaxgru/layers/cpu/build.py`, and whenever jaxgru is built.

It needs jaxlib, for the headers of XLA's foreign function interface, and GCC or Clang. Without a
compiler jaxgru is built without the kernel.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUTPUT = HERE / "_kernel.so"
FLAGS = (
    "-std=c++17 -O3 -fPIC -fvisibility=hidden -ffp-contract=fast -fno-math-errno "
    "-fno-trapping-math -Wno-psabi"
).split()
INSTRUCTIONS = {  # of x86-64; elsewhere only the last, which is NEON's on ARM
    "avx512": "-DVL=16 -mavx512f -mavx512dq -mavx512bw -mavx512vl -mavx2 -mfma "
              "-mprefer-vector-width=512",
    "avx2": "-DVL=8 -mavx2 -mfma",
    "generic": "-DVL=4",
}  # fmt: skip


def compiler() -> str | None:
    """Return the C++ compiler: $CXX, else what the system calls c++."""
    return shutil.which(os.environ.get("CXX", "c++"))


def build(output: Path = OUTPUT, extra: list[str] | None = None) -> None:
    """Compile the kernel.

    Raises:
      subprocess.CalledProcessError: the compiler failed.
      ImportError: there is no jaxlib.
    """
    import jaxlib

    headers = Path(jaxlib.__file__).parent / "include"
    flags = [str(compiler()), *FLAGS, *(extra or [])]
    names = list(INSTRUCTIONS)
    if platform.machine() not in ("x86_64", "AMD64"):
        names = ["generic"]
    with tempfile.TemporaryDirectory() as folder:
        commands = [
            [*flags, f"-DISA={name}", *INSTRUCTIONS[name].split(), "-c", str(HERE / "pass.cc"),
             "-o", f"{folder}/{name}.o"]
            for name in names
        ]  # fmt: skip
        exported = [
            "-fvisibility=default",
            f'-DJAXLIB="{jaxlib.__version__}"',
            f"-isystem{headers}",
        ]
        commands.append([*flags, *exported, "-c", str(HERE / "handlers.cc"),
                         "-o", f"{folder}/handlers.o"])  # fmt: skip
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda command: subprocess.run(command, check=True), commands))
        objects = [command[-1] for command in commands]
        built = Path(folder, output.name)
        subprocess.run([*flags, "-shared", *objects, "-o", str(built)], check=True)
        shutil.copy(built, output.with_suffix(".new"))
        os.replace(output.with_suffix(".new"), output)  # a running process keeps the old one


def hook() -> Any:
    """Return Hatch's build hook."""
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class KernelHook(BuildHookInterface):
        PLUGIN_NAME = "custom"

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            if self.target_name != "wheel" or os.environ.get("JAXGRU_CPU_KERNEL") == "none":
                return
            if compiler() is None:
                self.app.display_warning("jaxgru is built without its CPU kernel: no C++ compiler")
                return
            try:
                build()
            except (subprocess.CalledProcessError, ImportError) as error:
                self.app.display_warning(f"jaxgru is built without its CPU kernel: {error}")
                return
            build_data["artifacts"].append("jaxgru/layers/cpu/_kernel.so")
            build_data["pure_python"] = False
            tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{tag}"

    return KernelHook


def get_build_hook() -> Any:
    """Return the hook's class, for Hatch."""
    return hook()


if __name__ == "__main__":
    if compiler() is None:
        sys.exit("There is no C++ compiler; name one in $CXX.")
    build(extra=sys.argv[1:])
