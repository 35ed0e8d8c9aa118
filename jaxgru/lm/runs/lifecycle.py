"""Starting and resuming a training run, with its output on the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import Mesh

from jaxgru.lm.config import Config, dotted_names, load_config, override
from jaxgru.lm.data.dataset import Dataset, load_dataset
from jaxgru.lm.data.tokenizers import Tokenizer, load_tokenizer
from jaxgru.lm.formats.safetensors import save_safetensors
from jaxgru.lm.model import Params, num_params
from jaxgru.lm.runs import checkpoints, folders, initial, terminal
from jaxgru.lm.runs.checkpoints import CheckpointManager, open_checkpoints, silence_orbax
from jaxgru.lm.runs.initial import InitialModel
from jaxgru.lm.runs.reports import Events, write_losses, write_samples
from jaxgru.lm.runs.terminal import console, print_labelled
from jaxgru.lm.training import Observer, Progress, TrainState, fit, init_state
from jaxgru.lm.training.step import starting_from, state_shardings
from jaxgru.parallel import (
    all_or_raise,
    data_mesh,
    from_first,
    is_distributed,
    is_first,
    one_copy,
    shard,
    share_cpu,
)
from jaxgru.printing import counted

__all__ = [
    "resume_run",
    "silence_orbax",
    "start_run",
]

MAY_CHANGE_AT_RESUME = {"training.epochs", *dotted_names("placement", "setting")}

T = TypeVar("T")


def start_run(config: Config, root: Path, text_sha256: str = "") -> Path:
    """Train a config in the next free version of its run folder; return the folder.

    If the run ends before its first checkpoint, its folder is deleted.

    Args:
      text_sha256: the one that the text must have; "": any.

    Raises:
      KeyboardInterrupt: on Ctrl-C, SIGTERM or SIGHUP, once everything is saved.
    """
    with terminal.deferred_signals() as interrupted:
        mesh = _devices(config)
        folder, config, info, dataset, model = _create(config, root, text_sha256)
        try:
            with contextlib.ExitStack() as stack:
                all_or_raise(stack.enter_context, folders.lock_run(folder))
                state = all_or_raise(_fresh_state, config, mesh, dataset.tokenizer, model)
                del model  # training needs its memory
                manager = all_or_raise(stack.enter_context, open_checkpoints(folder))
                run = _Run(folder, config, info, dataset, mesh, manager)
                run.train(state, None, Progress(), interrupted)
        except BaseException:
            if not is_distributed() and folders.discard_empty(folder):  # others may still use it
                console.print(f"No step was saved, so {folder} is deleted.")
            raise
    return folder


def resume_run(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Path:
    """Resume a run from its newest checkpoint, or else from its first step; return its folder.

    Args:
      path: a run folder, or the folder of its versions.
      overrides: new values of fields in MAY_CHANGE_AT_RESUME, by dotted name; they are written to
        the run's config.toml. With more `training.epochs`, the remaining epochs have the learning
        rates of a run of that length.
    """
    overrides = dict(overrides or {})
    _check_overrides(path, overrides)
    with terminal.deferred_signals() as interrupted, contextlib.ExitStack() as stack:
        folder = _find_folder(path)
        run = _open(stack, folder, overrides)
        with console.status("reading the checkpoint"):
            state, best, progress = all_or_raise(run.restore, overrides)
        _in_first(checkpoints.finish_writing, run.manager, folder)
        # In all processes, because the first one may have deleted some
        run.manager.reload()
        if overrides:
            all_or_raise(run.change, overrides, progress)
        elif progress.is_over(run.config.training):
            console.print(run.finished(progress))
        run.train(state, best, progress, interrupted)
    return folder


def _find_folder(path: str | Path) -> Path:
    """Return the folder of the run that process 0 finds, relative to this one if it is inside."""
    run = _in_first(folders.find_run, path)
    folder = Path(from_first(run and str(run)))
    here = Path.cwd()
    if folder.is_relative_to(here):  # which is shorter to read
        return folder.relative_to(here)
    return folder


def _open(stack: contextlib.ExitStack, folder: Path, overrides: Mapping[str, Any]) -> _Run:
    """Lock a run, until the stack is closed, and load what it trains with."""
    all_or_raise(stack.enter_context, folders.lock_run(folder))
    config = all_or_raise(load_config, folder / "config.toml")
    if overrides:
        config = all_or_raise(override, config, {"name": config.name, **overrides})
    mesh = _devices(config)
    info = all_or_raise(folders.load_info, folder)
    with console.status("reading the text"):
        config, dataset = all_or_raise(_load_text, folder, config, info)
    manager = all_or_raise(stack.enter_context, open_checkpoints(folder))
    return _Run(folder, config, info, dataset, mesh, manager)


def _load_text(folder: Path, config: Config, info: folders.RunInfo) -> tuple[Config, Dataset]:
    """Load the text of a run that exists, as tokens of its tokenizer."""
    return load_dataset(config, load_tokenizer(folder), info.text_sha256)


def _in_first(do: Callable[..., T], *arguments: Any) -> T | None:
    """Call `do` in process 0, and return its result there; if it raises a UserError, all do."""

    def do_if_first() -> T | None:
        return do(*arguments) if is_first() else None

    return all_or_raise(do_if_first)


def _check_overrides(path: str | Path, overrides: Mapping[str, Any]) -> None:
    """Raise RunError for what cannot change within a run; it names a command that can be run."""
    fixed = sorted(overrides.keys() - MAY_CHANGE_AT_RESUME)
    if not fixed:
        return
    advice = "start a new run."
    # Its weights do not fit another model, and another training.init_from would replace them
    if not any(name == "training.init_from" or name.startswith("model.") for name in fixed):
        initial.config_from(str(path), overrides)  # raises where the values do not go together
        words = ["jaxgru", "train", "--init", str(path)]
        for name, value in overrides.items():
            words += [f"--{name}", str(value)]
        advice = f"start a new run from its weights: {shlex.join(words)}"
    raise folders.RunError(
        f"{fixed[0]} cannot change within a run, only {', '.join(sorted(MAY_CHANGE_AT_RESUME))} "
        f"can; {advice}"
    )


@dataclass
class _Run:
    """A run in progress: what stays as it is from its first step here to the last."""

    folder: Path
    config: Config
    info: folders.RunInfo
    dataset: Dataset
    mesh: Mesh
    manager: CheckpointManager

    def _longer_info(self) -> folders.RunInfo:
        """Return what run.json says once the run is longer."""
        return dataclasses.replace(self.info, lengthened=self.info.lengthened + 1)

    def restore(self, overrides: Mapping[str, Any]) -> tuple[TrainState, Params | None, Progress]:
        """Return what `train` needs, from the newest checkpoint or else for the first step."""
        config = self.config
        tokenizer = self.dataset.tokenizer
        if self.manager.latest_step() is None:
            model = initial.load_initial(config, self.info.init_sha256)
            return _fresh_state(config, self.mesh, tokenizer, model), None, Progress()
        info = self.info
        if "training.epochs" in overrides:
            info = self._longer_info()
        fingerprint = checkpoints.compute_fingerprint(config, info, tokenizer)
        return checkpoints.restore(self.manager, self.folder, config, self.mesh, fingerprint)

    def change(self, overrides: Mapping[str, Any], progress: Progress) -> None:
        """Write what --resume has changed to config.toml, and that epochs were to run.json.

        The samples of a finished run are renamed, because they are of fewer epochs.
        """
        if "training.epochs" in overrides:
            self._check_epochs(progress)
            if progress.finished and progress.is_over(self.config.training):
                console.print(self.finished(progress))
                others = dict(overrides)
                del others["training.epochs"]
                if not others:
                    return
                config = load_config(self.folder / "config.toml")
                self.config = override(config, {"name": config.name, **others})
            else:
                self._lengthen(progress)
        if is_first():
            folders.save_config(self.folder, self.config)

    def _check_epochs(self, progress: Progress) -> None:
        """Raise RunError where the config has fewer epochs than the run has begun."""
        epochs = self.config.training.epochs
        num_begun = progress.epoch
        if progress.epoch_losses:
            num_begun += 1
        if epochs < num_begun:
            raise folders.RunError(
                f"training.epochs is {epochs}, but {self.folder} has begun "
                f"{counted(num_begun, 'epoch')}."
            )

    def _lengthen(self, progress: Progress) -> None:
        """Say that the run has more epochs now, on the terminal and in run.json."""
        progress.finished = False
        console.print(
            f"The run now has {counted(self.config.training.epochs, 'epoch')}; from here on its "
            "learning rates are those of a run of that length."
        )
        self.info = self._longer_info()
        if is_first():
            samples = self.folder / "samples.txt"
            if samples.exists():
                samples.rename(self.folder / f"samples-{progress.epoch}-epochs.txt")
            # First, because a kill may come before the config
            folders.save_info(self.folder, self.info)

    def finished(self, progress: Progress) -> str:
        """Return why there is nothing left to train, and how to train more all the same."""
        training = self.config.training
        more = "--training.epochs N with --resume trains it for"
        if progress.has_stopped_early(training):
            more = f"training.patience = {training.patience} permits no"
        return f"{self.folder} is finished, with {counted(progress.epoch, 'epoch')}; {more} more."

    def train(
        self,
        state: TrainState,
        best: Params | None,
        progress: Progress,
        interrupted: Callable[[], bool],
    ) -> None:
        """Train to the end or to an interruption, and write all that a run leaves."""
        self._introduce(num_params(state.params))
        self._commit = folders.current_commit()
        if progress.records and is_first():  # a killed run may lack those of its last epoch
            write_losses(self.folder, self.config, self.info, progress)
        training = self.config.training
        self._events = None
        if training.tensorboard:
            self._events = _in_first(Events, self.folder, progress.records)
        with terminal.progress_bar(training.epochs * training.steps_per_epoch) as (bar, task):
            self._show = partial(bar.update, task)
            observer = Observer(
                on_steps=self._on_steps,
                on_validation=self._on_validation,
                on_epoch=self._on_epoch,
                interrupted=interrupted,
                on_interrupt=self._on_interrupt,
            )
            _, params = fit(
                self.config,
                state,
                best,
                progress,
                self.dataset.train,
                self.dataset.validation,
                observer,
                self.mesh,
                self.dataset.separator_token,
            )
            if is_first():
                self._show(status="writing samples")
                self._finish(params, progress)

    def _introduce(self, size: int) -> None:
        """Print what is trained on what, and where."""
        console.quiet = not is_first()
        place = f"{self.mesh.size} × {jax.devices()[0].device_kind}"
        if is_distributed():
            place += f" in {jax.process_count()} processes"
        print_labelled("data", self._describe_text())
        print_labelled("device", place)
        print_labelled("run", f"{self.config.name}, {size:,} parameters, in {self.folder}")
        data = self.config.data
        if not data.validation and not data.validation_fraction:
            tenth = "a tenth of the documents" if data.separator else "the text's last tenth"
            console.print(
                f"Nothing is held out: the validation loss is that of {tenth}, which is trained "
                "on, too."
            )

    def _describe_text(self) -> str:
        """Return how many tokens there are, and how many of them the vocabulary lacks."""
        dataset = self.dataset
        text = (
            f"{len(dataset.train):,} training and {len(dataset.validation):,} validation tokens "
            f"from {dataset.source}"
        )
        unknown = dataset.tokenizer.unknown
        if unknown is None:
            return text
        piece = dataset.tokenizer.pieces[unknown].strip()
        return f"{text}; {dataset.unknown_share():.2%} of them are {piece}"

    def _on_steps(self, epoch: int, done: int, loss: float, tokens_per_second: float) -> None:
        training = self.config.training
        self._show(
            completed=epoch * training.steps_per_epoch + done,
            what=f"epoch {epoch + 1}/{training.epochs}",
            status=f"loss {loss:.4f}",
            rate=f"{tokens_per_second:,.0f} tokens/s",
        )

    def _on_validation(self, epoch: int) -> None:
        self._show(status="validating")

    def _on_epoch(self, state: TrainState, best: Params | None, progress: Progress) -> None:
        if self.config.training.keep_epochs:
            self._keep_epoch(state, progress.epoch)
        self._save(state, best, progress)
        if is_first():
            write_losses(self.folder, self.config, self.info, progress)
        record = progress.records[-1]
        if self._events:
            self._events.add(record)
        console.print(
            f"epoch {record.epoch:>3}  train {record.train_loss:.4f}  "
            f"validation {record.val_loss:.4f}  {record.tokens_per_second:,.0f} tokens/s"
        )

    def _on_interrupt(self, state: TrainState, best: Params | None, progress: Progress) -> None:
        if state.step > 0:
            self._save(state, best, progress)
            console.print(
                f"Interrupted and saved after step {int(state.step)}. Resume with:\n"
                f"  jaxgru train --resume {shlex.quote(str(self.folder))}"
            )

    def _save(self, state: TrainState, best: Params | None, progress: Progress) -> None:
        """Save a checkpoint, and in run.json the commit that has computed it."""
        folders.check_there(self.folder)
        if is_first() and self._commit and self.info.commits[-1:] != [self._commit]:
            commits = [*self.info.commits, self._commit]
            self.info = dataclasses.replace(self.info, commits=commits)
            folders.save_info(self.folder, self.info)
        fingerprint = checkpoints.compute_fingerprint(
            self.config, self.info, self.dataset.tokenizer
        )
        checkpoints.save(self.manager, state, best, progress, fingerprint)

    def _keep_epoch(self, state: TrainState, epoch: int) -> None:
        """Write an epoch's model. This precedes its checkpoint: a killed run computes it again."""
        params = one_copy(state.evaluated, self.mesh)
        if is_first():
            path = self.folder / "epochs" / f"{epoch:03}.safetensors"
            path.parent.mkdir(exist_ok=True)
            dataset = self.dataset
            save_safetensors(path, params, self.config, dataset.tokenizer, dataset.sha256)

    def _finish(self, params: Params, progress: Progress) -> None:
        """Write the samples; print the result, and where to find it."""
        text = write_samples(self.folder, params, self.config, self.info, self.dataset.tokenizer)
        print_labelled("loss", self._describe_loss(progress))
        for label, line in zip(("text", ""), terminal.first_lines(text), strict=False):
            print_labelled(label, line)
        print_labelled("figure", str(self.folder / "loss.png"))
        print_labelled("sample", f"jaxgru sample {shlex.quote(str(self.folder))}")

    def _describe_loss(self, progress: Progress) -> str:
        """Return the result's loss and epoch, and where the best and the last differ, both."""
        epoch = progress.best_epoch
        best = progress.best_val_loss
        last = progress.records[-1].val_loss
        stops_early = self.config.training.patience > 0
        if epoch == progress.epoch:
            when = f"after epoch {epoch} of {epoch}, the lowest"
        elif stops_early:
            when = f"after epoch {epoch}; {last:.4f} after the last, which --epoch last gives"
        else:
            when = f"after the last epoch; {best:.4f} after epoch {epoch}, which --epoch best gives"
        loss = best if stops_early else last
        return f"{loss:.4f} on the validation text {when}"


class _Start(NamedTuple):
    """What a new run trains from."""

    folder: Path
    config: Config
    info: folders.RunInfo
    dataset: Dataset
    model: InitialModel | None


def _create(config: Config, root: Path, text_sha256: str) -> _Start:
    """Create a run's folder in process 0; return it and what it trains from in all processes."""
    start = _in_first(_create_folder, config, root, text_sha256)
    folder = Path(from_first(start and os.path.abspath(start.folder)))
    return all_or_raise(lambda: start or _read_start(folder))


def _create_folder(config: Config, root: Path, text_sha256: str) -> _Start:
    """Read the text, which completes the config, and create a run's folder."""
    folders.check_place(root)
    with console.status("reading the text"):
        complete, dataset, model = initial.load_text(config, text_sha256)
    tokenizer = dataset.tokenizer
    size = tokenizer.vocab_size
    wanted = config.model.vocab_size
    if tokenizer.is_sized and not config.data.tokenizer_file and size < wanted:
        console.print(
            f"The text is long enough for {size:,} {tokenizer.kind}, not for {wanted:,}"
            "; model.vocab_size is lowered to that."
        )
    init_sha256 = model.sha256 if model else ""
    info = folders.RunInfo(dataset.sha256, init_sha256)
    folder = folders.create_run(root, complete, tokenizer, info)
    return _Start(folder, complete, info, dataset, model)


def _read_start(folder: Path) -> _Start:
    """Read what a run trains from, whose folder process 0 has created."""
    info = folders.load_info(folder)
    config = load_config(folder / "config.toml")
    config, dataset = _load_text(folder, config, info)
    model = initial.load_initial(config, info.init_sha256)
    return _Start(folder, config, info, dataset, model)


def _devices(config: Config) -> Mesh:
    """Return the mesh of all devices, which share a batch; a CPU's cores count as devices."""
    if not is_distributed():  # a launcher shares the cores out
        share_cpu(config.training.batch_size)
    return data_mesh(config.training.batch_size)


def _fresh_state(
    config: Config, mesh: Mesh, tokenizer: Tokenizer, model: InitialModel | None
) -> TrainState:
    """Return a fresh state on the mesh only; a reference to another copy would keep its memory."""
    state = init_state(config.model, config.training, config.data.batches)
    if model:
        params, sentence = initial.initial_params(state.params, model, tokenizer)
        state = starting_from(params, state, config.training)
        if is_first():
            console.print(sentence)
    return shard(state, state_shardings(state, mesh, config.training))
