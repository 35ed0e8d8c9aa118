"""Puts a finished run's model into jaxgru/pretrained/, with a card that says how it was made."""

from __future__ import annotations

import startup  # noqa: F401

import datetime
from pathlib import Path

from jaxgru import load_run, num_params
from jaxgru.command_line import Parser, run_script
from jaxgru.config import Config
from jaxgru.dataset import load_dataset
from jaxgru.evaluation import Losses, evaluate
from jaxgru.files import write_text
from jaxgru.hardware import describe_hardware
from jaxgru.interop.safetensors import save_safetensors
from jaxgru.pretrained import FOLDER
from jaxgru.records import load_metrics
from jaxgru.run_folders import RunError, find_run, is_finished

MAX_BYTES = 5_000_000  # what the package may carry of one model


def main() -> None:
    """Reads the arguments, measures the run's model, and writes the model and its card."""
    parser = Parser(__doc__)
    parser.add_argument("run", help="a run folder, or one of its versions")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write (%(default)s)")
    parser.add_argument("--force", action="store_true", help="replace a model of the same name")
    arguments = parser.parse_args()
    run = find_run(arguments.run)
    if not is_finished(run):
        raise RunError(f"the run {run} is not finished.")
    params, config, tokenizer = load_run(run)
    target = arguments.folder / f"{config.name}.safetensors"
    if target.exists() and not arguments.force:
        raise RunError(f"{target} exists; to replace it, add --force.")
    if 4 * num_params(params) > MAX_BYTES:
        raise RunError(f"{config.name} is larger than the {MAX_BYTES:,} bytes that may ship.")
    _, dataset = load_dataset(config, tokenizer)
    losses = evaluate(params, dataset.validation, tokenizer, config.training.sequence_length)
    epochs = load_metrics(run / "metrics.jsonl")
    save_safetensors(target, params, config, tokenizer)
    write_text(target.with_suffix(".md"), card(config, num_params(params), losses, epochs))
    print(f"{config.name} written to {target}")


def card(config: Config, count: int, losses: Losses, epochs: list[dict[str, float]]) -> str:
    """The Markdown of a model's card: the command, seed, data and measured losses."""
    best = min(epochs, key=lambda record: record["val_loss"])
    chosen = best if config.training.patience else epochs[-1]
    with_dropout = " (with dropout)" if config.model.dropout else ""
    rows = [
        f"| {name} | {units['nats_per_token']:.4f} | {units['nats_per_character']:.4f} "
        f"| {units['bits_per_character']:.4f} |"
        for name, loss in (
            (f"state kept within windows of {config.training.sequence_length}", losses.windows),
            ("state never put back: one stream", losses.stream),
            ("state thrown away: stateless", losses.stateless),
        )
        for units in [losses.in_units(loss)]
    ]
    return "\n".join(
        [
            f"# {config.name}\n",
            f"- parameters: {count:,}, float32",
            f"- made by: `python scripts/train.py --config {config.name} "
            f"--training.seed {config.training.seed}`, then `python scripts/release.py`",
            f"- weights of epoch {chosen['epoch']} of {len(epochs)}; training loss there "
            f"{chosen['train_loss']:.4f} nats a token{with_dropout}",
            f"- seed: {config.training.seed}",
            f"- data: {config.data.corpus}, SHA-256 `{config.data.sha256}`, its first "
            f"{1 - config.data.validation_fraction:.0%} (the vocabulary: all of it); no other text",
            f"- measured on {datetime.date.today()}, on {describe_hardware()}\n",
            f"On the whole validation split ({losses.num_tokens:,} tokens, "
            f"{losses.num_characters:,} characters):\n",
            "| | nats a token | nats a character | bits a character |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    run_script(main)
