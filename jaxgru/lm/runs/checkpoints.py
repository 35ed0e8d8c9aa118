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
import os
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxgru.errors import counted, shown, warn
from jaxgru.lm.config import Config, dotted_names, field_value
from jaxgru.lm.data.tokenizers import Tokenizer, load_tokenizer
from jaxgru.lm.model import Params, flatten, init
from jaxgru.lm.runs.folders import RunError, RunInfo, find_run, load_run_config, saved_steps
from jaxgru.lm.runs.orbax import (
    ARRAYS,
    CHECKSUMS,
    KEPT,
    MANIFEST,
    BrokenCheckpoint,
    Checkpoint,
    CheckpointManager,
    open_checkpoints,
)
from jaxgru.lm.training import Progress, TrainState, init_state, state_shardings
from jaxgru.parallel.processes import is_first

JAX_SETTINGS = (
    *("jax_enable_x64", "jax_threefry_partitionable", "jax_default_prng_impl"),
    "jax_default_matmul_precision",
)
MAX_LISTINGS = 100  # of a run's checkpoints while another process trains it

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
    if tokenizer.vocab_size != config.model.vocab_size:
        raise RunError(
            f"the run {run} cannot be used: its tokenizer has "
            f"{counted(tokenizer.vocab_size, 'token')}, its config {config.model.vocab_size}."
        )
    like = jax.eval_shape(lambda: init(jax.random.key(0), config.model))
    now = made_with(config, RunInfo(), tokenizer)
    try:
        os.listdir(run / "checkpoints")
    except FileNotFoundError:  # opening it would create it
        raise _no_checkpoint(run) from None
    except OSError as error:
        raise RunError(f"{run / 'checkpoints'} cannot be read: {error.strerror}.") from error

    with open_checkpoints(run) as manager:

        def read(checkpoint: Checkpoint) -> Params:
            _check_made_with(checkpoint, now, ("model.", "tokenizer"))
            has_best = _has_best(checkpoint, config)
            if epoch == "best" and not has_best:
                raise RunError(f"the run {run} has not finished an epoch, so none is the best yet.")
            which = epoch or ("best" if config.training.patience and has_best else "last")
            return checkpoint.read_tree("best" if which == "best" else "params", like)

        params, step, broken = _read_newest(manager, run, like, read)
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
    given: Container[str] = (),
) -> None:
    """Raise RunError where a value whose name begins with one of `names` is not the checkpoint's.

    Placements and settings may differ, and values given at --resume. So may the epochs, if the run
    was lengthened since then (`RunInfo.lengthened` counts how often). A checkpoint without such a
    record passes.
    """
    if "made_with" not in checkpoint.items():
        return
    then = checkpoint.read_json("made_with")
    if not isinstance(then, dict):
        raise BrokenCheckpoint(f"{checkpoint} does not say what it was made with.")
    free = {"lengthened", *dotted_names("placement", "setting")}
    if now["lengthened"] != then.get("lengthened"):
        free.add("training.epochs")
    for name, value in now.items():
        if name not in then or name in free or name in given or then[name] == value:
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
    """Save a checkpoint of the state's step, unless there is one already, and read it back.

    recorded: what `made_with` returns; None: nothing is recorded.

    Raises:
      RunError: the parameters read back are not those that were written. The checkpoint is deleted;
        the one before it is kept.
    """
    checkpoint = Checkpoint(manager, int(state.step))
    if checkpoint.step in manager.all_steps():
        return
    values = {
        "params": state.evaluated,
        "optimizer": _without_evaluated(_storable(state)),
        "progress": progress.to_dict(),
        "made_with": recorded,
        "best": best,
    }
    checkpoint.write({name: value for name, value in values.items() if value is not None})
    fault = _fault_read_back(checkpoint, state.evaluated)
    if fault is not None:
        manager.delete(checkpoint.step)
        raise RunError(f"{checkpoint} cannot be read back ({fault}); it is deleted.")
    if is_first():
        checkpoint.write_checksums()


def _fault_read_back(checkpoint: Checkpoint, params: Params) -> str | None:
    """Return what is wrong with a checkpoint that was just written; None: nothing is.

    Each process reads its own parts of the parameters.
    """
    for item in checkpoint.items().intersection(ARRAYS):
        if not (checkpoint.folder / item / MANIFEST).is_file():
            return f"{item}/{MANIFEST} is missing"
    try:
        again = flatten(checkpoint.read_tree("params", params))
    except RunError as error:
        return str(error)
    for name, leaf in flatten(params).items():
        parts = zip(leaf.addressable_shards, again[name].addressable_shards, strict=True)
        if any(np.asarray(a.data).tobytes() != np.asarray(b.data).tobytes() for a, b in parts):
            return f"{name} differs from what was written"
    return None


def restore(
    manager: CheckpointManager,
    run: Path,
    config: Config,
    mesh: Mesh | None = None,
    recorded: dict[str, Any] | None = None,
    given: Container[str] = (),
) -> tuple[TrainState, Params | None, Progress]:
    """Restore what `fit` needs to resume, from the newest intact checkpoint.

    Broken ones that are newer are renamed, never deleted; a sentence on stderr names each.

    mesh: the devices to restore onto, each its own part, however many it was written from; None:
    the default device alone.
    recorded: what `made_with` returns now, to be compared with the checkpoint's.
    given: names of values that may differ, because they were given at --resume.

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
        if recorded is not None:
            _check_made_with(checkpoint, recorded, given=given)
        params = checkpoint.read_tree("params", like.params)
        rest = checkpoint.read_tree("optimizer", _without_evaluated(like))
        best = None
        if _has_best(checkpoint, config):
            best = checkpoint.read_tree("best", like.params)
        with checkpoint.reading():
            progress = Progress.from_dict(checkpoint.read_json("progress"))
        key = jax.random.wrap_key_data(rest.key)
        if int(rest.step) != checkpoint.step:
            raise BrokenCheckpoint(f"{checkpoint} contains step {int(rest.step)}.")
        evaluated = "params" if like.ema is None else "ema"
        return rest.replace(**{evaluated: params}, key=key), best, progress

    restored, step, broken = _read_newest(manager, run, like, read)
    if is_first():
        for checkpoint, fault in broken.items():
            warn(
                f"{checkpoint} is broken ({fault}); it is kept as {checkpoint.set_aside().name}, "
                f"and the run resumes from step {step}."
            )
    if broken:
        manager.reload()
    for old in sorted(manager.all_steps())[:-KEPT]:  # a kill cut its deletion short
        manager.delete(old)
    return restored


def _has_best(checkpoint: Checkpoint, config: Config) -> bool:
    """Return whether a checkpoint has the best epoch's parameters, or should have them."""
    an_epoch_is_done = checkpoint.step >= config.training.steps_per_epoch
    return an_epoch_is_done or "best" in checkpoint.items()


def _read_newest(
    manager: CheckpointManager, run: Path, like: Any, read: Callable[[Checkpoint], T]
) -> tuple[T, int, dict[Checkpoint, str]]:
    """Return what `read` gives for the newest intact checkpoint, its step, and newer ones' faults.

    Whoever trains the run deletes a checkpoint once there are two newer ones. So where one is not
    whole and there are others than before, they are read instead.

    like: the checkpoint's arrays, as shapes.

    Raises:
      RunError: there is none, or `read` raises it for a checkpoint whose files are intact.
    """
    broken: dict[Checkpoint, str] = {}
    steps, listings = saved_steps(run), 1
    while len(broken) < len(steps):
        step = steps[-1 - len(broken)]
        checkpoint = Checkpoint(manager, step)
        fault = checkpoint.fault(like)
        whole = fault is None and (checkpoint.folder / CHECKSUMS).exists()
        if fault is None:
            try:
                return read(checkpoint), step, broken
            except BrokenCheckpoint as error:
                fault = str(error.__cause__ or error)[:300]
                if saved_steps(run) == steps and whole:
                    raise  # the files are as they were written, so an older one would not help
        broken[checkpoint] = fault
        if listings < MAX_LISTINGS and (now := saved_steps(run)) != steps:
            steps, broken, listings = now, {}, listings + 1
    if not broken:
        raise _no_checkpoint(run)
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


def _no_checkpoint(run: Path) -> RunError:
    return RunError(f"the run {run} has no finished checkpoint.")
