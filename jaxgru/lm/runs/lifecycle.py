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
from typing import Any

import jax
from jax.sharding import Mesh

from jaxgru.lm.config import Config, dotted_names, load_config, override
from jaxgru.lm.data.dataset import Dataset, load_dataset
from jaxgru.lm.data.tokenizers import Tokenizer, load_tokenizer
from jaxgru.lm.formats.safetensors import save_safetensors
from jaxgru.lm.model import Params, num_params
from jaxgru.lm.runs import checkpoints, folders, initial, terminal
from jaxgru.lm.runs.checkpoints import CheckpointManager, open_checkpoints
from jaxgru.lm.runs.initial import InitialModel
from jaxgru.lm.runs.reports import Events, write_losses, write_samples
from jaxgru.lm.runs.terminal import console, print_labelled
from jaxgru.lm.training import Observer, Progress, TrainState, fit, init_state
from jaxgru.lm.training.step import starting_from, state_shardings
from jaxgru.parallel.hardware import share_cpu
from jaxgru.parallel.processes import all_or_raise, from_first, is_distributed, is_first
from jaxgru.parallel.sharding import data_mesh, one_copy, shard
from jaxgru.printing import counted

MAY_CHANGE_AT_RESUME = {"training.epochs", *dotted_names("placement", "setting")}


def start_run(config: Config, root: Path, text_sha256: str = "") -> Path:
    """Train a config in the next free version of its run folder; return the folder.

    If the run ends before its first checkpoint, its folder is deleted. Raises KeyboardInterrupt on
    Ctrl-C, SIGTERM or SIGHUP, once everything is saved.

    text_sha256: the one that the text must have; "": any.
    """
    with terminal.deferred_signals() as interrupted:
        mesh = _devices(config)
        folder, config, info, dataset, model = _create(config, root, text_sha256)
        try:
            with contextlib.ExitStack() as stack:
                all_or_raise(stack.enter_context, folders.claim(folder))
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
        run_path = all_or_raise(lambda: str(folders.find_run(path)) if is_first() else None)
        folder = Path(from_first(run_path))
        if folder.is_relative_to(Path.cwd()):  # which is shorter to read
            folder = folder.relative_to(Path.cwd())
        all_or_raise(stack.enter_context, folders.claim(folder))
        config = all_or_raise(load_config, folder / "config.toml")
        if overrides:
            config = all_or_raise(override, config, {"name": config.name, **overrides})
        mesh = _devices(config)
        info = all_or_raise(folders.load_info, folder)
        with console.status("reading the text"):
            text = lambda: load_dataset(config, load_tokenizer(folder), info.text_sha256)
            config, dataset = all_or_raise(text)
        manager = all_or_raise(stack.enter_context, open_checkpoints(folder))
        run = _Run(folder, config, info, dataset, mesh, manager)
        with console.status("reading the checkpoint"):
            state, best, progress = all_or_raise(run.restore, overrides)
        all_or_raise(lambda: checkpoints.finish_writing(manager, folder) if is_first() else None)
        manager.reload()  # in all processes: the first one may have deleted some
        if overrides:
            all_or_raise(run.change, overrides, progress)
        elif progress.is_over(config.training):
            console.print(run.finished(progress))
        run.train(state, best, progress, interrupted)
    return folder


def _check_overrides(path: str | Path, overrides: Mapping[str, Any]) -> None:
    """Raise RunError for what cannot change within a run; it names a command that can be run."""
    fixed = sorted(overrides.keys() - MAY_CHANGE_AT_RESUME)
    if not fixed:
        return
    anew = "start a new run."
    if not any(name == "training.init" or name.startswith("model.") for name in fixed):
        initial.config_from(str(path), overrides)  # raises where the values do not go together
        words = ["jaxgru", "train", "--init", str(path)]
        for name, value in overrides.items():
            words += [f"--{name}", str(value)]
        anew = f"start a new run from its weights: {shlex.join(words)}"
    raise folders.RunError(
        f"{fixed[0]} cannot change within a run, only {', '.join(sorted(MAY_CHANGE_AT_RESUME))} "
        f"can; {anew}"
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

    def _lengthened(self) -> folders.RunInfo:
        return dataclasses.replace(self.info, lengthened=self.info.lengthened + 1)

    def restore(self, overrides: Mapping[str, Any]) -> tuple[TrainState, Params | None, Progress]:
        """Return what `train` needs, from the newest checkpoint or else for the first step."""
        config, tokenizer = self.config, self.dataset.tokenizer
        if self.manager.latest_step() is None:
            model = initial.load_initial(config, self.info.init_sha256)
            return _fresh_state(config, self.mesh, tokenizer, model), None, Progress()
        info = self._lengthened() if "training.epochs" in overrides else self.info
        recorded = checkpoints.made_with(config, info, tokenizer)
        return checkpoints.restore(self.manager, self.folder, config, self.mesh, recorded)

    def change(self, overrides: Mapping[str, Any], progress: Progress) -> None:
        """Write what --resume has changed to config.toml, and that epochs were to run.json.

        The samples of a finished run are renamed, because they are of fewer epochs.
        """
        run, training = self.folder, self.config.training
        if "training.epochs" in overrides:
            epochs, begun = training.epochs, progress.epoch + bool(progress.epoch_losses)
            if epochs < begun:
                raise folders.RunError(
                    f"training.epochs is {epochs}, but {run} has begun {counted(begun, 'epoch')}."
                )
            if progress.finished and progress.is_over(training):
                console.print(self.finished(progress))
                config, others = load_config(run / "config.toml"), dict(overrides)
                del others["training.epochs"]
                if not others:
                    return
                self.config = override(config, {"name": config.name, **others})
            else:
                self._lengthen(progress)
        if is_first():
            folders.save_config(run, self.config)

    def _lengthen(self, progress: Progress) -> None:
        progress.finished, run = False, self.folder
        console.print(
            f"The run now has {counted(self.config.training.epochs, 'epoch')}; from here on its "
            "learning rates are those of a run of that length."
        )
        self.info = self._lengthened()
        if is_first():
            if (samples := run / "samples.txt").exists():
                samples.rename(run / f"samples-{progress.epoch}-epochs.txt")
            folders.save_info(run, self.info)  # first: a kill may come before the config

    def finished(self, progress: Progress) -> str:
        """Return why there is nothing left to train, and how to train more all the same."""
        training, more = self.config.training, "--training.epochs N with --resume trains it for"
        if progress.has_stopped_early(training):
            more = f"training.patience = {training.patience} permits no"
        return f"{self.folder} is finished, with {counted(progress.epoch, 'epoch')}; {more} more."

    def train(
        self, state: TrainState, best: Params | None, progress: Progress,
        interrupted: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Train to the end or to an interruption, and write all that a run leaves."""
        self._introduce(num_params(state.params))
        self._commit = folders.current_commit()
        if progress.records and is_first():  # a killed run may lack those of its last epoch
            write_losses(self.folder, self.config, self.info, progress)
        training = self.config.training
        events = lambda: Events(self.folder, progress.records) if is_first() else None
        self._events = all_or_raise(events) if training.tensorboard else None
        with terminal.progress_bar(training.epochs * training.steps_per_epoch) as (bar, task):
            self._show = partial(bar.update, task)
            validating = lambda epoch: self._show(status="validating")
            saving = self._on_epoch, interrupted, self._on_interrupt
            observer = Observer(self._on_steps, validating, *saving)
            splits = self.dataset.train, self.dataset.validation
            how = observer, self.mesh, self.dataset.end
            _, params = fit(self.config, state, best, progress, *splits, *how)
            if is_first():
                self._show(status="writing samples")
                self._finish(params, progress)

    def _introduce(self, size: int) -> None:
        console.quiet = not is_first()
        dataset, data = self.dataset, self.config.data
        train, validation = (f"{len(split):,}" for split in (dataset.train, dataset.validation))
        text = f"{train} training and {validation} validation tokens from {dataset.source}"
        if (token := dataset.tokenizer.unknown) is not None:
            piece = dataset.tokenizer.pieces[token].strip()
            text += f"; {dataset.unknown_share():.2%} of them are {piece}"
        processes = f" in {jax.process_count()} processes" if is_distributed() else ""
        print_labelled("data", text)
        print_labelled("device", f"{self.mesh.size} × {jax.devices()[0].device_kind}{processes}")
        print_labelled("run", f"{self.config.name}, {size:,} parameters, in {self.folder}")
        if not data.validation and not data.validation_fraction:
            tenth = "a tenth of the units" if data.unit else "the text's last tenth"
            console.print(
                f"Nothing is held out: the validation loss is that of {tenth}, which is trained "
                "on, too."
            )

    def _on_steps(self, epoch: int, done: int, loss: float, tokens_per_second: float) -> None:
        training = self.config.training
        self._show(
            completed=epoch * training.steps_per_epoch + done,
            what=f"epoch {epoch + 1}/{training.epochs}",
            status=f"loss {loss:.4f}",
            rate=f"{tokens_per_second:,.0f} tokens/s",
        )

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
        folders.check_there(self.folder)
        if is_first() and self._commit and self.info.commits[-1:] != [self._commit]:
            commits = [*self.info.commits, self._commit]
            self.info = dataclasses.replace(self.info, commits=commits)
            folders.save_info(self.folder, self.info)
        recorded = checkpoints.made_with(self.config, self.info, self.dataset.tokenizer)
        checkpoints.save(self.manager, state, best, progress, recorded)

    def _keep_epoch(self, state: TrainState, epoch: int) -> None:
        """Write an epoch's model. This precedes its checkpoint: a killed run computes it again."""
        params = one_copy(state.evaluated, self.mesh)
        if is_first():
            path = self.folder / "epochs" / f"{epoch:03}.safetensors"
            path.parent.mkdir(exist_ok=True)
            tokenizer, text_sha256 = self.dataset.tokenizer, self.dataset.sha256
            save_safetensors(path, params, self.config, tokenizer, text_sha256)

    def _finish(self, params: Params, progress: Progress) -> None:
        text = write_samples(self.folder, params, self.config, self.info, self.dataset.tokenizer)
        patience, epoch = self.config.training.patience, progress.best_epoch
        best, last = progress.best_val_loss, progress.records[-1].val_loss
        if epoch == progress.epoch:
            when = f"after epoch {epoch} of {epoch}, the lowest"
        elif patience:
            when = f"after epoch {epoch}; {last:.4f} after the last, which --epoch last gives"
        else:
            when = f"after the last epoch; {best:.4f} after epoch {epoch}, which --epoch best gives"
        print_labelled("loss", f"{best if patience else last:.4f} on the validation text {when}")
        for label, line in zip(("text", ""), terminal.first_lines(text), strict=False):
            print_labelled(label, line)
        print_labelled("figure", str(self.folder / "loss.png"))
        print_labelled("sample", f"jaxgru sample {shlex.quote(str(self.folder))}")


Start = tuple[Path, Config, folders.RunInfo, Dataset, InitialModel | None]


def _create(config: Config, root: Path, text_sha256: str) -> Start:
    """Create a run's folder in process 0; return it and what it trains from in all processes."""

    def create() -> Start:
        folders.check_place(root)
        with console.status("reading the text"):
            complete, dataset, model = initial.load_text(config, text_sha256)
        wanted, made = config.model.vocab_size, dataset.tokenizer.vocab_size
        if dataset.tokenizer.is_sized and not config.data.tokenizer_file and made < wanted:
            console.print(
                f"The text is long enough for {made:,} {dataset.tokenizer.kind}, not for {wanted:,}"
                "; model.vocab_size is lowered to that."
            )
        info = folders.RunInfo(dataset.sha256, model.sha256 if model else "")
        folder = folders.create_run(root, complete, dataset.tokenizer, info)
        return folder, complete, info, dataset, model

    def read(folder: Path) -> Start:
        info = folders.load_info(folder)
        complete = load_config(folder / "config.toml")
        complete, dataset = load_dataset(complete, load_tokenizer(folder), info.text_sha256)
        model = initial.load_initial(complete, info.init_sha256)
        return folder, complete, info, dataset, model

    created = all_or_raise(lambda: create() if is_first() else None)
    folder = Path(from_first(created and os.path.abspath(created[0])))
    return all_or_raise(lambda: created or read(folder))


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
