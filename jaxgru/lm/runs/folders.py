"""Run folders: creating, finding and locking them.

A run is `runs/<config>/v<N>/`:

    config.toml  run.json  tokenizer.*  metrics.jsonl  commits.txt  samples.txt  loss.png
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
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from jaxgru.errors import UserError, command
from jaxgru.lm.config import Config, ConfigError, load_config, to_dict
from jaxgru.lm.data.tokenizers import Tokenizer, save_tokenizer
from jaxgru.lm.files import check_writable, locked, read_bytes, reason, resolved, write_text
from jaxgru.parallel.processes import is_first

EPOCHS_FOLDER = "epochs"  # the folder of the models that `training.keep_epochs` keeps
LOCK = ".lock"  # not config.toml, whose lock would be lost when an editor replaces it
UNWRITABLE = ("*", "?", "[", "]", "\\")  # Orbax takes them for glob patterns
UNREADABLE = ("**", "\\")
OS_ERROR_CODE = re.compile(r"os_error_code='(\d+)'")  # in TensorStore's messages


class RunError(UserError):
    """A run folder that cannot be created, found or used."""


class RunLost(RunError):
    """A run's folder was moved or deleted while it was trained."""


class WriteError(RunError):
    """A run's folder can no longer be written; `why` is the reason, such as a full disk."""

    def __init__(self, run: Path, why: str, left: str) -> None:
        super().__init__(f"the run {run} cannot be written: {why}; {left}")
        self.why = why


@dataclass(frozen=True)
class RunInfo:
    """A run's run.json: what the run must know besides its config, and what no user sets."""

    text_sha256: str = ""  # as `Dataset.sha256`; "": unknown
    init_sha256: str = ""  # of the model that it starts from; "": from random weights
    lengthened: int = 0  # how often --resume has changed `training.epochs`

    def __post_init__(self) -> None:
        if [type(value) for value in vars(self).values()] != [str, str, int]:
            raise TypeError("a value is of another type")


def create_run(root: Path, config: Config, tokenizer: Tokenizer, info: RunInfo = RunInfo()) -> Path:
    """Create the next free version of a run folder, with its config, tokenizer and run.json.

    Raises:
      RunError: the folder cannot be written, or Orbax cannot use its path.
    """
    family = root / config.name
    check_path(family, UNWRITABLE)
    run = None
    try:
        family.mkdir(parents=True, exist_ok=True)
        latest = family / "latest"
        if not _may_link(latest):
            raise RunError(
                f"{latest} should be a link to the newest version; rename or delete what is there."
            )
        run = _next_version(family)
        save_tokenizer(tokenizer, run)
        save_info(run, info)
        save_config(run, config)  # last: with it, the folder is a run's
        _point(family)
    except BaseException as error:
        if run is not None:
            discard_empty(run)
        if isinstance(error, OSError):
            raise RunError(
                f"the run folder {family} cannot be written: {reason(error)}."
            ) from error
        raise
    return run


def save_config(run: Path, config: Config) -> None:
    """Write a run's config.toml. Raises OSError where that fails; an older file is untouched."""
    write_text(run / "config.toml", tomli_w.dumps(to_dict(config)))


def save_info(run: Path, info: RunInfo) -> None:
    """Write a run's run.json. Raises as `save_config`."""
    write_text(run / "run.json", json.dumps(dataclasses.asdict(info), indent=1) + "\n")


def load_info(run: Path) -> RunInfo:
    """Load a run's run.json. Raises RunError where it cannot be read or is damaged."""
    path = run / "run.json"
    try:
        return RunInfo(**json.loads(read_bytes(path, at_most=2**16)))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError, RecursionError) as error:
        names = ", ".join(field.name for field in dataclasses.fields(RunInfo))
        raise RunError(f"{path} is damaged; it must be a JSON object of {names}.") from error


def check_path(folder: Path, forbidden: tuple[str, ...]) -> None:
    """Raise RunError where Orbax would not find what it writes in a folder.

    Orbax takes some characters of a path for glob patterns, and "gs:" for a bucket.
    """
    try:
        path = resolved(folder)
    except OSError as error:
        raise RunError(f"{folder} cannot be used: {reason(error)}.") from error
    if not str(path).encode(errors="replace") == os.fsencode(path):
        raise RunError(f"checkpoints cannot be kept in {path}, because that is not UTF-8.")
    for part in path.parts[1:]:
        wrong = [text for text in forbidden if text in part]
        if part == "gs:":
            wrong = [part]
        if wrong:
            raise RunError(
                f"checkpoints cannot be kept in {path}, because {part!r} contains {wrong[0]!r}; "
                f"choose a path without {' '.join(forbidden)} and 'gs:', or rename the folder."
            )


def saved_steps(run: Path) -> list[int]:
    """Return the steps of which a run has checkpoints, whole or not, in order."""
    paths = (run / "checkpoints").glob("[0-9]*")
    return sorted(
        int(path.name) for path in paths if re.fullmatch("0|[1-9][0-9]*", path.name)
        and path.is_dir()
    )  # fmt: skip


def discard_empty(run: Path) -> bool:
    """Delete a new run that has no checkpoint, and point `latest` at the run before it.

    Returns whether it was deleted. Where it cannot be, nothing is raised.
    """
    family = run.parent
    with contextlib.suppress(OSError, RunError):
        if saved_steps(run):
            return False
        _despite_threads(lambda: shutil.rmtree(run))
        _point(family)
        if not versions(family):
            family.rmdir()  # fails where it holds anything else
    return not os.path.lexists(run)


def _point(family: Path) -> None:
    """Point `latest` at the newest version, even while other processes create and delete versions.

    A version gets its config before it is linked, and whoever changes the link looks again, so the
    last process to change it sees what is there. Where there is no version, the link is deleted.
    """
    latest, linked = family / "latest", ""
    while linked != (newest := _newest_usable(family)):
        if newest is None:
            latest.unlink(missing_ok=True)
        else:
            link = latest.with_name(f".latest.{secrets.token_hex(4)}")
            try:
                link.symlink_to(newest)
                os.replace(link, latest)
            except FileNotFoundError:  # a process that resumes a run has removed the link
                continue
            finally:
                link.unlink(missing_ok=True)
        linked = newest


def _link_again(run: Path) -> None:
    """Point `latest` at the newest version, if it points at none: after a kill, or in a copy."""
    if run in versions(run.parent):
        for link in run.parent.glob(".latest.*"):
            link.unlink(missing_ok=True)
        latest = run.parent / "latest"
        if _may_link(latest) and not latest.exists():
            _point(run.parent)


def _may_link(latest: Path) -> bool:
    """Return whether `latest` is a link or nothing, as which an empty folder counts.

    An empty folder is what some zip programs make of a link to a folder; it is deleted.
    """
    with contextlib.suppress(OSError):
        latest.rmdir()
    return latest.is_symlink() or not latest.exists()


def _newest_usable(family: Path) -> str | None:
    names = (run.name for run in versions(family) if (run / "config.toml").is_file())
    return next(names, None)


def _next_version(family: Path) -> Path:
    while True:
        newest = [int(run.name[1:]) for run in versions(family)[:1]]
        run = family / f"v{max(newest, default=0) + 1}"
        try:
            run.mkdir(parents=True)  # another process may have taken the number, or the folder away
            return run
        except FileExistsError:
            continue


def versions(family: Path) -> list[Path]:
    """Return a config's run folders, newest first; none if there is no such folder.

    Raises:
      RunError: the folder cannot be read.
    """
    try:
        runs = [run for run in family.iterdir() if re.fullmatch("v[0-9]+", run.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunError(f"{family} cannot be read: {reason(error)}.") from error
    return sorted(runs, key=lambda run: -int(run.name[1:]))


def is_finished(run: Path) -> bool:
    """Return whether a run is finished."""
    return (run / "samples.txt").exists()  # the last file that a run writes


def find_run(path: str | Path) -> Path:
    """Return the version that a path names: itself, or the newest one in a config's folder.

    The newest is what `latest` links to. In a copy, which may lack the link or have a folder in its
    place, it is the version with the highest number.

    Raises:
      RunError: there is no run.
    """
    path = Path(path)
    latest = path / "latest"
    linked = [latest] * os.path.islink(latest)
    for run in (path, *linked, *versions(path), latest):
        if os.path.isfile(run / "config.toml"):  # Path.is_file raises where a name is too long
            return resolved(run)
    if os.path.isfile(path):
        raise RunError(f"{path} is a file; a run is a folder.")
    raise RunError(
        f"there is no run in {path}: neither it nor a version in it (v1, v2, …) contains a "
        "config.toml."
    )


def from_here(run: Path) -> Path:
    """Return a run's path relative to the working folder, if the run is below it."""
    try:
        return run.relative_to(Path.cwd())
    except (ValueError, OSError):  # it is elsewhere; the working folder was deleted
        return run


def load_run_config(run: Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """Load a run's config, with these values changed: see `load_config`.

    Raises:
      RunError: its config.toml or an override cannot be used.
    """
    try:
        return load_config(run / "config.toml", overrides)
    except ConfigError as error:
        what = " with these overrides" if overrides else ""
        raise RunError(f"the run {run} cannot be used{what}: {error}") from error


@contextlib.contextmanager
def claim(run: Path) -> Iterator[Callable[[], None]]:
    """Lock a run for training, and delete the partial checkpoints of killed processes.

    Yields a function that raises RunLost once the folder has been moved or deleted. If a file
    cannot be written inside the context, a WriteError says so and names the last checkpoint.

    Raises:
      RunError: another process holds the lock, the folder cannot be written, or Orbax cannot use
        its path.
    """
    if not is_first():
        yield lambda: None  # of several processes that train one run, the first locks it for all
        return
    check_path(run, UNWRITABLE)
    with contextlib.ExitStack() as stack:
        try:
            for folder in (run, run / "checkpoints"):
                if folder.is_dir():
                    check_writable(folder)
            ours = stack.enter_context(locked(run / LOCK))
            if ours:
                _clear(run)
                _link_again(run)
        except OSError as error:
            raise RunError(f"the run {run} cannot be written: {reason(error)}.") from error
        if not ours:
            raise RunError(f"the run {run} is being trained by another process.")
        begun_in = os.stat(run)

        def check_in_place() -> None:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(run), begun_in):
                    return
            raise RunLost(
                f"the run {run} was moved or deleted while it was trained, so nothing more is "
                "written; its checkpoints are intact, and it can be resumed from where it is now."
            )

        try:
            yield check_in_place
        except UserError:
            raise
        except Exception as error:
            if (of_system := system_error(error)) is None:
                raise
            with contextlib.suppress(OSError):
                _despite_threads(lambda: _clear(run))
            raise WriteError(run, reason(of_system), _what_is_left(run)) from error


def _what_is_left(run: Path) -> str:
    steps = saved_steps(run)
    left = (
        f"the checkpoint of step {steps[-1]} is intact" if steps else "no checkpoint was saved yet"
    )
    return f"{left}; once that is solved, resume with: {command('train')} --resume {run}"


def _clear(run: Path) -> None:
    """Delete the partial checkpoints of processes that were killed; see also `write_bytes`."""
    for path in (run / "checkpoints").glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(path)


def _despite_threads(delete: Callable[[], None]) -> None:
    """Delete files after a failed write, while some threads may still be writing, for a second.

    What they write later is deleted when the run is resumed.
    """
    for _ in range(10):
        try:
            return delete()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)
    delete()


def system_error(error: BaseException | None) -> OSError | None:
    """Return the system's error that an error comes from, else None.

    TensorStore raises ValueErrors that quote the system's number; Orbax chains errors.
    """
    while error is not None:
        if isinstance(error, OSError):
            return error
        if code := OS_ERROR_CODE.search(str(error)):
            return OSError(int(code[1]), os.strerror(int(code[1])))
        before = error.__cause__ or error.__context__
        if before is not error.__cause__ and isinstance(before, FileNotFoundError):
            return None  # a bug in what handles a missing file
        error = before
    return None
