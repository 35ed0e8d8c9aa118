"""A training run on disk: started, resumed, reported on the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from jaxgru.config import Config, PublishedResults, TrainingConfig
from jaxgru.data.dataset import Dataset, load_dataset
from jaxgru.data.tokenizers import Tokenizer, TokenizerError, load_tokenizer
from jaxgru.errors import warn
from jaxgru.files import write_text
from jaxgru.model import Params
from jaxgru.parallel.hardware import peak_resident_bytes, share_cpu
from jaxgru.parallel.processes import from_first, is_first, many, together
from jaxgru.parallel.sharding import data_mesh, spread
from jaxgru.runs import checkpoints, folders
from jaxgru.runs.commits import current_commit, record_commit
from jaxgru.runs.figure import plot_losses
from jaxgru.runs.orbax import CheckpointManager, open_checkpoints
from jaxgru.sampling import generate
from jaxgru.training import (
    NonFiniteLoss,
    Observer,
    Progress,
    TrainState,
    fit,
    init_state,
    learning_rate,
    state_shardings,
)

MAY_CHANGE = checkpoints.FREE | {"training.epochs"}  # at --resume
T = TypeVar("T")


class _Output:
    """Standard output, for as long as it takes what is written; then nothing, after one warning.

    A terminal that is closed or a full disk behind `>` must not end a training run.
    """

    encoding = property(lambda self: getattr(sys.stdout, "encoding", "utf-8"))

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._try(lambda stream: stream.isatty()) or False

    def write(self, text: str) -> None:
        """Write text, or drop it."""
        self._try(lambda stream: stream.write(text))

    def flush(self) -> None:
        """Flush what was written, or drop it."""
        self._try(lambda stream: stream.flush())

    def _try(self, do: Callable[[Any], Any]) -> Any:
        stream = getattr(sys.stdout, "rich_proxied_file", sys.stdout)  # the bar redirects it
        if stream is None:
            return None
        try:
            return do(stream)
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            warn(f"standard output is gone ({error}); training continues without it.")


console = Console(file=_Output(), highlight=False, markup=False)  # a path may look like markup


def start_run(config: Config, root: Path) -> Path:
    """Train a config from scratch in the next free version of its run folder; return the folder.

    A run that ends before its first checkpoint leaves no folder behind, unless the disk failed.

    Raises:
      UserError: the corpus or the folder cannot be used, or a loss is not finite.
      KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP came; everything is saved.
    """
    with _deferred_signals() as interrupted:
        mesh = _devices(config)

        def create() -> tuple[Path, Config, Dataset] | None:
            if not is_first():
                return None
            with console.status("reading the text"):
                complete, dataset = load_dataset(config)
            return folders.create_run(root, complete, dataset.tokenizer), complete, dataset

        created = together(create)
        told = from_first(created and str(created[0].absolute()))
        run = created[0] if created else Path(told)
        try:
            config, dataset = together(
                lambda: created[1:] if created else
                load_dataset(folders.load_run_config(run), load_tokenizer(run))
            )  # fmt: skip
            with _in_all(folders.claim(run)) as in_place:
                parts = _fresh_state(config, mesh), None, Progress()
                with _in_all(open_checkpoints(run)) as manager:
                    _train(run, manager, config, dataset, mesh, *parts, interrupted, in_place)
        except folders.RunError:
            raise  # the disk failed, under threads of Orbax that still write
        except BaseException:
            with contextlib.suppress(OSError):
                if created and not many() and folders.discard_empty(run):
                    console.print(f"No step was saved, so {run} is deleted.", soft_wrap=True)
            raise
    return run


def resume_run(path: str | Path, overrides: Mapping[str, str] | None = None) -> Path:
    """Resume a run from its newest checkpoint, exactly; return its folder.

    A run that was stopped before its first checkpoint starts again.

    Args:
      path: a run folder, or the folder of its versions.
      overrides: values as they are typed on a command line, by dotted name, of the fields in
        MAY_CHANGE; they are written into the run's config.toml. With more `training.epochs`, the
        epochs that are left have the learning rates of a run that is so long from the start.

    Raises:
      UserError: there is no such run, another process trains it, its folder cannot be written, its
        checkpoint, corpus or the overrides do not fit, or a loss is not finite.
      KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP came; everything is saved.
    """
    overrides = dict(overrides or {})
    if Path(path).suffix in (".safetensors", ".pth"):
        raise folders.RunError(
            f"{path} cannot be resumed: it holds a model's parameters, and no run; name the run's "
            "folder."
        )
    for name in overrides.keys() - MAY_CHANGE:
        raise folders.RunError(
            f"{name} cannot change within a run; start a new run, or change one of "
            f"{', '.join(sorted(MAY_CHANGE))}."
        )
    with _deferred_signals() as interrupted:
        found = together(lambda: str(folders.find_run(path)) if is_first() else None)
        run = Path(from_first(found))
        with _in_all(folders.claim(run)) as in_place:
            config = together(lambda: _resumed_config(run, overrides))
            mesh = _devices(config)
            with _in_all(open_checkpoints(run)) as manager:
                with console.status("reading the text and the checkpoint"):
                    config, dataset = together(lambda: load_dataset(config, load_tokenizer(run)))
                    parts = together(
                        lambda: _restore(run, manager, config, dataset, mesh, overrides)
                    )
                if overrides:
                    config = together(lambda: _change(run, config, overrides, parts[-1]))
                elif parts[-1].finished:
                    console.print(
                        f"{run} is finished, with {parts[-1].epoch} epochs; --training.epochs N "
                        "beside --resume trains it for more.",
                        soft_wrap=True,
                    )
                _train(run, manager, config, dataset, mesh, *parts, interrupted, in_place)
    return run


@contextlib.contextmanager
def _in_all(context: contextlib.AbstractContextManager[T]) -> Iterator[T]:
    """Enter a context in each process of the run; where one of them fails, all do."""
    with contextlib.ExitStack() as stack:
        yield together(lambda: stack.enter_context(context))


@contextlib.contextmanager
def _deferred_signals() -> Iterator[Callable[[], bool]]:
    """Inside, the first SIGINT, SIGTERM or SIGHUP only sets a flag; a second one ends the process.

    An exception that is raised while XLA compiles crashes the process, so none is raised. A second
    signal ends it as SIGKILL would, which loses no checkpoint. A signal that is ignored stays
    ignored, as SIGHUP is under nohup. Python handles signals in its main thread alone; in another
    one, this does nothing.
    """
    seen: list[int] = []

    def handler(number: int, frame: Any) -> None:
        if seen:
            console.show_cursor(True)  # the bar has hidden it
            os._exit(130)
        seen.append(number)

    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    if threading.current_thread() is not threading.main_thread():
        before = {}
    ours = [number for number, old in before.items() if old != signal.SIG_IGN]
    for number in ours:
        signal.signal(number, handler)
    try:
        yield lambda: bool(seen)
    finally:
        for number in ours:
            signal.signal(number, before[number])


def _devices(config: Config) -> Mesh:
    """The devices that share a batch: all of them; of one process on a CPU, its cores.

    Several processes take a CPU's cores as their launcher has shared them out.
    """
    if not many():
        share_cpu(config.training.batch_size)
    return data_mesh(config.training.batch_size)


def _resumed_config(run: Path, overrides: Mapping[str, str]) -> Config:
    """Return a run's config with what was given at --resume; its name stays, on another path, too.

    The path of the text goes in afterwards, because `load_config` names a config after its text.
    """
    others = {name: text for name, text in overrides.items() if name != "data.corpus"}
    config = folders.load_run_config(run, others)
    corpus = overrides.get("data.corpus", config.data.corpus)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, corpus=corpus))


def _restore(
    run: Path,
    manager: CheckpointManager,
    config: Config,
    dataset: Dataset,
    mesh: Mesh,
    given: Mapping[str, str],
) -> tuple[TrainState, Params | None, Progress]:
    if manager.latest_step() is None:
        return _fresh_state(config, mesh), None, Progress()
    recorded = checkpoints.made_with(config, dataset.tokenizer)
    return checkpoints.restore(manager, run, config, mesh, recorded, given)


def _change(run: Path, config: Config, overrides: Mapping[str, str], progress: Progress) -> Config:
    """Write what was changed at --resume into a run's config.toml; return the new config.

    What was made of the run when it was finished is renamed, for it is of fewer epochs.

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
                "at least as many."
            )
        if progress.finished and progress.is_over(training):
            raise folders.RunError(
                f"{run} is finished after {progress.epoch} epochs, the best of them "
                f"{progress.best_epoch}, and stays so with training.epochs = {epochs} and "
                f"training.patience = {training.patience}."
            )
        config = dataclasses.replace(config, training=training, published=PublishedResults())
        progress.finished = False
        console.print(f"to be trained for {epochs} epochs{_schedule(training, progress)}.",
                      soft_wrap=True)  # fmt: skip
        for name in ("samples.txt", "study.json") if is_first() else ():
            path = run / name
            if path.exists():
                path.rename(path.with_stem(f"{path.stem}-{progress.epoch}-epochs"))
    if is_first():
        folders.save_config(run, config)
    return config


def _schedule(training: TrainingConfig, progress: Progress) -> str:
    """The learning rates of the epochs that are left, in words."""
    if progress.epoch >= training.epochs:
        return ""
    epochs = np.array([progress.epoch, training.epochs - 1])
    first, last = learning_rate(training)(epochs * training.steps_per_epoch)
    return (
        f"; from here on the learning rate is that of {training.epochs} epochs: {first:.3g}"
        f" in epoch {progress.epoch + 1}, {last:.3g} in the last"
    )


def _fresh_state(config: Config, mesh: Mesh) -> TrainState:
    """On the mesh, and nowhere else: a caller that kept the whole would keep its memory, too."""
    state = init_state(config.model, config.training, config.data.sampling)
    return spread(state, state_shardings(state, mesh, config.training))


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
    if many():
        devices += f" in {jax.process_count()} processes"
    console.print(
        f"{config.name}: {len(dataset.train):,} training and {len(dataset.validation):,} validation"
        f" tokens, {dataset.source}; {devices}; {run}",
        soft_wrap=True,
    )
    recorded = checkpoints.made_with(config, dataset.tokenizer)
    commit, begun = current_commit(), int(state.step)
    with _bar(config) as (bar, task):

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
            progress.records[-1] |= _peak_memory()
            save(state, best, progress)
            if is_first():
                _write_reports(run, config, progress)
            record = progress.records[-1]
            console.print(
                f"epoch {record['epoch']:>3}  train {record['train_loss']:.4f}  "
                f"validation {record['val_loss']:.4f}  "
                f"{record['tokens_per_second']:,.0f} tokens/s"
            )

        def on_interrupt(state: TrainState, best: Params | None, progress: Progress) -> None:
            if state.step == 0:  # there is nothing to save
                return
            save(state, best, progress)
            console.print(
                f"Interrupted and saved after step {int(state.step)}. Resume with:\n"
                f"  python scripts/train.py --resume {run}",
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
            raise NonFiniteLoss(f"{error} Nothing after it is kept; {kept}.") from error
        if is_first():
            check_in_place()
            bar.update(task, loss="writing samples")
            _finish(run, config, dataset, params, progress)


def _finish(
    run: Path, config: Config, dataset: Dataset, params: Params, progress: Progress
) -> None:
    _write_reports(run, config, progress)
    samples = sample_text(params, dataset.tokenizer, opening(dataset))
    write_text(run / "samples.txt", samples)
    console.print(
        f"Done: validation loss {progress.best_val_loss:.4f} in epoch {progress.best_epoch}, the "
        f"best. Read what it writes:\n  python scripts/sample.py --run {run}",
        soft_wrap=True,
    )


def opening(dataset: Dataset, prompt: str = "ROMEO: ") -> str:
    """The prompt, or the validation split's first tokens where the vocabulary lacks it."""
    try:
        dataset.tokenizer.encode(prompt)
        return prompt
    except TokenizerError:
        return dataset.tokenizer.decode(dataset.validation[:8])


def sample_text(params: Params, tokenizer: Tokenizer, prompt: str, num_tokens: int = 300) -> str:
    """Text from one prompt with and without the state, greedily and at temperature 0.8."""
    tokens = jnp.asarray(tokenizer.encode(prompt))[None]
    parts = []
    for temperature in (0.0, 0.8):
        for stateful in (False, True):
            new, _, _ = generate(
                params,
                jax.random.fold_in(jax.random.key(0), 0),  # as the first sample of sample.py
                tokens,
                num_tokens,
                temperature=temperature,
                stateful=stateful,
            )
            how = "stateful" if stateful else "stateless"
            how += ", greedy" if temperature == 0 else f", temperature {temperature}, seed 0"
            text = tokenizer.decode(jnp.concatenate([tokens, new], axis=1)[0])
            parts.append(f"--- {how}\n{text}\n")
    return "\n".join(parts)


def _write_reports(run: Path, config: Config, progress: Progress) -> None:
    """Write metrics.jsonl and the figure, both whole, from the records alone."""
    lines = [json.dumps(record) + "\n" for record in progress.records]
    write_text(run / "metrics.jsonl", "".join(lines))
    title = f"{config.name}, seed {config.training.seed}"
    try:
        plot_losses(run / "loss.png", title, [progress.records], config.published)
    except Exception as error:  # matplotlib's settings are the user's, and may ask for LaTeX
        if folders.disk_error(error) is not None:
            raise
        _warn_once(f"the figure {run / 'loss.png'} cannot be drawn: {' '.join(str(error).split())}")


@functools.cache
def _warn_once(sentence: str) -> None:
    warn(sentence)


def _peak_memory() -> dict[str, float]:
    """The most memory used so far, in MB of 10⁶ bytes: the device's, or on a CPU the process's."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        peak = statistics["peak_bytes_in_use"]
    else:
        peak = peak_resident_bytes()
    return {"peak_memory_mb": round(peak / 1e6, 1)} if peak else {}


@contextlib.contextmanager
def _bar(config: Config) -> Iterator[tuple[Bar, int]]:
    """A progress bar as wide as the terminal: what is narrower has fewer numbers beside it."""
    total = config.training.epochs * config.training.steps_per_epoch
    width = console.width
    columns = [SpinnerColumn(), BarColumn(bar_width=None), TimeRemainingColumn()]
    columns += [TextColumn("{task.fields[loss]}")] * (width >= 40)
    columns[1:1] = [TextColumn("{task.fields[epoch]}")] * (width >= 50)
    columns += [TextColumn("step {task.completed}/{task.total}")] * (width >= 70)
    columns += [TextColumn("{task.fields[rate]}")] * (width >= 90)
    with Bar(
        *columns,
        console=console,
        speed_estimate_period=120,
        transient=True,
        expand=True,
        disable=console.quiet,
    ) as bar:
        yield bar, bar.add_task("", total=total, epoch="", loss="compiling", rate="")
