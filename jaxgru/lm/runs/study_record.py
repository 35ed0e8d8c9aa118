"""Measurements of a run: `study.json` in its folder, and which of its epochs is the best."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import msgspec

from jaxgru.lm.files import read_bytes, write_text
from jaxgru.lm.runs.commits import trained_by
from jaxgru.lm.runs.folders import RunError
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


def best_epoch(run: Path) -> int:
    """Return the number of the epoch with the lowest validation loss.

    Raises:
      RunError: metrics.jsonl cannot be read, or lists no epochs.
    """
    from jaxgru.lm.training.records import Epoch  # needs Optax

    path = run / "metrics.jsonl"
    try:
        epochs = msgspec.json.Decoder(Epoch).decode_lines(read_bytes(path, at_most=2**23))
        if not epochs:
            raise ValueError("it lists no epoch")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise RunError(f"{path} cannot be read: {why}.") from error
    return min(epochs, key=lambda epoch: epoch.val_loss).epoch
