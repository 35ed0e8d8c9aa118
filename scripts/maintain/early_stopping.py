"""Stop a run early by one random validation batch per epoch, as the study does, many times.

The run has kept the model of each of its epochs, and was not stopped early itself:

  python scripts/train.py --config scribe_alpha --training.patience 0 --training.keep_epochs true

The result, docs/early_stopping.json, says how often each epoch would have been the best one.
"""

from __future__ import annotations

import startup  # noqa: F401

from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.progress import track

from jaxgru.cells.base import AnyArray
from jaxgru.cli.options import Parser, run_script
from jaxgru.lm import Params, apply, load
from jaxgru.lm.data.dataset import load_dataset
from jaxgru.lm.files import write_text
from jaxgru.lm.model import token_nll
from jaxgru.lm.runs.folders import (
    EPOCHS_FOLDER,
    RunError,
    find_run,
    load_info,
    load_run_config,
)
from pages.records import dumps
from study.records import EarlyStopping

STRIDE = 4  # tokens between the starts of two windows from which the batches are drawn


def main() -> None:
    """Read the arguments, evaluate each epoch's model, draw the batches and write the result."""
    parser = Parser(__doc__)
    parser.add_argument("run", help="a run folder, or one of its versions")
    parser.add_argument("--patience", type=int, default=5, help="in epochs (%(default)s)")
    parser.add_argument("--draws", type=int, default=1000, help="runs (%(default)s)")
    output = Path("docs/early_stopping.json")
    parser.add_argument("--output", type=Path, default=output, help="(%(default)s)")
    arguments = parser.parse_args()
    run = find_run(arguments.run)
    config = load_run_config(run)
    names = [f"{i + 1:03}.safetensors" for i in range(config.training.epochs)]
    models = [run / EPOCHS_FOLDER / name for name in names]
    if not all(path.exists() for path in models):
        raise RunError(f"the run {run} has not kept the model of each of its epochs.")
    _, dataset = load_dataset(config, load(run)[2], load_info(run).text_sha256)
    windows = [
        window_losses(load(path)[0], dataset.validation, config.training.sequence_length)
        for path in track(models, "evaluating each epoch")
    ]
    losses = draw(np.stack(windows), arguments.draws, config.training.batch_size)
    best = Counter(best_before_stopping(row, arguments.patience) for row in losses.tolist())
    result = EarlyStopping(
        config=config.name,
        draws=arguments.draws,
        patience=arguments.patience,
        losses=[round(float(loss), 5) for loss in losses.mean(axis=0)],
        noise=round(float(losses.std(axis=0, ddof=1).mean()), 5),
        best=[best[epoch + 1] for epoch in range(len(models))],
    )
    write_text(arguments.output, dumps(result) + "\n")
    Console(highlight=False).print(f"{result}\n{arguments.output} written")


def window_losses(
    params: Params, tokens: Int[AnyArray, "N"], window: int
) -> Float[np.ndarray, "M"]:
    """Return the mean nats per token of the windows that start every STRIDE tokens.

    Each starts from the zero state.
    """
    starts = np.arange(0, len(tokens) - window, STRIDE)
    at = starts[:, None] + np.arange(window)
    parts = np.split(at, range(64, len(at), 64))
    tokens = jnp.asarray(tokens)
    losses = [_row_losses(params, tokens[part], tokens[part + 1]) for part in parts]
    return np.concatenate([np.asarray(part, float) for part in losses])


@jax.jit
def _row_losses(
    params: Params, inputs: Int[Array, "B T"], targets: Int[Array, "B T"]
) -> Float[Array, "B"]:
    return token_nll(apply(params, inputs)[0], targets).mean(axis=-1)


def draw(
    losses: Float[np.ndarray, "epochs M"], draws: int, batch_size: int
) -> Float[np.ndarray, "draws epochs"]:
    """Return each epoch's loss on one random batch of the windows, another one in every draw."""
    rng = np.random.default_rng(0)
    batches = rng.integers(losses.shape[1], size=(draws, len(losses), batch_size))
    return np.stack([losses[i, batches[:, i]].mean(axis=-1) for i in range(len(losses))], axis=-1)


def best_before_stopping(losses: list[float], patience: int) -> int:
    """Return the epoch, from 1, whose model is kept if training stops `patience` epochs later."""
    best = 0
    for epoch, loss in enumerate(losses):
        if loss < losses[best]:
            best = epoch
        elif epoch - best == patience:
            break
    return best + 1


if __name__ == "__main__":
    run_script(main)
