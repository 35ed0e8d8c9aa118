"""Measures what a trained model loses with its state, on the whole validation split."""

from __future__ import annotations

import startup  # noqa: F401

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxgru import study
from jaxgru.command_line import Parser, load_model, run_script
from jaxgru.dataset import load_dataset
from jaxgru.evaluation import in_units
from jaxgru.run_folders import find_run


def main() -> None:
    """Reads the arguments, makes one call and prints tables."""
    parser = Parser(__doc__)
    parser.add_model()
    parser.add_argument(
        "--save", action="store_true", help="write it all into the run, too, as report.py reads it"
    )
    arguments = parser.parse_args()
    if arguments.save and (arguments.run is None or arguments.run.endswith(".safetensors")):
        parser.error("--save writes into a run folder; name one with --run.")

    params, config, tokenizer = load_model(arguments)
    config, dataset = load_dataset(config, tokenizer)
    window = config.training.sequence_length
    console = Console(highlight=False)
    with console.status("compiling") as status:
        record = study.measure(
            params, tokenizer, dataset, window, lambda what: status.update(f"measuring {what}")
        )
    if arguments.save:
        study.save_record(find_run(arguments.run), record)
    for table in (
        _losses(config.name, window, record),
        _text(record["text"]),
        _chain(record["chain"]),
    ):
        console.print(table)


def _losses(name: str, window: int, record: study.Record) -> Table:
    tokens, characters = record["num_tokens"], record["num_characters"]
    table = Table(title=f"{name}: {tokens:,} tokens, {characters:,} characters")
    table.add_column("state put back to zeros")
    for unit in ("nats/token", "bits/token", "nats/char", "bits/char"):
        table.add_column(unit, justify="right")
    rows = [
        ("every token: stateless" if every == 1 else f"every {every:,} tokens", loss)
        for every, loss in record["memory_curve"]
    ]
    for what, loss in (
        *rows,
        ("never: one stream", record["stream"]),
        (f"windows of {window}, as in training", record["windows"]),
        ("sensitivity: stateless less one stream", record["sensitivity"]),
    ):
        units = in_units(loss, tokens, characters)
        table.add_row(what, *(f"{value:.4f}" for value in units.values()))
    return table


def _text(record: study.Record) -> Table:
    table = Table(
        title=f"text from {study.NUM_PROMPTS} prompts: greedy for loops, else temperature "
        f"{study.TEMPERATURE}, top-k {study.TOP_K}"
    )
    table.add_column("")
    for name in record:
        table.add_column(name, justify="right")
    for measure, title in study.TEXT_MEASURES.items():
        cells = [values.get(measure) for values in record.values()]
        table.add_row(title, *("–" if value is None else f"{value:.4g}" for value in cells))
    return table


def _chain(record: study.Record) -> Table:
    table = Table(
        title=f"the stateless chain: {record['kl_to_bigram']:.4f} nats a token from the counted "
        "bigram, weighted by the corpus"
    )
    table.add_column("greedy text ends in")
    table.add_column("period", justify="right")
    table.add_column("from so many of the tokens", justify="right")
    for cycle in record["cycles"]:
        # as Text, for in a plain str Rich takes "[/b]" for markup
        table.add_row(Text(repr(cycle["text"])), str(cycle["period"]), f"{cycle['basin']:.0%}")
    return table


if __name__ == "__main__":
    run_script(main)
