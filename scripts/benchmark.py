"""Measure speed side by side with other libraries, and write docs/performance.md."""

from __future__ import annotations

import startup  # noqa: F401

import argparse
import datetime
import gc
import itertools
import math
import os
import platform
import shlex
import signal
import statistics
import sys
import time
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from bench import benchmark_page, timing
from bench.contestants import CONTESTANTS, build, is_measured, why_absent
from bench.records import BenchmarkRun, Benchmarks, ContestantTime, load, save
from bench.timing import KINDS, ONE_CORE, PRECISIONS, AnyTask, Started, on_cpu
from jaxgru.cli.options import Parser, run_script
from jaxgru.errors import UserError
from jaxgru.lm import load_config
from jaxgru.lm.config import Config
from jaxgru.parallel import hardware
from pages.markdown import versions
from pages.records import describe_hardware

CONFIGS = ("astra_alpha", "astra_beta", "astra_gamma")
console = Console(highlight=False)


def main() -> None:
    """Read the arguments, measure one table after another, and write what was measured."""
    # JAX and torch share a GPU: neither may preallocate all of its memory
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    arguments = _parse()
    configs = [_load(option, arguments) for option in arguments.configs]
    hardware.keep_freed_memory()
    if set(arguments.what) <= set(ONE_CORE) and hasattr(os, "sched_setaffinity"):
        # Before JAX and torch start their threads, which keep to it
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    hardware.share_cpu(math.gcd(*(config.training.batch_size for config in configs)))
    docs = Path(arguments.docs or "docs") if arguments.docs or not arguments.quick else None
    jax.config.update("jax_enable_compilation_cache", False)  # compile times are measured, too
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: write, then exit
    names = [name for name in arguments.only if not why_absent(name)]
    moment, run = datetime.datetime.now().isoformat(timespec="seconds"), _describe(arguments)
    console.print(run.hardware, run.note, sep="\n", markup=False)
    data = load(docs / "benchmarks.json") if docs else Benchmarks()
    measured = False
    try:
        for task, precision in _tasks(configs, arguments):
            if records := measure(task, precision, names, moment, arguments):
                data, measured = data.merged(moment, run, records), True
                if docs:
                    docs.mkdir(parents=True, exist_ok=True)
                    save(docs / "benchmarks.json", data)
    finally:
        if docs and measured:
            benchmark_page.write(docs, data)
            console.print(f"written to {docs / 'performance.md'}")


def _parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--configs", nargs="+", metavar="CONFIG", default=CONFIGS,
        help=f"names or .toml files ({' '.join(CONFIGS)})")  # fmt: skip
    add("--what", nargs="+", metavar="KIND", choices=KINDS, default=KINDS[: -len(ONE_CORE)],
        help=f"{', '.join(KINDS)} (all but the last three, for one core)")  # fmt: skip
    add("--only", nargs="+", metavar="CONTESTANT", choices=CONTESTANTS, default=[*CONTESTANTS],
        help=f"any of {', '.join(CONTESTANTS)} (all)")  # fmt: skip
    add("--precision", nargs="+", metavar="P", choices=PRECISIONS, default=["float32"],
        help="precision of matrix products: " + ", ".join(PRECISIONS))  # fmt: skip
    add("--repeats", type=int, metavar="N", help="number of rounds (default: 7, or 1 with --quick)")
    add("--quick", action="store_true", help="smoke test with hardly any repetition")
    add("--batch-size", type=int, metavar="B", help="rows of a batch (default: the config's)")
    add("--sequence-length", type=int, metavar="T", help="steps of a row (default: the config's)")
    add("--docs", metavar="FOLDER", help="where to write (default: docs, or nowhere with --quick)")
    arguments = parser.parse_args()
    arguments.only = [name for name in CONTESTANTS if name in arguments.only]  # in their order
    if arguments.repeats is None:
        arguments.repeats = 1 if arguments.quick else 7
    if arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}; it must be at least 1.")
    if set(ONE_CORE) & set(arguments.what) and not set(arguments.what) <= set(ONE_CORE):
        parser.error(f"--what {' '.join(ONE_CORE)}: they run on one core, without the others.")
    if "tf32" in arguments.precision and on_cpu():
        parser.error("--precision tf32 needs a GPU; a CPU has float32 and bfloat16.")
    return arguments


def _load(name: str, arguments: argparse.Namespace) -> Config:
    given = {"batch_size": arguments.batch_size, "sequence_length": arguments.sequence_length}
    config = load_config(name, {f"training.{n}": v for n, v in given.items() if v is not None})
    cell, activation = config.model.cell, config.model.activation
    if cell not in ("gru", "lstm", "rnn") or activation != "tanh":
        raise UserError(
            f"{name}: only GRUs, LSTMs and RNNs with tanh are measured; its cell is {cell}, with "
            f"{activation}."
        )
    return config


def _tasks(configs: list[Config], arguments: argparse.Namespace) -> list[tuple[AnyTask, str]]:
    """Return the tasks and precisions; if time runs out, each config has some."""
    todo = []
    for what, precision in itertools.product(arguments.what, arguments.precision):
        of_configs = [task for config in configs for task in timing.tasks(config, what)]
        todo += [(task, precision) for task in of_configs + timing.WITHOUT_CONFIG.get(what, [])]
    return todo


def _describe(arguments: argparse.Namespace) -> BenchmarkRun:
    """Return this run: the machine, the versions, and who cannot take part."""
    packages = filter(None, ("jax", *(entry.package for entry in CONTESTANTS.values())))
    absent = {name: why_absent(name) for name in arguments.only}
    notes = [f"{name} did not take part: {why}" for name, why in absent.items() if why]
    if not why_absent("torch.nn"):
        import torch

        notes.append(f"torch uses {torch.get_num_threads()} threads")
    if flags := os.environ.get("XLA_FLAGS"):
        notes.append(f"XLA_FLAGS was {flags}")
    notes.append(f"the machine's load was {os.getloadavg()[0]:.1f} at the start")
    return BenchmarkRun(
        hardware=describe_hardware(),
        command=shlex.join(["python", "scripts/benchmark.py", *sys.argv[1:]]),
        versions={"python": platform.python_version(), **versions(packages)},
        rounds=arguments.repeats,
        note="; ".join(notes) + ".",
    )


def measure(
    task: AnyTask, precision: str, names: list[str], moment: str, arguments: argparse.Namespace
) -> list[ContestantTime]:
    """Build all contestants for one task, time them in turn, and print and return the result."""
    started: dict[str, Started] = {}
    # Other programs on the same core do not count
    clock = time.process_time if task.what in ONE_CORE and on_cpu() else time.perf_counter
    label = f"{task.name}, {task.kind}, {precision}"
    with (
        jax.default_matmul_precision(None if on_cpu() else PRECISIONS[precision]),
        console.status("") as status,
    ):
        for name in (name for name in names if is_measured(name, task)):
            status.update(f"{label}: {name}: compiling")
            if not console.is_terminal:  # a log has no status line
                console.print(f"{label}: {name}")
            try:
                started[name] = timing.start(lambda name=name: build(name, task, precision), clock)
            except Exception as error:  # of another library: the others are measured anyway
                why = f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
                console.print(f"{label}: {name} failed: {why}", markup=False)
        seconds = timing.measure(
            started,
            arguments.repeats,
            0 if arguments.quick else timing.MIN_SECONDS,
            clock,
            on_round=lambda name, i: status.update(f"{label}: round {i + 1}: {name}"),
        )
    records = [
        ContestantTime(
            run=moment, config=task.name, kind=task.kind, batch_size=task.batch_size,
            num_tokens=task.num_tokens, precision=precision, contestant=name,
            median=statistics.median(times), min=min(times), max=max(times),
            compile_seconds=started[name].compile_seconds,
        )
        for name, times in seconds.items()
    ]  # fmt: skip
    if records:
        first = records[0]
        unit = benchmark_page.unit(first.kind)
        table = Table(title=f"{benchmark_page.title(first)}, {precision}, in {unit}")
        for i, column in enumerate(benchmark_page.HEAD):
            table.add_column(column, justify="right" if i else "left")
        for line in benchmark_page.rows(records):
            table.add_row(*line)
        console.print(table)
    del started, seconds  # the next task needs the memory
    gc.collect()
    return records


if __name__ == "__main__":
    run_script(main)
