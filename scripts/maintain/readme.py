"""Make the sample, tables and diagram of README.md, from a pretrained model and the records."""

from __future__ import annotations

import startup  # noqa: F401

import json
import math
import os
import re
import shlex
import subprocess
import sys

from bench import benchmark_page
from bench.benchmark_page import LABELS, rows
from bench.records import ONE_DEVICE, BenchmarkRun, ContestantTime
from jaxgru.cli.options import Parser, run_script
from jaxgru.errors import UserError
from jaxgru.lm.config import load_config
from jaxgru.lm.runs.published import load_published
from maintain.carry import plot_carry
from pages.markdown import DOCS, ROOT, table, write_page
from pages.records import grouped, load
from study.records import Study
from study.study_page import FILLED, Page

COMMAND = "python scripts/sample.py --pretrained astra_beta --compare --num-tokens 120"
WIDTH = "92"  # of the sample, in columns


def main() -> None:
    """Remake the tables and the diagram."""
    Parser(__doc__).parse_args()
    words = [sys.executable, *shlex.split(COMMAND)[1:]]
    environment = os.environ | {"COLUMNS": WIDTH, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"{COMMAND} failed: {done.stderr.strip()}")
    records = Records()
    write_page(ROOT / "README.md", records.tables(done.stdout), records.expected_sentences())
    plot_carry(DOCS / "figures" / "carry.png")


class Records:
    """What README.md is about: the study's runs, and the training steps measured last."""

    def __init__(self) -> None:
        study = load(DOCS / "study.json", Study)
        self.page = Page(study.runs, study.ngrams)
        self.benchmarks = benchmark_page.load(DOCS / "benchmarks.json")
        drawn = list(benchmark_page.figures(self.benchmarks).items())
        if not drawn:
            raise UserError(
                "docs/benchmarks.json has no training steps; scripts/benchmark.py adds them."
            )
        self.figure, records = drawn[0]
        last = max(record.run for record in records if record.config == records[0].config)
        self.steps = [record for record in records if record.run == last]  # they took turns

    def tables(self, sample: str) -> dict[str, str]:
        """Return the tables; `sample` is what COMMAND prints."""
        shown = "\n".join(line.rstrip() for line in sample.rstrip().splitlines())
        figure = f"![training steps as multiples of jaxgru's](docs/figures/{self.figure})"
        return {
            "sample": f"```\n$ {COMMAND}\n{shown}\n```",
            "results": results(self.page),
            "speeds": f"{speeds(self.steps, self.benchmarks.runs)}\n{figure}",
        }

    def expected_sentences(self) -> list[str]:
        """Return what stands in the sentences of README.md, with the numbers of the records."""
        page, run = self.page, self.benchmarks.runs[self.steps[0].run]
        alpha, gamma = page.first["astra_alpha"], page.first["astra_gamma"]
        betas = page.of("astra_beta")
        seconds = {
            record.config: record.median * record.steps_of_a_run
            for record in self.steps
            if record.contestant == "jaxgru"
        }
        cost, large = alpha.measured, gamma.measured.random_batches
        losses = ", ".join(f"{run.measured.random_batches.mean:.3f}" for run in betas)
        cast = (DOCS / "figures" / "two_commands.cast").read_text(encoding="utf-8")
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        torch = re.search(r'"torch==(.*)"', project)[1]
        return [
            f"costs astra_alpha **{cost.sensitivity:.2f} nats per character** (1 nat is 1.44 bits)",
            f": {cost.stateless:.3f}, not {cost.stream:.3f}.",
            f"**{cost.stateless - page.bigram:.2f} nats worse than counted bigrams**",
            f"({page.bigram:.3f}); the study calls",
            f"16 characters costs **{dict(cost.memory_curve)[16] - cost.stream:.2f} nats**;",
            f"**{page.filled([alpha])} characters** after a reset, the loss is within {FILLED}",
            f"astra_beta ({betas[0].parameters / 1e6:.1f} M parameters;",
            f"{seconds['astra_beta'] / 60:.0f} minutes of training steps on two CPU cores, at the",
            f"loss of **{losses}** (seeds {', '.join(str(run.seed) for run in betas)})",
            f"astra_gamma ({gamma.parameters / 1e6:.1f} M;",
            f"{seconds['astra_gamma'] / 3600:.1f} hours) **{large.mean:.3f}**",
            f"each ± {large.standard_error:.3f}, with the weights of the last epoch",
            f"(astra_gamma's best epoch: {large.best.mean:.3f})",
            f"compare with PyTorch {torch} (",
            f"; {json.loads(cast.splitlines()[0])['title']}.",
            f"(batch {self.steps[0].batch_size} × {self.steps[0].num_tokens}, clipping, AdamW)",
            f"on {run.hardware}; medians of {run.rounds} rounds",
        ]


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
