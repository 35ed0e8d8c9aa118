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

COMMAND = "jaxgru sample astra_beta --compare --num-tokens 60"
WIDTH = "92"  # of the sample, in columns
SHOWN = ["astra_alpha", "astra_beta", "astra_gamma"]
CONTESTANTS = {
    "jaxgru": "jaxgru",
    "autodiff": "`lax.scan`",
    "nnx": "Flax NNX",
    "haiku": "dm-haiku",
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
    return {"sample": f"```\n$ {COMMAND}\n{shown}\n```", "speeds": speeds()}


def speeds() -> str:
    """Return the table of training steps in milliseconds: a row per config."""
    lines = []
    steps = newest(load_benchmarks(DOCS / "benchmarks.json"), ["training"], "float32")
    for ours, faster in compared(r for r in steps if r.config in SHOWN):
        times = [value(ours, faster[name] * ours.median) for name in CONTESTANTS]
        lines.append([called(ours.config), f"**{times[0]}**", *times[1:]])
    return table(["model", *CONTESTANTS.values()], lines, "lr")


if __name__ == "__main__":
    run_script(main)
