"""Copy a finished run's model to jaxgru/lm/pretrained/, with a card that says how it was made."""

from __future__ import annotations

import startup  # noqa: F401

import datetime
from pathlib import Path

from jaxgru.cli.options import Parser, run_script
from jaxgru.lm import Scores, evaluate, load, num_params
from jaxgru.lm.config import Config
from jaxgru.lm.data.dataset import load_dataset
from jaxgru.lm.evaluation import in_units
from jaxgru.lm.files import write_text
from jaxgru.lm.formats.safetensors import save_safetensors
from jaxgru.lm.pretrained import FOLDER
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
    window = config.training.sequence_length
    losses = evaluate(params, dataset.validation, dataset.num_characters, window)
    epochs = load_metrics(run / "metrics.jsonl")
    save_safetensors(target, params, config, tokenizer, dataset.sha256)
    text = card(config, dataset.sha256, num_params(params), losses, epochs, load_info(run).commits)
    write_text(target.with_suffix(".md"), text)
    print(f"{config.name} written to {target}")


def card(
    config: Config,
    text_sha256: str,
    count: int,
    losses: dict[str, Scores],
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
    sizes = losses["stream"].num_tokens, losses["stream"].num_characters
    rows = [[name, *(f"{in_units(scores.loss, *sizes)[unit]:.4f}" for unit in units)]
            for name, scores in names.items()]  # fmt: skip
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
{by}- data: {data.corpus}, SHA-256 `{text_sha256}`, its first {1 - data.validation_fraction:.0%} \
(the vocabulary: all of it); no other text
- measured on {datetime.date.today()}, on {describe_hardware()}

On the whole validation split ({sizes[0]:,} tokens, {sizes[1]:,} characters):

{table(head, rows)}"""


if __name__ == "__main__":
    run_script(main)
