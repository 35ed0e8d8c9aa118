"""Training processes to do harm to: small, quick to start, and watched from outside.

Each is a process of its own that runs `scripts/train.py` from its first line, forked from a server
that has imported what it needs (`multiprocessing`'s forkserver), so that it starts in a fraction of
a second. Programs are compiled once (JAX's compilation cache).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import mmap
import multiprocessing
import os
import runpy
import shutil
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import jax
import numpy as np
import strikes
from strikes import Plan, Strike

import jaxgru

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "scripts" / "train.py"
CONFIG = "astra_alpha"
STEPS_PER_EPOCH = 40
OPTIONS = {
    "model.embedding_dim": 4,
    "model.hidden_dim": 8,
    "training.epochs": 6,
    "training.steps_per_epoch": STEPS_PER_EPOCH,
    "training.batch_size": 4,
    "training.sequence_length": 16,
    "training.patience": 6,
    "training.keep_epochs": "true",
}
LOOKS = 200_000  # a millisecond or more apart: how long anything may take before it counts as hung
PRELOADED = [
    "jaxgru.lm.runs.lifecycle",
    "jaxgru.cli.summary",
    "jaxgru.cli.options",
    "jaxgru.lm.runs.figure",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "orbax.checkpoint",
]
_processes = threading.Lock()  # multiprocessing looks at all of them whenever one is started


def wait_until(condition: Callable[[], Any], what: str) -> None:
    """Looks again and again until it holds; an AssertionError after that many LOOKS.

    Looks and not seconds: what stops us with our processes, however long, is no fault of theirs.
    """
    for _ in range(LOOKS):
        if condition():
            return
        time.sleep(0.001)
    raise AssertionError(f"waited in vain for {what}")


class Stream:
    """What a process writes, through a named pipe: a limit on the size of files leaves it alone."""

    def __init__(self, path: Path) -> None:
        self.path, self._seen = path, b""
        os.mkfifo(path)
        self._handle: int | None = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(self._handle, fcntl.F_SETPIPE_SZ, 1 << 20)  # more than any of them writes

    def read(self) -> str:
        """All that has come so far."""
        with contextlib.suppress(BlockingIOError):
            while self._handle is not None and (part := os.read(self._handle, 1 << 20)):
                self._seen += part
        return self._seen.decode(errors="replace")

    def close(self) -> None:
        """Reads what is left; more will not come."""
        if self._handle is not None:
            self.read()
            os.close(self._handle)
            self._handle = None


class Trainer:
    """One process of `scripts/train.py`: its steps, its signals, how it ended and what it said."""

    def __init__(self, context: Any, folder: Path, arguments: list[str], prepare: Callable | None):
        folder.mkdir()
        self._out, self._err = Stream(folder / "out"), Stream(folder / "err")
        steps = folder / "steps"
        steps.write_bytes(bytes(16))
        with open(steps, "r+b") as file:
            self._steps = mmap.mmap(file.fileno(), 16)
        arguments = [str(argument) for argument in arguments]
        self.process = context.Process(
            target=_train,
            args=(jaxgru.__file__, arguments, self._out.path, self._err.path, steps, prepare),
            daemon=True,
        )
        with _processes:
            self.process.start()

    @property
    def first_step(self) -> int:
        """The number of the first step that it did; 0: none yet."""
        return struct.unpack("qq", self._steps[:])[0]

    @property
    def last_step(self) -> int:
        """The number of the last step that it told of; 0: none yet."""
        return struct.unpack("qq", self._steps[:])[1]

    @property
    def ended(self) -> bool:
        with _processes:
            return self.process.exitcode is not None

    def wait_until(self, condition: Callable[[], Any], what: str) -> bool:
        """Whether it came about while the process lived."""
        wait_until(lambda: condition() or self.ended, what)
        return not self.ended

    def send(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if not self.ended:
            os.kill(self.process.pid, number)

    def end(self) -> int:
        """Waits for its end; the exit code, negative after a signal."""
        wait_until(lambda: self.ended, "its end")
        self._out.close()
        self._err.close()
        return self.process.exitcode

    @property
    def output(self) -> str:
        return self._out.read()

    @property
    def errors(self) -> str:
        return self._err.read()


def _train(
    library: str, arguments: list[str], out: Path, err: Path, steps: Path, prepare: Callable | None
) -> None:
    """In the new process: the script, as if called from a terminal."""
    assert jaxgru.__file__ == library, f"{jaxgru.__file__} and not {library}"
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):  # nohup ignores the latter
        signal.signal(number, signal.SIG_DFL)
    _count_steps(steps)
    if prepare:
        prepare()
    sys.argv = [str(TRAIN), *arguments]
    sys.path.insert(0, str(TRAIN.parent))
    runpy.run_path(str(TRAIN), run_name="__main__")


def _count_steps(path: Path) -> None:
    """Has the numbers of the first and last step written down, whatever then becomes of us."""
    from jaxgru.lm.runs import lifecycle

    make = lifecycle.Observer
    with open(path, "r+b") as file:
        numbers = mmap.mmap(file.fileno(), 16)

    def counting(*arguments: Any, **named: Any) -> Any:
        observer = make(*arguments, **named)
        tell = observer.on_steps

        def on_steps(epoch: int, done: int, *rest: Any) -> None:
            first = struct.unpack("qq", numbers[:])[0]
            last = epoch * STEPS_PER_EPOCH + done
            numbers[:] = struct.pack("qq", first or last, last)  # a run's first chunk is one step
            tell(epoch, done, *rest)

        observer.on_steps = on_steps
        return observer

    lifecycle.Observer = counting


@dataclass(frozen=True)
class Result:
    """All that a finished run must have in common with an undisturbed one, bit for bit."""

    arrays: str  # the SHA-256 of parameters, optimizer, key, step and the best parameters
    losses: tuple[tuple[float, ...], ...]  # by epoch: epoch, step, learning rate, losses
    samples: str


class Lab:
    """A folder with a text to train on, an undisturbed run and an interrupted one, and trainers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = folder / "text.txt"
        self.text.write_text("the quick brown fox jumps over the lazy dog; " * 40)
        self._context = multiprocessing.get_context("forkserver")
        self._numbers = itertools.count(1)
        self.can_strike = _start_server(folder)
        runs = self.place()
        self.undisturbed = self.version(runs)
        self.calls_of_new = self._calls(runs, lambda prepare: self.start(runs, prepare))
        self.result = self.result_of(self.undisturbed)
        self._interrupted = self._interrupt()
        run = self.interrupted()
        self.calls_of_resumed = self._calls(run, lambda prepare: self.resume(run, prepare))

    def _calls(self, folder: Path, begin: Callable[[Callable | None], Trainer]) -> tuple[int, int]:
        """Trains to the end: how many changes it makes, how often it opens something to read."""
        strike = self.strike(folder, Plan())
        trainer = begin(strike.prepare if self.can_strike else None)
        assert trainer.end() == 0, trainer.errors
        return strike.counts

    def strike(self, folder: Path, plan: Plan) -> Strike:
        """What a process shares with us that is struck at what it does below a folder."""
        return Strike(self.folder / f"strike{next(self._numbers)}", folder, plan)

    def place(self) -> Path:
        """A new folder for runs."""
        path = self.folder / f"runs{next(self._numbers)}"
        path.mkdir()
        return path

    def start(self, runs: Path, prepare: Callable | None = None) -> Trainer:
        """A process that begins a run. `prepare` is called in it first: a module's function."""
        options = [f"--{name}={value}" for name, value in OPTIONS.items()]
        start = ["--config", CONFIG, "--name", CONFIG, f"--data.corpus={self.text}"]
        start += ["--runs", runs, *options]
        return self._trainer(start, prepare)

    def resume(self, run: Path, prepare: Callable | None = None) -> Trainer:
        """A process that resumes a run."""
        return self._trainer(["--resume", run], prepare)

    def _trainer(self, arguments: list, prepare: Callable | None) -> Trainer:
        folder = self.folder / f"process{next(self._numbers)}"
        return Trainer(self._context, folder, arguments, prepare)

    def version(self, runs: Path, number: int = 1) -> Path:
        return runs / CONFIG / f"v{number}"

    def _interrupt(self) -> Path:
        """A run killed at once in its fifth epoch, with the checkpoints of two epochs."""
        runs, started = self.place(), time.monotonic()
        trainer, run = self.start(runs), self.version(runs)
        assert trainer.wait_until(lambda: trainer.last_step > 4 * STEPS_PER_EPOCH, "epoch 5")
        self.life = time.monotonic() - started  # seconds: most of a process's, once all is compiled
        trainer.send(signal.SIGKILL)
        trainer.end()
        assert [path.name for path in steps_in(run)] == ["120", "160"]
        return run

    def interrupted(self) -> Path:
        """A copy of a run killed in its fifth epoch, after step 160, to be spoilt."""
        runs = self.place()
        shutil.copytree(self._interrupted.parent, runs / CONFIG, symlinks=True)
        return self.version(runs)

    def result_of(self, run: Path) -> Result:
        """Reads what a finished run came to."""
        from jaxgru.lm.runs import checkpoints, folders, orbax

        config = folders.load_run_config(run)
        with orbax.open_checkpoints(run) as manager:
            state, best, progress = checkpoints.restore(manager, run, config)
        state = state.replace(key=jax.random.key_data(state.key))
        digest = hashlib.sha256()
        epochs = [jaxgru.lm.load(path)[0] for path in sorted((run / "epochs").iterdir())]
        for leaf in jax.tree.leaves((state, best, jaxgru.lm.load(run)[0], epochs)):
            array = np.asarray(leaf)
            digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert len(records) == len(progress.records)
        names = ("epoch", "step", "learning_rate", "train_loss", "val_loss")
        losses = tuple(tuple(record[name] for name in names) for record in records)
        return Result(digest.hexdigest(), losses, (run / "samples.txt").read_text())

    def differences(self, run: Path) -> list[str]:
        """How a finished run differs from the undisturbed one; none: recovered, every bit."""
        try:
            result = self.result_of(run)
        except Exception as error:  # whatever it is, the run has not recovered
            return [f"{type(error).__name__}: {error}"]
        return [
            f"its {name} differ"
            for name in ("arrays", "losses", "samples")
            if getattr(result, name) != getattr(self.result, name)
        ]

    def missing(self, run: Path) -> list[str]:
        """The files and checkpoints that the undisturbed run has and this one lacks."""
        return sorted(names(self.undisturbed) - names(run))

    def left_over(self, run: Path) -> list[str]:
        """What this run has beyond the undisturbed one, but for checkpoints set aside."""
        more = names(run) - names(self.undisturbed)
        return sorted(name for name in more if not name.split("/")[-1].partition(".broken")[1])


def _start_server(folder: Path) -> bool:
    """The process that the trainers are forked from; it starts no JAX back end itself.

    Returns whether they can be struck: whether there is a compiler.
    """
    library = strikes.compiled(folder)
    settings = {
        "LD_PRELOAD": str(library or ""),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "COLUMNS": "200",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        forkserver.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return library is not None


def names(run: Path) -> set[str]:
    """What is in a run's folder, in its checkpoints and among its epochs' models, by name."""
    paths = (*run.iterdir(), *run.glob("checkpoints/*"), *run.glob("epochs/*"))
    return {str(path.relative_to(run)) for path in paths}


def steps_in(run: Path) -> list[Path]:
    """A run's finished checkpoints, oldest first."""
    steps = [path for path in (run / "checkpoints").glob("*") if path.name.isdigit()]
    return sorted(steps, key=lambda path: int(path.name))
