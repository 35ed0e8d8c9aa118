"""Compile the GPU programs for an H200, without a GPU, and check what the compilers report.

The kernels of jaxgru/kernels/gru_hopper.py and gru_hopper_rows.py, forward and backward: their
registers, what they spill to memory, their shared memory, and the fences in their machine code. A
training step of astra_gamma by each implementation of its layers: how many kernels it launches.
"""

from __future__ import annotations

import sys
from os.path import dirname

sys.path.insert(0, dirname(dirname(__file__)))

import startup  # noqa: F401

import contextlib
import dataclasses
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import IO, Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from rich.console import Console
from rich.table import Table

from jaxgru import load_config
from jaxgru.cells.base import Mask
from jaxgru.cli.options import Parser, run_script
from jaxgru.errors import UserError
from jaxgru.kernels import gru_hopper, gru_hopper_rows
from jaxgru.training import init_state, train_step

SIZES = (64, 128, 256, 384, 512)
STEPS = ("scan", "wavefront", "hopper", "hopper_rows")
ROWS, TOKENS = 64, 128  # of astra_gamma

MAX_REGISTERS = 240  # a thread has 255: with all of them in use, the next change spills
MAX_SHARED = 227 * 1024  # bytes of a thread block on Hopper
MAX_IN_LOOPS = {"scan": 6144, "wavefront": 3000, "hopper": 0, "hopper_rows": 0}
"""Kernels that a step launches from loops: 8 per layer and time step, forward and backward; fewer
where the layers run at once; none where one kernel computes all time steps."""

WHEELS = ("jax-cuda13-plugin=={0}", "jax-cuda13-pjrt=={0}", "nvidia-cuda-nvcc", "nvidia-nvvm",
          "nvidia-cuda-nvdisasm")  # fmt: skip
"""What compiles for GPUs: the rest of JAX's extra "cuda13", 3 GB, is only needed to compute."""

H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 12 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  l2_cache_size: 62914560
  memory_bandwidth: 4800000000000
  device_memory_size: 150754820096
}
"""
"""What XLA asks of a GPU: the data sheet's numbers, CUDA's limits for compute capability 9.0."""

console = Console(highlight=False)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What ptxas, Mosaic and the disassembler say of a kernel; sizes in bytes."""

    name: str
    registers: int
    spilled: int
    shared: int
    fences: int | None  # None: not disassembled
    serialized: bool = False  # ptxas waits for each wgmma before the next

    def problems(self) -> list[str]:
        """Return what exceeds its bound, in one phrase each."""
        bounds = [
            ("registers", self.registers, MAX_REGISTERS),
            ("bytes spilled", self.spilled, 0),
            ("bytes of shared memory", self.shared, MAX_SHARED),
        ]
        found = [f"{n:,} {what}, more than {most:,}" for what, n, most in bounds if n > most]
        return found + ["each wgmma waits for the one before"] * self.serialized


def read_kernels(text: str) -> list[Kernel]:
    """Read the report that the compilers printed: `ptxas -v`, resources and SASS.

    Raises:
      ValueError: a kernel lacks its registers, its spills or its resources.
    """
    compiled = re.findall(
        r"Compiling entry function '(\w+)_mosaic_gpu_kernel'.*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        text,
        re.DOTALL,
    )
    resources = re.findall(r"Resources\(smem_scratch_bytes=(\d+),.*", text)
    barriers = re.findall(r"barrier_counts=Counter\(\{(.*?)\}\)", text)
    if not compiled or not len(compiled) == len(resources) == len(barriers):
        raise ValueError(f"the compilers printed no report of this form: {text[:1000]!r}")
    sass = dict(re.findall(r"\.text\.(\w+)_mosaic_gpu_kernel:\n(.*?)(?=\.text\.|\Z)", text, re.S))
    waiting = re.findall(r"wgmma.*? are serialized .*'(\w+)_mosaic_gpu_kernel'", text)
    kernels = []
    for found, shared, held in zip(compiled, resources, barriers, strict=True):
        name, stores, loads, registers = found[0], *map(int, found[1:])
        counts = re.findall(r"num_barriers=(\d+).*?\): (\d+)", held)
        bytes_held = int(shared) + sum(8 * int(n) * int(times) for n, times in counts)
        fences = len(re.findall(r"MEMBAR\S*\.GPU", sass[name])) if name in sass else None
        spilled, serialized = stores + loads, name in waiting
        kernels.append(Kernel(name, registers, spilled, bytes_held, fences, serialized))
    return kernels


REPORTS = {f"MOSAIC_GPU_DUMP_{name}": "1" for name in ("PTXAS", "RESOURCES", "SASS")}
"""The environment variables with which Mosaic prints what `read_kernels` reads."""

LAUNCH_NOTHING = {
    "after-all", "bitcast", "conditional", "constant", "get-tuple-element", "opt-barrier",
    "parameter", "partition-id", "replica-id", "tuple", "while", "call",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Launches:
    """What one call of a program launches: kernels in loops and outside, and copies of memory."""

    in_loops: int
    outside: int
    copies: int
    pallas: int

    def problems(self, how: str) -> list[str]:
        """Return what is not as it should be in a training step with its layers computed so."""
        found, most = [], MAX_IN_LOOPS[how]
        if self.in_loops > most:
            found.append(f"{self.in_loops:,} kernels launched in loops, more than {most:,}")
        layers = load_config("astra_gamma").model.num_layers
        if self.pallas != (kernels := 2 * layers * how.startswith("hopper")):
            found.append(f"{self.pallas} Pallas kernels, not {kernels}")
        return found


def count_launches(hlo: str) -> Launches:
    """Count what XLA's optimized program launches; a loop's body as often as it runs.

    Raises:
      ValueError: a loop does not say how often it runs.
    """
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        if head := re.match(r"(ENTRY )?%([\w.\-]+) .*\{$", line):
            name = head[2]
            bodies[name] = []
            entry = name if head[1] else entry
        elif name:
            bodies[name].append(line)

    def count(name: str, times: int, kind: str) -> Counter[str]:
        found: Counter[str] = Counter()
        for line in bodies[name]:
            if not (called := re.search(r" = .*?\s([a-z][a-z\-]*)\(", line)):
                continue
            operation = called[1]
            if operation == "while":
                runs = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
                body = re.search(r"body=%([\w.\-]+)", line)
                if not runs or not body:
                    raise ValueError(f"this loop does not say how often it runs: {line[:200]}")
                found += count(body[1], times * int(runs[1]), "in loops")
            elif operation in ("call", "conditional"):
                for other in re.findall(r"(?:to_apply|computation)=%([\w.\-]+)", line):
                    found += count(other, times, kind)
            elif operation == "copy" or operation.endswith("-start"):  # beside the kernels
                found["copies"] += times
            elif operation not in LAUNCH_NOTHING and not operation.endswith("-done"):
                found[kind] += times
                found["pallas"] += times * ('custom_call_target="mosaic_gpu' in line)
        return found

    found = count(entry, 1, "outside")
    return Launches(found["in loops"], found["outside"], found["copies"], found["pallas"])


# --- Compiling


def h200() -> Any:
    """Return a device to compile for: an H200 as the text above describes it.

    Raises:
      UserError: the wheels that compile for GPUs are not installed.
    """
    try:
        described = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1")
    except NotImplementedError:
        wheels = " ".join(WHEELS).format(jax.__version__)
        raise UserError(
            f"to compile for a GPU, install more wheels: python -m pip install {wheels}"
        ) from None
    return described.devices[0]


@contextlib.contextmanager
def printed_to(file: IO[str]) -> Iterator[None]:
    """Send to a file what is printed meanwhile, by C++ too."""
    sys.stdout.flush()
    screen = os.dup(1)
    os.dup2(file.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(screen, 1)
        os.close(screen)


def compile_for(device: Any, function: Callable, *arguments: Any) -> tuple[str, str]:
    """Compile a function of arrays of these shapes; return the program, and what was printed."""
    one = jax.sharding.SingleDeviceSharding(device)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), arguments)
    here = partial(gru_hopper.supports, device=device)
    with (
        mock.patch.object(jax, "default_backend", lambda: "gpu"),
        mock.patch.object(gru_hopper, "supports", here),
        mock.patch.dict(os.environ, REPORTS),
        tempfile.TemporaryFile("w+", errors="replace") as file,
    ):
        with printed_to(file):
            program = jax.jit(function).lower(*placed).compile()
        file.seek(0)
        return program.as_text(), file.read()


def compile_kernels(device: Any, H: int, gru: Callable, masked: bool) -> list[Kernel]:
    """Compile the forward and the backward kernel for H units; see `variants`."""

    def both(Uzr, Un, h0, a, keep, dh):
        mask = Mask(keep, jnp.float32(1 / 0.9)) if masked else None
        h, backward = jax.vjp(lambda *x: gru(*x, mask), Uzr, Un, h0, a)
        return h, backward(dh)

    B, T, narrow, wide = ROWS, TOKENS, jnp.bfloat16, jnp.float32
    shapes = [((H, 2 * H), narrow), ((H, H), narrow), ((B, H), wide), ((T, B, 3 * H), wide),
              ((T, B, H), bool), ((T, B, H), wide)]  # fmt: skip
    _, report = compile_for(device, both, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    return read_kernels(report)


def variants(H: int) -> Iterator[tuple[str, int, Callable]]:
    """Yield a remark, the thread blocks of a cluster and (Uzr, Un, h0, a, mask) → h."""
    for cluster in gru_hopper.clusters(H):
        for fenced in (False, True)[:cluster]:
            gru = lambda *x, options=(cluster, False, fenced): gru_hopper.gru(*x, *options)
            yield ", fences" * fenced, cluster, gru
    yield "", H // gru_hopper.BLOCK, gru_hopper_rows.gru


def compile_step(device: Any, unroll: str) -> Launches:
    """Compile a training step of astra_gamma in bfloat16, its layers computed in this way."""
    config = load_config("astra_gamma")
    model = dataclasses.replace(config.model, compute_dtype="bfloat16", unroll=unroll)
    state = jax.eval_shape(lambda: init_state(model, config.training))
    tokens = jax.ShapeDtypeStruct((100_000,), jnp.int32)
    step = lambda state, tokens: train_step(model, config.training, state, tokens)
    return count_launches(compile_for(device, step, state, tokens)[0])


# --- The command


def main() -> None:
    """Compile everything, print a table each of kernels and steps, and say what is wrong."""
    parser = Parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, metavar="H",
                        help="units of the kernels (default: %(default)s)")  # fmt: skip
    parser.add_argument("--steps", nargs="*", default=STEPS, metavar="HOW",
                        help="of " + ", ".join(STEPS))  # fmt: skip
    arguments = parser.parse_args()
    for H in arguments.sizes:
        if not gru_hopper.clusters(H):
            parser.error(f"there is no kernel for {H} units.")
    for how in arguments.steps:
        if how not in STEPS:
            parser.error(f"--steps knows no {how!r}; it knows {', '.join(STEPS)}.")
    # The plugin asks for a driver unless JAX computes elsewhere
    jax.config.update("jax_platforms", "cpu")
    device = h200()
    problems = check_kernels(device, arguments.sizes) + check_steps(device, arguments.steps)
    for problem in problems:
        console.print(problem)
    raise SystemExit(bool(problems))


def check_kernels(device: Any, sizes: Sequence[int]) -> list[str]:
    """Compile the kernels of these sizes, print a table, and return what is wrong."""
    table = Table("kernel", title="The kernels")
    for column in ("H", "blocks", "registers", "spilled, bytes", "shared, KB", "fences"):
        table.add_column(column, justify="right")
    compiled = [(H, *variant, masked) for H in sizes for variant in variants(H)
                for masked in (False, True)]  # fmt: skip
    problems = []
    for H, remark, cluster, gru, masked in compiled:
        for kernel in compile_kernels(device, H, gru, masked):
            name = kernel.name + ", mask" * masked + remark
            fences = "–" if kernel.fences is None else kernel.fences
            numbers = H, cluster, kernel.registers, kernel.spilled
            table.add_row(name, *map(str, numbers), f"{kernel.shared / 1024:.1f}", str(fences))
            problems += [f"{name}, H {H}, {cluster} blocks: {p}." for p in kernel.problems()]
    if sizes:
        console.print(table)
    return problems


def check_steps(device: Any, steps: Sequence[str]) -> list[str]:
    """Compile the training steps, print a table, and return what is wrong."""
    table = Table("layers", title="Launches in a training step of astra_gamma, bfloat16")
    for column in ("kernels in loops", "kernels outside", "of these, Pallas", "copies"):
        table.add_column(column, justify="right")
    problems = []
    for how in steps:
        found = compile_step(device, how)
        numbers = found.in_loops, found.outside, found.pallas, found.copies
        table.add_row(how, *(f"{n:,}" for n in numbers))
        problems += [f"{how}: {problem}." for problem in found.problems(how)]
    if steps:
        console.print(table)
    return problems


if __name__ == "__main__":
    run_script(main)
