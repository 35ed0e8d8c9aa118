"""Measurements of a run: `study.json` in its folder, and the best epoch of those it has kept."""

from __future__ import annotations

import datetime
import json
import math
import re
from pathlib import Path
from typing import Any

from jaxtyping import Int

from jaxgru.cells.base import AnyArray
from jaxgru.lm.evaluation import window_loss
from jaxgru.lm.files import write_text
from jaxgru.lm.formats.safetensors import load_safetensors
from jaxgru.lm.model import Params
from jaxgru.lm.runs.commits import trained_by
from jaxgru.lm.runs.folders import EPOCHS_FOLDER, RunError
from jaxgru.parallel.hardware import describe_hardware

FILE_NAME = "study.json"


def save_record(run: Path, record: dict[str, Any]) -> None:
    """Write a run's record into its folder, with the date, the hardware and the run's commits.

    Raises:
      RunError: the folder cannot be written.
    """
    made: dict[str, Any] = {"date": str(datetime.date.today()), "hardware": describe_hardware()}
    if commits := trained_by(run):
        made["commits"] = commits
    try:
        write_text(run / FILE_NAME, json.dumps(record | made, indent=1) + "\n")
    except OSError as error:
        raise RunError(f"{run / FILE_NAME} cannot be written: {error.strerror}.") from error


def kept_epochs(run: Path) -> list[Path]:
    """Return the models that the run has kept of its epochs (`training.keep_epochs`), in order."""
    paths = (run / EPOCHS_FOLDER).glob("*.safetensors")  # other files may lie among them
    ours = (path for path in paths if re.fullmatch("[0-9]{3,}", path.stem))
    return sorted(ours, key=lambda path: int(path.stem))


def best_kept_epoch(
    run: Path, tokens: Int[AnyArray, "N"], window: int = 128
) -> tuple[int, Params] | None:
    """Return the epoch whose model has the lowest loss in windows, and the model.

    None: the run has kept none (`training.keep_epochs`). Raises as `load_safetensors` does.
    """
    lowest, best = math.inf, None
    for path in kept_epochs(run):
        params, _, _ = load_safetensors(path)
        loss = window_loss(params, tokens, window)
        if best is None or loss < lowest:
            lowest, best = loss, (int(path.stem), params)
    return best
