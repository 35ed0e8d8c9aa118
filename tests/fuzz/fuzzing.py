"""The contract that hostile input is held to, and the worker that holds it there.

A kind of input is a module with `prepare(folder)`, `make(rng, folder)` and `load(made)`. `make`
builds one hostile input from a random number generator alone, so that a seed gives it again; `load`
hands it to the library's public loader and uses what comes back. Either that works, or it raises a
UserError of one line. A finding is anything else: another exception, a longer or unprintable
message, more time or memory than the bounds below, a file written outside the run folder, a process
started, a connection made, or the end of the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))  # a worker's, for pages/

SECONDS = 10.0
"""A case may take no longer, on a core that is shared."""

MEMORY_CONSTANT, MEMORY_FACTOR = 64 * 2**20, 40
"""A loader may take so many bytes, and so many more for each byte of its input."""

ADDRESS_SPACE = 6 * 2**30
"""What the kernel lets a worker take on top of what it begins with: enough to be caught in it."""

MESSAGE_LENGTH = 2000
"""Characters of a message: more is no sentence for people."""

KINDS = (
    "config", "checkpoints", "safetensors", "pth", "sentencepiece", "subwords",
    "characters", "text", "names", "prompts",
)  # fmt: skip


class Finding(Exception):
    """The contract was broken; the text says how."""


class Hang(BaseException):
    """The time is over. No Exception, so that no `except` in between takes it."""


@dataclasses.dataclass
class Made:
    """One input: what `load` needs, how many bytes it has, and where it may write."""

    value: Any
    size: int = 0
    may_write: Path | None = None


class Watch:
    """What a loader does to the world, by Python's audit hooks (PEP 578), which cannot be undone.

    Native code that opens files for itself is not seen here; `snapshot` compares the folders.
    """

    WRITES = {
        "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.link", "os.truncate",
        "os.chmod", "os.utime",
    }  # fmt: skip
    RUNS = {
        "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.startfile",
        "subprocess.Popen", "pty.spawn", "socket.connect", "socket.bind", "os.kill",
        "ctypes.dlopen", "webbrowser.open",
    }  # fmt: skip

    def __init__(self) -> None:
        self.on = False
        self.allowed: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple) -> None:
        if not self.on:
            return
        if event in self.RUNS:
            self.seen.append(f"{event} {arguments!r:.200}")
        elif event in self.WRITES:
            self._wrote(event, arguments[1] if event == "os.symlink" else arguments[0])
        elif event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            flags = arguments[2] or 0
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
                self._wrote(event, arguments[0])

    def _wrote(self, event: str, path: Any) -> None:
        if isinstance(path, int):
            return
        place = os.path.realpath(os.path.dirname(os.path.abspath(os.fsdecode(path))))
        if place == "/dev":
            return
        if self.allowed is None or not f"{place}/".startswith(f"{self.allowed}/"):
            self.seen.append(f"{event} {os.fsdecode(path)!r:.200}")


def check_message(error: Exception) -> None:
    """A UserError's message: one line, printable, and short enough to be read."""
    message = str(error)
    if not message or "\n" in message or "\r" in message:
        raise Finding(f"message of several lines: {message[:300]!r}") from error
    if not message.isprintable():
        raise Finding(f"message that a terminal would obey: {message[:300]!r}") from error
    if len(message) > MESSAGE_LENGTH:
        raise Finding(f"message of {len(message)} characters: {message[:100]!r}") from error
    while (error := error.__cause__ or error.__context__) is not None:
        if isinstance(error, MemoryError):
            raise Finding("memory: refused only because there was no more of it") from error


def check(load: Callable[[Any], None], made: Made, watch: Watch | None = None) -> str:
    """Holds one case to the contract; "used" or "refused". Raises Finding."""
    from jaxgru.errors import UserError

    if watch is not None:
        watch.seen, watch.allowed, watch.on = [], made.may_write, True
    try:
        load(made.value)
        outcome = "used"
    except UserError as error:
        check_message(error)
        outcome = "refused"
    except Finding:
        raise
    except Hang:
        raise Finding("hang: the time was not enough") from None
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        raise Finding(f"{type(error).__name__} at {where}: {str(error)[:200]}") from error
    finally:
        if watch is not None:
            watch.on = False
    if watch is not None and watch.seen:
        raise Finding(f"outside: {watch.seen[0]}")
    return outcome


def snapshot(folder: Path) -> set[str]:
    """Everything below a folder, links not followed."""
    return {os.path.join(at, name) for at, ds, fs in os.walk(folder) for name in (*ds, *fs)}


def case_rng(kind: str, seed: int, number: int) -> random.Random:
    """Case `number` of a kind, the same on every machine."""
    rng = random.Random(f"{kind}:{seed}:{number}")
    rng.number = number
    return rng


def quick_cases(kind: str, count: int, folder: Path, seed: int = 1) -> dict[str, int]:
    """The first cases in this process, for the test suite: exceptions and messages only.

    Memory and what is written are left to the workers of `campaign.py`.
    """
    module = importlib.import_module(f"kind_{kind}")
    module.prepare(folder)
    outcomes = {"used": 0, "refused": 0}
    for number in range(count):
        made = module.make(case_rng(kind, seed, number), folder)
        try:
            with time_limit(60):
                outcomes[check(module.load, made)] += 1
        except Finding as finding:
            known = getattr(module, "KNOWN", "")
            if not known or known not in str(finding):
                raise AssertionError(f"{kind}, seed {seed}, case {number}: {finding}") from finding
    return outcomes


# ---- the worker: a process of its own, which may be killed by what it is given


def memory(field: str) -> int:
    """A line of /proc/self/status in bytes: VmRSS, VmHWM (its peak), VmSize."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s*(\d+) kB", text)[1]) * 1024


def reset_peak() -> None:
    """Makes VmHWM begin again at VmRSS (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises Hang; native code that does not come back is ended by faulthandler."""

    def over(*_: object) -> None:
        raise Hang

    old = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + 10, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, old)


def work(kind: str, seed: int, start: int, stop: int, folder: Path) -> None:
    """Runs cases; says on stdout, a JSON line each, which it begins and how it ended."""
    os.environ["HOME"] = os.environ["XDG_CACHE_HOME"] = os.environ["TMPDIR"] = str(folder)
    os.chdir(folder)
    module = importlib.import_module(f"kind_{kind}")
    module.prepare(folder)
    bounds = {"seconds": SECONDS, "constant": MEMORY_CONSTANT, "factor": MEMORY_FACTOR}
    bounds |= getattr(module, "BOUNDS", {})
    watch = Watch()
    limited = False
    for number in range(start, stop):
        print(json.dumps({"begin": number}), flush=True)
        made = module.make(case_rng(kind, seed, number), folder)
        before = snapshot(folder)
        reset_peak()
        resident, began = memory("VmRSS"), time.monotonic()
        said = ""
        try:
            with time_limit(bounds["seconds"]):
                outcome = check(module.load, made, watch)
        except Finding as finding:
            outcome, said = "finding", str(finding)
        except Hang:
            outcome, said = "finding", f"hang: {bounds['seconds']:.0f} s were not enough"
        seconds, peak = time.monotonic() - began, memory("VmHWM") - resident
        new = {
            name for name in snapshot(folder) - before
            if made.may_write is None or not name.startswith(str(made.may_write))
        }  # fmt: skip
        if not said and new:
            outcome, said = "finding", f"outside: a new file {min(new)[:200]!r}"
        bound = bounds["constant"] + bounds["factor"] * made.size
        if not said and limited and peak > bound:
            outcome = "finding"
            said = f"memory: {peak >> 20} MiB for an input of {made.size} bytes"
        if outcome == "finding" and (known := getattr(module, "KNOWN", "")) and known in said:
            outcome = "known"
        if outcome == "finding":
            keep(folder, kind, seed, number)
        end = {"end": outcome, "said": said, "seconds": round(seconds, 4), "size": made.size}
        # the first case of a process warms up: imports, compiled programs, thread pools
        print(json.dumps(end | {"peak": peak if limited else 0}), flush=True)
        if not limited:
            limit = memory("VmSize") + ADDRESS_SPACE
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            limited = True


def keep(box: Path, kind: str, seed: int, number: int) -> None:
    """Puts a finding's input, where it is one small file, beside the table of findings."""
    if (box / "input").is_file() and (box / "input").stat().st_size < 2**20:
        shutil.copy(box / "input", box.parent / f"{kind}-{seed}-{number}.input")


@dataclasses.dataclass
class Tally:
    """How the cases of one kind went."""

    used: int = 0
    refused: int = 0
    known: int = 0
    findings: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    slowest: float = 0.0
    largest_peak: int = 0

    @property
    def cases(self) -> int:
        return self.used + self.refused + self.known + len(self.findings)


def run_kind(
    kind: str, seed: int, start: int, stop: int, folder: Path, progress: Callable[[Tally], None]
) -> Tally:
    """All cases of a kind, in as many workers as it takes; a worker's death is a finding."""
    tally, number = Tally(), start
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    while number < stop:
        box = folder / f"{kind}-{number}"
        shutil.rmtree(box, ignore_errors=True)
        box.mkdir(parents=True)
        command = [sys.executable, __file__, kind, str(seed), str(number), str(stop), str(box)]
        errors = (folder / f"{kind}.stderr").open("w+b")
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment)
        last = None
        for line in worker.stdout:
            try:
                said = json.loads(line)
            except ValueError:  # a native library's own words
                continue
            if "begin" in said:
                last = said["begin"]
                continue
            number = last + 1
            if said["end"] == "finding":
                tally.findings.append({"kind": kind, "seed": seed, "case": last} | said)
            else:
                setattr(tally, said["end"], getattr(tally, said["end"]) + 1)
                tally.slowest = max(tally.slowest, said["seconds"])
                tally.largest_peak = max(tally.largest_peak, said["peak"])
            last = None
            progress(tally)
        code = worker.wait()
        if code != 0:
            errors.seek(0)
            tail = errors.read().decode(errors="replace")[-2000:]
            if last is None:
                raise RuntimeError(f"the worker of {kind} could not begin:\n{tail}")
            keep(box, kind, seed, last)
            tally.findings.append(
                {"kind": kind, "seed": seed, "case": last, "said": f"process ended ({code})",
                 "stderr": tail}
            )  # fmt: skip
            number = last + 1
        errors.close()
        shutil.rmtree(box, ignore_errors=True)
    return tally


if __name__ == "__main__":
    work(sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5]))
