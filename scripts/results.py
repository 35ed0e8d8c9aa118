"""Makes docs/results.md, its figures and its numbers from finished runs, and from nothing else."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import math
import shlex
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxgru import generate, load_run
from jaxgru.checkpointing import RunError
from jaxgru.command_line import Parser, run_script
from jaxgru.config import Config, config_names, load_config
from jaxgru.dataset import load_dataset
from jaxgru.evaluation import evaluate
from jaxgru.files import write_text
from jaxgru.hardware import describe_hardware
from jaxgru.model import Params
from jaxgru.plotting import plot_losses
from jaxgru.tokenizers import Tokenizer

Result = dict[str, Any]


def main() -> None:
    """Reads the arguments; measures every run; writes the page."""
    parser = Parser(__doc__)
    parser.add_argument("--runs", default="runs", help="the folder of the runs (%(default)s)")
    parser.add_argument("--docs", default="docs", help="where to write (%(default)s)")
    parser.add_argument("--note", default="", help="what a reader of the timings should know")
    arguments = parser.parse_args()
    docs = Path(arguments.docs)
    finished = Path(arguments.runs).glob("*/v*/samples.txt")  # the last file that a run writes
    by_config: dict[str, list[Result]] = defaultdict(list)
    for samples in sorted(finished, key=lambda path: int(path.parent.name[1:])):
        result = measure(samples.parent)
        by_config[result["config"]].append(result)
    if not by_config:
        raise RunError(f"there are no finished runs in {arguments.runs}.")
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    write_text(docs / "results.json", json.dumps(by_config, indent=1) + "\n")
    write_text(docs / "results.md", page(by_config, docs / "figures", arguments.note))


def measure(run: Path) -> Result:
    """One run's record by epoch; of a full one, its losses on the validation split and text too."""
    print(f"measuring {run}")
    params, config, tokenizer = load_run(run)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    result = {
        "config": config.name,
        "seed": config.training.seed,
        "full": _is_full(config),
        "records": [json.loads(line) for line in lines],
    }
    return result | _judge(params, config, tokenizer) if result["full"] else result


def _judge(params: Params, config: Config, tokenizer: Tokenizer) -> Result:
    _, dataset = load_dataset(config, tokenizer)
    losses = evaluate(params, dataset.validation, tokenizer, config.training.sequence_length)
    prompt = jnp.asarray(tokenizer.encode("ROMEO: "))[None]
    text = {}
    for name, stateful in (("stateless", False), ("stateful", True)):
        options = {"temperature": 0, "stateful": stateful}
        new, _, _ = generate(params, jax.random.key(0), prompt, 100, **options)
        text[name] = tokenizer.decode(jnp.concatenate([prompt, new], axis=1)[0])
    return {
        "evaluation": {
            name: losses.in_units(getattr(losses, name))
            for name in ("windows", "stream", "stateless")
        },
        "greedy": text,
    }


def page(by_config: dict[str, list[Result]], figures: Path, note: str) -> str:
    """The Markdown of docs/results.md."""
    names = [name for name in config_names() if name in by_config]
    full = {n: r for n in names if (r := [r for r in by_config[n] if r["full"]])}
    short = {n: r[-1] for n in names if (r := [r for r in by_config[n] if not r["full"]])}
    command = shlex.join(["python", "scripts/results.py", *sys.argv[1:]])
    parts = [
        "# Results\n",
        f"Made by `{command}` on {datetime.date.today()}, on {describe_hardware()}. The runs are "
        "those of `python scripts/train.py --config NAME [--training.seed N]`, nothing else set. "
        "Losses "
        "are nats a token; validation is the WHOLE split from zero state in windows of 128 tokens, "
        "where the study publishes one random batch an epoch (noise of about ±0.04).\n",
        "## The whole validation split, after training\n",
        _evaluation_table(full),
        "## Cost\n",
        "Steps a second: median over epochs. Peak memory: the whole process's resident memory on a "
        "CPU, compiler and figures included; the device's own on a GPU. "
        f"{note}\n",
        _cost_table([*itertools.chain(*full.values()), *short.values()]),
    ]
    for name, results in full.items():
        published = load_config(name).published
        figure = figures / f"{name}.png"
        plot_losses(figure, name, [r["records"] for r in results], published)
        parts += [
            f"## {name}\n",
            f"![losses of {name}](figures/{figure.name})\n",
            _epoch_table(results, published.train_loss, published.val_loss),
        ]
        difference = _largest_difference(results, published.train_loss)
        if difference is not None:
            parts.append(
                "Largest difference of a training loss, from the 2nd epoch on, to the nearer "
                f"published run: {difference:.4f}.\n"
            )
        text = results[0]["greedy"]
        parts.append(f"Greedy from `ROMEO: `, seed of training {results[0]['seed']}:\n")
        parts += [f"- {how}: `{json.dumps(text[how])}`\n" for how in ("stateless", "stateful")]
    if short:
        parts += [
            "## Shortened runs\n",
            "These train, and no more is claimed: `--training.epochs 2` and few steps an epoch.\n",
            _short_table(short),
        ]
    return "\n".join(parts)


def _evaluation_table(full: dict[str, list[Result]]) -> str:
    rows = []
    for name, results in full.items():
        for result in results:
            e = result["evaluation"]
            units = ("nats_per_token", "nats_per_character", "bits_per_character")
            cells = [f"{e['windows'][unit]:.4f}" for unit in units]
            cells += [f"{e[how]['nats_per_token']:.4f}" for how in ("stream", "stateless")]
            cost = e["stateless"]["nats_per_token"] - e["stream"]["nats_per_token"]
            rows.append([name, str(result["seed"]), *cells, f"{cost:.4f}"])
    head = ["model", "seed", "windows of 128", "nats a character", "bits a character",
            "one stream", "stateless", "cost of the lost state"]  # fmt: skip
    return _table(head, rows)


def _cost_table(runs: list[Result]) -> str:
    rows = []
    for run in runs:
        name, training = run["config"], load_config(run["config"]).training
        tokens = training.batch_size * training.sequence_length
        rates = [record["tokens_per_second"] / tokens for record in run["records"]]
        seconds = sum(record["seconds"] for record in run["records"])
        memory = max(record["peak_memory_mb"] for record in run["records"])
        steps = run["records"][-1]["step"]
        rows.append([name, str(run["seed"]), f"{steps:,}", f"{statistics.median(rates):.2f}",
                     f"{min(rates):.2f} … {max(rates):.2f}", f"{seconds / 60:.1f}",
                     f"{memory:,.0f}"])  # fmt: skip
    head = ["model", "seed", "steps", "steps/s", "spread", "minutes of steps", "peak memory, MB"]
    return _table(head, rows)


def _epoch_table(results: list[Result], train: tuple, val: tuple) -> str:
    epochs = max(len(runs) for runs in (*train, *(r["records"] for r in results)))
    seeds = [r["seed"] for r in results]
    head = ["epoch", *(f"published train {i + 1}" for i in range(len(train)))]
    head += [f"train, seed {seed}" for seed in seeds]
    head += [f"published validation {i + 1}" for i in range(len(val))]
    head += [f"validation, seed {seed}" for seed in seeds]
    columns = [*train, *([x["train_loss"] for x in r["records"]] for r in results)]
    columns += [*val, *([x["val_loss"] for x in r["records"]] for r in results)]
    rows = []
    for epoch in range(epochs):
        cells = [column[epoch] if epoch < len(column) else float("nan") for column in columns]
        rows.append([str(epoch + 1), *("–" if math.isnan(c) else f"{c:.4f}" for c in cells)])
    return _table(head, rows)


def _short_table(short: dict[str, Result]) -> str:
    rows = [
        [name, str(run["records"][0]["step"]),
         *(f"{x['train_loss']:.4f}" for x in run["records"]),
         *(f"{x['val_loss']:.4f}" for x in run["records"])]
        for name, run in short.items()
    ]  # fmt: skip
    head = ["model", "steps an epoch", "train 1", "train 2", "validation 1", "validation 2"]
    return _table(head, rows)


def _largest_difference(results: list[Result], train: tuple) -> float | None:
    """Of any epoch but the first to the nearer published run; None where none is published."""
    differences = []
    for result in results:
        for i, record in enumerate(result["records"][1:], start=1):
            published = [run[i] for run in train if i < len(run) and not math.isnan(run[i])]
            if published:
                differences.append(min(abs(record["train_loss"] - loss) for loss in published))
    return max(differences, default=None)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _is_full(config: Config) -> bool:
    """Whether a run is the published recipe, whatever its seed."""
    published = load_config(config.name)
    seed = config.training.seed
    return dataclasses.replace(published.training, seed=seed) == config.training and (
        published.model == config.model
    )


if __name__ == "__main__":
    run_script(main)
