"""Run directories; Orbax save and restore.

A run is `runs/<config>/v<N>/`:

    config.toml  tokenizer.*  metrics.jsonl  samples.txt  loss.png  checkpoints/<step>/

and `runs/<config>/latest` points at the newest. A checkpoint has four items: `params` and
`optimizer` (AdamW's moments, key, step), the `best` parameters where training stops early, and
`progress` (JSON). Arrays are stored flat, by their path in the tree, so that a checkpoint can be
read without this library. Orbax writes a checkpoint beside and renames it: it is whole or absent.
Then `checksums.json` joins it, the SHA-256 of every file, by which a checkpoint that was spoilt
later is known and the one before it taken. (One without it is older than this rule, or its process
was killed at that moment; it counts as good if it can be read.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import tomli_w
from jax.sharding import Mesh

from jaxgru.config import Config, ConfigError, load_config, to_dict
from jaxgru.errors import UserError
from jaxgru.files import check_writable, file_hash, hashes, locked, remove_parts, write_text
from jaxgru.interop.safetensors import load_safetensors
from jaxgru.model import Params, flatten, init, unflatten
from jaxgru.sharding import row_shardings, shardings
from jaxgru.tokenizers import Tokenizer, load_tokenizer
from jaxgru.training import Progress, TrainState, init_state

if TYPE_CHECKING:  # Orbax takes long to import, so that only those who save or restore pay for it
    from orbax.checkpoint import CheckpointManager

CHECKSUMS = "checksums.json"
REWRITTEN = ("metrics.jsonl", "loss.png", "samples.txt")  # a run's files that are written again
DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),  # full, above a quota, above a limit on files
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
)
T = TypeVar("T")


class RunError(UserError):
    """A run folder that cannot be made, found or used."""


class BrokenCheckpoint(RunError):
    """A checkpoint that cannot be read."""


def create_run(root: Path, config: Config, tokenizer: Tokenizer) -> Path:
    """Makes the next free version of a run folder, with its config and tokenizer in it.

    Raises:
      RunError: the folder cannot be written.
    """
    family = root / config.name
    try:
        family.mkdir(parents=True, exist_ok=True)
        latest = family / "latest"
        if latest.exists() and not latest.is_symlink():
            raise RunError(f"{latest} is in the way: it should be a link to the newest version.")
        run = _next_version(family)
        tokenizer.save(run)
        write_text(run / "config.toml", tomli_w.dumps(to_dict(config)))
        _point(latest, run)
    except OSError as error:
        raise RunError(f"the run folder {family} cannot be written: {error.strerror}.") from error
    return run


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


def load_run_config(run: Path) -> Config:
    """A run's config, as it was when the run was made.

    Raises:
      RunError: its config.toml cannot be used.
    """
    try:
        return load_config(run / "config.toml")
    except ConfigError as error:
        raise RunError(f"the run {run} cannot be used: {error}") from error


def load_run(path: str | Path) -> tuple[Params, Config, Tokenizer]:
    """Parameters, config and tokenizer of a run folder, one of its versions or a .safetensors file.

    The parameters are the run's result: the best epoch's where training stops early, else the last.
    A run that is still going on, or was interrupted, gives those of its newest checkpoint that is
    whole; a sentence on stderr names those that are not. Nothing is written.

    Raises:
      RunError: there is no run or no finished checkpoint, or it does not fit its config.
      InteropError: the .safetensors file is missing or broken.
      TokenizerError: the tokenizer is missing or broken.
    """
    path = Path(path)
    if path.suffix == ".safetensors" and not path.is_dir():
        return load_safetensors(path)
    run = find_run(path)
    config = load_run_config(run)
    tokenizer = load_tokenizer(run)
    like = jax.eval_shape(lambda: init(jax.random.key(0), config.model))
    if not (run / "checkpoints").is_dir():  # to open it would make it
        raise _no_checkpoint(run)

    with _heard_once(), open_checkpoints(run) as manager:

        def read(step: int) -> Params:
            item = "best" if "best" in _items(manager, step) else "params"
            return _restore_tree(manager, step, item, like)

        params, step, broken = _read_newest(manager, run, read)
    for folder, fault in broken.items():
        _warn(f"checkpoint {folder} is broken ({fault}): that of step {step} is used.")
    if tokenizer.vocab_size != config.model.vocab_size:
        raise RunError(
            f"the run {run} cannot be used: its tokenizer has {tokenizer.vocab_size} tokens, "
            f"its config {config.model.vocab_size}."
        )
    return params, config, tokenizer


@contextlib.contextmanager
def claim(run: Path) -> Iterator[None]:
    """Holds a run for training: no other process gets it, and what a killed one left half is gone.

    Where the disk fails or is full inside, the error says so and which checkpoint is intact.

    Raises:
      RunError: another process holds it, or it cannot be written.
    """
    if jax.distributed.is_initialized() and jax.process_index() > 0:
        yield  # the first of several processes that train one run together claims it for all
        return
    with locked(run / "config.toml") as ours:
        if not ours:
            raise RunError(f"the run {run} is being trained by another process, which holds it.")
        try:
            for folder in (run, run / "checkpoints"):
                if folder.is_dir():
                    check_writable(folder)
            _clear(run)
        except OSError as error:
            raise RunError(f"the run {run} cannot be written: {error.strerror}.") from error
        try:
            with _heard_once():
                yield
        except UserError:
            raise
        except Exception as error:
            if (why := _disk_error(error)) is None:
                raise
            _clear_behind_threads(run)
            raise RunError(
                f"the run {run} cannot be written: {why}; {_what_is_left(run)}. "
                f"Mend that, then go on with: python scripts/train.py --resume {run}"
            ) from error


@contextlib.contextmanager
def _heard_once() -> Iterator[None]:
    """Has what goes wrong raised, and not told by Orbax and by each of its threads besides.

    After a failure it stays that way: they are heard when the error has long been raised.
    """
    loggers, hook = [logging.getLogger(name) for name in ("absl", "asyncio")], sys.unraisablehook
    levels = [logger.level for logger in loggers]

    def quiet(unraisable: Any) -> None:
        """TensorStore's threads find their loop closed; a second Ctrl-C may meet a collector."""
        error = unraisable.exc_value
        if not isinstance(error, KeyboardInterrupt) and "Event loop is closed" not in str(error):
            hook(unraisable)

    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    sys.unraisablehook = quiet
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    sys.unraisablehook = hook


def _what_is_left(run: Path) -> str:
    steps = [int(path.name) for path in (run / "checkpoints").glob("*") if path.name.isdigit()]
    return f"the checkpoint of step {max(steps)} is intact" if steps else "none was saved yet"


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


def _disk_error(error: BaseException | None) -> str | None:
    """What the system says where an error comes from the disk, in its words; else None.

    TensorStore raises ValueErrors that quote them; Orbax chains one error to another.
    """
    while error is not None:
        for number in DISK_ERRORS:
            if getattr(error, "errno", None) == number or os.strerror(number) in str(error):
                return os.strerror(number)
        error = error.__cause__ or error.__context__
    return None


def open_checkpoints(run: Path) -> CheckpointManager:
    """The run's checkpoints, newest two kept; a context manager."""
    import orbax.checkpoint as ocp

    return ocp.CheckpointManager(
        (run / "checkpoints").resolve(),
        options=ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False),
        item_handlers={
            "params": ocp.StandardCheckpointHandler(),
            "optimizer": ocp.StandardCheckpointHandler(),
            "best": ocp.StandardCheckpointHandler(),
            "progress": ocp.JsonCheckpointHandler(),
        },
    )


def save(
    manager: CheckpointManager, state: TrainState, best: Params | None, progress: Progress
) -> None:
    """Writes a checkpoint of the state's step, unless there already is one."""
    import orbax.checkpoint as ocp

    step = int(state.step)
    if step in manager.all_steps():
        return
    items = {
        "params": ocp.args.StandardSave(flatten(state.params)),
        "optimizer": ocp.args.StandardSave(flatten(_optimizer_tree(state))),
        "progress": ocp.args.JsonSave(dataclasses.asdict(progress)),
    }
    if best is not None:
        items["best"] = ocp.args.StandardSave(flatten(best))
    manager.save(step, args=ocp.args.Composite(**items))
    if jax.process_index() == 0:
        folder = _folder(manager, step)
        write_text(folder / CHECKSUMS, json.dumps(hashes(folder), indent=1))


def restore(
    manager: CheckpointManager, run: Path, config: Config, mesh: Mesh | None = None
) -> tuple[TrainState, Params | None, Progress]:
    """The newest checkpoint that is whole: what `fit` needs to go on.

    Those after it, which are not, are set aside: renamed, never deleted. A sentence on stderr says
    so.

    mesh: the devices to restore onto, each its own part, however many it was written from; None:
    the default device alone.

    Raises:
      RunError: there is none, or it does not fit the config.
    """
    import orbax.checkpoint as ocp

    like = jax.eval_shape(lambda: init_state(config.model, config.training, config.data.sampling))
    like_params, like_rest = like.params, jax.eval_shape(_optimizer_tree, like)
    if mesh is not None:
        where = shardings((like_params, like_rest), mesh, config.training.shard_parameters)
        where[1]["carry"] = row_shardings(like.carry, mesh)
        like_params, like_rest = jax.tree.map(
            lambda leaf, sharding: leaf.update(sharding=sharding), (like_params, like_rest), where
        )

    def read(step: int) -> tuple[TrainState, Params | None, Progress]:
        params = _restore_tree(manager, step, "params", like_params)
        rest = _restore_tree(manager, step, "optimizer", like_rest)
        best = None
        if "best" in _items(manager, step):
            best = _restore_tree(manager, step, "best", like_params)
        with _reading(_where(manager, step)):
            item = ocp.args.Composite(progress=ocp.args.JsonRestore())
            progress = Progress(**manager.restore(step, args=item)["progress"])
        key = jax.random.wrap_key_data(rest["key"])
        state = TrainState(params, rest["opt_state"], key, rest["step"], rest["carry"])
        return state, best, progress

    restored, step, broken = _read_newest(manager, run, read)
    for folder, fault in broken.items() if jax.process_index() == 0 else ():
        _warn(
            f"checkpoint {folder} is broken ({fault}): it is kept as {_set_aside(folder).name}, "
            f"and the run goes on from step {step}."
        )
    if broken:
        manager.reload()
    return restored


def _read_newest(
    manager: CheckpointManager, run: Path, read: Callable[[int], T]
) -> tuple[T, int, dict[Path, str]]:
    """What `read` makes of the newest checkpoint that is whole, its step, and what ails later ones.

    Raises:
      RunError: there is none, or what `read` raises of one whose files are as they were written.
    """
    broken: dict[Path, str] = {}
    for step in sorted(manager.all_steps(), reverse=True):
        folder = _folder(manager, step)
        fault = _fault(folder)
        if fault is None:
            try:
                return read(step), step, broken
            except BrokenCheckpoint as error:
                if (folder / CHECKSUMS).exists():
                    raise  # the files are right, so that an older checkpoint would not help
                fault = str(error.__cause__)
        broken[folder] = fault
    if not broken:
        raise _no_checkpoint(run)
    faults = "; ".join(f"{folder}: {fault}" for folder, fault in broken.items())
    raise RunError(
        f"the run {run} has no checkpoint that is whole ({faults}). "
        f"To train it from its first step again, delete {run / 'checkpoints'}."
    )


def _fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files, by its checksums; None: nothing, or it has none."""
    try:
        written = json.loads((folder / CHECKSUMS).read_bytes())
        for name, expected in written.items():
            if file_hash(folder / name) != expected:
                return f"{name} is not as it was written"
    except FileNotFoundError as error:
        missing = Path(error.filename)
        return None if missing.name == CHECKSUMS else f"{missing.relative_to(folder)} is missing"
    except PermissionError as error:
        raise RunError(f"checkpoint {folder} cannot be read: {error.strerror}.") from error
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except (ValueError, AttributeError, TypeError):
        return f"{CHECKSUMS} is not as it was written"
    return None


def _warn(sentence: str) -> None:
    print(sentence, file=sys.stderr)


def _set_aside(folder: Path) -> Path:
    """Renames a broken checkpoint so that it is none any more; returns where it is now."""
    aside, number = folder.with_name(f"{folder.name}.broken"), 1
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{folder.name}.broken{number}")
    return folder.rename(aside)


def _optimizer_tree(state: TrainState) -> dict[str, Any]:
    key = jax.random.key_data(state.key)
    return {"opt_state": state.opt_state, "key": key, "step": state.step, "carry": state.carry}


def _no_checkpoint(run: Path) -> RunError:
    return RunError(f"the run {run} has no finished checkpoint.")


def _items(manager: CheckpointManager, step: int) -> set[str]:
    return {path.name for path in _folder(manager, step).iterdir()}


def _folder(manager: CheckpointManager, step: int) -> Path:
    return Path(manager.directory) / str(step)


def _where(manager: CheckpointManager, step: int) -> str:
    return f"checkpoint {_folder(manager, step)}"


@contextlib.contextmanager
def _reading(where: str) -> Iterator[None]:
    """Whatever Orbax raises over files that are missing or cut short, as one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, NotImplementedError) as error:
        name = type(error).__name__
        raise BrokenCheckpoint(f"{where} is broken and cannot be read ({name}).") from error


def _restore_tree(manager: CheckpointManager, step: int, item: str, like: Any) -> Any:
    """An item in the form of `like`, where its leaves' shardings say, else the default device."""
    import orbax.checkpoint as ocp

    where = _where(manager, step)
    wanted = flatten(like)
    with _reading(where):
        stored = manager.item_metadata(step)[item]
    stored = {} if stored is None else dict(stored.tree)
    for name in sorted(wanted.keys() | stored.keys()):
        have, want = (getattr(tree.get(name), "shape", None) for tree in (stored, wanted))
        if have != want:
            raise RunError(
                f"{where} does not fit its config: {name} is {have or 'missing'} in the "
                f"checkpoint and {want or 'missing'} in the config."
            )
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    targets = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or device)
        for name, leaf in wanted.items()
    }
    with _reading(where):
        restored = manager.restore(
            step, args=ocp.args.Composite(**{item: ocp.args.StandardRestore(targets)})
        )[item]
    return unflatten(like, restored)
