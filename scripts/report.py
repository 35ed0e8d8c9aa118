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
from jaxgru.lm.config import field_value, load_config
from jaxgru.lm.data.dataset import load_dataset
from jaxgru.lm.data.tokenizers import Tokenizer
from jaxgru.lm.files import write_text
from jaxgru.lm.generation import PROMPT
from jaxgru.lm.runs.folders import RunError, load_info
from pages.markdown import write_page
from pages.records import describe_hardware, dumps, is_finished, load, load_or
from study.jobs import NANOGPT, SEEDS, all_jobs, find_job
from study.records import Run, RunMeasures, Study, load_metrics
from study.study_page import Page

MEASURES = "study.json"  # of a run, in its folder


def main() -> None:
    """Read the arguments, measure what is not yet measured, and write the page and its figures."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--runs", type=Path, default="runs", help="the folder of the runs (default: %(default)s)")
    add("--docs", type=Path, default="docs", help="where to write (default: %(default)s)")
    arguments = parser.parse_args()
    docs = arguments.docs
    kept = load_or(Study([]), docs / "study.json", Study)
    records = {key(r): r for r in [*kept.runs, *gather(arguments.runs)]}
    if not records:
        raise RunError(f"there are no finished runs of the study in {arguments.runs}.")
    ngrams = kept.ngrams or {name: count(name) for name in ("astra_alpha", "scribe_alpha")}
    order = list(SEEDS).index
    runs = sorted(
        records.values(),
        key=lambda r: (order(r.config), len(r.changes), list(r.changes), r.parameters, key(r)),
    )
    lines = ",\n".join(map(dumps, runs))
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    text = f'{{"ngrams": {json.dumps(ngrams)},\n"runs": [\n{lines}\n]}}\n'
    write_text(docs / "study.json", text)
    page = Page(runs, ngrams)
    page.draw(docs / "figures")
    write_page(docs / "study.md", page.tables())
    print(f"{docs / 'study.md'} made from {len(runs)} runs")


def key(run: Run) -> tuple[str, str, int]:
    """Return what identifies a run."""
    return run.config, json.dumps(run.changes), run.seed


def gather(root: Path) -> Iterable[Run]:
    """Yield the record of every finished run of the study; measure it if needed."""
    for job in all_jobs():
        run, config = find_job(root, job), job.config
        if run is None or not is_finished(run):
            continue
        epochs = load_metrics(run / "metrics.jsonl")
        if not (run / MEASURES).exists():
            print(f"measuring {run}", flush=True)
            best = min(epochs, key=lambda epoch: epoch.val_loss).epoch
            write_text(run / MEASURES, json.dumps(measure(run, best), indent=1) + "\n")
        names = [name for name, _ in job.overrides if name != "training.seed"]
        shapes = jax.eval_shape(lambda m=config.model: lm.init(jax.random.key(0), m))
        yield Run(
            config=job.name,
            changes={name: field_value(config, name) for name in names},
            seed=config.training.seed,
            parameters=lm.num_params(shapes),
            epochs=epochs,
            measured=load(run / MEASURES, RunMeasures),
        )


def measure(run: Path, best: int) -> dict[str, Any]:
    """Return what is measured of a run, as `RunMeasures` reads it; best: its best epoch."""
    params, config, tokenizer = lm.load(run)
    _, dataset = load_dataset(config, tokenizer)
    like_nanogpt = config.name in NANOGPT
    subject = measures.Subject(params, dataset, config.training.sequence_length)
    asked = ["recovery", *["random_batches"] * like_nanogpt]
    record = measures.measure(subject, asked).to_dict()
    for name, texts in sample(params, tokenizer).items():
        record["text"][name] |= texts
    if like_nanogpt:
        subject = dataclasses.replace(subject, params=lm.load(run, "best")[0])
        of_best = measures.random_batch_loss(subject).to_dict()
        record["random_batches"]["best"] = of_best | {"epoch": best}
    made = {"date": str(datetime.date.today()), "hardware": describe_hardware()}
    return record | made | {"commits": load_info(run).commits}


def sample(params: lm.Params, tokenizer: Tokenizer) -> dict[str, dict[str, str]]:
    """Return two texts for each treatment of the state, as `StudyText` has them."""
    prompt, made = jnp.asarray(tokenizer.encode(PROMPT))[None], {}
    kinds = {"greedy": (200, 0), "sampled": (300, measures.TEMPERATURE)}
    for name, treatment in measures.TREATMENTS.items():
        texts = {kind: measures.texts_of(params, prompt, *options, *treatment)[0]
                 for kind, options in kinds.items()}  # fmt: skip
        made[name] = {kind: PROMPT + tokenizer.decode(text) for kind, text in texts.items()}
    return made


def count(name: str) -> list[float]:
    """Return the losses of n-grams of a config's tokens, orders 1 to 8, nats per character."""
    _, dataset = load_dataset(load_config(name))
    tokens = dataset.validation
    models = [count_ngrams(dataset.train, dataset.tokenizer.vocab_size, order)
              for order in range(1, MAX_ORDER + 1)]  # fmt: skip
    return [float(model.token_nll(tokens).mean()) * (len(tokens) - 1) / dataset.num_characters
            for model in models]  # fmt: skip


if __name__ == "__main__":
    run_script(main)
