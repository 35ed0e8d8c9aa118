"""Make the tables, figures and numbers of docs/study.md from finished runs.

docs/study.json keeps each run's record, so that the page can have runs of several machines: a new
record replaces an older one of the same config, changes and seed.
"""

from __future__ import annotations

import startup  # noqa: F401

import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxgru import lm
from jaxgru.analysis import state_cost
from jaxgru.analysis.ngrams import MAX_ORDER, count_ngrams
from jaxgru.cli.options import Parser, run_script
from jaxgru.errors import UserError
from jaxgru.lm import init, num_params
from jaxgru.lm.config import Config, load_config
from jaxgru.lm.data.dataset import load_dataset
from jaxgru.lm.files import write_text
from jaxgru.lm.runs.commits import trained_by
from jaxgru.lm.runs.folders import RunError, is_finished, load_info, load_run_config, versions
from jaxgru.lm.runs.reports import recipe
from jaxgru.parallel.hardware import describe_hardware
from pages.markdown import write_page
from pages.records import dumps, load, load_or
from study.jobs import NANOGPT, SEEDS
from study.records import (
    Ablation,
    DynamicEvaluation,
    EarlyStopping,
    Kept,
    Plateau,
    Run,
    RunMeasures,
    load_metrics,
    may_change,
)
from study.sentences import expected_sentences
from study.study_page import Page

MEASURES = "study.json"  # of a run, in its folder
console = Console(highlight=False, markup=False)


def main() -> None:
    """Read the arguments, measure what is not yet measured, and write the page and its figures."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--runs", default="runs", help="the folder of the runs (default: %(default)s)"
    )
    parser.add_argument("--docs", default="docs", help="where to write (default: %(default)s)")
    arguments = parser.parse_args()
    docs = Path(arguments.docs)
    kept = load_or(Kept([]), docs / "study.json", Kept)
    stopping = load_or(None, docs / "early_stopping.json", EarlyStopping)
    plateaus = load_or([], docs / "plateau.json", list[Plateau])
    dynamics = load_or([], docs / "dynamic.json", list[DynamicEvaluation])
    ablations = load_or([], docs / "ablation.json", list[Ablation])
    records = {key(r): r for r in [*kept.runs, *gather(Path(arguments.runs))]}
    if not records:
        raise RunError(f"there are no finished runs of the study in {arguments.runs}.")
    ngrams = {name: count(name) for name in ("astra_alpha", "scribe_alpha")}
    order = list(SEEDS).index
    runs = sorted(
        records.values(),
        key=lambda r: (order(r.config), len(r.changes), list(r.changes), r.parameters, key(r)),
    )
    lines = ",\n".join(map(dumps, runs))
    text = f'{{"ngrams": {json.dumps(ngrams)},\n"runs": [\n{lines}\n]}}\n'
    try:
        (docs / "figures").mkdir(parents=True, exist_ok=True)
        write_text(docs / "study.json", text)
        page = Page(runs, ngrams, stopping, plateaus, dynamics, ablations)
        page.draw(docs / "figures")
        write_page(docs / "study.md", page.tables(), expected_sentences(page))
    except OSError as error:
        raise UserError(f"{docs} cannot be written: {error.strerror}.") from error
    console.print(f"{docs / 'study.md'} made from {len(runs)} runs")


def key(run: Run) -> tuple[str, str, int]:
    """Return what identifies a run."""
    return run.config, json.dumps(run.changes), run.seed


def gather(root: Path) -> Iterable[Run]:
    """Yield the record of every finished run of the study, oldest first; measure it if needed."""
    for name in SEEDS:
        for run in reversed(versions(root / name)):
            if not is_finished(run):
                continue
            config = load_run_config(run)
            changes = changed(config)
            if changes is None or load_info(run).lengthened:
                continue
            epochs = load_metrics(run / "metrics.jsonl")
            if not (run / MEASURES).exists():
                console.print(f"measuring {run}")
                best = min(epochs, key=lambda epoch: epoch.val_loss).epoch
                write_text(run / MEASURES, json.dumps(measure(run, best), indent=1) + "\n")
            shapes = jax.eval_shape(lambda m=config.model: init(jax.random.key(0), m))
            yield Run(
                config=name,
                changes=changes,
                seed=config.training.seed,
                parameters=num_params(shapes),
                epochs=epochs,
                measured=load(run / MEASURES, RunMeasures),
            )


def measure(run: Path, best: int) -> dict[str, Any]:
    """Return what is measured of a run, as `RunMeasures` reads it; best: its best epoch."""
    params, config, tokenizer = lm.load(run)
    _, dataset = load_dataset(config, tokenizer)
    like_nanogpt = config.name in NANOGPT
    record = state_cost.measure(
        params, tokenizer, dataset, config.training.sequence_length, random_batches=like_nanogpt
    ).to_dict()
    if like_nanogpt:
        tokens = dataset.validation
        of_best = state_cost.evaluate_random_batches(lm.load(run, "best")[0], tokens).to_dict()
        record["random_batches"]["best"] = of_best | {"epoch": best}
    made = {"date": str(datetime.date.today()), "hardware": describe_hardware()}
    return record | made | {"commits": trained_by(run)}


def changed(config: Config) -> dict[str, Any] | None:
    """Return the fields that differ from the config of that name.

    None if one of them is the corpus or no run of the study changes it: the run is none of them.
    """
    ours, theirs = recipe(config), recipe(load_config(config.name))
    changes = {name: ours[name] for name in ours if ours[name] != theirs[name]}
    return changes if all(name != "data.corpus" and may_change(name) for name in changes) else None


def count(name: str) -> list[float]:
    """Return the losses of n-grams of a config's tokens, orders 1 to 8, nats per character."""
    _, dataset = load_dataset(load_config(name))
    tokens = dataset.validation
    largest = count_ngrams(dataset.train, dataset.tokenizer.vocab_size, MAX_ORDER)
    models = [largest.lower(order) for order in range(1, MAX_ORDER + 1)]
    return [float(model.token_nll(tokens).mean()) * (len(tokens) - 1) / dataset.num_characters
            for model in models]  # fmt: skip


if __name__ == "__main__":
    run_script(main)
