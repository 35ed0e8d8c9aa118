"""Train the recipe with which best_gru began, at about a quarter of its size, with changes.

That recipe has two GRU layers of 512 units. Here, the text, the parameters and the steps are 0.27
times as many, so there are about as many passes over the text and parameters for each character
of it. The steps of the warm-up and of the averaged weights are not scaled. The last tenth of the
training text is held out, and the loss is measured on it: the validation text chooses nothing. The
result is added to docs/ablation.json. On one core, a training takes 10 to 20 minutes.
"""

from __future__ import annotations

import startup  # noqa: F401

import datetime
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxgru.cli.options import Parser, run_script
from jaxgru.lm import Config, load, load_config
from jaxgru.lm.config import override
from jaxgru.lm.data.corpus import load_corpus
from jaxgru.lm.data.dataset import load_dataset
from jaxgru.lm.evaluation import window_loss
from jaxgru.lm.runs.commits import current_commit
from jaxgru.lm.runs.lifecycle import start_run
from jaxgru.parallel.hardware import describe_hardware
from pages.records import add_to
from study.records import Ablation

WINDOW = 256  # of nanoGPT's test
CHARACTERS = 276_000
SMALLER = {"model.hidden_dim": 256, "training.epochs": 8}  # 0.27 times the parameters and steps
PLAIN = {"model.cell": "gru", "training.weight_drop": 0.2}  # what best_gru has changed since

THREE = {"model.num_layers": 3, "model.hidden_dim": 205}  # 2 % more parameters
MOGRIFIER = {"model.cell": "mogrifier_gru", "model.hidden_dim": 230}
LONGER = {"training.sequence_length": 128, "training.batch_size": 32}  # as many tokens
STRONGER = {
    "training.input_dropout": 0.1,
    "training.between_dropout": 0.3,
    "training.output_dropout": 0.4,
}
CHANGES: dict[str, dict[str, Any]] = {
    "none": {},
    "no weight drop": {"training.weight_drop": 0.0},
    "weight drop 0.4": {"training.weight_drop": 0.4},
    "weight drop 0.4 and twice the dropout": STRONGER | {"training.weight_drop": 0.4},
    "no averaged weights": {"training.ema_decay": 0.0},
    "random crops instead of streams": {
        "data.batches": "crops",
        "training.random_offset": False,
        "training.reset_probability": 0.0,
    },
    "twice the steps": {"training.epochs": 16},
    "twice the steps and weight drop 0.4": {
        "training.epochs": 16,
        "training.weight_drop": 0.4,
    },
    "LSTM, 222 units": {"model.cell": "lstm", "model.hidden_dim": 222},
    "four layers, 177 units": {"model.num_layers": 4, "model.hidden_dim": 177},
    "three layers, 205 units": THREE,
    "sequences of 128, 32 rows": LONGER,
    "three layers, 205 units; sequences of 128, 32 rows": THREE | LONGER,
    "input dropout 0.2": {"training.input_dropout": 0.2},
    "Mogrifier GRU, 230 units": MOGRIFIER,
    "Mogrifier GRU, 230 units; weight drop 0.3": MOGRIFIER | {"training.weight_drop": 0.3},  # now
    "Mogrifier GRU, 230 units; five eighths of the steps": MOGRIFIER | {"training.epochs": 5},
    "Mogrifier GRU, 230 units; weight drop 0.4, one and a half times the dropout": MOGRIFIER
    | {
        "training.weight_drop": 0.4,
        "training.input_dropout": 0.075,
        "training.between_dropout": 0.225,
        "training.output_dropout": 0.3,
    },
}
"""What is changed in the recipe, by the title of its row."""


def main() -> None:
    """Read the arguments, train, and write the losses beside those of other trainings."""
    parser = Parser(__doc__)
    parser.add_argument("titles", nargs="*", metavar="change", help="title of a row (all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="(0)")
    output = Path("docs/ablation.json")
    parser.add_argument("--output", type=Path, default=output, help="(%(default)s)")
    arguments = parser.parse_args()
    if unknown := set(arguments.titles) - CHANGES.keys():
        parser.error(f"there is no change {unknown.pop()!r}; there are: {'; '.join(CHANGES)}.")
    place = {title: i for i, title in enumerate(CHANGES)}  # rows that the script has lost come last
    order = lambda row: (place.get(row.title, len(place)), row.title, row.seed)
    for seed in arguments.seeds:
        for title in arguments.titles or CHANGES:
            result = trained(title, seed)
            Console(highlight=False).print(f"{title}, seed {seed}: {result.loss}")
            add_to(arguments.output, result, order)


def trained(title: str, seed: int) -> Ablation:
    """Train the recipe with a change, and return its loss on the held-out text."""
    with tempfile.TemporaryDirectory() as folder:
        config = changed(Path(folder), CHANGES[title], seed)
        run = start_run(config, Path(folder))
        params, config, tokenizer = load(run)
        tokens = load_dataset(config, tokenizer)[1].validation
        return Ablation(
            title=title,
            seed=seed,
            loss=round(window_loss(params, tokens, WINDOW), 4),
            date=str(datetime.date.today()),
            hardware=describe_hardware(),
            commit=current_commit(),
        )


def changed(folder: Path, changes: dict[str, Any], seed: int) -> Config:
    """Return the config of a training, whose two texts are written to the folder."""
    text = load_corpus("tiny_shakespeare").text
    end = int(0.9 * len(text))  # of the training text
    held_out = int(0.9 * end)
    (folder / "text.txt").write_text(text[held_out - CHARACTERS : held_out], encoding="utf-8")
    (folder / "held_out.txt").write_text(text[held_out:end], encoding="utf-8")
    texts = {"data.corpus": f"{folder}/text.txt", "data.validation": f"{folder}/held_out.txt"}
    config = load_config("best_gru", SMALLER | PLAIN | texts | {"training.seed": seed})
    return override(config, changes)


if __name__ == "__main__":
    run_script(main)
