"""Checkpoint files: written by Orbax, and checked before Orbax reads them.

Every item is stored under its own name: arrays flat, by their path in the tree, so that they can be
read without this library, the rest as JSON. Orbax writes a checkpoint to a temporary folder and
renames it, so a checkpoint is complete or absent. Then `checksums.json` is added, the SHA-256 of
every file, by which damage is found later. (A checkpoint without it comes from a process that was
killed at that moment; it is used if it can be read.)

Run folders are shared, so a checkpoint may come from a stranger: its files are restricted in kind
and size, and its arrays in shape, before they are opened.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.util
import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxgru.errors import needs
from jaxgru.lm.files import file_hash, files_below, hashes, read_bytes, reason, resolved, write_text
from jaxgru.lm.model import flatten, unflatten
from jaxgru.lm.runs.folders import UNREADABLE, RunError, check_path, system_error

with needs("train"):  # before a run begins
    if importlib.util.find_spec("orbax.checkpoint") is None:
        raise ModuleNotFoundError(name="orbax-checkpoint")

if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager
else:
    CheckpointManager = Any  # Orbax takes long to import, so it is imported only where it is used

ARRAYS, JSON = ("params", "optimizer", "best"), ("progress", "made_with")  # the items
CHECKSUMS = "checksums.json"
KEPT = 2  # the newest checkpoints of a run; Orbax deletes the others after each save
MANIFEST = "manifest.ocdbt"  # missing where Orbax has not merged what its processes wrote
JSON_FILES = (CHECKSUMS, "_CHECKPOINT_METADATA", "_METADATA", "_sharding", "metadata")
OF_DAMAGE = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENAMETOOLONG),
    *(errno.EIO, None),  # Orbax's own have no number
)
"""The numbers of the errors that mean a damaged checkpoint; all others mean the machine."""
MAX_JSON = 2**26
"""Bytes in one of them: the losses of an epoch of three million steps."""


class BrokenCheckpoint(RunError):
    """A checkpoint that cannot be read."""


def silence_orbax() -> Callable[[], None]:
    """Silence Orbax's logging, so that a failure is reported once, by its exception.

    What Orbax only logs (a merge that it skips) is found by reading each checkpoint back.

    Returns a function that restores the logging.
    """
    _ignore_late_errors()
    levels = {logger: logger.level for logger in map(logging.getLogger, ("absl", "asyncio"))}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)

    def undo() -> None:
        for logger, level in levels.items():
            logger.setLevel(level)

    return undo


@functools.cache
def _ignore_late_errors() -> None:
    """Ignore what follows a failed read, from now on, because it may come long after it.

    TensorStore's threads raise once their event loop is closed, and so do the reads of other arrays
    when they are garbage. A second Ctrl-C may also come during garbage collection.
    """
    hook = sys.unraisablehook

    def quiet(unraisable: Any) -> None:
        error = unraisable.exc_value
        known = "Event loop is closed", "Encountered error while reading array index"
        if not (isinstance(error, KeyboardInterrupt) or any(text in str(error) for text in known)):
            hook(unraisable)

    sys.unraisablehook = quiet


@contextlib.contextmanager
def open_checkpoints(run: Path) -> Iterator[CheckpointManager]:
    """Open a run's checkpoints, of which the newest KEPT are kept.

    Raises:
      RunError: Orbax cannot use the run's path, or `checkpoints` is not a folder.
    """
    import orbax.checkpoint as ocp

    check_path(run, UNREADABLE)
    folder = run / "checkpoints"
    if os.path.lexists(folder) and not folder.is_dir():
        raise RunError(f"{folder} should be a folder; rename or delete what is there.")
    with contextlib.ExitStack() as stack:
        stack.callback(silence_orbax())
        try:
            manager = ocp.CheckpointManager(
                resolved(folder),
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=KEPT,
                    enable_async_checkpointing=False,
                    lightweight_initialize=True,  # read nothing before the files are checked
                ),
                item_handlers={name: ocp.StandardCheckpointHandler() for name in ARRAYS}
                | {name: ocp.JsonCheckpointHandler() for name in JSON},
            )
        except OSError as error:
            raise RunError(f"{folder} cannot be opened: {reason(error)}.") from error
        yield stack.enter_context(manager)


def try_writing(run: Path) -> None:
    """Write a file as deep in a run as those of a checkpoint, and delete it.

    So that a path which is too long, say, ends a run before it trains and not after an epoch.

    Raises:
      RunError: it cannot be written.
    """
    import tensorstore

    trial = resolved(run) / "checkpoints" / "0000000000.orbax-checkpoint-tmp"  # see folders.claim
    folder = trial / "optimizer.orbax-checkpoint-tmp" / "ocdbt.process_000000" / "d"
    try:
        store = tensorstore.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
        store.write(32 * "0", b"").result()
    except ValueError as error:
        of_system = system_error(error)
        why = reason(of_system) if of_system else str(error).partition("\n")[0]
        raise RunError(f"checkpoints cannot be written into {run}: {why}.") from error
    finally:
        shutil.rmtree(trial, ignore_errors=True)


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of one step; printed as "checkpoint FOLDER"."""

    manager: CheckpointManager
    step: int

    @property
    def folder(self) -> Path:
        """Its folder, `checkpoints/<step>`."""
        return Path(self.manager.directory) / str(self.step)

    def __str__(self) -> str:
        return f"checkpoint {self.folder}"

    def items(self) -> set[str]:
        """Return the names of its items. Raises BrokenCheckpoint where it has vanished."""
        with self.reading():
            return set(os.listdir(self.folder))

    def write(self, values: Mapping[str, Any]) -> None:
        """Write the checkpoint from these items: trees of arrays, or what JSON can hold."""
        import orbax.checkpoint as ocp

        arguments = {
            name: ocp.args.StandardSave(flatten(value)) if name in ARRAYS
            else ocp.args.JsonSave(value)
            for name, value in values.items()
        }  # fmt: skip
        self.manager.save(self.step, args=ocp.args.Composite(**arguments))

    def write_checksums(self) -> None:
        """Add the checksums, once it is complete."""
        write_text(self.folder / CHECKSUMS, json.dumps(hashes(self.folder), indent=1))

    def read_json(self, item: str) -> Any:
        """Return an item stored as JSON. Raises BrokenCheckpoint where it cannot be read."""
        import orbax.checkpoint as ocp

        self._check_present(item)
        with self.reading():
            args = ocp.args.Composite(**{item: ocp.args.JsonRestore()})
            return self.manager.restore(self.step, args=args)[item]

    def read_tree(self, item: str, like: Any) -> Any:
        """Return an item in the form of `like`, on its leaves' shardings or the default device.

        Raises:
          BrokenCheckpoint: it cannot be read.
          RunError: its arrays do not have the shapes of `like`, or are larger than their files.
        """
        import orbax.checkpoint as ocp

        wanted = flatten(like)
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        targets = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or device)
            for name, leaf in wanted.items()
        }
        self._check_present(item)
        with self.reading():
            stored = self._description(item)
            for name in sorted(wanted.keys() | stored.keys()):
                have, want = (getattr(tree.get(name), "shape", None) for tree in (stored, wanted))
                if have != want:
                    raise RunError(
                        f"{self} does not fit its config: {name} is {have or 'missing'} in the "
                        f"checkpoint and {want or 'missing'} in the config."
                    )
            chunks = sum(self._num_chunks(name, stored[name], wanted[name]) for name in wanted)
            needed, size = _num_bytes(like), sum(files_below(self.folder / item).values())
            # chunks that are not stored count as zeros; each takes 4 KB while it is read
            if needed > 2**26 + 32 * size or chunks > 2**14 + size // 128:
                raise RunError(
                    f"{self} cannot be used: the arrays of its {item} have {needed:,} bytes in "
                    f"{chunks:,} parts, the files {size:,}."
                )
            args = ocp.args.Composite(**{item: ocp.args.StandardRestore(targets)})
            return unflatten(like, self.manager.restore(self.step, args=args)[item])

    def _check_present(self, item: str) -> None:
        """Raise BrokenCheckpoint where an item is missing, as in a copy that was cut off."""
        if item not in self.items():
            raise BrokenCheckpoint(f"{self} is broken: its {item} is missing.")

    def _description(self, item: str) -> dict[str, Any]:
        """Return shapes, dtypes and parts of an item's arrays, by name."""
        import orbax.checkpoint as ocp

        with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
            described = handler.metadata(self.manager.directory / str(self.step) / item)
        return {str(name): array for name, array in dict(described.tree).items()}

    def _num_chunks(self, name: str, stored: Any, wanted: jax.Array | jax.ShapeDtypeStruct) -> int:
        """Return the number of parts an array is stored in: one per device it was spread over.

        Raises:
          RunError: the array is not numeric, or a part is larger than the array (TensorStore
            allocates whole parts).
        """
        dtype = jnp.dtype(stored.dtype)
        kinds = (jnp.floating, jnp.integer)
        if not any(jnp.issubdtype(dtype, k) and jnp.issubdtype(wanted.dtype, k) for k in kinds):
            raise RunError(f"{self} cannot be used: {name} is {dtype}; it must be {wanted.dtype}.")
        chunk = tuple(stored.storage.chunk_shape)
        if any(part > max(whole, 1) for part, whole in zip(chunk, wanted.shape, strict=True)):
            raise RunError(
                f"{self} cannot be used: {name} is stored in parts of {chunk}, more than its shape "
                f"{wanted.shape}."
            )
        return math.prod(-(-whole // part) for part, whole in zip(chunk, wanted.shape, strict=True))

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Turn whatever missing, truncated or forged files raise into a BrokenCheckpoint.

        Raises:
          RunError: the system cannot open intact files either: too many are open, for example.
        """
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
            if (of_system := system_error(first)) and of_system.errno not in OF_DAMAGE:
                raise RunError(f"{self} cannot be read: {reason(of_system)}.") from first
            what = f"{type(first).__name__}: {str(first)[:300]}"
            raise BrokenCheckpoint(f"{self} is broken and cannot be read ({what}).") from first

    def fault(self, like: Any) -> str | None:
        """Return what is wrong with its files; None: nothing is.

        Orbax opens whatever is in the folder, so it may hold only regular files of plausible sizes.
        The checksums are in the same folder: they reveal damage, not forgery.

        like: all arrays that it should have, by which sizes are judged.
        """
        folder, array_bytes = self.folder, _num_bytes(like)
        try:
            if folder.is_symlink():
                return "it is a link"
            sizes = files_below(folder)
            if (size := sum(sizes.values())) > 2**30 + 32 * array_bytes:  # all will be hashed
                return f"it has {size:,} bytes, for arrays of {array_bytes:,}"
            for name, size in sizes.items():
                path = Path(name)
                of_json = path.name in JSON_FILES or path.parent.name == "array_metadatas"
                if of_json and size > MAX_JSON:
                    return f"{name} has {size:,} bytes; at most {MAX_JSON:,} are allowed"
            if CHECKSUMS not in sizes:
                return None
            for name, expected in json.loads(read_bytes(folder / CHECKSUMS)).items():
                if name not in sizes:
                    return f"{name} is missing"
                if file_hash(folder / name) != expected:
                    return f"{name} differs from what was written"
        except OSError as error:
            if error.errno not in OF_DAMAGE:
                raise RunError(f"{self} cannot be read: {reason(error)}.") from error
            return f"it cannot be read: {reason(error)}"
        except (ValueError, AttributeError, RecursionError):
            return f"{CHECKSUMS} differs from what was written"
        return None

    def set_aside(self) -> Path:
        """Rename it, so that it no longer counts as a checkpoint; return its new path."""
        aside, number = self.folder.with_name(f"{self.folder.name}.broken"), 1
        while os.path.lexists(aside):
            number += 1
            aside = aside.with_name(f"{self.folder.name}.broken{number}")
        return self.folder.rename(aside)


def _num_bytes(like: Any) -> int:
    """Return the size of a tree's arrays in bytes, from their shapes and dtypes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))
