"""Run folders: made, found, and held by one process at a time.

A run is `runs/<config>/v<N>/`:

    config.toml  tokenizer.*  metrics.jsonl  commits.txt  samples.txt  loss.png
    checkpoints/<step>/  .lock

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
from jaxgru.data.tokenizers import Tokenizer
from jaxgru.errors import UserError
from jaxgru.files import check_writable, locked, remove_parts, write_text
from jaxgru.parallel.processes import is_first
from jaxgru.runs import commits

REWRITTEN = ("metrics.jsonl", "loss.png", "samples.txt", commits.FILE_NAME)  # while it is trained
LOCK = ".lock"  # a file of its own: an editor that replaces config.toml would take its lock away
UNWRITABLE = ("*", "?", "[", "]", "\\")  # in a path, Orbax takes them for patterns to glob by
UNREADABLE = ("**", "\\")
DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),  # full, above a quota, above a limit on files
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
)


class RunError(UserError):
    """A run folder that cannot be made, found or used."""


def create_run(root: Path, config: Config, tokenizer: Tokenizer) -> Path:
    """Make the next free version of a run folder, with its config and tokenizer in it.

    Raises:
      RunError: the folder cannot be written, or its path is one that checkpoints cannot have.
    """
    family = root / config.name
    check_path(family, UNWRITABLE)
    try:
        family.mkdir(parents=True, exist_ok=True)
        latest = family / "latest"
        if latest.exists() and not latest.is_symlink():
            raise RunError(f"{latest} is in the way: it should be a link to the newest version.")
        run = _next_version(family)
        tokenizer.save(run)
        save_config(run, config)
        _point(latest, run)
    except OSError as error:
        raise RunError(f"the run folder {family} cannot be written: {error.strerror}.") from error
    return run


def save_config(run: Path, config: Config) -> None:
    """Write a run's config.toml. Raises OSError where it cannot; an older one is then untouched."""
    write_text(run / "config.toml", tomli_w.dumps(to_dict(config)))


def check_path(folder: Path, forbidden: tuple[str, ...]) -> None:
    """Raise RunError where Orbax would not find in a folder what it has written there.

    It takes a path for a pattern, and "gs:" in it for a bucket.
    """
    path = folder.resolve()
    for part in path.parts[1:]:
        wrong = [text for text in forbidden if text in part]
        if part == "gs:":
            wrong = [part]
        if wrong:
            raise RunError(
                f"checkpoints cannot be kept in {path}, for {part!r} has {wrong[0]!r} in it; "
                f"choose a path without {' '.join(forbidden)} and 'gs:', or rename the folder."
            )


def discard_empty(run: Path) -> bool:
    """Delete a new run that has no checkpoint yet; `latest` again points at the one before it.

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
            family.rmdir()  # unless there is something else in it
    return True


def _point(latest: Path, run: Path) -> None:
    """Makes the link name the newest version, even where several are being made at once.

    A version has its config before it is linked; so whoever links last has seen the newest.
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
            run.mkdir()  # fails where another process took the number first
            return run
        except FileExistsError:
            continue


def versions(family: Path) -> list[Path]:
    """A config's run folders, v1, v2, …, newest first; none where there is no such folder."""
    if not family.is_dir():
        return []
    runs = (run for run in family.iterdir() if re.fullmatch(r"v\d+", run.name))
    return sorted(runs, key=lambda run: -int(run.name[1:]))


def is_finished(run: Path) -> bool:
    """Whether a run came to its end."""
    return (run / "samples.txt").exists()  # the last file that a run writes


def find_run(path: str | Path) -> Path:
    """The version folder that a path means: itself, or the newest below a config's folder.

    Raises:
      RunError: there is no run.
    """
    path = Path(path)
    for run in (path, path / "latest"):
        if os.path.isfile(run / "config.toml"):  # Path.is_file raises where a name is too long
            return run.resolve()
    raise RunError(f"there is no run in {path}: no config.toml in it, nor in a folder 'latest'.")


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
    """Lock a run for training, and delete partial files that a killed process left in it.

    Yields a function that raises RunError once the folder is no longer where it was. Where the disk
    fails or is full inside, the error says so and which checkpoint is intact.

    Raises:
      RunError: another process holds it, it cannot be written, or its path is one that checkpoints
        cannot have.
    """
    if not is_first():
        yield lambda: None  # the first of several processes that train one run claims it for all
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
            raise RunError(f"the run {run} is being trained by another process, which holds it.")
        begun_in = os.stat(run)

        def check_in_place() -> None:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(run), begun_in):
                    return
            raise RunError(
                f"the run {run} was moved or deleted while it was trained, and nothing more is "
                "written; resume it where it is now, for the checkpoints in it are intact."
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
    return f"{left}; when that is mended, resume with: python scripts/train.py --resume {run}"


def _clear(run: Path) -> None:
    """Removes what a process left that was stopped while it wrote: none of it was ever whole."""
    for path in (run / "checkpoints").glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(path)
    for name in REWRITTEN:
        remove_parts(run / name)


def _clear_behind_threads(run: Path) -> None:
    """`_clear` after a write that failed, of which some threads may not know yet.

    What they still leave, if it takes them longer than a second, is cleared when the run goes on.
    """
    for _ in range(10):
        try:
            _clear(run)
            return
        except OSError:
            time.sleep(0.1)


def disk_error(error: BaseException | None) -> str | None:
    """What the system says where an error comes from the disk, in its words; else None.

    TensorStore raises ValueErrors that quote them; Orbax chains one error to another.
    """
    while error is not None:
        for number in DISK_ERRORS:
            if getattr(error, "errno", None) == number or os.strerror(number) in str(error):
                return os.strerror(number)
        error = error.__cause__ or error.__context__
    return None
