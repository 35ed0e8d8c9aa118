"""Checkpoints of a run folder, by Orbax: saved, verified, restored.

A checkpoint has five items: `params` and `optimizer` (AdamW's moments, key, step, the streams'
carry), the `best` parameters where training stops early, and in JSON `progress` and `made_with`:
all else that decides the numbers, with which whoever resumes is compared. Arrays are stored flat,
by their path in the tree, so that a checkpoint can be read without this library. Orbax writes a
checkpoint beside and renames it: it is whole or absent. Then `checksums.json` joins it, the SHA-256
of every file, by which a checkpoint that was spoilt later is known and the one before it taken.
(One without it is older than this rule, or its process was killed at that moment; it counts as good
if it can be read.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxgru.config import Config, dotted_names, field_value
from jaxgru.data.tokenizers import Tokenizer, load_tokenizer
from jaxgru.errors import shown, warn
from jaxgru.files import file_hash, files_below, hashes, read_bytes, write_text
from jaxgru.interop.pth import load_pth
from jaxgru.interop.safetensors import load_safetensors
from jaxgru.model import Params, flatten, init, unflatten
from jaxgru.runs.folders import UNREADABLE, RunError, check_path, find_run, load_run_config
from jaxgru.training import Progress, TrainState, init_state, state_shardings

if TYPE_CHECKING:  # Orbax takes long to import, so that only those who save or restore pay for it
    from orbax.checkpoint import CheckpointManager

CHECKSUMS = "checksums.json"
MANIFEST = "manifest.ocdbt"  # without it, Orbax has not merged what its processes have written
JAX_SETTINGS = (
    *("jax_enable_x64", "jax_threefry_partitionable", "jax_default_prng_impl"),
    "jax_default_matmul_precision",
)
FREE = {"data.corpus", "training.remat", "training.shard_parameters"}
"""The fields that may differ from a checkpoint's; a corpus is known by its SHA-256."""

EPOCH = ("epoch", "step", "train_loss", "val_loss", "tokens_per_second", "seconds")
JSON_FILES = (CHECKSUMS, "_CHECKPOINT_METADATA", "_METADATA", "_sharding", "metadata")
MAX_JSON = 2**26
"""Bytes of one: the losses of an epoch of three million steps."""
T = TypeVar("T")


class BrokenCheckpoint(RunError):
    """A checkpoint that cannot be read."""


def load_run(path: str | Path) -> tuple[Params, Config, Tokenizer]:
    """Parameters, config and tokenizer of a run folder or version, a .safetensors or a .pth file.

    The parameters are the run's result: the best epoch's where training stops early, else the last.
    A run that is still going on, or was interrupted, gives those of its newest checkpoint that is
    whole; a sentence on stderr names those that are not. Nothing is written. Of a .pth, the
    tokenizer is what `interop.pth.load_pth` takes where none is given.

    Raises:
      RunError: there is no run or no finished checkpoint, or it does not fit its config.
      InteropError: the .safetensors or .pth file is missing or broken.
      TokenizerError: the tokenizer is missing or broken.
    """
    path = Path(path)
    if path.suffix == ".safetensors" and not path.is_dir():
        return load_safetensors(path)
    if path.suffix == ".pth" and not path.is_dir():
        return load_pth(path)
    run = find_run(path)
    config = load_run_config(run)
    tokenizer = load_tokenizer(run)
    if tokenizer.vocab_size != config.model.vocab_size:
        raise RunError(
            f"the run {run} cannot be used: its tokenizer has {tokenizer.vocab_size} tokens, "
            f"its config {config.model.vocab_size}."
        )
    like = jax.eval_shape(lambda: init(jax.random.key(0), config.model))
    try:
        os.listdir(run / "checkpoints")
    except FileNotFoundError:  # to open it would make it
        raise _no_checkpoint(run) from None
    except OSError as error:
        raise RunError(f"{run / 'checkpoints'} cannot be read: {error.strerror}.") from error

    with open_checkpoints(run) as manager:

        def read(step: int) -> Params:
            _check_made_with(manager, step, made_with(config, tokenizer), ("model.", "tokenizer"))
            item = "best" if "best" in _items(manager, step) else "params"
            return _restore_tree(manager, step, item, like)

        params, step, broken = _read_newest(manager, run, like, read)
    for folder, fault in broken.items():
        warn(f"checkpoint {folder} is broken ({fault}): that of step {step} is used.")
    return params, config, tokenizer


def made_with(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return all that decides a run's numbers besides its state, by name, for a checkpoint."""
    names = (name for name in dotted_names() if not name.startswith("published."))
    fields = {name: field_value(config, name) for name in names}
    settings = {name: getattr(jax.config, name) for name in JAX_SETTINGS}
    tokens = {"tokenizer (SHA-256)": hashlib.sha256(tokenizer.to_bytes()).hexdigest()}
    return fields | settings | tokens


def _check_made_with(
    manager: CheckpointManager,
    step: int,
    now: dict[str, Any],
    names: tuple[str, ...] = ("",),
    given: Container[str] = (),
) -> None:
    """Raise RunError where what begins with one of these names is not as the checkpoint has it.

    What was given at --resume may differ. So may the epochs where the run was lengthened since, as
    `training.lengthened` counts. Checkpoints of older versions have no such record, and pass.
    """
    if "made_with" not in _items(manager, step):
        return
    then = _read_json(manager, step, "made_with")
    if not isinstance(then, dict):
        raise BrokenCheckpoint(f"{_where(manager, step)} does not say what it was made with.")
    epochs = {"training.epochs", "training.lengthened"}
    count = then.get("training.lengthened")
    free = FREE | epochs if now["training.lengthened"] != count else FREE
    for name, value in now.items():
        if name not in then or name in free or name in given or then[name] == value:
            continue
        if name.startswith(names):
            advice = "set it back, or start a new run"
            if name in epochs:
                advice = f"to change it, resume with --{name} {value}"
            raise RunError(
                f"{_where(manager, step)} was made with {name} = {shown(then[name])}, and this is "
                f"{shown(value)}; {advice}."
            )


def silence_orbax() -> Callable[[], None]:
    """Silence Orbax's logging, so that a failure is reported once, by its exception.

    What it only logs (a merge that it skips) is found by reading each checkpoint back.

    Returns a function that undoes it.
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

    def undo() -> None:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        sys.unraisablehook = hook

    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    sys.unraisablehook = quiet
    return undo


@contextlib.contextmanager
def open_checkpoints(run: Path) -> Iterator[CheckpointManager]:
    """Open the run's checkpoints, of which the newest two are kept.

    Raises:
      RunError: the run's path is one that checkpoints cannot have, or something else is in their
        place.
    """
    import orbax.checkpoint as ocp

    check_path(run, UNREADABLE)
    folder = run / "checkpoints"
    if os.path.lexists(folder) and not folder.is_dir():
        raise RunError(f"{folder} is in the way: it should be a folder.")
    undo = silence_orbax()
    try:
        with ocp.CheckpointManager(
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
                "made_with": ocp.JsonCheckpointHandler(),
            },
        ) as manager:
            yield manager
    finally:
        undo()


def save(
    manager: CheckpointManager,
    state: TrainState,
    best: Params | None,
    progress: Progress,
    recorded: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint of the state's step, unless there is one already, and read it back.

    recorded: what `made_with` returns; None: nothing is recorded.

    Raises:
      RunError: the parameters that are read back are not those that were written. The checkpoint is
        deleted; the one before it is still there.
    """
    import orbax.checkpoint as ocp

    step = int(state.step)
    if step in manager.all_steps():
        return
    items = {
        "params": ocp.args.StandardSave(flatten(state.params)),
        "optimizer": ocp.args.StandardSave(flatten(_storable(state).replace(params=None))),
        "progress": ocp.args.JsonSave(dataclasses.asdict(progress)),
    }
    if recorded is not None:
        items["made_with"] = ocp.args.JsonSave(recorded)
    if best is not None:
        items["best"] = ocp.args.StandardSave(flatten(best))
    manager.save(step, args=ocp.args.Composite(**items))
    fault = _fault_read_back(manager, step, state.params)
    if fault is not None:
        manager.delete(step)
        raise RunError(f"{_where(manager, step)} cannot be read back ({fault}); it is deleted.")
    if jax.process_index() == 0:
        folder = _folder(manager, step)
        write_text(folder / CHECKSUMS, json.dumps(hashes(folder), indent=1))


def _fault_read_back(manager: CheckpointManager, step: int, params: Params) -> str | None:
    """What is wrong with a checkpoint that was just written; None: nothing.

    Each process reads its own parts of the parameters.
    """
    for item in _items(manager, step) & {"params", "optimizer", "best"}:
        if not (_folder(manager, step) / item / MANIFEST).is_file():
            return f"{item}/{MANIFEST} is missing"
    try:
        again = _restore_tree(manager, step, "params", params)
    except RunError as error:
        return str(error)
    for name, leaf in flatten(params).items():
        parts = zip(leaf.addressable_shards, flatten(again)[name].addressable_shards, strict=True)
        if any(np.asarray(a.data).tobytes() != np.asarray(b.data).tobytes() for a, b in parts):
            return f"{name} is not as it was written"
    return None


def restore(
    manager: CheckpointManager,
    run: Path,
    config: Config,
    mesh: Mesh | None = None,
    recorded: dict[str, Any] | None = None,
    given: Container[str] = (),
) -> tuple[TrainState, Params | None, Progress]:
    """Return the newest checkpoint that is whole: what `fit` needs to resume.

    Those after it, which are not, are set aside: renamed, never deleted. A sentence on stderr says
    so.

    mesh: the devices to restore onto, each its own part, however many it was written from; None:
    the default device alone.
    recorded: what `made_with` returns now, to be compared with what the checkpoint was made with.
    given: names of what may differ, for it was given at --resume.

    Raises:
      RunError: there is none, it does not fit the config, or it was made with something else.
    """
    like = jax.eval_shape(
        lambda: _storable(init_state(config.model, config.training, config.data.sampling))
    )
    if mesh is not None:
        where = state_shardings(like, mesh, config.training)
        like = jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), like, where)

    def read(step: int) -> tuple[TrainState, Params | None, Progress]:
        if recorded is not None:
            _check_made_with(manager, step, recorded, given=given)
        params = _restore_tree(manager, step, "params", like.params)
        rest = _restore_tree(manager, step, "optimizer", like.replace(params=None))
        best = None
        if "best" in _items(manager, step):
            best = _restore_tree(manager, step, "best", like.params)
        with _reading(_where(manager, step)):
            progress = _progress(_read_json(manager, step, "progress"))
        key = jax.random.wrap_key_data(rest.key)
        if int(rest.step) != step:
            raise BrokenCheckpoint(f"{_where(manager, step)} is of step {int(rest.step)}.")
        return rest.replace(params=params, key=key), best, progress

    restored, step, broken = _read_newest(manager, run, like, read)
    for folder, fault in broken.items() if jax.process_index() == 0 else ():
        warn(
            f"checkpoint {folder} is broken ({fault}): it is kept as {_set_aside(folder).name}, "
            f"and the run resumes from step {step}."
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


def _set_aside(folder: Path) -> Path:
    """Renames a broken checkpoint so that it is none any more; returns where it is now."""
    aside, number = folder.with_name(f"{folder.name}.broken"), 1
    while os.path.lexists(aside):
        number += 1
        aside = folder.with_name(f"{folder.name}.broken{number}")
    return folder.rename(aside)


def _read_json(manager: CheckpointManager, step: int, item: str) -> Any:
    import orbax.checkpoint as ocp

    with _reading(_where(manager, step)):
        args = ocp.args.Composite(**{item: ocp.args.JsonRestore()})
        return manager.restore(step, args=args)[item]


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
        if not (isinstance(record, dict) and all(is_number(record.get(name)) for name in EPOCH)):
            raise ValueError(f"the record of an epoch lacks one of {', '.join(EPOCH)}")
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
