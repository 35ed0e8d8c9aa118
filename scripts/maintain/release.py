"""Copy a finished run's model to the trained ones, with a card that says how it was made.

A model of at most 3 MB goes to jaxgru/lm/pretrained/, a larger one to models/jaxgru_models/. The
first folder's losses.json keeps the losses of all of them for `jaxgru models`.
"""

from __future__ import annotations

import startup  # noqa: F401

import datetime
import json
from pathlib import Path

from jaxgru.analysis.measures import Subject
from jaxgru.cli.options import Parser, run_script
from jaxgru.files import write_text
from jaxgru.lm import load, num_params
from jaxgru.lm.config import Config
from jaxgru.lm.data.dataset import Dataset, load_dataset
from jaxgru.lm.evaluation import in_units
from jaxgru.lm.formats.safetensors import save_safetensors
from jaxgru.lm.pretrained import FOLDER, LARGE_MODELS, measured_losses
from jaxgru.lm.runs.folders import RunError, find_run, load_info
from pages.markdown import table
from pages.measurements import describe_hardware, is_finished
from study.study_records import Epoch, load_metrics

MAX_BYTES = 20_000_000  # of one model
MAX_BYTES_IN_PACKAGE = 3_000_000  # of one that everybody downloads who uses a layer


def main() -> None:
    """Read the arguments, evaluate the run's model, and write the model and its card."""
    parser = Parser(__doc__)
    parser.add_argument("run", help="a run folder, or one of its versions")
    parser.add_argument("--folder", type=Path, help="where to write instead, losses.json as well")
    parser.add_argument("--force", action="store_true", help="replace a model of the same name")
    arguments = parser.parse_args()
    run = find_run(arguments.run)
    if not is_finished(run):
        raise RunError(f"the run {run} is not finished.")
    params, config, tokenizer = load(run)
    num_bytes = 4 * num_params(params)
    by_size = FOLDER if num_bytes <= MAX_BYTES_IN_PACKAGE else LARGE_MODELS
    target = (arguments.folder or by_size) / f"{config.name}.safetensors"
    if target.exists() and not arguments.force:
        raise RunError(f"{target} exists; to replace it, add --force.")
    if num_bytes > MAX_BYTES:
        raise RunError(f"{config.name} is larger than {MAX_BYTES:,} bytes, a release's limit.")
    info = load_info(run)
    _, dataset = load_dataset(config, tokenizer, info.text_sha256)
    losses = evaluate(Subject(params, dataset, config.training.sequence_length))
    epochs = load_metrics(run / "metrics.jsonl")
    save_safetensors(target, params, config, tokenizer, dataset.sha256)
    text = card(config, dataset, num_params(params), losses, epochs, info.commits)
    write_text(target.with_suffix(".md"), text)
    write_losses(arguments.folder or FOLDER, config.name, losses)
    print(f"{config.name} written to {target}")


def evaluate(subject: Subject) -> dict[str, dict[str, float]]:
    """Return the model's losses on the validation split, by treatment of the state and unit."""
    nats = {
        "windows": subject.loss(subject.window),
        "stream": subject.stream,
        "stateless": subject.loss(1),
    }
    num_tokens = len(subject.nats)
    num_characters = subject.text.num_characters
    return {name: in_units(loss, num_tokens, num_characters) for name, loss in nats.items()}


def write_losses(folder: Path, name: str, losses: dict[str, dict[str, float]]) -> None:
    """Add a model to the folder's losses.json, in nats per character."""
    path = folder / "losses.json"
    by_model = measured_losses(folder) if path.exists() else {}
    by_model[name] = {
        treatment: round(units["nats_per_character"], 4) for treatment, units in losses.items()
    }
    write_text(path, json.dumps(dict(sorted(by_model.items())), indent=1) + "\n")


def card(
    config: Config,
    dataset: Dataset,
    count: int,
    losses: dict[str, dict[str, float]],
    epochs: list[Epoch],
    commits: list[str],
) -> str:
    """Return a model's card in Markdown: the command, seed, commits, data and measured losses."""
    training = config.training
    data = config.data
    best = min(epochs, key=lambda epoch: epoch.val_loss)
    epoch_of_weights = best if training.patience else epochs[-1]
    rates = [rate for name, rate in vars(training).items() if "drop" in name]
    dropout = " (with dropout)" if any(rates) else ""
    init_option = f" --init {training.init_from}" if training.init_from else ""
    by = f"- by jaxgru's commit {', then '.join(commits)}\n" if commits else ""
    return f"""<!-- Made by scripts/maintain/release.py. -->

# {config.name}

- parameters: {count:,}, float32
- made by: `python scripts/train.py --config {config.name} --training.seed \
{training.seed}{init_option}`, then `python -m scripts.maintain.release`
- weights of epoch {epoch_of_weights.epoch} of {len(epochs)}; training loss there \
{epoch_of_weights.train_loss:.4f} nats per token{dropout}
- seed: {training.seed}
{by}- data: {data.corpus}, SHA-256 `{dataset.sha256}`, its first \
{1 - data.validation_fraction:.0%} \
(the vocabulary: all of it); no other text
- measured on {datetime.date.today()}, on {describe_hardware()}

On the whole validation split ({len(dataset.validation) - 1:,} tokens, \
{dataset.num_characters:,} characters):

{losses_table(training.sequence_length, losses)}"""


def losses_table(window: int, losses: dict[str, dict[str, float]]) -> str:
    """Return the card's table of losses: a row per treatment of the state, a column per unit."""
    names = {
        "windows": f"state kept within windows of {window}",
        "stream": "state never reset: one stream",
        "stateless": "state reset before every token",
    }
    units = ("nats_per_token", "nats_per_character", "bits_per_character")
    head = ["", *(unit.replace("_", " ") for unit in units)]
    rows = [
        [text, *(f"{losses[treatment][unit]:.4f}" for unit in units)]
        for treatment, text in names.items()
    ]
    return table(head, rows)


if __name__ == "__main__":
    run_script(main)
