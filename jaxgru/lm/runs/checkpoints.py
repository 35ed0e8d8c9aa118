"""Checkpoints of a run: what they hold, saving, and restoring the newest one that is intact.

A checkpoint has five items: `params`, `optimizer`, the `best` epoch's parameters once an epoch is
done, and as JSON `progress` and `fingerprint`: the run's fingerprint, which is everything else that
decides the numbers and must be the same when the run is resumed. `optimizer` has AdamW's moments,
the key, the step, and the streams' carry. If `params` is a moving average, it also has the
parameters that are trained.

Orbax stores arrays flat, by their path in the tree, and renames a temporary folder, so a checkpoint
is complete or absent. Then `checksums.json` is added, the SHA-256 of every file, because Orbax does
not notice a flipped bit of a weight. (A checkpoint without it comes from a process that was killed
at that moment. It is used if it can be read, with a sentence, and a resumed run adds the file.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import shlex
import shutil
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import jax
from jax.sharding import Mesh

from jaxgru.errors import needs
from jaxgru.files import CHECKSUMS, damage, damage_as, write_checksums
from jaxgru.lm.config import Config, dotted_names, field_value, load_config
from jaxgru.lm.data.tokenizers import Tokenizer, load_tokenizer
from jaxgru.lm.formats.metadata import check_size
from jaxgru.lm.model import Params, flatten, shapes, unflatten
from jaxgru.lm.runs.folders import RunError, RunInfo, find_run, load_info, saved_steps
from jaxgru.lm.training import Progress, TrainState, init_state, state_shardings
from jaxgru.parallel import is_first
from jaxgru.printing import shown, warn

with needs("train"):
    import msgspec
    import orbax.checkpoint as ocp
    from orbax.checkpoint import CheckpointManager

ARRAYS = ("params", "optimizer", "best")  # the items that are trees of arrays
JSON = ("progress", "fingerprint")  # the others
NUM_KEPT = 2  # checkpoints of a run
JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_threefry_partitionable",
    "jax_default_prng_impl",
    "jax_default_matmul_precision",
)
# Parts of what TensorStore's threads raise after a failure that has been reported
LATE_MESSAGES = ("Event loop is closed", "error while reading array index")

T = TypeVar("T")


class BrokenCheckpoint(RunError):
    """A checkpoint that cannot be read."""


def load_folder(
    path: Path, epoch: Literal["best", "last"] | None = None
) -> tuple[Params, Config, Tokenizer]:
    """Load parameters, config and tokenizer from a run's folder: see `jaxgru.lm.load`."""
    run = find_run(path)
    # Before the config, as they are written where a run is lengthened
    info = load_info(run)
    config = load_config(run / "config.toml")
    tokenizer = load_tokenizer(run)
    check_size(f"the run {run} cannot be used", tokenizer, config.model)
    like = shapes(config.model)
    fingerprint = _fingerprint_of_files(config, info, tokenizer)

    def read(checkpoint: Checkpoint) -> Params:
        _check_fingerprint(checkpoint, fingerprint)
        item = _item_of_epoch(epoch, run, config, checkpoint.step)
        return checkpoint.read({item: like})[item]

    if not saved_steps(run):  # opening a folder that is missing would create it
        raise RunError(f"the run {run} has no finished checkpoint.")
    with open_checkpoints(run) as manager:
        newest = _read_newest(manager, run, read)
        if not newest.checkpoint.has_checksums():
            resume = f"jaxgru train --resume {shlex.quote(str(run))}"
            warn(
                f"{newest.checkpoint} has no checksums, so damage to it would not be noticed; "
                f"{resume} adds them."
            )
    for checkpoint, fault in newest.faults.items():
        warn(f"{checkpoint} is broken ({fault}); that of step {newest.checkpoint.step} is used.")
    return newest.contents, config, tokenizer


def _item_of_epoch(
    epoch: Literal["best", "last"] | None, run: Path, config: Config, step: int
) -> str:
    """Return the item of the checkpoint of this step that holds an epoch's parameters.

    Args:
      epoch: None: the best with early stopping, and otherwise the last.
    """
    has_best = step >= config.training.steps_per_epoch
    if epoch == "best" and not has_best:
        raise RunError(f"the run {run} has not finished an epoch, so none is the best yet.")
    stops_early = config.training.patience > 0
    if epoch == "best" or (not epoch and stops_early and has_best):
        return "best"
    return "params"


def compute_fingerprint(config: Config, info: RunInfo, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return everything that decides a run's numbers besides its state, by name."""
    settings = {name: getattr(jax.config, name) for name in JAX_SETTINGS}
    return _fingerprint_of_files(config, info, tokenizer) | settings


def _fingerprint_of_files(config: Config, info: RunInfo, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what a run's own files say of its numbers: the fingerprint but JAX's settings."""
    fields = {name: field_value(config, name) for name in dotted_names()}
    tokens = {"tokenizer (SHA-256)": hashlib.sha256(tokenizer.to_bytes()).hexdigest()}
    return fields | vars(info) | tokens


def _check_fingerprint(checkpoint: Checkpoint, fingerprint: dict[str, Any]) -> None:
    """Raise RunError where a value is not the one that the checkpoint was made with.

    Placements and settings may differ. So may the epochs, if the run was lengthened since then
    (`RunInfo.lengthened` counts how often).
    """
    stored = checkpoint.read({"fingerprint": dict[str, Any]})["fingerprint"]
    may_differ = {"lengthened", "commits", *dotted_names("placement", "setting")}
    if fingerprint.get("lengthened") != stored.get("lengthened"):
        may_differ.add("training.epochs")
    for name, value in fingerprint.items():
        if name not in stored or name in may_differ or stored[name] == value:
            continue
        advice = "set it back, or start a new run"
        if name == "training.epochs":
            advice = f"set it back or, to change it, resume with --{name} {value}"
        raise RunError(
            f"{checkpoint} was made with {name} = {shown(stored[name])}, and this is "
            f"{shown(value)}; {advice}."
        )


def save(
    manager: CheckpointManager,
    state: TrainState,
    best: Params | None,
    progress: Progress,
    fingerprint: dict[str, Any] | None = None,
) -> None:
    """Save a checkpoint of the state's step, unless there is one already.

    Args:
      fingerprint: what `compute_fingerprint` returns.
    """
    checkpoint = Checkpoint(manager, int(state.step))
    if checkpoint.step in manager.all_steps():
        return
    values: dict[str, Any] = {
        "params": state.evaluated,
        "optimizer": _without_evaluated(_storable(state)),
        "progress": msgspec.to_builtins(progress),
        "fingerprint": fingerprint or {},
    }
    if best is not None:
        values["best"] = best
    checkpoint.write(values)


def restore(
    manager: CheckpointManager,
    run: Path,
    config: Config,
    mesh: Mesh | None = None,
    fingerprint: dict[str, Any] | None = None,
) -> tuple[TrainState, Params | None, Progress]:
    """Restore what `fit` needs to resume, from the newest intact checkpoint.

    Broken ones that are newer are renamed, never deleted; a sentence on stderr names each.

    Args:
      mesh: the devices to restore onto, however many it was written from; None: the default device.
      fingerprint: what `compute_fingerprint` returns now, to be compared with the checkpoint's.
    """
    like = jax.eval_shape(
        lambda: _storable(init_state(config.model, config.training, config.data.batches))
    )
    if mesh is not None:
        shardings = state_shardings(like, mesh, config.training)
        like = jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), like, shardings)

    def read(checkpoint: Checkpoint) -> tuple[TrainState, Params | None, Progress]:
        _check_fingerprint(checkpoint, fingerprint or {})
        has_best = checkpoint.step >= config.training.steps_per_epoch
        return _read_training(checkpoint, like, has_best)

    newest = _read_newest(manager, run, read)
    if is_first():
        for checkpoint, fault in newest.faults.items():
            aside = checkpoint.folder.rename(f"{checkpoint.folder}.broken")
            warn(
                f"{checkpoint} is broken ({fault}); it is kept as {aside.name}, and the run "
                f"resumes from step {newest.checkpoint.step}."
            )
    if newest.faults:
        manager.reload()
    return newest.contents


def _read_training(
    checkpoint: Checkpoint, like: TrainState, has_best: bool
) -> tuple[TrainState, Params | None, Progress]:
    """Read what `fit` needs, the state in the form of `like`."""
    likes: dict[str, Any] = {
        "params": like.params,
        "optimizer": _without_evaluated(like),
        "progress": Progress,
    }
    if has_best:
        likes["best"] = like.params
    items = checkpoint.read(likes)
    stored = items["optimizer"]
    key = jax.random.wrap_key_data(stored.key)
    if like.ema is None:
        state = stored.replace(params=items["params"], key=key)
    else:
        state = stored.replace(ema=items["params"], key=key)
    return state, items.get("best"), items["progress"]


def finish_writing(manager: CheckpointManager, run: Path) -> None:
    """Do what a killed process has left undone, once `restore` has read the newest checkpoint.

    That one gets the checksums that it lacks. Those older than the newest two are deleted, of which
    a process that was killed while it deleted one may have left a part.
    """
    steps = saved_steps(run)
    for step in steps[:-NUM_KEPT]:
        shutil.rmtree(Checkpoint(manager, step).folder)
    if not steps:
        return
    newest = Checkpoint(manager, steps[-1])
    if not newest.has_checksums():
        write_checksums(newest.folder)
        warn(
            f"{newest} had no checksums, so damage to it would not have been noticed; it has them "
            "now."
        )


@dataclass(frozen=True)
class _Newest(Generic[T]):
    """What was read from the newest intact checkpoint, and the faults of newer ones."""

    contents: T
    checkpoint: Checkpoint
    faults: dict[Checkpoint, str]


def _read_newest(
    manager: CheckpointManager, run: Path, read: Callable[[Checkpoint], T]
) -> _Newest[T]:
    """Apply `read` to the newest intact checkpoint.

    Whoever trains the run deletes a checkpoint once there are two newer ones. So where one is not
    whole and there are others than before, they are read instead.

    Raises:
      RunError: none is intact.
    """
    faults: dict[Checkpoint, str] = {}
    steps = saved_steps(run)
    for step in reversed(steps):
        checkpoint = Checkpoint(manager, step)
        try:
            fault = checkpoint.damage()
            if fault is None:
                return _Newest(read(checkpoint), checkpoint, faults)
        except BrokenCheckpoint as error:
            if checkpoint.has_checksums():  # intact, so an older one would not help
                raise
            fault = str(error)
        if saved_steps(run) != steps:
            return _read_newest(manager, run, read)
        faults[checkpoint] = fault
    reasons = [f"{checkpoint.folder}: {fault}" for checkpoint, fault in faults.items()]
    raise RunError(
        f"the run {run} has no intact checkpoint ({'; '.join(reasons)}). "
        f"To train it from its first step again, delete {run / 'checkpoints'}."
    )


def _storable(state: TrainState) -> TrainState:
    """Return the state as it is stored, with its key as plain numbers."""
    return dataclasses.replace(state, key=jax.random.key_data(state.key))


def _without_evaluated(state: TrainState) -> TrainState:
    """Return the state without its evaluated parameters, which are the item `params`."""
    evaluated = "params" if state.ema is None else "ema"
    return dataclasses.replace(state, **{evaluated: None})


def silence_orbax() -> Callable[[], Any]:
    """Silence Orbax's logging, and TensorStore's threads, which raise after a full disk.

    Then a failure is reported once, by its exception. Returns a function that undoes this.
    """
    hook = sys.unraisablehook

    def report_unless_late(unraisable: Any) -> None:
        message = str(unraisable.exc_value)
        if not any(part in message for part in LATE_MESSAGES):
            hook(unraisable)

    loggers = [logging.getLogger("absl"), logging.getLogger("asyncio")]
    levels = [logger.level for logger in loggers]
    sys.unraisablehook = report_unless_late
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)

    def undo() -> None:
        sys.unraisablehook = hook
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

    return undo


@contextlib.contextmanager
def open_checkpoints(run: Path) -> Generator[CheckpointManager]:
    """Open a run's checkpoints, of which Orbax keeps the newest `NUM_KEPT`."""
    handlers: dict[str, Any] = {name: ocp.StandardCheckpointHandler() for name in ARRAYS}
    handlers |= {name: ocp.JsonCheckpointHandler() for name in JSON}
    options = ocp.CheckpointManagerOptions(
        max_to_keep=NUM_KEPT,
        enable_async_checkpointing=False,
        lightweight_initialize=True,  # read nothing before the checksums are compared
    )
    folder = (run / "checkpoints").resolve()
    undo = silence_orbax()
    try:
        with ocp.CheckpointManager(folder, options=options, item_handlers=handlers) as manager:
            yield manager
    finally:
        undo()


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

    def write(self, values: Mapping[str, Any]) -> None:
        """Write these items, trees of arrays or what JSON can hold, and then the checksums."""
        arguments = {name: _save_arguments(name, value) for name, value in values.items()}
        self.manager.save(self.step, args=ocp.args.Composite(**arguments))
        if is_first():
            write_checksums(self.folder)

    def has_checksums(self) -> bool:
        """Return whether it has checksums, so that damage to it is noticed."""
        return (self.folder / CHECKSUMS).exists()

    def damage(self) -> str | None:
        """Return what is not as the checksums say; None: nothing, or it has none."""
        return damage(self.folder)

    def read(self, likes: Mapping[str, Any]) -> dict[str, Any]:
        """Return items in the form of these trees, on their leaves' shardings or the default one.

        Args:
          likes: for each item a tree of arrays or shapes, or the type of its JSON.

        Raises:
          BrokenCheckpoint: an item is missing, damaged, of other shapes or of another type.
        """
        arguments = {item: _restore_arguments(item, like) for item, like in likes.items()}
        with damage_as(BrokenCheckpoint, f"{self} cannot be read"):
            items = self.manager.restore(self.step, args=ocp.args.Composite(**arguments))
            return {item: _in_form(item, like, items[item]) for item, like in likes.items()}


def _save_arguments(item: str, value: Any) -> ocp.args.CheckpointArgs:
    """Return what Orbax takes to save an item."""
    if item in ARRAYS:
        return ocp.args.StandardSave(flatten(value))
    return ocp.args.JsonSave(value)


def _restore_arguments(item: str, like: Any) -> ocp.args.CheckpointArgs:
    """Return what Orbax takes to restore an item."""
    if item not in ARRAYS:
        return ocp.args.JsonRestore()
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or device)

    return ocp.args.StandardRestore(jax.tree.map(placed, flatten(like)))


def _in_form(item: str, like: Any, restored: Any) -> Any:
    """Return what Orbax has restored, as a tree or a type like this."""
    if item in ARRAYS:
        return unflatten(like, restored)
    return msgspec.convert(restored, like)
