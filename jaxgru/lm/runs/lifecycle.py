"""Starting and resuming a training run, with its output on the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxgru.errors import command
from jaxgru.lm.config import Config, TrainingConfig, dotted_names
from jaxgru.lm.data.dataset import Dataset, load_dataset
from jaxgru.lm.data.tokenizers import Tokenizer, load_tokenizer
from jaxgru.lm.formats import format_of
from jaxgru.lm.formats.safetensors import save_safetensors
from jaxgru.lm.model import Params
from jaxgru.lm.parallel.hardware import share_cpu
from jaxgru.lm.parallel.processes import all_or_raise, from_first, is_distributed, is_first
from jaxgru.lm.parallel.sharding import data_mesh, one_copy, shard
from jaxgru.lm.runs import checkpoints, folders, initial, measurements
from jaxgru.lm.runs.commits import current_commit, record_commit
from jaxgru.lm.runs.orbax import CheckpointManager, open_checkpoints, try_writing
from jaxgru.lm.runs.reports import write_losses, write_samples
from jaxgru.lm.runs.terminal import console, deferred_signals, progress_bar
from jaxgru.lm.training import (
    NonFiniteLoss,
    Observer,
    Progress,
    TrainState,
    fit,
    init_state,
    learning_rate,
    state_shardings,
)

MAY_CHANGE_AT_RESUME = {"training.epochs", *dotted_names("placement", "setting")}
T = TypeVar("T")


def start_run(config: Config, root: Path) -> Path:
    """Train a config in the next free version of its run folder; return the folder.

    Training starts from random weights, or from those of the model `training.init`. If the run ends
    before its first checkpoint, its folder is deleted.

    Raises:
      UserError: the corpus, the model to start from or the folder cannot be used, or a loss is not
        finite.
      KeyboardInterrupt: on Ctrl-C, SIGTERM or SIGHUP, once everything is saved.
    """
    with deferred_signals() as interrupted:
        mesh = _devices(config)

        def create() -> tuple[Path, Config, Dataset] | None:
            if not is_first():
                return None
            with console.status("reading the text"):
                complete, dataset = initial.load_text(config)
            return folders.create_run(root, complete, dataset.tokenizer), complete, dataset

        created = all_or_raise(create)
        told = from_first(created and os.path.abspath(created[0]))
        run = created[0] if created else Path(told)
        try:
            config, dataset = all_or_raise(
                lambda: created[1:] if created else
                load_dataset(folders.load_run_config(run), load_tokenizer(run))
            )  # fmt: skip
            with _in_all(_claim(run)) as in_place:
                state = all_or_raise(lambda: _fresh_state(config, mesh, dataset.tokenizer))
                parts = state, None, Progress()
                with _in_all(open_checkpoints(run)) as manager:
                    _train(run, manager, config, dataset, mesh, *parts, interrupted, in_place)
        except folders.RunLost:
            raise  # what is in its place now is not ours
        except BaseException as error:
            if created and not is_distributed() and folders.discard_empty(run):
                if isinstance(error, folders.WriteError):
                    left = "of its checkpoints none was saved yet, so it is deleted."
                    raise folders.WriteError(run, error.why, left) from error
                console.print(f"No step was saved, so {run} is deleted.", soft_wrap=True)
            raise
    return run


def resume_run(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Path:
    """Resume a run from its newest checkpoint, exactly; return its folder.

    A run that was stopped before its first checkpoint starts from its first step.

    Args:
      path: a run folder, or the folder of its versions.
      overrides: new values of fields in MAY_CHANGE_AT_RESUME, by dotted name; they are written to
        the run's config.toml. With more `training.epochs`, the remaining epochs have the learning
        rates of a run of that length.

    Raises:
      UserError: there is no such run, another process trains it, its folder cannot be written, its
        checkpoint or corpus or the overrides do not fit, or a loss is not finite.
      KeyboardInterrupt: on Ctrl-C, SIGTERM or SIGHUP, once everything is saved.
    """
    overrides = dict(overrides or {})
    if format_of(path):
        raise folders.RunError(
            f"{path} cannot be resumed: it holds a model's parameters, not a run; give the run's "
            "folder."
        )
    for name in overrides.keys() - MAY_CHANGE_AT_RESUME:
        raise folders.RunError(
            f"{name} cannot change within a run; start a new run, or change one of "
            f"{', '.join(sorted(MAY_CHANGE_AT_RESUME))}."
        )
    with deferred_signals() as interrupted:
        found = all_or_raise(lambda: str(folders.find_run(path)) if is_first() else None)
        run = folders.from_here(Path(from_first(found)))
        with _in_all(_claim(run)) as in_place:
            config = all_or_raise(lambda: _resumed_config(run, overrides))
            mesh = _devices(config)
            with console.status("reading the text"):
                config, dataset = all_or_raise(lambda: load_dataset(config, load_tokenizer(run)))
            with _in_all(open_checkpoints(run)) as manager:
                with console.status("reading the checkpoint"):
                    parts = all_or_raise(
                        lambda: _restore(run, manager, config, dataset, mesh, overrides)
                    )
                if overrides:
                    config = all_or_raise(lambda: _change(run, config, overrides, parts[-1]))
                elif parts[-1].is_over(config.training):
                    console.print(
                        f"{run} is finished, with {parts[-1].epoch} epochs; --training.epochs N "
                        "beside --resume trains it for more.",
                        soft_wrap=True,
                    )
                _train(run, manager, config, dataset, mesh, *parts, interrupted, in_place)
    return run


@contextlib.contextmanager
def _claim(run: Path) -> Iterator[Callable[[], None]]:
    """Enter `folders.claim`, and try whether checkpoints can be written."""
    with folders.claim(run) as in_place:
        if is_first():
            try_writing(run)
        yield in_place


@contextlib.contextmanager
def _in_all(context: contextlib.AbstractContextManager[T]) -> Iterator[T]:
    """Enter a context in each process of the run; if that fails in one, it fails in all."""
    with contextlib.ExitStack() as stack:
        yield all_or_raise(lambda: stack.enter_context(context))


def _devices(config: Config) -> Mesh:
    """Return the mesh of all devices, which share a batch; a CPU's cores count as devices.

    Several processes on a CPU leave its cores to their launcher.
    """
    if not is_distributed():
        share_cpu(config.training.batch_size)
    return data_mesh(config.training.batch_size)


def _resumed_config(run: Path, overrides: Mapping[str, Any]) -> Config:
    """Return a run's config with the values given at --resume.

    The corpus is replaced afterwards, because `load_config` would name the config after it.
    """
    others = {name: value for name, value in overrides.items() if name != "data.corpus"}
    config = folders.load_run_config(run, others)
    corpus = overrides.get("data.corpus", config.data.corpus)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, corpus=corpus))


def _restore(
    run: Path,
    manager: CheckpointManager,
    config: Config,
    dataset: Dataset,
    mesh: Mesh,
    given: Mapping[str, Any],
) -> tuple[TrainState, Params | None, Progress]:
    if manager.latest_step() is None:
        return _fresh_state(config, mesh, dataset.tokenizer), None, Progress()
    recorded = checkpoints.made_with(config, dataset.tokenizer)
    return checkpoints.restore(manager, run, config, mesh, recorded, given)


def _change(run: Path, config: Config, overrides: Mapping[str, Any], progress: Progress) -> Config:
    """Write the config with the values given at --resume to config.toml; return it.

    The samples and the record of a finished run are renamed, because they are of fewer epochs.

    Raises:
      RunError: the epochs leave nothing to train.
    """
    if "training.epochs" in overrides:
        epochs, count = config.training.epochs, config.training.lengthened + 1
        training = dataclasses.replace(config.training, lengthened=count)
        begun = progress.epoch + bool(progress.epoch_losses)
        if epochs < begun:
            raise folders.RunError(
                f"training.epochs is {epochs}, but {begun} epochs of {run} have begun; it must be "
                f"at least {begun}."
            )
        unchanged = epochs == folders.load_run_config(run).training.epochs
        if progress.finished and unchanged and epochs == progress.epoch:
            console.print(f"{run} is finished, with {epochs} epochs.", soft_wrap=True)
            return config
        if progress.finished and progress.is_over(training):
            raise folders.RunError(
                f"{run} is finished after {progress.epoch} epochs, of which epoch "
                f"{progress.best_epoch} is the best, and remains finished with training.epochs = "
                f"{epochs} and training.patience = {training.patience}."
            )
        config = dataclasses.replace(config, training=training)
        progress.finished = False
        console.print(f"The run now has {epochs} epochs{_schedule(training, progress)}.",
                      soft_wrap=True)  # fmt: skip
        if is_first():
            for path in (run / "samples.txt", run / measurements.FILE_NAME):
                if path.exists():
                    path.rename(path.with_stem(f"{path.stem}-{progress.epoch}-epochs"))
    if is_first():
        folders.save_config(run, config)
    return config


def _schedule(training: TrainingConfig, progress: Progress) -> str:
    """Return a message about the learning rates of the remaining epochs."""
    if progress.epoch >= training.epochs:
        return ""
    epochs = np.array([progress.epoch, training.epochs - 1])
    first, last = np.asarray(learning_rate(training)(epochs * training.steps_per_epoch))
    rates = f"{first:.3g} in epoch {progress.epoch + 1}"
    if progress.epoch + 1 < training.epochs:
        rates += f", {last:.3g} in the last"
    return f"; from here on its learning rates are those of a run of that length: {rates}"


def _fresh_state(config: Config, mesh: Mesh, tokenizer: Tokenizer) -> TrainState:
    """Return a fresh state on the mesh only; a reference to another copy would keep its memory."""
    state = init_state(config.model, config.training, config.data.batches)
    if config.training.init:
        params, told = initial.initial_params(state.params, config, tokenizer)
        state = dataclasses.replace(state, params=params)
        if is_first():
            console.print(told, soft_wrap=True)
    return shard(state, state_shardings(state, mesh, config.training))


def _train(
    run: Path,
    manager: CheckpointManager,
    config: Config,
    dataset: Dataset,
    mesh: Mesh,
    state: TrainState,
    best: Params | None,
    progress: Progress,
    interrupted: Callable[[], bool],
    check_in_place: Callable[[], None],
) -> None:
    console.quiet = not is_first()
    devices = f"{mesh.size} × {jax.devices()[0].device_kind}"
    if is_distributed():
        devices += f" in {jax.process_count()} processes"
    console.print(
        f"{config.name}: {len(dataset.train):,} training and {len(dataset.validation):,} validation"
        f" tokens, {dataset.source}; {devices}; {run}",
        soft_wrap=True,
    )
    recorded = checkpoints.made_with(config, dataset.tokenizer)
    commit, begun = current_commit(), int(state.step)
    if progress.records and is_first():  # a killed run may lack those of its last epoch
        write_losses(run, config, progress)
    with progress_bar(config) as (bar, task):

        def save(state: TrainState, best: Params | None, progress: Progress) -> None:
            check_in_place()
            if is_first():
                record_commit(run, commit, begun)
            checkpoints.save(manager, state, best, progress, recorded)

        def on_steps(epoch: int, done: int, loss: float, tokens_per_second: float) -> None:
            bar.update(
                task,
                completed=epoch * config.training.steps_per_epoch + done,
                epoch=f"epoch {epoch + 1}/{config.training.epochs}",
                loss=f"loss {loss:.4f}",
                rate=f"{tokens_per_second:,.0f} tokens/s",
            )

        def on_validation(epoch: int) -> None:
            bar.update(task, loss="validating")

        def on_epoch(state: TrainState, best: Params | None, progress: Progress) -> None:
            if config.training.keep_epochs:
                check_in_place()
                params = one_copy(state.params, mesh)
                if is_first():
                    _keep_epoch(run, progress.epoch, params, config, dataset.tokenizer)
            save(state, best, progress)
            if is_first():
                write_losses(run, config, progress)
            record = progress.records[-1]
            console.print(
                f"epoch {record.epoch:>3}  train {record.train_loss:.4f}  "
                f"validation {record.val_loss:.4f}  {record.tokens_per_second:,.0f} tokens/s"
            )

        def on_interrupt(state: TrainState, best: Params | None, progress: Progress) -> None:
            if state.step == 0:  # there is nothing to save
                return
            save(state, best, progress)
            console.print(
                f"Interrupted and saved after step {int(state.step)}. Resume with:\n"
                f"  {command('train')} --resume {run}",
                soft_wrap=True,
            )

        observer = Observer(on_steps, on_validation, on_epoch, interrupted, on_interrupt)
        try:
            _, params = fit(
                config, state, best, progress, dataset.train, dataset.validation, observer, mesh
            )
        except NonFiniteLoss as error:
            step = manager.latest_step()
            kept = f"the last good checkpoint is of step {step}" if step else "none was saved yet"
            raise NonFiniteLoss(f"{error} Nothing after it is saved; {kept}.") from error
        if is_first():
            check_in_place()
            bar.update(task, loss="writing samples")
            _finish(run, config, dataset.tokenizer, params, progress)


def _keep_epoch(
    run: Path, epoch: int, params: Params, config: Config, tokenizer: Tokenizer
) -> None:
    """Write an epoch's model. This precedes its checkpoint: a killed run computes it again."""
    folder = run / folders.EPOCHS_FOLDER
    folder.mkdir(exist_ok=True)
    save_safetensors(folder / f"{epoch:03}.safetensors", params, config, tokenizer)


def _finish(
    run: Path, config: Config, tokenizer: Tokenizer, params: Params, progress: Progress
) -> None:
    write_samples(run, params, config, tokenizer)
    best = f"best validation loss is {progress.best_val_loss:.4f}, in epoch {progress.best_epoch}"
    if progress.best_epoch < progress.epoch and not config.training.patience:
        last = f"the last epoch's, whose validation loss is {progress.records[-1].val_loss:.4f}"
        best = f"model is {last}; the {best}"
    console.print(
        f"Done: the {best}. Sample from the model with:\n  {command('sample')} --run {run}",
        soft_wrap=True,
    )
