"""The harm that is done to training runs, one function a kind: what it did, and what was lost.

Each takes a lab and a `random.Random`, and does its harm once, to a process or to a run's folder;
then the run is resumed, and its end compared with the undisturbed run's, bit for bit.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fault_lab import STEPS_PER_EPOCH, Lab, Trainer, names, steps_in

LAST_STEP = 6 * STEPS_PER_EPOCH
WRITE = 0.15  # seconds: within so long of a checkpoint's first file a process is killed
NEVER = "there was no run yet"


@dataclass
class Outcome:
    """What one harm did."""

    problems: list[str]  # none: the run recovered, every bit
    steps_lost: int = 0  # done once and had to be done again
    files_lost: list[str] = field(default_factory=list)
    note: str = ""  # where it struck, or what was said


class Problems(list[str]):
    """Sentences about what went wrong."""

    def unless(self, right: bool, what: str) -> None:
        if not right:
            self.append(what)

    def of_one_sentence(self, trainer: Trainer, code: int, *words: str) -> None:
        """It must end with this code and one line on stderr that has these words in it."""
        ended, said = trainer.end(), trainer.errors
        self.unless(ended == code, f"it ended with {ended} and not {code}: {said[-300:]}")
        self.unless(len(said.splitlines()) == 1, f"not one line: {said[-1000:]}")
        self.extend(f"it does not say {word!r}: {said}" for word in words if word not in said)


def recover(lab: Lab, run: Path, problems: Problems) -> Trainer:
    """Resumes a run to its end and compares it with the undisturbed one.

    One that was stopped before its first step has left no folder, and starts again.
    """
    trainer = lab.resume(run) if run.exists() else lab.start(run.parents[1])
    code = trainer.end()
    if code != 0:
        problems.append(f"it cannot be resumed ({code}): {trainer.errors[-1000:]}")
        return trainer
    problems += lab.differences(run)
    problems += [f"left over: {name}" for name in lab.left_over(run)]
    return trainer


def outcome(lab: Lab, run: Path, problems: Problems, lost: int = 0, note: str = "") -> Outcome:
    return Outcome(list(problems), lost, lab.missing(run), note)


def steps_lost(before: Trainer, after: Trainer) -> int:
    """Steps that were done before and are done again. Its first chunk of steps is a single one."""
    return max(0, before.last_step - (after.first_step or LAST_STEP + 1) + 1)


# ---- killed ----


def kills(lab: Lab, rng: random.Random, most: int, moment: Callable) -> list[Outcome]:
    """Kills one run again and again, `most` times at most, then lets it end."""
    runs, run = lab.place(), None
    notes: list[str] = []
    trainers: list[Trainer] = []
    while True:
        trainers.append(lab.start(runs) if run is None else lab.resume(run))
        if len(notes) == most or not moment(lab, trainers[-1], runs, rng):
            break
        trainers[-1].send(signal.SIGKILL)
        if trainers[-1].end() == 0:
            break  # it came to its end first
        run = newest_run(runs)
        notes.append(_where_it_struck(run, trainers[-1]))
    problems = Problems()
    code = trainers[-1].end()
    problems.unless(code == 0, f"it ended with {code}: {trainers[-1].errors[-1000:]}")
    run = newest_run(runs)
    problems += lab.differences(run)
    problems += [f"left over: {name}" for name in lab.left_over(run)]
    return [
        outcome(lab, run, problems, steps_lost(before, after), note)
        for (before, after), note in zip(itertools.pairwise(trainers), notes, strict=True)
    ]


def newest_run(runs: Path) -> Path | None:
    """The newest run that can be resumed; None: no process has come so far."""
    found = [path.parent for path in runs.glob("*/v*/config.toml")]
    return max(found, key=lambda run: int(run.name[1:]), default=None)


def _where_it_struck(run: Path | None, trainer: Trainer) -> str:
    if run is None:
        return NEVER
    entries = names(run)
    if any("tmp" in name for name in entries):
        return "inside a checkpoint write"
    if not all((step / "checksums.json").exists() for step in steps_in(run)[-1:]):
        return "between a checkpoint and its checksums"
    if any(name.endswith(".part") for name in entries):
        return "inside another file's write"
    return "elsewhere" if trainer.last_step else "before the first step"


def at_random(lab: Lab, trainer: Trainer, runs: Path, rng: random.Random) -> bool:
    """At any moment of its life."""
    end = time.monotonic() + rng.uniform(0, lab.life)
    return trainer.wait_until(lambda: time.monotonic() > end, "its moment")


def in_a_write(lab: Lab, trainer: Trainer, runs: Path, rng: random.Random) -> bool:
    """When the first, second or third checkpoint from now on is being written."""
    seen: set[Path] = set()
    number = rng.randint(1, 3)

    def written() -> bool:
        seen.update(runs.glob("*/v*/checkpoints/*tmp"))
        return len(seen) >= number

    if not trainer.wait_until(written, "a checkpoint"):
        return False
    end = time.monotonic() + rng.uniform(0, WRITE)
    return trainer.wait_until(lambda: time.monotonic() > end, "its moment")


# ---- told to stop ----


def stopped(lab: Lab, rng: random.Random, number: int, times: int) -> Outcome:
    """SIGTERM or Ctrl-C while it trains, once or twice within 0.3 s."""
    runs = lab.place()
    trainer, step = lab.start(runs), rng.randint(0, LAST_STEP - 2 * STEPS_PER_EPOCH)
    trainer.wait_until(lambda: trainer.last_step > step, "training")
    trainer.send(number)
    if times == 2:
        end = time.monotonic() + rng.uniform(0, 0.3)
        trainer.wait_until(lambda: time.monotonic() > end, "its moment")
        trainer.send(number)
    code, problems, run = trainer.end(), Problems(), lab.version(runs)
    # where the first has stopped it before the second comes, the system's own rule is back
    allowed = (130, -number) if times == 2 else (130,)
    problems.unless(code in allowed, f"it ended with {code}: {trainer.errors[-1000:]}")
    problems.unless("Traceback" not in trainer.errors, trainer.errors[-1000:])
    if times == 1:
        problems.unless(f"--resume {run}" in trainer.output, "it does not say how to go on")
    after = recover(lab, run, problems)
    lost = steps_lost(trainer, after)
    problems.unless(times == 2 or lost == 0, f"{lost} steps were lost")
    return outcome(lab, run, problems, lost)


def stopped_before_it_began(lab: Lab, rng: random.Random) -> Outcome:
    """Ctrl-C after its first sentence: while the step is compiled, or in one of the first steps."""
    runs = lab.place()
    trainer, problems = lab.start(runs), Problems()
    trainer.wait_until(lambda: "tokens" in trainer.output, "its first sentence")
    trainer.send(signal.SIGINT)
    code = trainer.end()
    problems.unless(code == 130, f"it ended with {code}: {trainer.errors[-1000:]}")
    problems.unless(trainer.errors == "", trainer.errors[-1000:])
    note = f"after step {trainer.last_step}"
    if trainer.last_step:
        after = recover(lab, lab.version(runs), problems)
        return outcome(lab, lab.version(runs), problems, steps_lost(trainer, after), note)
    problems.unless(not any(runs.iterdir()), f"left over: {list(runs.rglob('*'))}")
    recover(lab, lab.version(runs), problems)
    return outcome(lab, lab.version(runs), problems, note=note)


def output_gone(lab: Lab, rng: random.Random) -> Outcome:
    """Standard output takes nothing (/dev/full): one sentence on stderr, and the run is trained."""
    runs, problems = lab.place(), Problems()
    trainer = lab.start(runs, full_output)
    problems.of_one_sentence(trainer, 0, "standard output is gone")
    problems += lab.differences(lab.version(runs))
    return outcome(lab, lab.version(runs), problems, note=trainer.errors)


def full_output() -> None:
    """In a new process: standard output is a device that is always full."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


# ---- the disk ----


def file_limit(lab: Lab, rng: random.Random) -> Outcome:
    """From some step on no file may be larger than 1 to 5 kB (RLIMIT_FSIZE): a write fails."""
    runs = lab.place()
    trainer, step = lab.start(runs), rng.randint(1, LAST_STEP - 2 * STEPS_PER_EPOCH)
    trainer.wait_until(lambda: trainer.last_step >= step, "training")
    limit = rng.randint(1000, 5000)
    resource.prlimit(trainer.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    return _full(lab, trainer, lab.version(runs), "File too large", contextlib.nullcontext)


def full_disk(lab: Lab, rng: random.Random) -> Outcome:
    """The run is on a file system (tmpfs) that has room for one to three checkpoints; ENOSPC."""
    runs = lab.place()
    with mounted("-t", "tmpfs", "-o", f"size={rng.randint(250, 600)}k", "tmpfs", runs):
        trainer = lab.start(runs)

        def make_room() -> contextlib.AbstractContextManager:
            subprocess.run(["mount", "-o", "remount,size=64m", str(runs)], check=True)
            return contextlib.nullcontext()

        return _full(lab, trainer, lab.version(runs), "No space left on device", make_room)


def _full(lab: Lab, trainer: Trainer, run: Path, why: str, mend: Callable) -> Outcome:
    problems = Problems()
    problems.of_one_sentence(trainer, 2, why, "cannot be written")
    kept = steps_in(run)
    told = f"checkpoint of step {kept[-1].name} is intact" if kept else "none was saved yet"
    problems.unless(told in trainer.errors, f"it does not say {told!r}: {trainer.errors}")
    mend()  # a thread of Orbax may outlive the error and leave its part; `recover` sees it gone
    after = recover(lab, run, problems)
    return outcome(lab, run, problems, steps_lost(trainer, after), trainer.errors)


@contextlib.contextmanager
def mounted(*arguments: object) -> Iterator[None]:
    """With something mounted on the folder that is the last argument. Only root may."""
    subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(arguments[-1])], check=True)


def can_mount(folder: Path) -> bool:
    """Whether this process may mount file systems."""
    try:
        with mounted("-t", "tmpfs", "tmpfs", folder):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A folder that cannot be written: mounted read-only over itself (root), or by its mode."""
    if os.geteuid() != 0:
        paths = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
        for path in paths:
            path.chmod(0o555)
        yield
        for path in paths:
            path.chmod(0o755)
        return
    with mounted("--bind", folder, folder):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        yield


def read_only_run(lab: Lab, rng: random.Random) -> Outcome:
    """A run's folder is read-only when it is resumed."""
    run, problems = lab.interrupted(), Problems()
    before = _contents(run)
    with read_only(run):
        trainer = lab.resume(run)
        problems.of_one_sentence(trainer, 2, f"the run {run} cannot be written")
        problems.unless("tokens" not in trainer.output, "it had begun")
    problems.unless(_contents(run) == before, "the folder has changed")
    after = recover(lab, run, problems)
    return outcome(lab, run, problems, max(0, after.first_step - 161), trainer.errors)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- a newest checkpoint that is not as it was written ----


def spoilt(lab: Lab, rng: random.Random, how: Callable[[Path, random.Random], None]) -> Outcome:
    """A file of the newest checkpoint is spoilt: it is set aside, and the one before is used."""
    run, problems = lab.interrupted(), Problems()
    newest = run / "checkpoints" / "160"
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    unlucky = rng.choice([path for path in files if path.name != "checksums.json"])
    how(unlucky, rng)
    before = _contents(newest)
    after = recover(lab, run, problems)
    said = after.errors
    problems.unless(len(said.splitlines()) == 1, f"not one line: {said}")
    problems.unless(f"{newest} is broken" in said, f"it does not name it: {said}")
    problems.unless("resumes from step 120" in said, f"it does not say from where: {said}")
    aside = newest.with_name("160.broken")
    kept = {path.replace(str(aside), str(newest)): b for path, b in _contents(aside).items()}
    problems.unless(kept == before, "the broken checkpoint was not kept as it was")
    note = f"{unlucky.relative_to(newest)}: {said}"
    return outcome(lab, run, problems, max(0, 161 - after.first_step), note)


def flip(path: Path, rng: random.Random) -> None:
    """Flips one bit."""
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, rng: random.Random) -> None:
    """Cuts off its end."""
    os.truncate(path, rng.randrange(path.stat().st_size))


def remove(path: Path, rng: random.Random) -> None:
    """Removes the file."""
    path.unlink()


def remove_item(path: Path, rng: random.Random) -> None:
    """Removes the whole item (parameters, optimizer, best, progress) that the file belongs to."""
    newest = next(parent for parent in path.parents if parent.name == "160")
    shutil.rmtree(newest / rng.choice(["params", "optimizer", "best", "progress"]))


def all_spoilt(lab: Lab, rng: random.Random) -> Outcome:
    """Every checkpoint is broken: one clear error, again and again, and nothing is deleted."""
    run, problems = lab.interrupted(), Problems()
    for step in steps_in(run):
        flip(step / "params" / "_METADATA", rng)
    before = _contents(run)
    for _ in range(2):
        trainer = lab.resume(run)
        problems.of_one_sentence(trainer, 2, "no checkpoint that is whole", "160", "120")
    problems.unless(_contents(run) == before, "the folder has changed")
    shutil.rmtree(run / "checkpoints")  # as the sentence says
    recover(lab, run, problems)
    return outcome(lab, run, problems, 160, trainer.errors)


def torn_metrics(lab: Lab, rng: random.Random) -> Outcome:
    """The last line of metrics.jsonl is torn."""
    run, problems = lab.interrupted(), Problems()
    metrics = run / "metrics.jsonl"
    last = len(metrics.read_bytes().splitlines()[-1])
    os.truncate(metrics, metrics.stat().st_size - rng.randrange(2, last))
    after = recover(lab, run, problems)
    return outcome(lab, run, problems, max(0, 161 - after.first_step))


# ---- the clock ----


def clock_back() -> None:
    """In a new process: Python's clocks say that it is a year ago."""
    year = 365 * 24 * 3600.0
    now, now_ns, real = time.time, time.time_ns, datetime.datetime

    class Earlier(real):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return real.now(tz) - datetime.timedelta(seconds=year)

    time.time, time.time_ns = lambda: now() - year, lambda: now_ns() - int(year * 1e9)
    datetime.datetime = Earlier


def clock(lab: Lab, rng: random.Random) -> Outcome:
    """Set back a year, files' times too; then right again: steps decide, and no times."""
    run, problems = lab.interrupted(), Problems()
    first = lab.resume(run, clock_back)
    if first.wait_until(lambda: first.last_step > 5 * STEPS_PER_EPOCH, "epoch 6"):
        first.send(signal.SIGKILL)
    first.end()
    problems.unless(first.first_step == 161, f"it went on from step {first.first_step}")
    for age, step in enumerate(steps_in(run)):  # the newest checkpoint has the oldest time
        for path in (step, *step.rglob("*")):
            os.utime(path, (time.time() - 1e6 * age,) * 2)
    after = recover(lab, run, problems)
    problems.unless(after.first_step in (201, 0), f"then from step {after.first_step}")
    return outcome(lab, run, problems, steps_lost(first, after))


# ---- two at once ----


def two_starts(lab: Lab, rng: random.Random) -> Outcome:
    """Two runs of one config begin at once: two versions, both as if alone."""
    runs, problems = lab.place(), Problems()
    trainers = [lab.start(runs), lab.start(runs)]
    problems += [trainer.errors[-1000:] for trainer in trainers if trainer.end() != 0]
    for number in (1, 2):
        problems += lab.differences(lab.version(runs, number))
        problems += [f"left over: {name}" for name in lab.left_over(lab.version(runs, number))]
    there = sorted(path.name for path in lab.version(runs).parent.iterdir())
    problems.unless(there == ["latest", "v1", "v2"], f"there are {there}")
    latest = os.readlink(lab.version(runs).parent / "latest")
    problems.unless(latest == "v2", f"latest is {latest}")
    return outcome(lab, lab.version(runs), problems)


def two_resumes(
    lab: Lab, rng: random.Random, between: Callable[[Path], None] = lambda run: None
) -> Outcome:
    """A second process resumes a run while a first trains it: refused, and no harm is done.

    between: what is done to the run's folder before the second comes.
    """
    run, problems = lab.interrupted(), Problems()
    first = lab.resume(run)
    first.wait_until(lambda: first.last_step > 160, "training")
    first.send(signal.SIGSTOP)  # so that it holds the run however slow the second is
    between(run)
    second = lab.resume(run)
    problems.of_one_sentence(second, 2, f"the run {run} is being trained by another process")
    first.send(signal.SIGCONT)
    problems.unless(first.end() == 0, first.errors[-1000:])
    problems += lab.differences(run)
    problems += [f"left over: {name}" for name in lab.left_over(run)]
    return outcome(lab, run, problems, max(0, 161 - first.first_step), second.errors)


def edit_config(run: Path) -> None:
    """As `sed -i` and vim do: a new file takes the place of config.toml."""
    shutil.copy(run / "config.toml", run / "config.toml~")
    os.replace(run / "config.toml~", run / "config.toml")


def moved(lab: Lab, rng: random.Random) -> Outcome:
    """The run's folder is moved while it is trained: it ends, and is resumed where it is now."""
    run, problems = lab.interrupted(), Problems()
    trainer = lab.resume(run)
    trainer.wait_until(lambda: trainer.last_step > 160, "training")
    elsewhere = run.rename(lab.place() / "moved")
    problems.of_one_sentence(trainer, 2, f"the run {run} was moved or deleted")
    problems.unless(not run.exists(), f"something is written at the old place: {run}")
    after = recover(lab, elsewhere, problems)
    return outcome(lab, elsewhere, problems, steps_lost(trainer, after), trainer.errors)


def killed_holder(lab: Lab, rng: random.Random) -> Outcome:
    """The process that holds a run is killed: the next one gets it at once."""
    run, problems = lab.interrupted(), Problems()
    first = lab.resume(run)
    first.wait_until(lambda: first.last_step > 160, "training")
    first.send(signal.SIGKILL)
    first.end()
    after = recover(lab, run, problems)
    return outcome(lab, run, problems, steps_lost(first, after))


ALL: dict[str, Callable[[Lab, random.Random], Outcome]] = {
    "SIGTERM once": lambda lab, rng: stopped(lab, rng, signal.SIGTERM, 1),
    "SIGTERM twice": lambda lab, rng: stopped(lab, rng, signal.SIGTERM, 2),
    "Ctrl-C once": lambda lab, rng: stopped(lab, rng, signal.SIGINT, 1),
    "Ctrl-C twice": lambda lab, rng: stopped(lab, rng, signal.SIGINT, 2),
    "SIGHUP once": lambda lab, rng: stopped(lab, rng, signal.SIGHUP, 1),
    "Ctrl-C before the first step": stopped_before_it_began,
    "standard output full": output_gone,
    "no file above a limit (EFBIG)": file_limit,
    "the disk is full (ENOSPC)": full_disk,
    "newest checkpoint: a bit flipped": lambda lab, rng: spoilt(lab, rng, flip),
    "newest checkpoint: a file cut short": lambda lab, rng: spoilt(lab, rng, truncate),
    "newest checkpoint: a file missing": lambda lab, rng: spoilt(lab, rng, remove),
    "newest checkpoint: an item missing": lambda lab, rng: spoilt(lab, rng, remove_item),
    "every checkpoint broken": all_spoilt,
    "two starts at once": two_starts,
    "two resumes at once": two_resumes,
    "two resumes, config.toml replaced between": lambda lab, rng: two_resumes(
        lab, rng, edit_config
    ),
    "moved while it trains": moved,
    "its holder killed": killed_holder,
    "run folder read-only": read_only_run,
    "clock set back a year": clock,
    "metrics.jsonl with a torn last line": torn_metrics,
}
"""Every kind but kills, by the name in the report."""
