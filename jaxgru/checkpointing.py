"""Checkpoints of a run folder, by Orbax: saved, verified, restored.

A checkpoint has four items: `params` and `optimizer` (AdamW's moments, key, step, the streams'
carry), the `best` parameters where training stops early, and `progress` (JSON). Arrays are stored
flat, by their path in the tree, so that a checkpoint can be read without this library. Orbax writes
a checkpoint beside and renames it: it is whole or absent. Then `checksums.json` joins it, the
SHA-256 of every file, by which a checkpoint that was spoilt later is known and the one before it
taken. (One without it is older than this rule, or its process was killed at that moment; it counts
as good if it can be read.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxgru.config import Config
from jaxgru.errors import printable
from jaxgru.files import file_hash, files_below, hashes, read_bytes, write_text
from jaxgru.interop.safetensors import load_safetensors
from jaxgru.model import Params, flatten, init, unflatten
from jaxgru.records import difference_of_epoch
from jaxgru.run_folders import RunError, find_run, load_run_config
from jaxgru.tokenizers import Tokenizer, load_tokenizer
from jaxgru.training import Progress, TrainState, init_state, state_shardings

if TYPE_CHECKING:  # Orbax takes long to import, so that only those who save or restore pay for it
    from orbax.checkpoint import CheckpointManager

CHECKSUMS = "checksums.json"
JSON_FILES = (CHECKSUMS, "_CHECKPOINT_METADATA", "_METADATA", "_sharding", "metadata")
MAX_JSON = 2**26
"""Bytes of one: the losses of an epoch of three million steps."""
T = TypeVar("T")


class BrokenCheckpoint(RunError):
    """A checkpoint that cannot be read."""


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
    try:
        os.listdir(run / "checkpoints")
    except FileNotFoundError:  # to open it would make it
        raise _no_checkpoint(run) from None
    except OSError as error:
        raise RunError(f"{run / 'checkpoints'} cannot be read: {error.strerror}.") from error

    with open_checkpoints(run) as manager:

        def read(step: int) -> Params:
            item = "best" if "best" in _items(manager, step) else "params"
            return _restore_tree(manager, step, item, like)

        params, step, broken = _read_newest(manager, run, like, read)
    for folder, fault in broken.items():
        _warn(f"checkpoint {folder} is broken ({fault}): that of step {step} is used.")
    if tokenizer.vocab_size != config.model.vocab_size:
        raise RunError(
            f"the run {run} cannot be used: its tokenizer has {tokenizer.vocab_size} tokens, "
            f"its config {config.model.vocab_size}."
        )
    return params, config, tokenizer


@contextlib.contextmanager
def _heard_once() -> Iterator[None]:
    """Has what goes wrong raised, and not told by Orbax and by each of its threads besides.

    After a failure it stays that way: they are heard when the error has long been raised.
    """
    loggers, hook = [logging.getLogger(name) for name in ("absl", "asyncio")], sys.unraisablehook
    levels = [logger.level for logger in loggers]

    def quiet(unraisable: Any) -> None:
        """TensorStore's threads find their loop closed; a second Ctrl-C may meet a collector; of
        arrays that are read together, the first that fails is raised."""
        error = unraisable.exc_value
        known = "Event loop is closed", "Encountered error while reading array index"
        if not (isinstance(error, KeyboardInterrupt) or any(text in str(error) for text in known)):
            hook(unraisable)

    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    sys.unraisablehook = quiet
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    sys.unraisablehook = hook


@contextlib.contextmanager
def open_checkpoints(run: Path) -> Iterator[CheckpointManager]:
    """The run's checkpoints, newest two kept.

    Raises:
      RunError: something else is in their place.
    """
    import orbax.checkpoint as ocp

    folder = run / "checkpoints"
    if os.path.lexists(folder) and not folder.is_dir():
        raise RunError(f"{folder} is in the way: it should be a folder.")
    with (
        _heard_once(),
        ocp.CheckpointManager(
            folder.resolve(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=2,
                enable_async_checkpointing=False,
                lightweight_initialize=True,  # none is read before its files are checked
            ),
            item_handlers={
                "params": ocp.StandardCheckpointHandler(),
                "optimizer": ocp.StandardCheckpointHandler(),
                "best": ocp.StandardCheckpointHandler(),
                "progress": ocp.JsonCheckpointHandler(),
            },
        ) as manager,
    ):
        yield manager


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
        "optimizer": ocp.args.StandardSave(flatten(_storable(state).replace(params=None))),
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

    like = jax.eval_shape(
        lambda: _storable(init_state(config.model, config.training, config.data.sampling))
    )
    if mesh is not None:
        where = state_shardings(like, mesh, config.training)
        like = jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), like, where)

    def read(step: int) -> tuple[TrainState, Params | None, Progress]:
        params = _restore_tree(manager, step, "params", like.params)
        rest = _restore_tree(manager, step, "optimizer", like.replace(params=None))
        best = None
        if "best" in _items(manager, step):
            best = _restore_tree(manager, step, "best", like.params)
        with _reading(_where(manager, step)):
            item = ocp.args.Composite(progress=ocp.args.JsonRestore())
            progress = _progress(manager.restore(step, args=item)["progress"])
        key = jax.random.wrap_key_data(rest.key)
        return rest.replace(params=params, key=key), best, progress

    restored, step, broken = _read_newest(manager, run, like, read)
    for folder, fault in broken.items() if jax.process_index() == 0 else ():
        _warn(
            f"checkpoint {folder} is broken ({fault}): it is kept as {_set_aside(folder).name}, "
            f"and the run goes on from step {step}."
        )
    if broken:
        manager.reload()
    return restored


def _read_newest(
    manager: CheckpointManager, run: Path, like: Any, read: Callable[[int], T]
) -> tuple[T, int, dict[Path, str]]:
    """What `read` makes of the newest checkpoint that is whole, its step, and what ails later ones.

    like: the shapes of its arrays.

    Raises:
      RunError: there is none, or what `read` raises of one whose files are as they were written.
    """
    broken: dict[Path, str] = {}
    for step in sorted(manager.all_steps(), reverse=True):
        folder = _folder(manager, step)
        fault = _fault(folder, _num_bytes(like))
        if fault is None:
            try:
                return read(step), step, broken
            except BrokenCheckpoint as error:
                if (folder / CHECKSUMS).exists():
                    raise  # the files are right, so that an older checkpoint would not help
                fault = str(error.__cause__)[:300]
        broken[folder] = fault
    if not broken:
        raise _no_checkpoint(run)
    faults = "; ".join(f"{folder}: {fault}" for folder, fault in broken.items())
    raise RunError(
        f"the run {run} has no checkpoint that is whole ({faults}). "
        f"To train it from its first step again, delete {run / 'checkpoints'}."
    )


def _fault(folder: Path, array_bytes: int) -> str | None:
    """What is wrong with a checkpoint's files, by its checksums; None: nothing, or it has none.

    Orbax opens what a folder holds, so it must hold files of plausible sizes and nothing else. The
    checksums came with the folder: against malice they are none.
    """
    try:
        if folder.is_symlink():
            return "it is a link"
        sizes = files_below(folder)
        if (size := sum(sizes.values())) > 2**30 + 32 * array_bytes:  # to be hashed
            return f"it has {size:,} bytes, for arrays of {array_bytes:,}"
        for name in sizes:
            of_json = Path(name).name in JSON_FILES or Path(name).parent.name == "array_metadatas"
            if of_json and sizes[name] > MAX_JSON:
                return f"{name} has {sizes[name]:,} bytes; there may be {MAX_JSON:,}"
        if CHECKSUMS not in sizes:
            return None
        for name, expected in json.loads(read_bytes(folder / CHECKSUMS)).items():
            if name not in sizes:
                return f"{name} is missing"
            if file_hash(folder / name) != expected:
                return f"{name} is not as it was written"
    except PermissionError as error:
        raise RunError(f"checkpoint {folder} cannot be read: {error.strerror}.") from error
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except (ValueError, AttributeError, RecursionError):
        return f"{CHECKSUMS} is not as it was written"
    return None


def _num_bytes(like: Any) -> int:
    """How many bytes a tree's arrays have, by their shapes and dtypes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))


def _warn(sentence: str) -> None:
    print(printable(sentence), file=sys.stderr)


def _set_aside(folder: Path) -> Path:
    """Renames a broken checkpoint so that it is none any more; returns where it is now."""
    aside, number = folder.with_name(f"{folder.name}.broken"), 1
    while os.path.lexists(aside):
        number += 1
        aside = folder.with_name(f"{folder.name}.broken{number}")
    return folder.rename(aside)


def _storable(state: TrainState) -> TrainState:
    """The state as it is stored, its key as plain numbers."""
    return state.replace(key=jax.random.key_data(state.key))


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
    """Whatever Orbax raises over files that are missing, cut short or forged, as one sentence."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        first: BaseException = error
        while (before := first.__cause__ or first.__context__) is not None:
            first = before
        if isinstance(first, (MemoryError, jax.errors.JaxRuntimeError)):
            raise  # the machine's fault
        what = f"{type(first).__name__}: {str(first)[:300]}"
        raise BrokenCheckpoint(f"{where} is broken and cannot be read ({what}).") from first


def _progress(stored: Any) -> Progress:
    """What `save` was given, if that is what was stored. Raises ValueError, TypeError."""
    progress = Progress(**stored)

    def is_number(value: Any) -> bool:
        return type(value) in (int, float) and (abs(value) < 2**63 or value == math.inf)

    if not isinstance(progress.records, list) or not isinstance(progress.epoch_losses, list):
        raise ValueError("its records or losses are not a list")
    for record in progress.records:
        if (difference := difference_of_epoch(record)) is not None:
            raise ValueError(difference)
    numbers = *progress.epoch_losses, progress.epoch_seconds, progress.best_val_loss
    if not all(map(is_number, numbers)) or progress.epoch_seconds < 0:
        raise ValueError("its losses or seconds are not all numbers")
    if type(progress.best_epoch) is not int or not 0 <= progress.best_epoch <= progress.epoch:
        raise ValueError("its best epoch is none of its epochs")
    if type(progress.finished) is not bool:
        raise ValueError("it does not say whether it is finished")
    return progress


def _restore_tree(manager: CheckpointManager, step: int, item: str, like: Any) -> Any:
    """An item in the form of `like`, where its leaves' shardings say, else the default device."""
    import orbax.checkpoint as ocp

    where = _where(manager, step)
    wanted = flatten(like)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    targets = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or device)
        for name, leaf in wanted.items()
    }
    with _reading(where):
        stored = manager.item_metadata(step)[item]
        stored = {} if stored is None else {str(name): x for name, x in dict(stored.tree).items()}
        for name in sorted(wanted.keys() | stored.keys()):
            have, want = (getattr(tree.get(name), "shape", None) for tree in (stored, wanted))
            if have != want:
                raise RunError(
                    f"{where} does not fit its config: {name} is {have or 'missing'} in the "
                    f"checkpoint and {want or 'missing'} in the config."
                )
        chunks = sum(_num_chunks(where, name, stored[name], wanted[name]) for name in wanted)
        needed, size = _num_bytes(like), sum(files_below(_folder(manager, step) / item).values())
        # chunks that are not stored count as zeros; each takes 4 KB while it is read
        if needed > 2**26 + 32 * size or chunks > 2**14 + size // 128:
            raise RunError(
                f"{where} cannot be used: the arrays of its {item} have {needed:,} bytes in "
                f"{chunks:,} parts, the files {size:,}."
            )
        restored = manager.restore(
            step, args=ocp.args.Composite(**{item: ocp.args.StandardRestore(targets)})
        )[item]
    return unflatten(like, restored)


def _num_chunks(where: str, name: str, stored: Any, wanted: jax.ShapeDtypeStruct) -> int:
    """In how many parts an array is stored: one for each device that it was spread over.

    Raises:
      RunError: it is not of numbers, or a part is larger than the array; for TensorStore makes room
        for whole parts.
    """
    kinds = (jnp.floating, jnp.integer)
    dtype = jnp.dtype(stored.dtype)
    if not any(jnp.issubdtype(dtype, k) and jnp.issubdtype(wanted.dtype, k) for k in kinds):
        raise RunError(f"{where} cannot be used: {name} is {dtype}; it must be {wanted.dtype}.")
    chunk = tuple(stored.storage.chunk_shape)
    if any(part > max(whole, 1) for part, whole in zip(chunk, wanted.shape, strict=True)):
        raise RunError(
            f"{where} cannot be used: {name} is stored in parts of {chunk}, more than its shape "
            f"{wanted.shape}."
        )
    return math.prod(-(-whole // part) for part, whole in zip(chunk, wanted.shape, strict=True))
