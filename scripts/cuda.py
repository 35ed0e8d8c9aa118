"""Runs, one after another, everything that waits for a GPU; each part has its own time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from jaxgru.command_line import Parser, run_script

SCRIPTS = Path(__file__).parent
PUBLISHED = ["astra_alpha", "astra_beta", "astra_gamma", "scribe_gamma", "leviathan"]
BENCHMARK = ["scripts/benchmark.py", "--no-torch-compile", "--configs", *PUBLISHED]
NO_WAITING = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=+WHILE"}  # loops as CUDA graphs
FLOAT32, TF32 = ({"JAX_DEFAULT_MATMUL_PRECISION": p} for p in ("float32", "tensorfloat32"))
PARTS = {
    "kernel": (4, ["-m", "pytest", "-o", "addopts=", "-q", "tests/test_gru_hopper.py",
                   "-k", "on_a_gpu"]),
    "training": (10, [*BENCHMARK, "--what", "training", "forward",
                      "--precision", "float32", "tf32", "bfloat16", "--repeats", "5"]),
    "command_buffers": (6, ["scripts/benchmark.py", "--no-torch-compile", "--configs",
                            "astra_gamma", "--only", "jaxgru", "wavefront", "plain_scan",
                            "--repeats", "5", "--docs", "docs/command_buffers"], NO_WAITING),
    "sampling": (6, [*BENCHMARK, "--what", "sampling", "--repeats", "5"]),
    "torch.compile": (8, ["scripts/benchmark.py", "--configs", "astra_gamma", "--what", "training",
                          "--only", "jaxgru", "torch.compile", "--repeats", "5"]),
    "cost": (4, ["scripts/cost.py"]),
    "gamma": (3, ["scripts/train.py", "--config", "astra_gamma"], FLOAT32),
    "gamma_wavefront": (3, ["scripts/train.py", "--config", "astra_gamma"],
                        FLOAT32 | {"JAXGRU_UNROLL": "wavefront"}),
    "gamma_tf32": (3, ["scripts/train.py", "--config", "astra_gamma"], TF32),
    "gamma_bfloat16": (3, ["scripts/train.py", "--config", "astra_gamma",
                           "--model.compute_dtype", "bfloat16"]),
    "gamma_hopper": (3, ["scripts/train.py", "--config", "astra_gamma",
                         "--model.compute_dtype", "bfloat16"], {"JAXGRU_UNROLL": "hopper"}),
    "study": (10, ["scripts/reproduce.py", "--all", "--minutes", "9"]),
}  # fmt: skip
"""Minutes that each may take, its command, and what that finds in its environment.

The kernel comes first, for all else may wait for it.
"""

console = Console(highlight=False)


def main() -> None:
    """Reads the arguments; runs the parts; says how each ended."""
    parser = Parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="PART", default=list(PARTS),
                        help=", ".join(PARTS))  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the commands, and do nothing")
    arguments = parser.parse_args()
    for name in arguments.only:
        if name not in PARTS:
            parser.error(f"there is no part {name!r}; there are {', '.join(PARTS)}.")
    ended = {}
    for name in arguments.only:
        minutes, command, *given = PARTS[name]
        shown = [f"{key}={value}" for part in given for key, value in part.items()]
        line = " ".join([*shown, "python", *command])
        console.print(f"[bold]{name}[/bold]: {line}", soft_wrap=True)
        if not arguments.list:
            ended[name] = run(command, minutes, *given)
    for name, how in ended.items():
        console.print(f"{name}: {how}")
    raise SystemExit(any(how != "done" for how in ended.values()))


def run(command: list[str], minutes: float, given: Mapping[str, str] = {}) -> str:
    """One part in a process of its own, which finds this repository's jaxgru; how it ended."""
    paths = [str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | given
    try:
        done = subprocess.run(
            [sys.executable, *command], cwd=SCRIPTS.parent, env=environment, timeout=60 * minutes
        )
    except subprocess.TimeoutExpired:
        return f"stopped after {minutes:g} minutes"
    return "done" if done.returncode == 0 else f"exit code {done.returncode}"


if __name__ == "__main__":
    run_script(main)
