"""Train the first steps of a GRU model in PyTorch: how long is its loss that of the frequencies?

scribe_gamma predicts each token by its frequency alone for hundreds of steps. This trains the same
model by the PyTorch reference, with PyTorch's own initial weights, batches and dropout; with 450
steps, in about an hour. The result, docs/plateau.json, has the mean loss of every 25 steps.
"""

from __future__ import annotations

import sys
from os.path import dirname

sys.path.insert(0, dirname(dirname(dirname(__file__))))  # torchref
sys.path.insert(0, dirname(dirname(__file__)))

import startup  # noqa: F401

import datetime
import statistics
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

import torchref
from jaxgru.cli.options import Parser, run_script
from jaxgru.config import Config, load_config
from jaxgru.data.dataset import load_dataset
from jaxgru.errors import UserError
from jaxgru.files import write_text
from jaxgru.parallel.hardware import describe_hardware
from pages.records import PLATEAU_MEAN, Plateau, dumps


def main() -> None:
    """Read the arguments, train and write the losses."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--config", default="scribe_gamma", help="of a GRU (%(default)s)")
    add("--seed", type=int, default=0, help="PyTorch's seed (%(default)s)")
    add("--steps", type=int, default=450, help="of training, at most an epoch (%(default)s)")
    add("--output", type=Path, default=Path("docs/plateau.json"), help="(%(default)s)")
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    model = config.model
    if model.cell != "gru" or model.dropout_site != "state" or model.layer_norm:
        raise UserError(f"{config.name} is not a GRU with dropout inside its recurrence.")
    most = config.training.steps_per_epoch  # afterwards, the learning rate changes
    if not 0 < arguments.steps <= most or arguments.steps % PLATEAU_MEAN:
        raise UserError(
            f"--steps is {arguments.steps}; it must be a multiple of {PLATEAU_MEAN} and at most "
            f"{most}, an epoch."
        )
    config, dataset = load_dataset(config)
    tokens = torch.from_numpy(dataset.train.astype(np.int64))
    losses = train(config, tokens, arguments.seed, arguments.steps)
    result = Plateau(
        config=config.name,
        seed=arguments.seed,
        losses=[round(statistics.mean(losses[i : i + PLATEAU_MEAN]), 3)
                for i in range(0, len(losses), PLATEAU_MEAN)],
        date=str(datetime.date.today()),
        hardware=f"{describe_hardware().rpartition(', ')[0]}, PyTorch {torch.__version__}",
    )  # fmt: skip
    write_text(arguments.output, dumps(result) + "\n")
    Console(highlight=False).print(f"{result}\n{arguments.output} written")


def train(config: Config, tokens: torch.Tensor, seed: int, steps: int) -> list[float]:
    """Return the loss of each training step: the config's recipe, all random numbers PyTorch's."""
    torch.manual_seed(seed)
    m, t = config.model, config.training
    model = torchref.MyGRUModel(
        m.vocab_size, m.embedding_dim, m.hidden_dim, m.num_layers, m.dropout,
        second_bias=m.second_bias,
    )  # fmt: skip
    optimizer, schedule = torchref.make_optimizer(model, t.learning_rate, t.epochs, t.weight_decay)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(0, len(tokens) - t.sequence_length - 1, (t.batch_size,))
        crops = tokens[starts[:, None] + torch.arange(t.sequence_length + 1)]
        return crops[:, :-1], crops[:, 1:]

    batches = (batch() for _ in track(range(steps), "training"))
    return torchref.train_epoch(model, optimizer, schedule, batches, t.max_grad_norm)


if __name__ == "__main__":
    run_script(main)
