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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
from rich.console import Console
from rich.status import Status
from rich.table import Table

from bench import benchmark_page, timing
from bench.benchmark_records import BenchmarkRun, Benchmarks, ContestantTime, load, save
from bench.contestants import CONTESTANTS, build, is_measured, why_absent
from bench.timing import KINDS, ONE_CORE, PRECISIONS, AnyTask, Started, on_cpu
from jaxgru.cli.options import Parser, run_script
from jaxgru.errors import UserError
from jaxgru.lm import load_config
from jaxgru.lm.config import Config
from jaxgru.parallel import hardware
from pages.markdown import versions
from pages.measurements import describe_hardware

CONFIGS = ("astra_alpha", "astra_beta", "astra_gamma")
console = Console(highlight=False)


def main() -> None:
    """Read the arguments, measure one table after another, and write what was measured."""
    # JAX and torch share a GPU: neither may preallocate all of its memory
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    arguments = _parse()
    configs = [_load(option, arguments) for option in arguments.configs]
    _prepare_process(configs, arguments.what)
    docs = _docs_folder(arguments)
    names = [name for name in arguments.only if not why_absent(name)]
    moment = datetime.datetime.now().isoformat(timespec="seconds")
    run = _describe(arguments)
    console.print(run.hardware, run.note, sep="\n", markup=False)
    data = load(docs / "benchmarks.json") if docs else Benchmarks()
    has_measured = False
    try:
        for task, precision in _tasks(configs, arguments):
            records = measure(task, precision, names, moment, arguments)
            if not records:
                continue
            data = data.merged(moment, run, records)
            has_measured = True
            if docs:
                docs.mkdir(parents=True, exist_ok=True)
                save(docs / "benchmarks.json", data)
    finally:
        if docs and has_measured:
            benchmark_page.write(docs, data)
            console.print(f"written to {docs / 'performance.md'}")


def _parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "--configs",
        nargs="+",
        metavar="CONFIG",
        default=CONFIGS,
        help=f"names or .toml files ({' '.join(CONFIGS)})",
    )
    add(
        "--what",
        nargs="+",
        metavar="KIND",
        choices=KINDS,
        default=KINDS[: -len(ONE_CORE)],
        help=f"{', '.join(KINDS)} (all but the last three, for one core)",
    )
    add(
        "--only",
        nargs="+",
        metavar="CONTESTANT",
        choices=CONTESTANTS,
        default=[*CONTESTANTS],
        help=f"any of {', '.join(CONTESTANTS)} (all)",
    )
    add(
        "--precision",
        nargs="+",
        metavar="P",
        choices=PRECISIONS,
        default=["float32"],
        help=f"precision of matrix products: {', '.join(PRECISIONS)}",
    )
    add("--repeats", type=int, metavar="N", help="number of rounds (default: 7, or 1 with --quick)")
    add("--quick", action="store_true", help="smoke test with hardly any repetition")
    add("--batch-size", type=int, metavar="B", help="rows of a batch (default: the config's)")
    add("--sequence-length", type=int, metavar="T", help="steps of a row (default: the config's)")
    add("--docs", metavar="FOLDER", help="where to write (default: docs, or nowhere with --quick)")
    arguments = parser.parse_args()
    arguments.only = [name for name in CONTESTANTS if name in arguments.only]  # in their order
    if arguments.repeats is None:
        arguments.repeats = 1 if arguments.quick else 7
    _check(parser, arguments)
    return arguments


def _check(parser: Parser, arguments: argparse.Namespace) -> None:
    """End the command, with one sentence, for options that are wrong or not of this machine."""
    kinds = set(arguments.what)
    if arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}; it must be at least 1.")
    if kinds & set(ONE_CORE) and kinds - set(ONE_CORE):
        parser.error(f"--what {' '.join(ONE_CORE)}: they run on one core, without the others.")
    if "tf32" in arguments.precision and on_cpu():
        parser.error("--precision tf32 needs a GPU; a CPU has float32 and bfloat16.")


def _load(name: str, arguments: argparse.Namespace) -> Config:
    """Return a config with the sizes that the arguments ask for.

    Raises:
      UserError: nobody else has its cell.
    """
    sizes = {
        "training.batch_size": arguments.batch_size,
        "training.sequence_length": arguments.sequence_length,
    }
    changes = {field: size for field, size in sizes.items() if size is not None}
    config = load_config(name, changes)
    cell = config.model.cell
    activation = config.model.activation
    if cell not in ("gru", "lstm", "rnn") or activation != "tanh":
        raise UserError(
            f"{name}: only GRUs, LSTMs and RNNs with tanh are measured; its cell is {cell}, with "
            f"{activation}."
        )
    return config


def _prepare_process(configs: list[Config], kinds: Sequence[str]) -> None:
    """Set up this process's memory, cores and signals, and what JAX keeps."""
    hardware.keep_freed_memory()
    if set(kinds) <= set(ONE_CORE) and hasattr(os, "sched_setaffinity"):
        # Before JAX and torch start their threads, which keep to it
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    hardware.share_cpu(math.gcd(*(config.training.batch_size for config in configs)))
    jax.config.update("jax_enable_compilation_cache", False)  # compile times are measured, too
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: write, then exit


def _docs_folder(arguments: argparse.Namespace) -> Path | None:
    """Return the folder to write into; None if nothing is to be written."""
    if arguments.docs:
        return Path(arguments.docs)
    return None if arguments.quick else Path("docs")


def _tasks(configs: list[Config], arguments: argparse.Namespace) -> list[tuple[AnyTask, str]]:
    """Return the tasks and precisions; if time runs out, each config has some."""
    pairs: list[tuple[AnyTask, str]] = []
    for what, precision in itertools.product(arguments.what, arguments.precision):
        for config in configs:
            pairs += [(task, precision) for task in timing.tasks(config, what)]
        pairs += [(task, precision) for task in timing.WITHOUT_CONFIG.get(what, [])]
    return pairs


def _describe(arguments: argparse.Namespace) -> BenchmarkRun:
    """Return this run: the machine, the versions, and who cannot take part."""
    packages = [entry.package for entry in CONTESTANTS.values() if entry.package]
    reasons = {name: why_absent(name) for name in arguments.only}
    notes = [f"{name} did not take part: {why}" for name, why in reasons.items() if why]
    if not why_absent("torch.nn"):
        import torch

        notes.append(f"torch uses {torch.get_num_threads()} threads")
    flags = os.environ.get("XLA_FLAGS")
    if flags:
        notes.append(f"XLA_FLAGS was {flags}")
    notes.append(f"the machine's load was {os.getloadavg()[0]:.1f} at the start")
    return BenchmarkRun(
        hardware=describe_hardware(),
        command=shlex.join(["python", "scripts/benchmark.py", *sys.argv[1:]]),
        versions={"python": platform.python_version(), **versions(["jax", *packages])},
        rounds=arguments.repeats,
        note="; ".join(notes) + ".",
    )


def measure(
    task: AnyTask, precision: str, names: list[str], moment: str, arguments: argparse.Namespace
) -> list[ContestantTime]:
    """Build all contestants for one task, time them in turn, and print and return the result."""
    clock = _clock(task)
    min_seconds = 0 if arguments.quick else timing.MIN_SECONDS
    label = _label(task, precision)
    with (
        jax.default_matmul_precision(None if on_cpu() else PRECISIONS[precision]),
        console.status("") as status,
    ):

        def show_round(name: str, number: int) -> None:
            status.update(f"{label}: round {number + 1}: {name}")

        started = _start_all(task, precision, names, status)
        seconds = timing.measure(started, arguments.repeats, min_seconds, clock, show_round)
    records = [
        ContestantTime(
            run=moment,
            config=task.name,
            kind=task.kind,
            batch_size=task.batch_size,
            num_tokens=task.num_tokens,
            precision=precision,
            contestant=name,
            median=statistics.median(times),
            min=min(times),
            max=max(times),
            compile_seconds=started[name].compile_seconds,
        )
        for name, times in seconds.items()
    ]
    if records:
        _print_table(records)
    del started, seconds  # the next task needs the memory
    gc.collect()
    return records


def _label(task: AnyTask, precision: str) -> str:
    """Return what the log calls a task."""
    return f"{task.name}, {task.kind}, {precision}"


def _clock(task: AnyTask) -> Callable[[], float]:
    """Return what times a task; on one core, other programs on the same core do not count."""
    return time.process_time if task.what in ONE_CORE and on_cpu() else time.perf_counter


def _start_all(
    task: AnyTask, precision: str, names: list[str], status: Status
) -> dict[str, Started]:
    """Return the contestants that have this task, compiled and warm, without those that fail."""
    label = _label(task, precision)
    started = {}
    for name in names:
        if not is_measured(name, task):
            continue
        status.update(f"{label}: {name}: compiling")
        if not console.is_terminal:  # a log has no status line
            console.print(f"{label}: {name}")
        try:
            started[name] = timing.start(partial(build, name, task, precision), _clock(task))
        except Exception as error:  # of another library: the others are measured anyway
            why = f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
            console.print(f"{label}: {name} failed: {why}", markup=False)
    return started


def _print_table(records: Sequence[ContestantTime]) -> None:
    """Print the times of one task, which are the records."""
    first = records[0]
    unit = benchmark_page.unit(first.kind)
    table = Table(title=f"{benchmark_page.title(first)}, {first.precision}, in {unit}")
    name_column, *figure_columns = benchmark_page.HEAD
    table.add_column(name_column, justify="left")
    for column in figure_columns:
        table.add_column(column, justify="right")
    for row in benchmark_page.rows(records):
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    run_script(main)
