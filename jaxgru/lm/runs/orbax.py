"""Checkpoint files, which Orbax writes and reads, and their checksums.

Every item is stored under its own name: arrays flat, by their path in the tree, so that they can be
read without this library, the rest as JSON. Orbax writes a checkpoint to a temporary folder and
renames it, so a checkpoint is complete or absent. Then `checksums.json` is added, the SHA-256 of
every file, by which damage is found later. (A checkpoint without it comes from a process that was
killed at that moment; it is used if it can be read.)
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxgru.errors import needs
from jaxgru.lm.files import file_hash, hashes, write_text
from jaxgru.lm.model import flatten, unflatten
from jaxgru.lm.runs.folders import RunError
from jaxgru.parallel.processes import is_first

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


class BrokenCheckpoint(RunError):
    """A checkpoint that cannot be read."""


def silence_orbax() -> Callable[[], Any]:
    """Silence Orbax's logging, so that a failure is reported once, by its exception.

    Returns a function that restores the logging.
    """
    _ignore_late_errors()
    loggers = logging.getLogger("absl"), logging.getLogger("asyncio")
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    return lambda: [logger.setLevel(level) for logger, level in zip(loggers, levels, strict=True)]


@functools.cache
def _ignore_late_errors() -> None:
    """Ignore what TensorStore's threads raise after a failed read or write, maybe long after it."""
    hook = sys.unraisablehook
    known = "Event loop is closed", "Encountered error while reading array index"

    def quiet(unraisable: Any) -> None:
        if not any(text in str(unraisable.exc_value) for text in known):
            hook(unraisable)

    sys.unraisablehook = quiet


@contextlib.contextmanager
def open_checkpoints(run: Path) -> Iterator[CheckpointManager]:
    """Open a run's checkpoints, of which the newest KEPT are kept."""
    import orbax.checkpoint as ocp

    with contextlib.ExitStack() as stack:
        stack.callback(silence_orbax())
        manager = ocp.CheckpointManager(
            (run / "checkpoints").resolve(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=KEPT,
                enable_async_checkpointing=False,
                lightweight_initialize=True,  # read nothing before the checksums are compared
            ),
            item_handlers={name: ocp.StandardCheckpointHandler() for name in ARRAYS}
            | {name: ocp.JsonCheckpointHandler() for name in JSON},
        )
        yield stack.enter_context(manager)


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

    def has(self, item: str) -> bool:
        """Return whether it has an item."""
        return (self.folder / item).exists()

    def write(self, values: Mapping[str, Any]) -> None:
        """Write these items, trees of arrays or what JSON can hold, and then the checksums.

        Raises:
          RunError: Orbax has left out a part, which it only logs. The checkpoint is deleted.
        """
        import orbax.checkpoint as ocp

        arguments = {
            name: ocp.args.StandardSave(flatten(value)) if name in ARRAYS
            else ocp.args.JsonSave(value)
            for name, value in values.items()
        }  # fmt: skip
        self.manager.save(self.step, args=ocp.args.Composite(**arguments))
        for item in ARRAYS:
            if item in values and not self.has(f"{item}/{MANIFEST}"):
                self.manager.delete(self.step)
                raise RunError(f"{self} is not whole: Orbax has written no {item}/{MANIFEST}.")
        if is_first():
            write_text(self.folder / CHECKSUMS, json.dumps(hashes(self.folder), indent=1))

    def damage(self) -> str | None:
        """Return what the checksums say is wrong; None: nothing, or it has none.

        Raises:
          OSError: a file cannot be read.
        """
        name = CHECKSUMS
        if not self.has(name):
            return None
        try:
            for name, expected in json.loads((self.folder / CHECKSUMS).read_bytes()).items():
                if file_hash(self.folder / name) != expected:
                    return f"{name} differs from what was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except (ValueError, AttributeError):
            return f"{CHECKSUMS} differs from what was written"
        return None

    def read(self, likes: Mapping[str, Any]) -> dict[str, Any]:
        """Return items in the form of these trees, on their leaves' shardings or the default one.

        likes: for each item a tree of arrays or shapes; None: it is JSON.

        Raises:
          BrokenCheckpoint: an item is missing, damaged, or of other shapes.
        """
        import orbax.checkpoint as ocp

        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

        def target(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or device)

        arguments = {
            item: ocp.args.JsonRestore() if like is None
            else ocp.args.StandardRestore(jax.tree.map(target, flatten(like)))
            for item, like in likes.items()
        }  # fmt: skip
        try:
            found = self.manager.restore(self.step, args=ocp.args.Composite(**arguments))
            return {
                item: found[item] if like is None else unflatten(like, found[item])
                for item, like in likes.items()
            }
        except Exception as error:  # whatever missing or damaged files make Orbax raise
            what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise BrokenCheckpoint(f"{self} cannot be read ({what}).") from error
