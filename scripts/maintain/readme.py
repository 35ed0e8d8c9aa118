"""Make the sample and the tables of README.md, from a pretrained model and the records."""

from __future__ import annotations

import startup  # noqa: F401

import math
import os
import re
import shlex
import subprocess
import sys

from bench import benchmark_page
from bench.records import ONE_DEVICE, ContestantTime
from jaxgru.cli.options import Parser, run_script
from jaxgru.errors import UserError
from jaxgru.lm.config import load_config
from pages.markdown import DOCS, ROOT, table, write_page
from pages.records import grouped, load
from study.records import Study
from study.study_page import FILLED, Page, lowest_to_highest

COMMAND = "jaxgru sample astra_beta --compare --num-tokens 90"
WIDTH = "92"  # of the sample, in columns


def main() -> None:
    """Remake the tables."""
    Parser(__doc__).parse_args()
    words = [sys.executable, "-m", *shlex.split(COMMAND)]
    environment = os.environ | {"COLUMNS": WIDTH, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"{COMMAND} failed: {done.stderr.strip()}")
    records = Records()
    write_page(ROOT / "README.md", records.tables(done.stdout), records.expected_sentences())


class Records:
    """What README.md is about: the study's runs, and the training steps measured last."""

    def __init__(self) -> None:
        study = load(DOCS / "study.json", Study)
        self.page = Page(study.runs, study.ngrams)
        self.benchmarks = benchmark_page.load(DOCS / "benchmarks.json")
        records = benchmark_page.drawn(self.benchmarks)
        if not records:
            raise UserError(
                "docs/benchmarks.json has no training steps; scripts/benchmark.py adds them."
            )
        last = max(record.run for record in records if record.config == records[0].config)
        self.steps = [record for record in records if record.run == last]  # they took turns

    def tables(self, sample: str) -> dict[str, str]:
        """Return the tables; `sample` is what COMMAND prints."""
        shown = "\n".join(line.rstrip() for line in sample.rstrip().splitlines())
        return {
            "sample": f"```\n$ {COMMAND}\n{shown}\n```",
            "results": results(self.page),
            "speeds": speeds(self.steps),
        }

    def expected_sentences(self) -> list[str]:
        """Return what stands in the sentences of README.md, with the numbers of the records."""
        page, run = self.page, self.benchmarks.runs[self.steps[0].run]
        cost = page.first["astra_alpha"].measured
        right, wrong = (100 * math.exp(-loss) for loss in (cost.stream, cost.stateless))
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        ppo = [r for (kind, *_), r in benchmark_page.ppo_ratios(self.benchmarks).items()
               if kind == "ppo"]  # fmt: skip
        of_ppo = f"trains [{benchmark_page.span(ppo).removesuffix('×')} times](docs/performance.md)"
        torch = re.search(r'"torch==(.*)"', project)[1]
        return [
            *([of_ppo] if ppo else []),
            f"trains {ratios(self.steps, ['autodiff', 'nnx', 'haiku'])} times as fast as with",
            f"{ratios(self.steps, ['nnx', 'haiku'], ONE_DEVICE)} times](docs/performance.md)",
            f"compare with PyTorch {torch} (",
            f"(batch {self.steps[0].batch_size} × {self.steps[0].num_tokens}, clipping, AdamW)",
            f"on {run.hardware}; medians of {run.rounds} rounds",
            f"**{cost.sensitivity:.2f} nats per character**: {cost.stateless:.3f}, not "
            f"{cost.stream:.3f}.",
            f"right next character a probability of {wrong:.0f} % instead of {right:.0f} % "
            "(geometric means).",
            f"counts ({page.bigram:.3f})",
            f"**{page.filled([page.first['astra_alpha']])} characters** after a reset",
            f"back to within {FILLED}",
            f"{page.first['best_gru'].parameters / 1e6:.1f} million parameters, has a loss of "
            f"{lowest_to_highest(page.losses_as_nanogpt('best_gru'))};",
        ]


def ratios(records: list[ContestantTime], names: list[str], way: str = "") -> str:
    """Return the lowest and the highest time of these contestants as a multiple of jaxgru's."""
    times = {(record.config, record.contestant): record.median for record in records}
    multiples = [time / times[config, f"jaxgru{way}"] for (config, name), time in times.items()
                 if name in [f"{peer}{way}" for peer in names]]  # fmt: skip
    return f"{min(multiples):.1f} to {max(multiples):.1f}"


SHOWN = ["astra_alpha", "astra_beta", "astra_gamma", "scribe_alpha", "leviathan"]


def results(page: Page) -> str:
    """Return the table of what a reset at every token costs, in nats per character."""
    lines = []
    for name in SHOWN:
        run = page.first[name]
        config, measured = load_config(name).model, run.measured
        kept, reset, cost = (
            measured.per_character(loss)
            for loss in (measured.stream, measured.stateless, measured.sensitivity)
        )
        unit = "characters" if measured.num_tokens == measured.num_characters else "subwords"
        lines.append([
            f"{name}: {config.cell.upper()}, {unit}",
            f"{run.parameters:,}",
            *(f"{loss:.3f}" for loss in (kept, reset, cost)),
        ])  # fmt: skip
    return table(
        ["nats per character", "parameters", "state kept", "reset before every token", "cost"],
        lines,
        "lr",
    )


CONTESTANTS = {
    "jaxgru": "jaxgru",
    "autodiff": "`lax.scan`",
    "nnx": "Flax NNX",
    "haiku": "Haiku",
    "torch.nn": "`torch.nn`",
}


def speeds(records: list[ContestantTime]) -> str:
    """Return the table of training steps in milliseconds: a row per config."""
    lines = []
    for name, same in grouped(records, lambda record: record.config).items():
        times = {record.contestant: 1000 * record.median for record in same}
        model = load_config(name).model
        shown = [f"{times[peer]:,.3g}" if times[peer] < 1000 else f"{times[peer]:,.0f}"
                 for peer in CONTESTANTS]  # fmt: skip
        sizes = f"{model.cell.upper()}, {model.num_layers} × {model.hidden_dim} ({name})"
        lines.append([sizes, f"**{shown[0]}**", *shown[1:]])
    return table(["model", *CONTESTANTS.values()], lines, "lr")


if __name__ == "__main__":
    run_script(main)
