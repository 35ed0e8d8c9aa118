"""Run folders: creating, finding and locking them.

A run is `runs/<config>/v<N>/`:

    config.toml  tokenizer.*  metrics.jsonl  commits.txt  samples.txt  loss.png  study.json
    checkpoints/<step>/  epochs/<epoch>.safetensors  .lock

and `runs/<config>/latest` points at the newest.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import tomli_w

from jaxgru.config import Config, ConfigError, load_config, to_dict
from jaxgru.data.tokenizers import Tokenizer, save_tokenizer
from jaxgru.errors import UserError, command
from jaxgru.files import check_writable, locked, write_text
from jaxgru.parallel.processes import is_first

EPOCHS_FOLDER = "epochs"  # the folder of the models that `training.keep_epochs` keeps
LOCK = ".lock"  # not config.toml, whose lock would be lost when an editor replaces it
UNWRITABLE = ("*", "?", "[", "]", "\\")  # Orbax takes them for glob patterns
UNREADABLE = ("**", "\\")
DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),  # full, above a quota, above a limit on files
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
)


class RunError(UserError):
    """A run folder that cannot be created, found or used."""


def create_run(root: Path, config: Config, tokenizer: Tokenizer) -> Path:
    """Create the next free version of a run folder, with its config and tokenizer.

    Raises:
      RunError: the folder cannot be written, or Orbax cannot use its path.
    """
    family = root / config.name
    check_path(family, UNWRITABLE)
    try:
        family.mkdir(parents=True, exist_ok=True)
        latest = family / "latest"
        if latest.exists() and not latest.is_symlink():
            raise RunError(f"{latest} is in the way: it should be a link to the newest version.")
        run = _next_version(family)
        save_tokenizer(tokenizer, run)
        save_config(run, config)
        _point(latest, run)
    except OSError as error:
        raise RunError(f"the run folder {family} cannot be written: {error.strerror}.") from error
    return run


def save_config(run: Path, config: Config) -> None:
    """Write a run's config.toml. Raises OSError where that fails; an older file is untouched."""
    write_text(run / "config.toml", tomli_w.dumps(to_dict(config)))


def check_path(folder: Path, forbidden: tuple[str, ...]) -> None:
    """Raise RunError where Orbax would not find what it writes in a folder.

    Orbax takes some characters of a path for glob patterns, and "gs:" for a bucket.
    """
    path = folder.resolve()
    for part in path.parts[1:]:
        wrong = [text for text in forbidden if text in part]
        if part == "gs:":
            wrong = [part]
        if wrong:
            raise RunError(
                f"checkpoints cannot be kept in {path}, because {part!r} contains {wrong[0]!r}; "
                f"choose a path without {' '.join(forbidden)} and 'gs:', or rename the folder."
            )


def discard_empty(run: Path) -> bool:
    """Delete a new run that has no checkpoint, and point `latest` at the run before it.

    Returns whether it was deleted.
    """
    if any((run / "checkpoints").glob("*")):
        return False
    family = run.parent
    shutil.rmtree(run)
    if any((other / "config.toml").is_file() for other in versions(family)):
        _point(family / "latest", run)
    else:
        (family / "latest").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            family.rmdir()  # fails where it holds anything else
    return True


def _point(latest: Path, run: Path) -> None:
    """Point the link at the newest version, even while other processes create versions.

    A version gets its config before it is linked, so the last process to link sees the newest.
    """
    link = latest.with_name(f".latest.{run.name}")
    linked = ""
    while linked != (newest := _newest_usable(latest.parent)):
        link.symlink_to(newest)
        os.replace(link, latest)
        linked = newest


def _newest_usable(family: Path) -> str:
    return next(run.name for run in versions(family) if (run / "config.toml").is_file())


def _next_version(family: Path) -> Path:
    while True:
        newest = [int(run.name[1:]) for run in versions(family)[:1]]
        run = family / f"v{max(newest, default=0) + 1}"
        try:
            run.mkdir()  # fails where another process has taken the number
            return run
        except FileExistsError:
            continue


def versions(family: Path) -> list[Path]:
    """Return a config's run folders, newest first; none where there is no such folder."""
    if not family.is_dir():
        return []
    runs = (run for run in family.iterdir() if re.fullmatch(r"v\d+", run.name))
    return sorted(runs, key=lambda run: -int(run.name[1:]))


def is_finished(run: Path) -> bool:
    """Return whether a run is finished."""
    return (run / "samples.txt").exists()  # the last file that a run writes


def find_run(path: str | Path) -> Path:
    """Return the version that a path names: itself, or the newest one in a config's folder.

    Raises:
      RunError: there is no run.
    """
    path = Path(path)
    for run in (path, path / "latest"):
        if os.path.isfile(run / "config.toml"):  # Path.is_file raises where a name is too long
            return run.resolve()
    if os.path.isfile(path):
        raise RunError(f"{path} is a file; a run is a folder.")
    raise RunError(f"there is no run in {path}: neither it nor its 'latest' has a config.toml.")


def from_here(run: Path) -> Path:
    """Return a run's path relative to the working folder, if the run is below it."""
    here = Path.cwd()
    return run.relative_to(here) if run.is_relative_to(here) else run


def load_run_config(run: Path, overrides: Mapping[str, str] | None = None) -> Config:
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

    Yields a function that raises RunError once the folder has been moved or deleted. If the disk is
    full or fails inside the context, the error says so and names the last intact checkpoint.

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
        except OSError as error:
            raise RunError(f"the run {run} cannot be written: {error.strerror}.") from error
        if not ours:
            raise RunError(f"the run {run} is being trained by another process.")
        begun_in = os.stat(run)

        def check_in_place() -> None:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(run), begun_in):
                    return
            raise RunError(
                f"the run {run} was moved or deleted while it was trained, so nothing more is "
                "written; its checkpoints are intact, and it can be resumed from where it is now."
            )

        try:
            yield check_in_place
        except UserError:
            raise
        except Exception as error:
            if (why := disk_error(error)) is None:
                raise
            _clear_behind_threads(run)
            left = _what_is_left(run)
            raise RunError(f"the run {run} cannot be written: {why}; {left}") from error


def _what_is_left(run: Path) -> str:
    steps = [int(path.name) for path in (run / "checkpoints").glob("*") if path.name.isdigit()]
    left = f"the checkpoint of step {max(steps)} is intact" if steps else "none was saved yet"
    return f"{left}; once that is solved, resume with: {command('train')} --resume {run}"


def _clear(run: Path) -> None:
    """Delete the partial checkpoints of processes that were killed; see also `write_bytes`."""
    for path in (run / "checkpoints").glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(path)


def _clear_behind_threads(run: Path) -> None:
    """Delete partial files after a failed write, while some threads may still be writing.

    What they write more than a second later is deleted when the run is resumed.
    """
    for _ in range(10):
        try:
            _clear(run)
            return
        except OSError:
            time.sleep(0.1)


def disk_error(error: BaseException | None) -> str | None:
    """Return the system's message if an error comes from the disk, else None.

    TensorStore raises ValueErrors that quote the message; Orbax chains one error to another.
    """
    while error is not None:
        for number in DISK_ERRORS:
            if getattr(error, "errno", None) == number or os.strerror(number) in str(error):
                return os.strerror(number)
        error = error.__cause__ or error.__context__
    return None
