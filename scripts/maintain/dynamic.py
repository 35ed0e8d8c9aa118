"""Evaluate models that learn as they read (dynamic evaluation), and write docs/dynamic.json.

For each model with a state: its settings, chosen on the end of the training text; the losses of the
validation split, static and dynamic, in one stream and with the state (never the weights) reset
every few tokens; and both losses along the text, for the figure.
"""

from __future__ import annotations

import startup  # noqa: F401

import datetime
from pathlib import Path

import numpy as np
from jaxtyping import Float
from rich.console import Console

from jaxgru.cli.options import Parser, run_script
from jaxgru.lm import load
from jaxgru.lm.data.dataset import load_dataset
from jaxgru.lm.dynamic import CHOSEN_ON, choose_dynamic, dynamic_nll
from jaxgru.lm.evaluation import stream_nll, window_nll
from jaxgru.lm.runs.commits import current_commit
from jaxgru.parallel.hardware import describe_hardware
from pages.records import add_to
from study.records import DYNAMIC_PARTS, DynamicEvaluation

RESETS = (1, 8, 32, 128, 1024)


def main() -> None:
    """Read the arguments, measure, and write each model's record as soon as it is complete."""
    parser = Parser(__doc__)
    add = parser.add_argument
    models = ["elman_alpha", "astra_alpha", "scribe_alpha", "astra_beta", "astra_gamma", "best_gru"]
    add("--models", nargs="+", default=models, help="pretrained, or runs (%(default)s)")
    add("--output", type=Path, default=Path("docs/dynamic.json"), help="(%(default)s)")
    arguments = parser.parse_args()
    for model in arguments.models:
        record = measure(model)
        add_to(arguments.output, record, lambda record: record.model)
        Console(highlight=False, markup=False).print(
            f"{record.model}: {record.static:.4f} → {record.dynamic:.4f} nats per token"
        )


def measure(model: str) -> DynamicEvaluation:
    """Return the record of a pretrained model, or of a run, by the name of its config."""
    params, config, tokenizer = load(model)
    dataset = load_dataset(config, tokenizer)[1]
    tokens = dataset.validation
    chosen = choose_dynamic(params, dataset.train[-CHOSEN_ON:])
    static, dynamic = stream_nll(params, tokens), dynamic_nll(params, tokens, chosen)
    resets = [
        (every, round(float(window_nll(params, tokens, every).mean()), 4),
         round(float(dynamic_nll(params, tokens, chosen, every).mean()), 4))
        for every in RESETS
    ]  # fmt: skip
    return DynamicEvaluation(
        model=config.name,
        learning_rate=chosen.learning_rate, decay=chosen.decay, every=chosen.every,
        static=round(float(static.mean()), 4), dynamic=round(float(dynamic.mean()), 4),
        num_tokens=len(tokens) - 1, num_characters=dataset.num_characters, resets=resets,
        static_parts=parts(static), dynamic_parts=parts(dynamic),
        date=str(datetime.date.today()), hardware=describe_hardware(), commit=current_commit(),
    )  # fmt: skip


def parts(nll: Float[np.ndarray, "N"]) -> list[float]:
    """Return the mean loss of each of DYNAMIC_PARTS equal parts of the text."""
    return [round(float(part.mean()), 4) for part in np.array_split(nll, DYNAMIC_PARTS)]


if __name__ == "__main__":
    run_script(main)
