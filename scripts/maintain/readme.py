"""Make the sample and the tables of README.md, from a pretrained model and the records."""

from __future__ import annotations

import startup  # noqa: F401

import os
import shlex
import subprocess
import sys

from bench.benchmark_page import compared, newest, value
from bench.records import load as load_benchmarks
from jaxgru.cli.options import Parser, run_script
from jaxgru.errors import UserError
from pages.markdown import DOCS, ROOT, table, write_page
from pages.models import called
from pages.records import load
from study.records import Study
from study.study_page import Page

COMMAND = "jaxgru sample astra_beta --compare --num-tokens 60"
WIDTH = "92"  # of the sample, in columns
SHOWN = ["astra_alpha", "astra_beta", "astra_gamma", "scribe_alpha", "leviathan"]
CONTESTANTS = {
    "jaxgru": "jaxgru",
    "autodiff": "`lax.scan`",
    "nnx": "Flax NNX",
    "haiku": "Haiku",
    "torch.nn": "`torch.nn`",
}


def main() -> None:
    """Remake the tables."""
    Parser(__doc__).parse_args()
    words = [sys.executable, "-m", *shlex.split(COMMAND)]
    environment = os.environ | {"COLUMNS": WIDTH, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"{COMMAND} failed: {done.stderr.strip()}")
    write_page(ROOT / "README.md", tables(done.stdout))


def tables(sample: str) -> dict[str, str]:
    """Return the tables; `sample` is what COMMAND prints."""
    shown = "\n".join(line.rstrip() for line in sample.rstrip().splitlines())
    return {"sample": f"```\n$ {COMMAND}\n{shown}\n```", "results": results(), "speeds": speeds()}


def results() -> str:
    """Return the table of what a reset at every token costs, in nats per character."""
    study, lines = load(DOCS / "study.json", Study), []
    page = Page(study.runs, study.ngrams)
    for name in SHOWN:
        run = page.first[name]
        measured = run.measured
        losses = measured.stream, measured.stateless, measured.sensitivity
        lines.append([run.called, f"{run.parameters:,}",
                      *(f"{measured.per_character(loss):.3f}" for loss in losses)])  # fmt: skip
    return table(
        ["nats per character", "parameters", "state kept", "reset before every token", "cost"],
        lines,
        "lr",
    )


def speeds() -> str:
    """Return the table of training steps in milliseconds: a row per config."""
    lines = []
    steps = newest(load_benchmarks(DOCS / "benchmarks.json"), ["training"], "float32")
    for ours, faster in compared(r for r in steps if r.config in SHOWN[:3]):
        times = [value(ours, faster[name] * ours.median) for name in CONTESTANTS]
        lines.append([called(ours.config), f"**{times[0]}**", *times[1:]])
    return table(["model", *CONTESTANTS.values()], lines, "lr")


if __name__ == "__main__":
    run_script(main)
