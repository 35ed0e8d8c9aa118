"""Train a pretrained model further on a text of one's own, beside one that starts from nothing.

    python examples/fine_tuning.py
    python examples/fine_tuning.py --text my_text.txt --model astra_beta --epochs 4

Both runs have the same text, steps and seed; one has random initial weights, the other those of a
pretrained model, as with `jaxgru train --init astra_alpha --data.corpus my_text.txt`. Of characters
that the model does not know, the rows of the embedding and the head are random; the run says how
many there are.

The text is by default what Python's `help()` says about the language. After the first epoch, the
model that was trained on Shakespeare is ahead by 0.13 nats per character, after the third by 0.02.

It needs what training needs: `pip install ".[train]"`.
"""

import argparse
import json
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

from jaxgru import UserError
from jaxgru.lm import load, load_config
from jaxgru.lm.generation import Options, stream_text
from jaxgru.lm.runs.initial import config_from
from jaxgru.lm.runs.lifecycle import start_run


def validation_losses(run: Path) -> list[float]:
    """Return the loss of each epoch, nats per token."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["val_loss"] for line in lines]


def main() -> None:
    """Parse the arguments, train twice, and print the losses and a text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", type=Path, help="a file in UTF-8; default: Python's language reference")
    add("--model", default="astra_alpha", help="a pretrained model; default: %(default)s")
    add("--epochs", type=int, default=3, help="default: %(default)s")
    add("--steps-per-epoch", type=int, default=200, help="default: %(default)s")
    add("--runs", type=Path, help="folder of the runs; default: a temporary one")
    arguments = parser.parse_args()
    folder = arguments.runs or Path(tempfile.mkdtemp())
    text = arguments.text or folder / "python.txt"
    if not arguments.text:
        text.write_text("\n".join(topics.values()), encoding="utf-8")
    changes = {
        "data.corpus": str(text.absolute()),
        "training.epochs": arguments.epochs,
        "training.steps_per_epoch": arguments.steps_per_epoch,
    }
    try:
        fresh = start_run(load_config(arguments.model, changes), folder)
        tuned = start_run(config_from(arguments.model, changes), folder)
    except UserError as error:
        raise SystemExit(f"fine_tuning.py: {error}") from None
    print(f"validation loss, nats per token: from nothing, from {arguments.model}")
    pairs = zip(validation_losses(fresh), validation_losses(tuned), strict=True)
    for epoch, (from_nothing, from_model) in enumerate(pairs, 1):
        print(f"  epoch {epoch}: {from_nothing:.3f}, {from_model:.3f}")
    params, _, tokenizer = load(tuned)
    prompt = text.read_text(encoding="utf-8")[:20]
    print(*stream_text(params, tokenizer, prompt, Options(num_tokens=200)), sep="")
    print(f"the runs are in {folder}")


if __name__ == "__main__":
    main()
