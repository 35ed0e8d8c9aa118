"""Copy a finished run's model to jaxgru/lm/pretrained/, with a card that says how it was made.

losses.json, beside it, keeps the losses of all of them for `jaxgru models`.
"""

from __future__ import annotations

import startup  # noqa: F401

import datetime
import json
from pathlib import Path

from jaxgru.analysis.measures import Subject
from jaxgru.cli.options import Parser, run_script
from jaxgru.lm import load, num_params
from jaxgru.lm.config import Config
from jaxgru.lm.data.dataset import Dataset, load_dataset
from jaxgru.lm.evaluation import in_units
from jaxgru.lm.files import write_text
from jaxgru.lm.formats.safetensors import save_safetensors
from jaxgru.lm.pretrained import FOLDER, measured_losses
from jaxgru.lm.runs.folders import RunError, find_run, load_info
from pages.markdown import table
from pages.records import describe_hardware, is_finished
from study.records import Epoch, load_metrics

MAX_BYTES = 20_000_000  # of one model in the package


def main() -> None:
    """Read the arguments, evaluate the run's model, and write the model and its card."""
    parser = Parser(__doc__)
    parser.add_argument("run", help="a run folder, or one of its versions")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write (%(default)s)")
    parser.add_argument("--force", action="store_true", help="replace a model of the same name")
    arguments = parser.parse_args()
    run = find_run(arguments.run)
    if not is_finished(run):
        raise RunError(f"the run {run} is not finished.")
    params, config, tokenizer = load(run)
    target = arguments.folder / f"{config.name}.safetensors"
    if target.exists() and not arguments.force:
        raise RunError(f"{target} exists; to replace it, add --force.")
    if 4 * num_params(params) > MAX_BYTES:
        raise RunError(f"{config.name} is larger than {MAX_BYTES:,} bytes, a release's limit.")
    _, dataset = load_dataset(config, tokenizer, load_info(run).text_sha256)
    subject = Subject(params, dataset, config.training.sequence_length)
    nats = {"windows": subject.loss(subject.window), "stream": subject.stream,
            "stateless": subject.loss(1)}  # fmt: skip
    sizes = len(subject.nats), dataset.num_characters
    losses = {name: in_units(loss, *sizes) for name, loss in nats.items()}
    epochs = load_metrics(run / "metrics.jsonl")
    save_safetensors(target, params, config, tokenizer, dataset.sha256)
    commits = load_info(run).commits
    text = card(config, dataset, num_params(params), losses, epochs, commits)
    write_text(target.with_suffix(".md"), text)
    path = arguments.folder / "losses.json"
    models = measured_losses(arguments.folder) if path.exists() else {}
    models[config.name] = {name: round(units["nats_per_character"], 4)
                           for name, units in losses.items()}  # fmt: skip
    write_text(path, json.dumps(dict(sorted(models.items())), indent=1) + "\n")
    print(f"{config.name} written to {target}")


def card(
    config: Config,
    dataset: Dataset,
    count: int,
    losses: dict[str, dict[str, float]],
    epochs: list[Epoch],
    commits: list[str],
) -> str:
    """Return a model's card in Markdown: the command, seed, commits, data and measured losses."""
    best = min(epochs, key=lambda epoch: epoch.val_loss)
    names = {
        f"state kept within windows of {config.training.sequence_length}": losses["windows"],
        "state never reset: one stream": losses["stream"],
        "state reset before every token": losses["stateless"],
    }
    units = "nats_per_token", "nats_per_character", "bits_per_character"
    rows = [[name, *(f"{loss[unit]:.4f}" for unit in units)] for name, loss in names.items()]
    training, data = config.training, config.data
    initial = f" --init {training.init}" if training.init else ""
    chosen = best if training.patience else epochs[-1]
    rates = {name: rate for name, rate in vars(training).items() if "drop" in name}
    dropout = " (with dropout)" if any(rates.values()) else ""
    by = f"- by jaxgru's commit {', then '.join(commits)}\n" if commits else ""
    head = ["", *(unit.replace("_", " ") for unit in units)]
    return f"""<!-- Made by scripts/maintain/release.py. -->

# {config.name}

- parameters: {count:,}, float32
- made by: `python scripts/train.py --config {config.name} --training.seed \
{training.seed}{initial}`, then `python -m scripts.maintain.release`
- weights of epoch {chosen.epoch} of {len(epochs)}; training loss there {chosen.train_loss:.4f} \
nats per token{dropout}
- seed: {training.seed}
{by}- data: {data.corpus}, SHA-256 `{dataset.sha256}`, its first \
{1 - data.validation_fraction:.0%} \
(the vocabulary: all of it); no other text
- measured on {datetime.date.today()}, on {describe_hardware()}

On the whole validation split ({len(dataset.validation) - 1:,} tokens, \
{dataset.num_characters:,} characters):

{table(head, rows)}"""


if __name__ == "__main__":
    run_script(main)
