"""Measure finished runs of the study, and make the tables and figures of docs/study.md.

docs/study.json keeps each run's record, so that the page can have runs of several machines: a new
record replaces an older one of the same config, changes and seed.
"""

from __future__ import annotations

import startup  # noqa: F401

import dataclasses
import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxgru import lm
from jaxgru.analysis import measures
from jaxgru.analysis.ngrams import MAX_ORDER, count_ngrams
from jaxgru.cli.options import Parser, run_script
from jaxgru.files import write_text
from jaxgru.lm.config import ModelConfig, field_value, load_config
from jaxgru.lm.data.dataset import load_dataset
from jaxgru.lm.data.tokenizers import Tokenizer
from jaxgru.lm.generation import PROMPT
from jaxgru.lm.runs.folders import RunError, load_info
from pages.markdown import write_page
from pages.measurements import describe_hardware, dumps, is_finished, load, load_or
from study.jobs import NANOGPT, SEEDS, all_jobs, find_job
from study.study_page import Page
from study.study_records import Run, RunMeasures, Study, load_metrics

MEASURES = "study.json"  # of a run, in its folder


def main() -> None:
    """Read the arguments, measure what is not yet measured, and write the page and its figures."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--runs", type=Path, default="runs", help="the folder of the runs (default: %(default)s)")
    add("--docs", type=Path, default="docs", help="where to write (default: %(default)s)")
    arguments = parser.parse_args()
    docs = arguments.docs
    earlier = load_or(Study([]), docs / "study.json", Study)
    records = {key(run): run for run in [*earlier.runs, *gather(arguments.runs)]}
    if not records:
        raise RunError(f"there are no finished runs of the study in {arguments.runs}.")
    ngrams = earlier.ngrams or {name: count(name) for name in ("astra_alpha", "scribe_alpha")}
    runs = sorted(records.values(), key=place)
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    write_text(docs / "study.json", study_json(runs, ngrams))
    page = Page(runs, ngrams)
    page.draw(docs / "figures")
    write_page(docs / "study.md", page.tables())
    print(f"{docs / 'study.md'} made from {len(runs)} runs")


def key(run: Run) -> tuple[str, str, int]:
    """Return what identifies a run."""
    return run.config, json.dumps(run.changes), run.seed


def place(run: Run) -> tuple:
    """Return what the runs are sorted by: each config's own ones first, in the study's order."""
    config = list(SEEDS).index(run.config)
    return config, len(run.changes), list(run.changes), run.parameters, key(run)


def study_json(runs: list[Run], ngrams: dict[str, list[float]]) -> str:
    """Return the text of study.json, which has a run per line."""
    lines = ",\n".join(map(dumps, runs))
    return f'{{"ngrams": {json.dumps(ngrams)},\n"runs": [\n{lines}\n]}}\n'


def gather(root: Path) -> Iterable[Run]:
    """Yield the record of every finished run of the study; measure it if needed."""
    for job in all_jobs():
        run = find_job(root, job)
        if run is None or not is_finished(run):
            continue
        epochs = load_metrics(run / "metrics.jsonl")
        if not (run / MEASURES).exists():
            print(f"measuring {run}", flush=True)
            best = min(epochs, key=lambda epoch: epoch.val_loss).epoch
            write_text(run / MEASURES, json.dumps(measure(run, best), indent=1) + "\n")
        config = job.config
        names = [name for name, _ in job.overrides if name != "training.seed"]
        yield Run(
            config=job.name,
            changes={name: field_value(config, name) for name in names},
            seed=config.training.seed,
            parameters=count_parameters(config.model),
            epochs=epochs,
            measured=load(run / MEASURES, RunMeasures),
        )


def count_parameters(model: ModelConfig) -> int:
    """Return how many parameters a model has, without drawing them."""
    return lm.num_params(jax.eval_shape(lambda: lm.init(jax.random.key(0), model)))


def measure(run: Path, best: int) -> dict[str, Any]:
    """Return what is measured of a run, as `RunMeasures` reads it; best: its best epoch."""
    params, config, tokenizer = lm.load(run)
    _, dataset = load_dataset(config, tokenizer)
    like_nanogpt = config.name in NANOGPT
    subject = measures.Subject(params, dataset, config.training.sequence_length)
    extra = ["recovery", "random_batches"] if like_nanogpt else ["recovery"]
    record = measures.measure(subject, extra).to_dict()
    for name, texts in sample(params, tokenizer).items():
        record["text"][name] |= texts
    if like_nanogpt:
        best_params, _, _ = lm.load(run, "best")
        of_best = measures.random_batch_loss(dataclasses.replace(subject, params=best_params))
        record["random_batches"]["best"] = of_best.to_dict() | {"epoch": best}
    return record | {
        "date": str(datetime.date.today()),
        "hardware": describe_hardware(),
        "commits": load_info(run).commits,
    }


def sample(params: lm.Params, tokenizer: Tokenizer) -> dict[str, dict[str, str]]:
    """Return two texts for each treatment of the state, as `StudyText` has them."""
    prompt = jnp.asarray(tokenizer.encode(PROMPT))[None]

    def text(num_tokens: int, temperature: float, treatment: tuple[bool, bool]) -> str:
        (tokens,) = measures.texts_of(params, prompt, num_tokens, temperature, *treatment)
        return PROMPT + tokenizer.decode(tokens)

    return {
        name: {
            "greedy": text(200, 0, treatment),
            "sampled": text(300, measures.TEMPERATURE, treatment),
        }
        for name, treatment in measures.TREATMENTS.items()
    }


def count(name: str) -> list[float]:
    """Return the losses of n-grams of a config's tokens, orders 1 to 8, nats per character."""
    _, dataset = load_dataset(load_config(name))
    tokens = dataset.validation
    losses = []
    for order in range(1, MAX_ORDER + 1):
        model = count_ngrams(dataset.train, dataset.tokenizer.vocab_size, order)
        nats_per_token = float(model.token_nll(tokens).mean())
        losses.append(nats_per_token * (len(tokens) - 1) / dataset.num_characters)
    return losses


if __name__ == "__main__":
    run_script(main)
