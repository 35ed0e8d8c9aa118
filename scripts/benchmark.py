"""Measure speed side by side with other libraries, and write docs/performance.md."""

from __future__ import annotations

import startup  # noqa: F401

import argparse
import contextlib
import datetime
import gc
import itertools
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from bench import benchmark_page, timing
from bench.contestants import CONTESTANTS, build, is_measured, why_absent
from bench.records import BenchmarkRun, Benchmarks, ContestantTime
from bench.timing import KINDS, PRECISIONS, AnyTask, Started, Task, TooSlow, on_cpu
from jaxgru.cli.options import Parser, run_script
from jaxgru.errors import UserError
from jaxgru.lm import config_names, load_config
from jaxgru.lm.config import Config
from jaxgru.lm.runs.published import load_published
from jaxgru.parallel import hardware
from pages.markdown import versions

PACKAGES = ("jax", "flax", "dm-haiku", "torch")
console = Console(highlight=False)


def main() -> None:
    """Read the arguments, measure one table after another, and write what was measured."""
    # JAX and torch share a GPU: neither may preallocate all of its memory
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    arguments = _parse()
    configs = {option: _load(option, arguments) for option in arguments.configs}
    hardware.keep_freed_memory()
    hardware.share_cpu(math.gcd(*(config.training.batch_size for config in configs.values())))
    if arguments.probe:
        return _probe(*configs.values(), arguments)

    docs = Path(arguments.docs or "docs") if arguments.docs or not arguments.quick else None
    kept = benchmark_page.load(docs / "benchmarks.json") if docs else Benchmarks()
    jax.config.update("jax_enable_compilation_cache", False)  # compile times are measured, too
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: write, then exit
    benchmark = Benchmark(arguments, docs, kept)
    todo: list[tuple[str, AnyTask, str]] = []  # if time runs out, each config has some
    for what, precision in itertools.product(arguments.what, arguments.precision):
        for option, config in configs.items():
            todo += [(option, task, precision) for task in timing.tasks(config, what)]
        todo += [("", task, precision) for task in timing.WITHOUT_CONFIG.get(what, [])]
    compiled = tempfile.TemporaryDirectory()  # torch's cache: empty, as JAX has none
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled.name
    try:
        for option, task, precision in todo:
            benchmark.measure(option, task, precision)
    finally:
        compiled.cleanup()
        if docs and benchmark.data.records:
            benchmark_page.write(docs, benchmark.data)
            console.print(f"written to {docs / 'performance.md'}")


def _parse() -> argparse.Namespace:
    published = [name for name in config_names() if load_published(name).num_params]
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--configs", nargs="+", metavar="CONFIG", default=published,
        help="names or .toml files (the seven published ones)")  # fmt: skip
    add("--what", nargs="+", metavar="KIND", default=KINDS, help=", ".join(KINDS))
    add("--only", nargs="+", metavar="CONTESTANT", default=list(CONTESTANTS),
        help=f"any of {', '.join(CONTESTANTS)}")  # fmt: skip
    add("--precision", nargs="+", metavar="P", default=["float32"],
        help="precision of matrix products: " + ", ".join(PRECISIONS))  # fmt: skip
    add("--repeats", type=int, metavar="N", help="number of rounds (default: 7, or 1 with --quick)")
    add("--quick", action="store_true", help="smoke test with hardly any repetition")
    add(
        "--memory",
        action="store_true",
        help="also peak memory on a CPU, each in a process of its own",
    )
    add(
        "--no-torch-compile",
        action="store_true",
        help="leave out torch.compile, which takes minutes",
    )
    add("--no-ceilings", action="store_true", help="do not measure the machine's ceilings")
    add("--compile-limit", type=float, default=900, metavar="SECONDS",
        help="give up torch.compile after this time (default: %(default)g)")  # fmt: skip
    add("--batch-size", type=int, metavar="B", help="default: the config's")
    add("--sequence-length", type=int, metavar="T", help="default: the config's")
    add("--docs", metavar="FOLDER", help="where to write (default: docs, or nowhere with --quick)")
    add("--probe", help=argparse.SUPPRESS)  # see _probe
    arguments = parser.parse_args()
    for option, known in [("only", CONTESTANTS), ("what", KINDS), ("precision", PRECISIONS)]:
        for value in getattr(arguments, option):
            if value not in known:
                parser.error(f"--{option} knows no {value!r}; it knows {', '.join(known)}.")
    if arguments.repeats is None:
        arguments.repeats = 1 if arguments.quick else 7
    if arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}; it must be at least 1.")
    if not arguments.compile_limit > 0:
        parser.error(f"--compile-limit is {arguments.compile_limit:g}; it must be above 0.")
    if "tf32" in arguments.precision and on_cpu():
        parser.error("--precision tf32 needs a GPU; a CPU has float32 and bfloat16.")
    return arguments


def _load(name: str, arguments: argparse.Namespace) -> Config:
    given = {"batch_size": arguments.batch_size, "sequence_length": arguments.sequence_length}
    config = load_config(name, {f"training.{n}": v for n, v in given.items() if v is not None})
    try:
        timing.operations_per_token(config.model)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    return config


class Benchmark:
    """One run of this script: its options, the machine, and the measurements so far."""

    def __init__(self, arguments: argparse.Namespace, docs: Path | None, kept: Benchmarks) -> None:
        self.arguments, self.docs, self.data = arguments, docs, kept
        self.on_cpu = on_cpu()
        self.name = datetime.datetime.now().isoformat(timespec="seconds")
        names = [name for name in CONTESTANTS if name in arguments.only]
        if arguments.no_torch_compile:
            names = [name for name in names if name != "torch.compile"]
        absent = {name: why_absent(name) for name in names}
        self.contestants = [name for name in names if not absent[name]]
        notes = [f"{name} did not take part: {why}" for name, why in absent.items() if why]
        self.has_torch = not why_absent("torchref")
        if self.has_torch:
            import torch

            notes.append(f"torch uses {torch.get_num_threads()} threads")
        if flags := os.environ.get("XLA_FLAGS"):
            notes.append(f"XLA_FLAGS was {flags}")
        notes.append(f"the machine's load was {os.getloadavg()[0]:.1f} at the start")
        machine = hardware.describe_hardware()
        if arguments.no_ceilings:
            device = jax.devices()[0].device_kind
            ceilings = timing.KNOWN_CEILINGS.get(device, {})
            known = f"those known of an {device}" if ceilings else "unknown"
            notes.append(f"ceilings were not measured, but are {known}")
        else:
            with console.status("the machine's ceiling"):
                ceilings = self.ceilings()
        console.print(machine, *notes, sep="\n", markup=False)
        for what, much in ceilings.items():
            console.print(f"ceiling: {benchmark_page.ceiling_text(what, much)}")
        self.run = BenchmarkRun(
            hardware=machine,
            command=shlex.join(["python", "scripts/benchmark.py", *sys.argv[1:]]),
            versions={"python": platform.python_version(), **versions(PACKAGES)},
            rounds=arguments.repeats,
            note="; ".join(notes) + ".",
            ceilings=ceilings,
        )

    def ceilings(self) -> dict[str, float]:
        """Return operations per second by precision, and on a GPU "copy", in bytes per second."""
        repeats = 1 if self.arguments.quick else 5
        sizes = [256] if self.arguments.quick else [1024, 2048, 4096] + [8192] * (not self.on_cpu)
        found = {}
        if self.has_torch:
            from bench import torch_peers
        for precision in self.arguments.precision if self.on_cpu else PRECISIONS:
            makers = [lambda size, p=precision: timing.jax_product(size, p)]
            if self.has_torch:
                makers.append(lambda size, p=precision: torch_peers.product(size, p))
            found[precision] = timing.product_ceiling(makers, sizes, repeats)
        if not self.on_cpu:
            makers = [timing.jax_copy, *([torch_peers.copy] if self.has_torch else [])]
            num_bytes = 2**26 if self.arguments.quick else 2**30
            found["copy"] = timing.copy_ceiling(makers, num_bytes, repeats)
        return found

    def measure(self, option: str, task: AnyTask, precision: str) -> None:
        """Build all contestants for one task, time them in turn, print and keep the result.

        option: the name of the task's config on the command line.
        """
        names = [name for name in self.contestants if is_measured(name, task)]
        if not names:
            return
        started: dict[str, Started] = {}
        failed: dict[str, str] = {}
        memory: dict[str, int | None] = {}
        label = f"{task.name}, {task.kind}, {precision}"
        with (
            jax.default_matmul_precision(None if self.on_cpu else PRECISIONS[precision]),
            console.status("") as status,
        ):
            for name in names:
                status.update(f"{label}: {name}: compiling")
                if not console.is_terminal:  # a log has no status line
                    console.print(f"{label}: {name}")
                began = self.begin(name, task, precision)
                if isinstance(began, str):
                    failed[name] = began
                    continue
                started[name] = began
                memory[name] = None if self.on_cpu else began.contestant.memory()
            timings = timing.measure(
                started,
                self.arguments.repeats,
                0 if self.arguments.quick else timing.MIN_SECONDS,
                on_repeat=lambda name, i: status.update(
                    f"{label}: round {i + 1} of {self.arguments.repeats}: {name}"
                ),
            )
            if self.on_cpu and self.arguments.memory and isinstance(task, Task):
                for name in started:
                    status.update(f"{label}: {name}: memory, in a process of its own")
                    memory[name] = self.peak_memory(name, option, task, precision)
        self.keep([
            timing.make_record(self.name, task, precision, name,
                               failed.get(name) or (started[name], timings[name]), memory.get(name))
            for name in names
        ])  # fmt: skip
        del started, timings  # the next task needs the memory
        gc.collect()

    def begin(self, name: str, task: AnyTask, precision: str) -> Started | str:
        """Return a contestant, warm, or one line that says why there is none."""
        limit = self.arguments.compile_limit
        try:
            with timing.time_limit(limit) if name == "torch.compile" else contextlib.nullcontext():
                return timing.start(lambda: build(name, task, precision))
        except TooSlow:
            return f"not compiled within {limit:g} s"
        except Exception as error:
            return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]

    def peak_memory(self, name: str, option: str, task: Task, precision: str) -> int | None:
        """Return the peak memory in bytes of a process that does only this; None if it fails."""
        B, T = task.config.training.batch_size, task.config.training.sequence_length
        command = [sys.executable, __file__, "--configs", option, "--only", name]
        command += ["--probe", task.kind, "--precision", precision]
        command += ["--batch-size", str(B), "--sequence-length", str(T)]
        done = subprocess.run(command, capture_output=True, text=True)
        return int(done.stdout) if done.returncode == 0 else None

    def keep(self, records: list[ContestantTime]) -> None:
        """Print the records as a table, and save them with the others at once."""
        self.data = benchmark_page.merge(self.data, self.name, self.run, records)
        if self.docs:
            self.docs.mkdir(parents=True, exist_ok=True)
            benchmark_page.save(self.docs / "benchmarks.json", self.data)
        table = Table(title=f"{records[0].config}: {benchmark_page.title(records[0])}")
        for i, column in enumerate(benchmark_page.head(records[0].kind)):
            table.add_column(column, justify="right" if i else "left")
        for line in benchmark_page.rows(records, self.data.runs):
            table.add_row(*line)
        console.print(table)
        for line in benchmark_page.failures(records):
            console.print(line, markup=False)


def _probe(config: Config, arguments: argparse.Namespace) -> None:
    """Call a contestant twice and print this process's peak memory: what --memory starts."""
    (task,) = [t for what in KINDS for t in timing.tasks(config, what) if t.kind == arguments.probe]
    timing.start(lambda: build(arguments.only[0], task, *arguments.precision))
    print(hardware.peak_resident_bytes())


if __name__ == "__main__":
    run_script(main)
