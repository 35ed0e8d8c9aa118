"""Run folders: creating, finding and locking them.

A run is `runs/<config>/v<N>/`:

    config.toml  run.json  tokenizer.*  metrics.jsonl  samples.txt  loss.png
    checkpoints/<step>/  epochs/<epoch>.safetensors  tensorboard/  .lock

and `runs/<config>/latest` points at the newest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

from jaxgru.errors import UserError, needs
from jaxgru.files import damage, damage_as, locked, reason, regular, write_text
from jaxgru.lm.config import Config, to_dict
from jaxgru.lm.data.tokenizers import Tokenizer, save_tokenizer
from jaxgru.parallel import is_first

ROOT = Path(__file__).parents[3]
LOCK = ".lock"  # not config.toml, whose lock would be lost when an editor replaces it
LATE_WRITES = 1.0  # seconds for which threads may write on after an error
OS_ERROR_CODE = re.compile(r"os_error_code='(\d+)'")  # in TensorStore's messages


class RunError(UserError):
    """A run folder that cannot be created, found or used."""


@dataclass(frozen=True)
class RunInfo:
    """A run's run.json: what the run must know besides its config, and what no user sets."""

    text_sha256: str = ""  # as `Dataset.sha256`; "": unknown
    init_sha256: str = ""  # of the model that it starts from; "": from random weights
    lengthened: int = 0  # how often --resume has changed `training.epochs`
    commits: list[str] = field(default_factory=list)  # of the checkouts that trained it, in order


def current_commit() -> str | None:
    """Return the commit of the checkout that this package is part of; None if there is none.

    "-dirty" is appended where files differ from the commit.
    """
    repository = [f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}"]
    describe = ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    command = ["git", *repository, "--no-optional-locks", *describe]
    try:
        answer = subprocess.run(command, capture_output=True, check=True, timeout=5, text=True)
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, or no answer
        return None
    return answer.stdout.strip()


def create_run(root: Path, config: Config, tokenizer: Tokenizer, info: RunInfo = RunInfo()) -> Path:
    """Create the next free version of a run folder, with its config, tokenizer and run.json."""
    family = root / config.name
    run = None
    try:
        run = _next_version(family)
        _point(family)
        save_tokenizer(tokenizer, run)
        save_info(run, info)
        save_config(run, config)  # last: with it, the folder is a run's
    except BaseException as error:
        if run is not None:
            discard_empty(run)
        if isinstance(error, OSError):
            raise RunError(f"the folder {family} cannot be written: {reason(error)}.") from error
        raise
    return run


def _check_link(error: OSError) -> None:
    """Raise RunError where a link to nothing, as to an unmounted disk, is in a folder's place."""
    path = os.fsdecode(error.filename or "")
    if os.path.islink(path) and not os.path.exists(path):
        raise RunError(
            f"{path} is a link to {os.readlink(path)}, which is not there; mount or create it, or "
            "remove the link."
        ) from error


def check_place(folder: Path) -> None:
    """Raise RunError where Orbax cannot keep checkpoints in a folder because of its path."""
    path = os.path.realpath(folder)
    # Orbax takes a path with one of these for a pattern
    wildcard = re.search(r"[*?[\]\\]", path)
    if wildcard:
        raise RunError(
            f"checkpoints cannot be kept in {folder}, because its path contains {wildcard[0]!r}; "
            "choose one without * ? [ ] \\, or rename the folder."
        )
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise RunError(
            f"checkpoints cannot be kept in {folder}, because its path is not UTF-8; choose "
            "another, or rename the folder."
        ) from error


def check_there(run: Path) -> None:
    """Raise RunError where a run that is being trained has been moved or deleted."""
    if not (run / "config.toml").exists():
        raise RunError(
            f"the run {run} was moved or deleted while it was trained; if it was moved, it can be "
            "resumed from where it is now."
        )


def save_config(run: Path, config: Config) -> None:
    """Write a run's config.toml.

    Raises:
      OSError: it cannot be written; an older file is untouched.
    """
    write_text(run / "config.toml", tomli_w.dumps(to_dict(config)))


def save_info(run: Path, info: RunInfo) -> None:
    """Write a run's run.json.

    Raises:
      OSError: as `save_config`.
    """
    write_text(run / "run.json", json.dumps(dataclasses.asdict(info), indent=1) + "\n")


def load_info(run: Path) -> RunInfo:
    """Load a run's run.json.

    Raises:
      RunError: it cannot be read, or is damaged.
    """
    with needs("train"):
        import msgspec
    path = run / "run.json"
    with damage_as(RunError, f"{path} cannot be read"):
        info = RunInfo(**json.loads(regular(path).read_bytes()))  # which refuses other names
        return msgspec.convert(vars(info), RunInfo)


def saved_steps(run: Path) -> list[int]:
    """Return the steps of which a run has checkpoints, whole or not, in order."""
    paths = (run / "checkpoints").glob("[0-9]*")
    return sorted(int(path.name) for path in paths if path.name.isdecimal())


def discard_empty(run: Path) -> bool:
    """Delete a new run that has no checkpoint, if possible; return whether it was deleted."""
    if saved_steps(run) or not run.exists():
        return False
    _delete(run)
    with contextlib.suppress(OSError):
        _point(run.parent)
        run.parent.rmdir()  # fails where it holds anything else
    return not run.exists()


def _delete(run: Path) -> None:
    """Delete a folder, if possible, and what TensorStore's threads put there after a failure.

    After an error, they go on for a moment and create the folders again that they write into.
    """
    deadline = time.monotonic()
    if (run / "checkpoints").exists():
        deadline += LATE_WRITES
    shutil.rmtree(run, ignore_errors=True)
    while time.monotonic() < deadline:
        time.sleep(LATE_WRITES / 20)
        shutil.rmtree(run, ignore_errors=True)


def _point(family: Path) -> None:
    """Point `latest` at the newest version; where there is none, delete it."""
    latest = family / "latest"
    newest = versions(family)[:1]
    if newest:
        link = latest.with_name(f".latest.{secrets.token_hex(4)}")
        link.symlink_to(newest[0].name)
        os.replace(link, latest)
    else:
        latest.unlink(missing_ok=True)
    if versions(family)[:1] != newest:  # another process has created or deleted one
        _point(family)


def _next_version(family: Path) -> Path:
    """Create and return the folder of the version after the newest one."""
    number = 1
    runs = versions(family)
    if runs:
        number = _number(runs[0]) + 1
    while True:
        try:
            family.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            _check_link(error)
            raise
        run = family / f"v{number}"
        try:
            run.mkdir()
        except FileExistsError:  # another process has taken the number
            number += 1
        except FileNotFoundError:  # another process has deleted the folder, which was empty
            continue
        else:
            return run


def versions(family: Path) -> list[Path]:
    """Return a config's run folders, newest first; none if there is no such folder."""
    if not os.path.isdir(family):
        return []
    runs = [family / name for name in os.listdir(family) if re.fullmatch("v[0-9]+", name)]
    return sorted(runs, key=_number, reverse=True)


def _number(run: Path) -> int:
    """Return the number of a version, as in its folder's name."""
    return int(run.name.removeprefix("v"))


def find_run(path: str | Path) -> Path:
    """Return the version that a path names: itself, or the newest one in a config's folder."""
    path = Path(path)
    for run in (path, *versions(path)):
        if os.path.isfile(run / "config.toml"):  # Path.is_file raises where a name is too long
            return run.resolve()
    raise RunError(
        f"there is no run in {path}: neither it nor a version in it (v1, v2, …) contains a "
        "config.toml; give the folder that training printed, such as runs/astra_alpha/v1."
    )


@contextlib.contextmanager
def lock_run(run: Path) -> Generator[None]:
    """Lock a run for training, and delete what killed processes have left.

    Raises:
      RunError: another process trains the run, its path cannot hold checkpoints, or the system has
        failed, as with a full disk; the message then names the last checkpoint.
    """
    if not is_first():
        yield  # the first process locks it for all
        return
    check_place(run)
    try:
        with locked(run / LOCK) as is_ours:
            if not is_ours:
                raise RunError(f"the run {run} is being trained by another process.")
            _delete_unfinished(run)
            yield
    except UserError:
        raise
    except Exception as error:
        system_error = _system_error(error)
        if system_error is None:
            raise
        check_there(run)
        raise RunError(
            f"the run {run} stopped: {reason(system_error)}; {_how_to_resume(run)}"
        ) from error


def _delete_unfinished(run: Path) -> None:
    """Delete what a killed process has left half written."""
    for path in (run / "checkpoints").glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(path)
    for path in run.rglob(".jaxgru-*.part"):
        path.unlink()


def _how_to_resume(run: Path) -> str:
    """Return which checkpoint of a run that stopped is intact, and the command that resumes it."""
    folders = {step: run / "checkpoints" / str(step) for step in saved_steps(run)}
    intact = [step for step, folder in folders.items() if damage(folder) is None]
    if not intact:
        return "no checkpoint was saved yet."
    command = f"jaxgru train --resume {shlex.quote(str(run))}"
    return f"the checkpoint of step {intact[-1]} is intact; once that is solved: {command}"


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the system's error that an error comes from; TensorStore quotes only its number."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        code = OS_ERROR_CODE.search(str(error))
        if code:
            number = int(code[1])
            return OSError(number, os.strerror(number))
        error = error.__cause__
    return None
