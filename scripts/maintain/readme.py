"""Make README.md from docs/study.json, docs/benchmarks.json and a sample of a pretrained model.

Its text is in pages/templates/README.md.jinja. The diagram docs/figures/carry.png is drawn, too.
"""

from __future__ import annotations

import sys
from os.path import dirname

sys.path.insert(0, dirname(dirname(__file__)))

import startup  # noqa: F401

import json
import math
import os
import re
import shlex
import subprocess
from pathlib import Path

from jaxgru.cli.options import Parser, run_script
from jaxgru.errors import UserError
from jaxgru.lm.config import load_config
from jaxgru.lm.files import write_text
from jaxgru.lm.runs.published import load_published
from pages import benchmark_page
from pages.benchmark_page import LABELS, rows
from pages.figures import plot_carry
from pages.markdown import render, table
from pages.records import ONE_DEVICE, BenchmarkRun, ContestantTime, Study, grouped, load
from pages.study_page import FILLED, Page

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "python scripts/sample.py --pretrained astra_beta --compare --num-tokens 120"
WIDTH = "92"  # of the sample, in columns


def main() -> None:
    """Write README.md and the diagram."""
    Parser(__doc__).parse_args()
    words = [sys.executable, *shlex.split(COMMAND)[1:]]
    environment = os.environ | {"COLUMNS": WIDTH, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"{COMMAND} failed: {done.stderr.strip()}")
    write_text(ROOT / "README.md", readme(done.stdout))
    plot_carry(ROOT / "docs" / "figures" / "carry.png")


def readme(sample: str) -> str:
    """Return README.md; `sample` is what COMMAND prints."""
    docs = ROOT / "docs"
    study = load(docs / "study.json", Study)
    page = Page(study.runs, study.ngrams)
    benchmarks = benchmark_page.load(docs / "benchmarks.json")
    drawn = list(benchmark_page.figures(benchmarks).items())
    if not drawn:
        raise UserError(
            "docs/benchmarks.json has no training steps; scripts/benchmark.py adds them."
        )
    figure, records = drawn[0]
    last = max(record.run for record in records if record.config == records[0].config)
    records = [record for record in records if record.run == last]  # they took turns
    cast = (docs / "figures" / "two_commands.cast").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return render(
        "README.md.jinja",
        page=page,
        seconds={
            record.config: record.median * record.steps_of_a_run
            for record in records
            if record.contestant == "jaxgru"
        },
        filled=FILLED,
        command=COMMAND,
        sample="\n".join(line.rstrip() for line in sample.rstrip().splitlines()),
        results=results(page),
        played=json.loads(cast.splitlines()[0])["title"],
        torch=re.search(r'"torch==(.*)"', project)[1],
        run=benchmarks.runs[records[0].run],
        sizes=f"batch {records[0].batch_size} × {records[0].num_tokens}",
        speeds=speeds(records, benchmarks.runs),
        figure=figure,
    )


def results(page: Page) -> str:
    """Return the table of all models: published losses beside measured ones, in nats per token.

    Models that stop early have the losses of their best epoch, all others those of the last.
    """
    lines = []
    for name in page.first:
        runs, published = page.of(name), load_published(name)
        stops = bool(load_config(name).training.patience)
        chosen = [min(range(len(losses)), key=losses.__getitem__) if stops else len(losses) - 1
                  for losses in published.val_loss]  # fmt: skip
        theirs = [(losses[i], i + 1)
                  for losses, i in zip(published.train_loss, chosen, strict=True)
                  if not math.isnan(losses[i])]  # fmt: skip
        ours = [(run.epochs[run.result_epoch - 1].train_loss, run.result_epoch) for run in runs]
        lines.append([
            f"{name}, {', '.join(str(run.seed) for run in runs)}",
            f"{runs[0].parameters:,}",
            *(_losses([f"{loss:.3f}" + f" (epoch {epoch})" * stops for loss, epoch in training])
              for training in (theirs, ours)),
            _losses([f"{losses[i]:.2f}"
                     for losses, i in zip(published.val_loss, chosen, strict=True)
                     if not math.isnan(losses[i])]),
            *(_losses([f"{getattr(run.measured, what):.3f}" for run in runs])
              for what in ("windows", "stateless", "sensitivity")),
        ])  # fmt: skip
    counted = page.ngrams["astra_alpha"]
    best = min(range(len(counted)), key=counted.__getitem__)
    lines.append([f"counted {best + 1}-grams", *["–"] * 4, f"{counted[best]:.3f}", "–", "–"])
    head = ["model, seeds", "parameters", "published training", "measured training",
            "published validation", "measured validation", "stateless",
            "what the lost state costs"]  # fmt: skip
    return table(head, lines)


def _losses(texts: list[str]) -> str:
    """Join losses; a dash if there are none."""
    return ", ".join(texts) or "–"


def speeds(records: list[ContestantTime], runs: dict[str, BenchmarkRun]) -> str:
    """Return the table of training steps: a row per config, a column per contestant."""
    times = {config: {row[0]: row[1] for row in rows(same, runs)}
             for config, same in grouped(records, lambda r: r.config).items()}  # fmt: skip
    names = list(dict.fromkeys(name for of_config in times.values() for name in of_config))
    head = [column(name, any(name.endswith(ONE_DEVICE) for name in names)) for name in names]
    lines = [[config, *(of_config.get(name, "–") for name in names)]
             for config, of_config in times.items()]  # fmt: skip
    return table(["model", *head], lines)


def column(contestant: str, ways: bool) -> str:
    """Return a contestant's name and, if there are two ways, whether it splits the batch."""
    name = contestant.removesuffix(ONE_DEVICE)
    way = ", one" if name != contestant else ", split" if not name.startswith("torch") else ""
    return LABELS.get(name, name) + way * ways


if __name__ == "__main__":
    run_script(main)
