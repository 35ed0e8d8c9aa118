"""Measures a trained model on the whole validation split: with its state, and without."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from jaxgru.command_line import Parser, load_model, run_script
from jaxgru.dataset import load_dataset
from jaxgru.evaluation import evaluate


def main() -> None:
    """Reads the arguments, makes one call and prints a table."""
    parser = Parser(__doc__)
    parser.add_model()
    arguments = parser.parse_args()

    params, config, tokenizer = load_model(arguments)
    config, dataset = load_dataset(config, tokenizer)
    window = config.training.sequence_length
    losses = evaluate(params, dataset.validation, tokenizer, window)

    table = Table(
        title=f"{config.name}: {losses.num_tokens:,} tokens, {losses.num_characters:,} characters"
    )
    table.add_column("state")
    for unit in ("nats/token", "bits/token", "nats/char", "bits/char"):
        table.add_column(unit, justify="right")
    for name, loss in (
        (f"windows of {window}", losses.windows),
        ("one stream", losses.stream),
        ("stateless", losses.stateless),
    ):
        table.add_row(name, *(f"{value:.4f}" for value in losses.in_units(loss).values()))
    Console().print(table)


if __name__ == "__main__":
    run_script(main)
