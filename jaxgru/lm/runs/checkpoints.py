"""Checkpoints of a run: what they hold, saving, and restoring the newest one that is intact.

A checkpoint has five items: `params`, `optimizer`, the `best` epoch's parameters once an epoch is
done, and as JSON `progress` and `made_with`: everything else that decides the numbers, which must
be the same when the run is resumed. `optimizer` has AdamW's moments, the key, the step, and the
streams' carry. If `params` is a moving average, it also has the parameters that are trained.
`orbax.py` says how they are stored.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
from jax.sharding import Mesh

from jaxgru.errors import needs, shown, warn
from jaxgru.lm.config import Config, dotted_names, field_value
from jaxgru.lm.data.tokenizers import Tokenizer, load_tokenizer
from jaxgru.lm.files import reason
from jaxgru.lm.model import Params, init
from jaxgru.lm.runs.folders import RunError, RunInfo, find_run, load_run_config, saved_steps
from jaxgru.lm.runs.orbax import (
    CHECKSUMS,
    BrokenCheckpoint,
    Checkpoint,
    CheckpointManager,
    open_checkpoints,
)
from jaxgru.lm.training import Progress, TrainState, init_state, state_shardings
from jaxgru.parallel.processes import is_first

with needs("train"):
    import msgspec

JAX_SETTINGS = (
    *("jax_enable_x64", "jax_threefry_partitionable", "jax_default_prng_impl"),
    "jax_default_matmul_precision",
)

T = TypeVar("T")


def load_folder(
    path: Path, epoch: Literal["best", "last"] | None = None
) -> tuple[Params, Config, Tokenizer]:
    """Load parameters, config and tokenizer from a run's folder: see `jaxgru.lm.load`.

    Raises:
      RunError: there is no run or no intact checkpoint, its parts do not fit together, or the best
        epoch is asked for and none is finished.
      TokenizerError: the tokenizer cannot be read.
    """
    run = find_run(path)
    config = load_run_config(run)
    tokenizer = load_tokenizer(run)
    like = jax.eval_shape(lambda: init(jax.random.key(0), config.model))
    now = made_with(config, RunInfo(), tokenizer)

    def read(checkpoint: Checkpoint) -> Params:
        _check_made_with(checkpoint, now, ("model.", "tokenizer"))
        has_best = checkpoint.step >= config.training.steps_per_epoch
        if epoch == "best" and not has_best:
            raise RunError(f"the run {run} has not finished an epoch, so none is the best yet.")
        of_best = epoch == "best" or (not epoch and config.training.patience and has_best)
        item = "best" if of_best else "params"
        return checkpoint.read({item: like})[item]

    if not saved_steps(run):  # opening a folder that is missing would create it
        raise RunError(f"the run {run} has no finished checkpoint.")
    with open_checkpoints(run) as manager:
        params, step, broken = _read_newest(manager, run, read)
    for checkpoint, fault in broken.items():
        warn(f"{checkpoint} is broken ({fault}); that of step {step} is used.")
    return params, config, tokenizer


def made_with(config: Config, info: RunInfo, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return everything that decides a run's numbers besides its state, by name."""
    fields = {name: field_value(config, name) for name in dotted_names()}
    settings = {name: getattr(jax.config, name) for name in JAX_SETTINGS}
    tokens = {"tokenizer (SHA-256)": hashlib.sha256(tokenizer.to_bytes()).hexdigest()}
    return fields | vars(info) | settings | tokens


def _check_made_with(
    checkpoint: Checkpoint,
    now: dict[str, Any],
    names: tuple[str, ...] = ("",),
) -> None:
    """Raise RunError where a value whose name begins with one of `names` is not the checkpoint's.

    Placements and settings may differ. So may the epochs, if the run was lengthened since then
    (`RunInfo.lengthened` counts how often).
    """
    then = checkpoint.read({"made_with": None})["made_with"]
    free = {"lengthened", "commits", *dotted_names("placement", "setting")}
    if now.get("lengthened") != then.get("lengthened"):
        free.add("training.epochs")
    for name, value in now.items():
        if name not in then or name in free or then[name] == value:
            continue
        if name.startswith(names):
            advice = "set it back, or start a new run"
            if name == "training.epochs":
                advice = f"to change it, resume with --{name} {value}"
            raise RunError(
                f"{checkpoint} was made with {name} = {shown(then[name])}, and this is "
                f"{shown(value)}; {advice}."
            )


def save(
    manager: CheckpointManager,
    state: TrainState,
    best: Params | None,
    progress: Progress,
    recorded: dict[str, Any] | None = None,
) -> None:
    """Save a checkpoint of the state's step, unless there is one already.

    recorded: what `made_with` returns; None: nothing is recorded.
    """
    checkpoint = Checkpoint(manager, int(state.step))
    if checkpoint.step in manager.all_steps():
        return
    values = {
        "params": state.evaluated,
        "optimizer": _without_evaluated(_storable(state)),
        "progress": msgspec.to_builtins(progress),
        "made_with": recorded or {},
        "best": best,
    }
    checkpoint.write({name: value for name, value in values.items() if value is not None})


def restore(
    manager: CheckpointManager,
    run: Path,
    config: Config,
    mesh: Mesh | None = None,
    recorded: dict[str, Any] | None = None,
) -> tuple[TrainState, Params | None, Progress]:
    """Restore what `fit` needs to resume, from the newest intact checkpoint.

    Broken ones that are newer are renamed, never deleted; a sentence on stderr names each.

    mesh: the devices to restore onto, each its own part, however many it was written from; None:
    the default device alone.
    recorded: what `made_with` returns now, to be compared with the checkpoint's.

    Raises:
      RunError: there is none, it does not fit the config, or it was made with other values.
    """
    like = jax.eval_shape(
        lambda: _storable(init_state(config.model, config.training, config.data.batches))
    )
    if mesh is not None:
        shardings = state_shardings(like, mesh, config.training)
        like = jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), like, shardings)

    def read(checkpoint: Checkpoint) -> tuple[TrainState, Params | None, Progress]:
        _check_made_with(checkpoint, recorded or {})
        likes = {"params": like.params, "optimizer": _without_evaluated(like), "progress": None}
        if checkpoint.step >= config.training.steps_per_epoch:
            likes["best"] = like.params
        found = checkpoint.read(likes)
        evaluated = "params" if like.ema is None else "ema"
        key = jax.random.wrap_key_data(found["optimizer"].key)
        state = found["optimizer"].replace(**{evaluated: found["params"]}, key=key)
        try:
            progress = msgspec.convert(found["progress"], Progress)
        except ValueError as error:  # another version of jaxgru wrote it
            raise BrokenCheckpoint(f"{checkpoint} cannot be read (progress: {error}).") from error
        return state, found.get("best"), progress

    restored, step, broken = _read_newest(manager, run, read)
    if is_first():
        for checkpoint, fault in broken.items():
            aside = checkpoint.folder.rename(f"{checkpoint.folder}.broken")
            warn(
                f"{checkpoint} is broken ({fault}); it is kept as {aside.name}, and the run "
                f"resumes from step {step}."
            )
    if broken:
        manager.reload()
    return restored


def _read_newest(
    manager: CheckpointManager, run: Path, read: Callable[[Checkpoint], T]
) -> tuple[T, int, dict[Checkpoint, str]]:
    """Return what `read` gives for the newest intact checkpoint, its step, and newer ones' faults.

    Whoever trains the run deletes a checkpoint once there are two newer ones. So where one is not
    whole and there are others than before, they are read instead.

    Raises:
      RunError: there is none, or `read` raises it for a checkpoint whose files are intact.
    """
    broken: dict[Checkpoint, str] = {}
    steps = saved_steps(run)
    for step in reversed(steps):
        checkpoint = Checkpoint(manager, step)
        try:
            fault = checkpoint.damage()
            if fault is None:
                return read(checkpoint), step, broken
        except OSError as error:
            raise RunError(f"{checkpoint} cannot be read: {reason(error)}.") from error
        except BrokenCheckpoint as error:
            if checkpoint.has(CHECKSUMS):  # its files are intact, so an older one would not help
                raise
            fault = str(error)
        if saved_steps(run) != steps:
            return _read_newest(manager, run, read)
        broken[checkpoint] = fault
    faults = "; ".join(f"{one.folder}: {fault}" for one, fault in broken.items())
    raise RunError(
        f"the run {run} has no intact checkpoint ({faults}). "
        f"To train it from its first step again, delete {run / 'checkpoints'}."
    )


def _storable(state: TrainState) -> TrainState:
    """Return the state as it is stored, with its key as plain numbers."""
    return dataclasses.replace(state, key=jax.random.key_data(state.key))


def _without_evaluated(state: TrainState) -> TrainState:
    """Return the state without its evaluated parameters, which are the item `params`."""
    return dataclasses.replace(state, **{"params" if state.ema is None else "ema": None})
