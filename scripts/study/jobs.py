"""The jobs of the study: which runs it needs, and which of them a folder already has."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxgru.cli.options import typed
from jaxgru.errors import UserError
from jaxgru.lm.config import Config, load_config
from jaxgru.lm.runs.folders import load_info, versions
from jaxgru.lm.runs.reports import recipe

SEEDS = {
    "astra_alpha": 3,
    "astra_beta": 3,
    "astra_gamma": 3,
    "scribe_alpha": 1,
    "scribe_beta": 2,
    "scribe_gamma": 1,
    "leviathan": 1,
    "elman_alpha": 3,
    "bengio_mlp": 3,
    "best_gru": 3,
}
"""The number of seeds, from 0 on, that each config is trained with."""

NANOGPT = ("astra_beta", "astra_gamma", "best_gru")
"""The configs that are also evaluated as nanoGPT is: their last epoch and their best one."""

VARIANTS = [
    *({"training.state_dropout": 0, "training.seed": seed} for seed in range(3)),
    *({"model.hidden_dim": size} for size in (32, 64, 256)),
    *({"model.num_layers": number} for number in (2, 3)),
    *({"data.batches": "streams", "training.seed": seed} for seed in range(3)),
    *(
        {"data.batches": "streams", "training.state_dropout": 0, "training.seed": seed}
        for seed in range(3)
    ),
    *({"training.compute_dtype": "bfloat16", "training.seed": seed} for seed in range(3)),
]
"""Changes to astra_alpha, to measure the cost of its dropout, the cost of a reset by size, the
gain of contiguous streams over random crops with and without dropout, and the cost of bfloat16."""


@dataclass(frozen=True)
class Job:
    """One run: a config's name and the fields to change in it, by dotted name."""

    name: str
    overrides: tuple[tuple[str, Any], ...]

    @property
    def config(self) -> Config:
        """The config to train."""
        return load_config(self.name, dict(self.overrides))

    def __str__(self) -> str:
        options = [f"--{name} {typed(value)}" for name, value in self.overrides]
        return " ".join([self.name, *options])


def all_jobs() -> list[Job]:
    """Return every job: the first seed of every config, then the other seeds, then the variants."""
    jobs = []
    for seed, name in itertools.product(range(max(SEEDS.values())), SEEDS):
        if seed < SEEDS[name]:
            overrides = (("training.seed", seed),) if seed else ()
            jobs.append(Job(name, overrides))
    jobs += [Job("astra_alpha", tuple(variant.items())) for variant in VARIANTS]
    return jobs


def find_job(runs: Path, job: Job) -> Path | None:
    """Return the newest run of a job, finished or not, on the study's corpus, or None."""
    config = job.config
    for run in versions(runs / job.name):
        try:
            config_of_run = load_config(run / "config.toml")
            info = load_info(run)
        except UserError:  # of a process that was killed at once
            continue
        same_seed = config_of_run.training.seed == config.training.seed
        if same_seed and recipe(config_of_run) == recipe(config) and not info.lengthened:
            return run
    return None
