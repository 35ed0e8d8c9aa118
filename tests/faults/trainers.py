"""Training processes to which something happens at the n-th change that they make to a run's files.

They are forked from a server that has imported what they need, so each starts at once, and run
`scripts/train.py` from its first line.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import runpy
import signal
import sys
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

TRAIN = Path(__file__).resolve().parents[2] / "scripts" / "train.py"
CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink"}  # audited by Python
FULL = 4096  # bytes, to which files are limited as by a full disk: more than is printed


@dataclass(frozen=True)
class Harm:
    """What happens at the n-th change: a signal, or the disk is full from then on."""

    nth: int = 0  # 0: nothing
    number: int = signal.SIGKILL  # 0: the disk is full instead
    delay: float = 0.0  # seconds until a kill, which then also comes within TensorStore's writes


NO_HARM = Harm()


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int  # negative after a signal
    output: str
    errors: str
    changes: int  # that it made, if nothing happened to it


def start_server() -> None:
    """Import what the processes need, once. The server starts no JAX back end itself."""
    modules = ("jaxgru.lm.runs.lifecycle", "jaxgru.cli.summary",
               "matplotlib.figure", "matplotlib.backends.backend_agg", "orbax.checkpoint",
               "tensorboardX", "trainers")  # fmt: skip
    forkserver.set_forkserver_preload(list(modules))
    forkserver.ensure_running()


def train(folder: Path, arguments: list[str], harm: Harm = NO_HARM) -> Ended:
    """Run `scripts/train.py` to its end; `folder` is the one of all runs."""
    logs = [folder.with_name(f"{folder.name}.{name}") for name in ("out", "err", "changes")]
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_train, args=(str(folder), arguments, logs, harm))
    process.start()
    process.join()
    output, errors, changes = (path.read_text() if path.exists() else "" for path in logs)
    assert process.exitcode is not None
    return Ended(process.exitcode, output, errors, int(changes or 0))


def _train(folder: str, arguments: list[str], logs: list[Path], harm: Harm) -> None:
    for number, path in enumerate(logs[:2], 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    changes = 0

    def count(event: str, values: tuple[Any, ...]) -> None:
        nonlocal changes
        writes = event == "open" and values[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if not (writes or event in CHANGES) or not any(str(x).startswith(folder) for x in values):
            return
        changes += 1
        if changes != harm.nth:
            return
        if harm.number == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, FULL))
        elif harm.delay:
            signal.setitimer(signal.ITIMER_REAL, harm.delay)  # SIGALRM kills as SIGKILL does
        else:
            os.kill(os.getpid(), harm.number)

    sys.addaudithook(count)
    sys.argv = [str(TRAIN), *arguments]
    sys.path.insert(0, str(TRAIN.parent))
    try:
        runpy.run_path(str(TRAIN), run_name="__main__")
    finally:
        logs[2].write_text(str(changes))
