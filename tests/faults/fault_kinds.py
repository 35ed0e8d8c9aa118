"""The harm that is done to training runs, one function a kind: what it did, and what was lost.

Each takes a lab and a `random.Random`, and does its harm once, to a process or to a run's folder;
then the run is resumed, and its end compared with the undisturbed run's, bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fault_lab import STEPS_PER_EPOCH, Lab, Trainer, names, steps_in
from strikes import How, Plan

LAST_STEP = 6 * STEPS_PER_EPOCH
EDGE = 60  # changes: of a run's beginning, and of its end
MOMENTS = [How.BEFORE, How.HALF, How.AFTER]
ONCE = [errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EACCES, errno.EDQUOT, errno.EROFS,
        errno.ESTALE, errno.EBUSY, errno.ETXTBSY, errno.EINTR]  # fmt: skip
ALWAYS = [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE]
READING = [errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.EACCES, errno.EINTR]


@dataclass
class Outcome:
    """What one harm did."""

    problems: list[str]  # none: the run recovered, every bit
    steps_lost: int = 0  # done once and had to be done again
    files_lost: list[str] = field(default_factory=list)
    note: str = ""  # what was done, or what was said
    where: list[str] = field(default_factory=list)  # what was being done at that moment


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

    One that was stopped before its first step has left no config, and starts again.
    """
    begun = (run / "config.toml").exists()
    trainer = lab.resume(run) if begun else lab.start(run.parents[1])
    code = trainer.end()
    run = run if begun else newest_run(run.parents[1]) or run
    if code != 0:
        problems.append(f"it cannot be resumed ({code}): {trainer.errors[-1000:]}")
        return trainer
    problems += lab.differences(run)
    problems += [f"left over: {name}" for name in lab.left_over(run)]
    return trainer


def outcome(
    lab: Lab,
    run: Path,
    problems: Problems,
    lost: int = 0,
    note: str = "",
    where: Sequence[str] = (),
) -> Outcome:
    return Outcome(list(problems), lost, lab.missing(run), note, list(where))


def steps_lost(*trainers: Trainer) -> int:
    """The most steps that one of a run's processes does again. Its first chunk is a single step."""
    lost = done = 0
    for trainer in trainers:
        if trainer.first_step:
            lost = max(lost, done - trainer.first_step + 1)
        done = max(done, trainer.last_step)
    return lost


# ---- killed, told to stop or let down by the system, at any moment ----


def some_run(lab: Lab, rng: random.Random) -> Path:
    """A folder for a new run, or with one that is to be resumed."""
    return lab.place() if rng.random() < 0.5 else lab.interrupted().parents[1]


def go_on(lab: Lab, runs: Path, prepare: Callable | None = None) -> Trainer:
    """Resumes the run in a folder; starts one where none can be resumed."""
    run = newest_run(runs)
    return lab.resume(run, prepare) if run else lab.start(runs, prepare)


def newest_run(runs: Path) -> Path | None:
    """The newest run that can be resumed; None: no process has come so far."""
    found = [path.parent for path in runs.glob("*/v*/config.toml")]
    return max(found, key=lambda run: int(run.name[1:]), default=None)


def killed_at_random(lab: Lab, rng: random.Random) -> Outcome:
    """SIGKILL at any moment of its life."""
    runs, problems = some_run(lab, rng), Problems()
    trainer, end = go_on(lab, runs), time.monotonic() + rng.uniform(0, lab.life)
    trainer.wait_until(lambda: time.monotonic() > end, "its moment")
    trainer.send(signal.SIGKILL)
    trainer.end()
    run = newest_run(runs)
    where = _where_it_struck(run, trainer)
    after = recover(lab, run or lab.version(runs), problems)
    run = newest_run(runs) or lab.version(runs)
    return outcome(lab, run, problems, steps_lost(trainer, after), where=[where])


def _where_it_struck(run: Path | None, trainer: Trainer) -> str:
    if run is None:
        return "before there was a run"
    entries = names(run)
    if any("tmp" in name for name in entries):
        return "inside a checkpoint write"
    if not all((step / "checksums.json").exists() for step in steps_in(run)[-1:]):
        return "between a checkpoint and its checksums"
    if any(name.endswith(".part") for name in entries):
        return "inside another file's write"
    return "elsewhere" if trainer.last_step else "before the first step"


def struck(
    lab: Lab,
    rng: random.Random,
    draw: Callable[[random.Random], Plan],
    check: Callable[[Problems, Trainer, Plan], None],
) -> Outcome:
    """One or two processes of a run are struck at the n-th of their changes; then it is resumed.

    draw: how they are struck. check: whether one has ended as it must.
    """
    runs, problems = some_run(lab, rng), Problems()
    trainers: list[Trainer] = []
    notes: list[str] = []
    where: list[str] = []
    unreadable = False  # a checkpoint, at least once
    for again in (False, True)[: rng.randint(1, 2)]:
        plan = draw(rng)
        most = (lab.calls_of_resumed if newest_run(runs) else lab.calls_of_new)[plan.reads]
        edges = rng.choice([(1, EDGE), (1, most), (most - EDGE, most)])
        if again:  # where it clears up behind the first
            edges = (1, EDGE)
        plan = dataclasses.replace(plan, nth=rng.randint(*edges))
        strike = lab.strike(runs, plan)
        trainer = go_on(lab, runs, strike.prepare)
        code = trainer.end()
        trainers.append(trainer)
        if strike.struck:
            notes.append(f"{plan}, {strike.struck}: {code} {trainer.errors.strip()[-300:]}")
            where.append(_place(strike.struck))
            unreadable |= plan.reads and plan.number == errno.EIO
            check(problems, trainer, plan)
        elif code != 0:
            problems.append(f"not struck, it ended with {code}: {trainer.errors[-1000:]}")
        if plan.times == 1 and plan.number != signal.SIGKILL and newest_run(runs) is None:
            left = sorted(str(path.relative_to(runs)) for path in runs.rglob("*"))
            problems.unless(not left, f"left over of a start: {left}")
    trainers.append(recover(lab, newest_run(runs) or lab.version(runs), problems))
    if not where and not problems:  # of two runs, one makes some changes more
        return struck(lab, rng, draw, check)
    run = newest_run(runs) or lab.version(runs)
    latest = run.with_name("latest")
    problems.unless(latest.is_symlink() and latest.resolve() == run.resolve(), "latest is wrong")
    parts = [path.name for path in run.parent.glob(".*")]
    problems.unless(not parts, f"left over beside it: {parts}")
    aside = [path.name for path in run.glob("checkpoints/*.broken*")]
    problems.unless(unreadable or not aside, f"set aside, though whole: {aside}")
    lost = steps_lost(*trainers)
    most = 0 if check is has_stopped else STEPS_PER_EPOCH * (2 if unreadable else 1)
    problems.unless(lost <= most, f"{lost} steps were lost")
    return outcome(lab, run, problems, lost, "; ".join(notes), where)


def _place(struck: str) -> str:
    """What a struck call was part of."""
    for part in ("checkpoints", "epochs"):
        if f"/{part}/" in struck:
            return f"in {part}"
    return "in other files"


def kill(rng: random.Random) -> Plan:
    """SIGKILL before a call, after it or, where it writes, half-way."""
    return Plan(how=rng.choice(MOMENTS), number=signal.SIGKILL)


def was_killed(problems: Problems, trainer: Trainer, plan: Plan) -> None:
    """It was, and nothing else."""
    problems.unless(trainer.end() == -signal.SIGKILL, f"it ended with {trainer.end()}")


def stop(rng: random.Random) -> Plan:
    """SIGTERM, Ctrl-C or SIGHUP."""
    number = rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    return Plan(how=rng.choice(MOMENTS), number=number)


def has_stopped(problems: Problems, trainer: Trainer, plan: Plan) -> None:
    """It has saved what it had, or was at its end, and complains of nothing."""
    code = trainer.end()
    problems.unless(code in (130, 0), f"it ended with {code}")
    problems.unless(trainer.errors == "", f"it said {trainer.errors[-1000:]}")


def fail(rng: random.Random) -> Plan:
    """One change fails."""
    return Plan(how=How.FAILS, number=rng.choice(ONCE))


def fail_always(rng: random.Random) -> Plan:
    """So do all that follow."""
    return Plan(how=How.FAILS, number=rng.choice(ALWAYS), times=2**62)


def fail_reading(rng: random.Random) -> Plan:
    """A file or folder cannot be opened."""
    return Plan(how=How.FAILS, number=rng.choice(READING), reads=True)


def has_told(problems: Problems, trainer: Trainer, plan: Plan) -> None:
    """It has ended with one sentence that says why, or it could do without."""
    code, said, why = trainer.end(), trainer.errors, os.strerror(plan.number)
    lines = said.splitlines()
    problems.unless(code in (0, 2), f"{plan}: it ended with {code}")
    if "Traceback" in said or len(lines) > 1:
        problems.append(f"{plan}: not one line: {said[:300]} … {said[-600:]}")
    elif code == 2:
        problems.unless(len(lines) == 1 and why in said, f"{plan}: it does not say why: {said}")
        may = plan.number == errno.EIO or ", delete " not in said
        problems.unless(may, f"{plan}: it advises to delete what is whole: {said}")


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


def full_disk(lab: Lab, rng: random.Random) -> Outcome:
    """The run is on a file system (tmpfs) that has room for one to three checkpoints; ENOSPC."""
    runs, problems = lab.place(), Problems()
    with mounted("-t", "tmpfs", "-o", f"size={rng.randint(250, 600)}k", "tmpfs", runs):
        trainer, run = lab.start(runs), lab.version(runs)
        problems.of_one_sentence(trainer, 2, "No space left on device", "cannot be written")
        kept = steps_in(run)
        told = (
            f"checkpoint of step {kept[-1].name} is intact"
            if kept
            else "no checkpoint was saved yet"
        )
        problems.unless(told in trainer.errors, f"it does not say {told!r}: {trainer.errors}")
        subprocess.run(["mount", "-o", "remount,size=64m", str(runs)], check=True)
        # a thread of Orbax may outlive the error and leave its part; `recover` sees it gone
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
        problems.of_one_sentence(trainer, 2, "no intact checkpoint", "160", "120")
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


ALL: dict[str, Callable[[Lab, random.Random], Outcome]] = {
    "SIGKILL at random": killed_at_random,
    "SIGKILL at the n-th change": lambda lab, rng: struck(lab, rng, kill, was_killed),
    "a signal at the n-th change": lambda lab, rng: struck(lab, rng, stop, has_stopped),
    "the n-th change fails": lambda lab, rng: struck(lab, rng, fail, has_told),
    "every change fails from the n-th on": lambda lab, rng: struck(lab, rng, fail_always, has_told),
    "the n-th opening to read fails": lambda lab, rng: struck(lab, rng, fail_reading, has_told),
    "SIGTERM once": lambda lab, rng: stopped(lab, rng, signal.SIGTERM, 1),
    "SIGTERM twice": lambda lab, rng: stopped(lab, rng, signal.SIGTERM, 2),
    "Ctrl-C once": lambda lab, rng: stopped(lab, rng, signal.SIGINT, 1),
    "Ctrl-C twice": lambda lab, rng: stopped(lab, rng, signal.SIGINT, 2),
    "SIGHUP once": lambda lab, rng: stopped(lab, rng, signal.SIGHUP, 1),
    "Ctrl-C before the first step": stopped_before_it_began,
    "standard output full": output_gone,
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
    "run folder read-only": read_only_run,
    "clock set back a year": clock,
    "metrics.jsonl with a torn last line": torn_metrics,
}
"""Every kind, by the name in the report."""
