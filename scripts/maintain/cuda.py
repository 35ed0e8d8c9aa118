"""Run everything that waits for a GPU, one part after another, each with its own time limit.

Parts come in the order of their urgency, and the day may end between any two. Each writes into the
folder of results as it goes: what it prints, its measurements, its runs. missing.py lists what the
machine lacks.
"""

from __future__ import annotations

import sys
from os.path import dirname

sys.path.insert(0, dirname(dirname(__file__)))

import startup  # noqa: F401

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from bench.timing import PRECISIONS
from jaxgru.cli.options import Parser, run_script
from jaxgru.files import write_text

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "{results}"  # in a command: the folder of results
PUBLISHED = ["astra_gamma", "astra_alpha", "astra_beta", "scribe_gamma", "leviathan"]


class Part(NamedTuple):
    """Minutes that a part may take, its command for Python, and its environment variables.

    small: options that follow in a rehearsal; the last of two equal options counts.
    """

    minutes: float
    command: list[str]
    environment: Mapping[str, str] = {}
    small: Sequence[str] = ()


def kernel(name: str, H: int) -> Part:
    """Return a kernel's tests for H units; a deadlock takes no more than this process's time."""
    tests = ["-o", "addopts=", "-q", "-s", f"tests/kernels/test_gru_{name}.py"]
    return Part(0.75, ["-m", "pytest", *tests, "-k", f"on_a_gpu and [{H}-"])


def benchmark(minutes: float, *options: str, folder: str = "benchmarks", **environment) -> Part:
    """Return a call of benchmark.py. Its own ceilings would be measured again at each call."""
    where = ["--no-ceilings", "--docs", f"{RESULTS}/{folder}"]
    small = ["--quick", "--precision", "float32", "--batch-size", "2", "--sequence-length", "4"]
    if "--configs" in options:
        small += ["--configs", "astra_gamma"]
    command = ["scripts/benchmark.py", *options, "--repeats", "5", *where]
    if "torch.compile" not in options:
        command.append("--no-torch-compile")
    return Part(minutes, command, environment, small)


def train(*options: str, config: str = "astra_gamma", **environment: str) -> Part:
    """Return the published training of a model: up to 20 epochs."""
    command = ["scripts/train.py", "--config", config, *options]
    command += ["--runs", f"{RESULTS}/runs"]
    small = ["--training.epochs", "1", "--training.steps-per-epoch", "2", "--training.batch-size",
             "2", "--training.sequence-length", "4", "--model.hidden-dim", "8"]  # fmt: skip
    return Part(3, command, environment, small)


GAMMA, ALL = ["--configs", "astra_gamma"], ["--configs", *PUBLISHED]
PRECISE = ["--precision", "bfloat16", "float32", "tf32"]
KERNELS = ["hopper", "hopper_rows"]  # a day with a GPU decides which one stays
OURS = ["--only", "jaxgru", "wavefront", *KERNELS]
BFLOAT16 = ["--model.compute_dtype", "bfloat16"]
GRAPHS = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=+WHILE"}  # loops as CUDA graphs
FLOAT32, TF32 = ({"JAX_DEFAULT_MATMUL_PRECISION": PRECISIONS[p]} for p in ("float32", "tf32"))
PARTS = {
    **{f"{name}_{H}": kernel(name, H) for name in KERNELS for H in (64, 128, 256, 320, 512)},
    "gamma": benchmark(7, *GAMMA, "--what", "training", *PRECISE, *OURS, "torch.nn"),
    "graphs": benchmark(4, *GAMMA, "--what", "training", *PRECISE, *OURS, folder="graphs",
                        **GRAPHS),
    "training": benchmark(10, *ALL, "--what", "training", "forward", *PRECISE),
    **{f"train_{name}": train(*BFLOAT16, "--model.unroll", name) for name in KERNELS},
    "train_bfloat16": train(*BFLOAT16),
    "train_float32": train(**FLOAT32),
    "train_wavefront": train("--model.unroll", "wavefront", **FLOAT32),
    "train_tf32": train(**TF32),
    "sampling": benchmark(6, *ALL, "--what", "sampling"),
    "torch.compile": benchmark(8, *GAMMA, "--what", "training", "--only", "jaxgru",
                               "torch.compile"),
    "cost": Part(4, ["scripts/bench/cost.py", "--docs", RESULTS], {},
                 ["--repeats", "1", "--largest", "256"]),
    "plateau": Part(4, ["scripts/maintain/plateau.py", "--seeds", *map(str, range(8)), "--output",
                        f"{RESULTS}/plateau.json"], FLOAT32,
                    ["--seeds", "0", "--steps", "25", "--batch-size", "1"]),
    # the seed of docs/plateau.json that learns at once
    "train_scribe_gamma": train("--training.seed", "4", config="scribe_gamma", **FLOAT32),
    "study": Part(10, ["scripts/reproduce.py", "--all", "--minutes", "9", "--runs",
                       f"{RESULTS}/study"], {}, ["--list"]),
}  # fmt: skip
"""The parts by name, the most urgent first."""

console = Console(highlight=False)


def main() -> None:
    """Read the arguments, run the parts, and print how each ended."""
    parser = Parser(__doc__)
    parser.add_argument("--results", metavar="FOLDER", help="where all results go")
    parser.add_argument("--only", nargs="+", metavar="PART", default=list(PARTS),
                        help="of " + ", ".join(PARTS))  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the commands and exit")
    parser.add_argument("--rehearse", action="store_true",
                        help="run each part in small, on a CPU")  # fmt: skip
    arguments = parser.parse_args()
    for name in arguments.only:
        if name not in PARTS:
            parser.error(f"there is no part {name!r}; there are {', '.join(PARTS)}.")
    if not (arguments.list or arguments.results):
        parser.error("--results is missing: name a folder for the results.")
    folder = Path(arguments.results).resolve() if arguments.results else Path(RESULTS)
    platform = "cpu" if arguments.rehearse else "cuda"  # without a GPU, a part fails at once
    ended = {}
    for name in arguments.only:
        part = PARTS[name]
        options = part.small if arguments.rehearse else ()
        command = [word.replace(RESULTS, str(folder)) for word in (*part.command, *options)]
        environment = {"JAX_PLATFORMS": platform, **part.environment}
        if arguments.rehearse:
            environment.pop("XLA_FLAGS", None)  # a CPU's XLA ends at a GPU's flag
        given = [f"{key}={value}" for key, value in environment.items()]
        line = shlex.join([*given, "python", *command])
        console.print(f"[bold]{name}[/bold], {part.minutes:g} min: {line}", soft_wrap=True)
        if not arguments.list:
            began = time.monotonic()
            how = run(command, part.minutes, environment, folder / "logs" / f"{name}.log")
            ended[name] = f"{how}, {time.monotonic() - began:.0f} s"
            console.print(f"{name}: {ended[name]}")
            write_text(folder / "parts.txt", "".join(f"{n}: {e}\n" for n, e in ended.items()))
    raise SystemExit(any(not how.startswith("done") for how in ended.values()))


def run(command: list[str], minutes: float, given: Mapping[str, str], log: Path) -> str:
    """Run one part in a process with this repository's jaxgru; return how it ended.

    What it prints goes to the log, and its last lines to the screen. When the time is over, it may
    save for 15 s.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                   "PYTHONUNBUFFERED": "1", **given}  # fmt: skip
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(60 * minutes)
            how = "done" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            how = f"stopped after {minutes:g} minutes"
        finally:  # Ctrl-C, too: the part's processes are in a session of their own
            stop(process)
        output.seek(0)
        console.print(*output.readlines()[-15:], sep="", end="", markup=False, soft_wrap=True)
    return how


def stop(process: subprocess.Popen) -> None:
    """End a process and those that it started, if they have not ended, first politely."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(15)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    run_script(main)
