"""Run everything that waits for a GPU, one part after another, each with its own time limit."""

from __future__ import annotations

import sys
from os.path import dirname

sys.path.insert(0, dirname(dirname(__file__)))

import startup  # noqa: F401

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from bench.timing import PRECISIONS
from jaxgru.cli.options import Parser, run_script

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ["astra_alpha", "astra_beta", "astra_gamma", "scribe_gamma", "leviathan"]
BENCHMARK = ["scripts/benchmark.py", "--no-torch-compile", "--configs", *PUBLISHED]


class Part(NamedTuple):
    """Minutes that a part may take, its command for Python, and its environment variables."""

    minutes: float
    command: list[str]
    environment: Mapping[str, str] = {}


GAMMA = ["scripts/train.py", "--config", "astra_gamma"]
BFLOAT16 = ["--model.compute_dtype", "bfloat16"]
NO_WAITING = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=+WHILE"}  # loops as CUDA graphs
FLOAT32, TF32 = ({"JAX_DEFAULT_MATMUL_PRECISION": PRECISIONS[p]} for p in ("float32", "tf32"))
PARTS = {
    "kernel": Part(4, ["-m", "pytest", "-o", "addopts=", "-q", "tests/kernels/test_gru_hopper.py",
                       "-k", "on_a_gpu"]),
    "training": Part(10, [*BENCHMARK, "--what", "training", "forward",
                          "--precision", "float32", "tf32", "bfloat16", "--repeats", "5"]),
    "command_buffers": Part(6, ["scripts/benchmark.py", "--no-torch-compile", "--configs",
                                "astra_gamma", "--only", "jaxgru", "wavefront", "plain_scan",
                                "--repeats", "5", "--docs", "docs/command_buffers"], NO_WAITING),
    "sampling": Part(6, [*BENCHMARK, "--what", "sampling", "--repeats", "5"]),
    "torch.compile": Part(8, ["scripts/benchmark.py", "--configs", "astra_gamma", "--what",
                              "training", "--only", "jaxgru", "torch.compile", "--repeats", "5"]),
    "cost": Part(4, ["scripts/bench/cost.py"]),
    "gamma": Part(3, GAMMA, FLOAT32),
    "gamma_wavefront": Part(3, [*GAMMA, "--model.unroll", "wavefront"], FLOAT32),
    "gamma_tf32": Part(3, GAMMA, TF32),
    "gamma_bfloat16": Part(3, [*GAMMA, *BFLOAT16]),
    "gamma_hopper": Part(3, [*GAMMA, *BFLOAT16, "--model.unroll", "hopper"]),
    "study": Part(10, ["scripts/reproduce.py", "--all", "--minutes", "9"]),
}  # fmt: skip
"""The parts by name; the kernel's comes first, because it is the most urgent."""

console = Console(highlight=False)


def main() -> None:
    """Read the arguments, run the parts, and print how each ended."""
    parser = Parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="PART", default=list(PARTS),
                        help="of " + ", ".join(PARTS))  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the commands and exit")
    arguments = parser.parse_args()
    for name in arguments.only:
        if name not in PARTS:
            parser.error(f"there is no part {name!r}; there are {', '.join(PARTS)}.")
    ended = {}
    for name in arguments.only:
        part = PARTS[name]
        given = [f"{key}={value}" for key, value in part.environment.items()]
        line = " ".join([*given, "python", *part.command])
        console.print(f"[bold]{name}[/bold]: {line}", soft_wrap=True)
        if not arguments.list:
            ended[name] = run(part.command, part.minutes, part.environment)
    for name, how in ended.items():
        console.print(f"{name}: {how}")
    raise SystemExit(any(how != "done" for how in ended.values()))


def run(command: list[str], minutes: float, given: Mapping[str, str] = {}) -> str:
    """Run one part in a process with this repository's jaxgru; return how it ended."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **given}
    try:
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, timeout=60 * minutes
        )
    except subprocess.TimeoutExpired:
        return f"stopped after {minutes:g} minutes"
    return "done" if done.returncode == 0 else f"exit code {done.returncode}"


if __name__ == "__main__":
    run_script(main)
