"""A training run on disk: begun, gone on with, reported on the terminal."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from jaxgru import checkpointing, run_folders
from jaxgru.config import Config
from jaxgru.dataset import Dataset, load_dataset
from jaxgru.files import write_text
from jaxgru.hardware import share_cpu
from jaxgru.model import Params
from jaxgru.plotting import plot_losses
from jaxgru.processes import from_first, is_first, many, together
from jaxgru.sampling import generate
from jaxgru.sharding import data_mesh, spread
from jaxgru.tokenizers import Tokenizer, TokenizerError, load_tokenizer
from jaxgru.training import (
    NonFiniteLoss,
    Observer,
    Progress,
    TrainState,
    fit,
    init_state,
    state_shardings,
)

console = Console(highlight=False, markup=False)  # a path may hold what looks like markup


def start_run(config: Config, root: Path) -> Path:
    """Trains a config from scratch in the next free version of its run folder; returns the folder.

    Raises:
      UserError: the corpus or the folder cannot be used, or a loss is not finite.
      KeyboardInterrupt: Ctrl-C or SIGTERM came; everything is saved.
    """
    mesh = _devices(config)

    def create() -> tuple[Path, Config, Dataset] | None:
        if not is_first():
            return None
        complete, dataset = load_dataset(config)
        return run_folders.create_run(root, complete, dataset.tokenizer), complete, dataset

    created = together(create)
    told = from_first(created and str(created[0].absolute()))
    run = created[0] if created else Path(told)
    config, dataset = together(lambda: created[1:] if created else _load(run))
    with _claimed(run):
        _train(run, config, dataset, mesh, _fresh_state(config, mesh), None, Progress())
    return run


def resume_run(path: str | Path) -> Path:
    """Goes on with a run from its newest checkpoint, exactly; returns its folder.

    A run that was stopped before its first checkpoint starts again.

    Raises:
      UserError: there is no such run, another process trains it, its folder cannot be written, its
        checkpoint or corpus do not fit, or a loss is not finite.
      KeyboardInterrupt: Ctrl-C or SIGTERM came; everything is saved.
    """
    found = together(lambda: str(run_folders.find_run(path)) if is_first() else None)
    run = Path(from_first(found))
    mesh = _devices(together(lambda: run_folders.load_run_config(run)))
    with _claimed(run):
        config, dataset = together(lambda: _load(run))
        with checkpointing.open_checkpoints(run) as manager:
            if manager.latest_step() is None:
                state, best, progress = _fresh_state(config, mesh), None, Progress()
            else:
                state, best, progress = together(
                    lambda: checkpointing.restore(manager, run, config, mesh)
                )
        _train(run, config, dataset, mesh, state, best, progress)
    return run


@contextlib.contextmanager
def _claimed(run: Path) -> Iterator[None]:
    """`run_folders.claim`; where the first of several processes is refused, all are."""
    with contextlib.ExitStack() as claim:
        together(lambda: claim.enter_context(run_folders.claim(run)))
        yield


def _devices(config: Config) -> Mesh:
    """The devices that share a batch: all of them; of one process on a CPU, its cores.

    Several processes take a CPU's cores as their launcher has shared them out.
    """
    if not many():
        share_cpu(config.training.batch_size)
    return data_mesh(config.training.batch_size)


def _load(run: Path) -> tuple[Config, Dataset]:
    return load_dataset(run_folders.load_run_config(run), load_tokenizer(run))


def _fresh_state(config: Config, mesh: Mesh) -> TrainState:
    """On the mesh, and nowhere else: a caller that kept the whole would keep its memory, too."""
    state = init_state(config.model, config.training, config.data.sampling)
    return spread(state, state_shardings(state, mesh, config.training))


def _train(
    run: Path,
    config: Config,
    dataset: Dataset,
    mesh: Mesh,
    state: TrainState,
    best: Params | None,
    progress: Progress,
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
    with checkpointing.open_checkpoints(run) as manager, _bar(config) as (bar, task):

        def on_steps(epoch: int, done: int, loss: float, tokens_per_second: float) -> None:
            bar.update(
                task,
                completed=epoch * config.training.steps_per_epoch + done,
                epoch=f"epoch {epoch + 1}/{config.training.epochs}",
                loss=f"loss {loss:.4f}",
                rate=f"{tokens_per_second:,.0f} tokens/s",
            )

        def on_epoch(state: TrainState, best: Params | None, progress: Progress) -> None:
            progress.records[-1] |= _peak_memory()
            checkpointing.save(manager, state, best, progress)
            if is_first():
                _write_reports(run, config, progress)
            record = progress.records[-1]
            console.print(
                f"epoch {record['epoch']:>3}  train {record['train_loss']:.4f}  "
                f"validation {record['val_loss']:.4f}  "
                f"{record['tokens_per_second']:,.0f} tokens/s"
            )

        def on_interrupt(state: TrainState, best: Params | None, progress: Progress) -> None:
            checkpointing.save(manager, state, best, progress)
            console.print(
                f"Interrupted and saved after step {int(state.step)}. Go on with:\n"
                f"  python scripts/train.py --resume {run}",
                soft_wrap=True,
            )

        observer = Observer(on_steps, on_epoch, on_interrupt)
        try:
            _, params = fit(
                config, state, best, progress, dataset.train, dataset.validation, observer, mesh
            )
        except NonFiniteLoss as error:
            step = manager.latest_step()
            kept = f"the last good checkpoint is of step {step}" if step else "none was saved yet"
            raise NonFiniteLoss(f"{error} Nothing after it is kept; {kept}.") from error
    if is_first():
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
                jax.random.key(0),
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
    """metrics.jsonl and the figure, both whole, from the records alone."""
    lines = [json.dumps(record) + "\n" for record in progress.records]
    write_text(run / "metrics.jsonl", "".join(lines))
    title = f"{config.name}, seed {config.training.seed}"
    plot_losses(run / "loss.png", title, [progress.records], config.published)


def _peak_memory() -> dict[str, float]:
    """The most memory used so far, in MB of 10⁶ bytes: the device's, or on a CPU the process's."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        peak = statistics["peak_bytes_in_use"]
    else:
        try:
            import resource
        except ImportError:  # Windows has no such count
            return {}
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"peak_memory_mb": round(peak / 1e6, 1)}


@contextlib.contextmanager
def _bar(config: Config) -> Iterator[tuple[Bar, int]]:
    total = config.training.epochs * config.training.steps_per_epoch
    columns = [
        TextColumn("{task.fields[epoch]}"),
        BarColumn(),
        TextColumn("step {task.completed}/{task.total}"),
        TextColumn("{task.fields[loss]}  {task.fields[rate]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    ]
    with Bar(
        *columns, console=console, speed_estimate_period=120, transient=True, disable=console.quiet
    ) as bar:
        yield bar, bar.add_task("", total=total, epoch="compiling", loss="", rate="")
