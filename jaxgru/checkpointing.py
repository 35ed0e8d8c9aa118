"""Run directories; Orbax save and restore.

A run is `runs/<config>/v<N>/`:

    config.toml  tokenizer.*  metrics.jsonl  samples.txt  loss.png  checkpoints/<step>/

and `runs/<config>/latest` points at the newest. A checkpoint has four items: `params` and
`optimizer` (AdamW's moments, key, step), the `best` parameters where training stops early, and
`progress` (JSON). Arrays are stored flat, by their path in the tree, so that a checkpoint can be
read without this library. Orbax writes a checkpoint beside and renames it: it is whole or absent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import tomli_w
from jax.sharding import Mesh

from jaxgru.config import Config, ConfigError, load_config, to_dict
from jaxgru.errors import UserError
from jaxgru.files import write_text
from jaxgru.interop.safetensors import load_safetensors
from jaxgru.model import Params, flatten, init, unflatten
from jaxgru.sharding import shardings
from jaxgru.tokenizers import Tokenizer, load_tokenizer
from jaxgru.training import Progress, TrainState, init_state

if TYPE_CHECKING:  # Orbax takes long to import, so that only those who save or restore pay for it
    from orbax.checkpoint import CheckpointManager


class RunError(UserError):
    """A run folder that cannot be made, found or used."""


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
        link = family / f".latest.{run.name}"
        link.symlink_to(run.name)
        os.replace(link, latest)
    except OSError as error:
        raise RunError(f"the run folder {family} cannot be written: {error.strerror}.") from error
    return run


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
        if (run / "config.toml").is_file():
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
    A run that is still going on, or was interrupted, gives those of its newest checkpoint.

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
    with open_checkpoints(run) as manager:
        step = _newest(manager, run)
        item = "best" if "best" in _items(manager, step) else "params"
        params = _restore_tree(manager, step, item, like)
    if tokenizer.vocab_size != config.model.vocab_size:
        raise RunError(
            f"the run {run} cannot be used: its tokenizer has {tokenizer.vocab_size} tokens, "
            f"its config {config.model.vocab_size}."
        )
    return params, config, tokenizer


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


def restore(
    manager: CheckpointManager, run: Path, config: Config, mesh: Mesh | None = None
) -> tuple[TrainState, Params | None, Progress]:
    """The newest checkpoint: what `fit` needs to go on.

    mesh: the devices to restore onto, each its own part, however many it was written from; None:
    the default device alone.

    Raises:
      RunError: there is none, or it does not fit the config.
    """
    import orbax.checkpoint as ocp

    step = _newest(manager, run)
    like = jax.eval_shape(lambda: init_state(config.model, config.training))
    like_params, like_rest = like.params, jax.eval_shape(_optimizer_tree, like)
    if mesh is not None:
        where = shardings((like_params, like_rest), mesh, config.training.shard_parameters)
        like_params, like_rest = jax.tree.map(
            lambda leaf, sharding: leaf.update(sharding=sharding), (like_params, like_rest), where
        )
    params = _restore_tree(manager, step, "params", like_params)
    rest = _restore_tree(manager, step, "optimizer", like_rest)
    best = None
    if "best" in _items(manager, step):
        best = _restore_tree(manager, step, "best", like_params)
    with _reading(_where(manager, step)):
        item = ocp.args.Composite(progress=ocp.args.JsonRestore())
        progress = Progress(**manager.restore(step, args=item)["progress"])
    key = jax.random.wrap_key_data(rest["key"])
    return TrainState(params, rest["opt_state"], key, rest["step"]), best, progress


def _optimizer_tree(state: TrainState) -> dict[str, Any]:
    key = jax.random.key_data(state.key)
    return {"opt_state": state.opt_state, "key": key, "step": state.step}


def _newest(manager: CheckpointManager, run: Path) -> int:
    step = manager.latest_step()
    if step is None:
        raise _no_checkpoint(run)
    return step


def _no_checkpoint(run: Path) -> RunError:
    return RunError(f"the run {run} has no finished checkpoint.")


def _items(manager: CheckpointManager, step: int) -> set[str]:
    return {path.name for path in (Path(manager.directory) / str(step)).iterdir()}


def _where(manager: CheckpointManager, step: int) -> str:
    return f"checkpoint {Path(manager.directory) / str(step)}"


@contextlib.contextmanager
def _reading(where: str) -> Iterator[None]:
    """Whatever Orbax raises over files that are missing or cut short, as one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{where} is broken and cannot be read ({type(error).__name__}).") from error


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
