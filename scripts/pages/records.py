"""What runs wrote down, read again: metrics.jsonl, a run's study.json, and docs/study.json.

What is read is checked against what `running` and `study` write, so that a file that was cut short
or edited is one sentence and not an error in the middle of a page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxgru.config import config_names, dotted_names
from jaxgru.errors import UserError
from jaxgru.files import read_bytes

Record = dict[str, Any]


class RecordError(UserError):
    """A file of measurements that cannot be read; the message says which and why."""


MAX_BYTES = 2**23
"""Of a file: 40,000 epochs. Python's dictionaries take up to 80 times what they are read from."""

NUMBER, WHOLE, MEASURES = "a number", "a whole number", "measures"
TEXTS = ("greedy", "sampled")  # of the measures, those that are texts

EPOCH = {
    "epoch": WHOLE,
    "step": WHOLE,
    "train_loss": NUMBER,
    "val_loss": NUMBER,
    "tokens_per_second": NUMBER,
    "seconds": NUMBER,
}
STUDY = {
    "num_tokens": WHOLE,
    "num_characters": WHOLE,
    "windows": NUMBER,
    "stream": NUMBER,
    "stateless": NUMBER,
    "sensitivity": NUMBER,
    "memory_curve": [(WHOLE, NUMBER)],
    "recovery": [NUMBER],
    "chain": {
        "kl_to_bigram": NUMBER,
        "kl_to_frequencies": NUMBER,
        "cycles": [{"text": str, "period": WHOLE, "basin": NUMBER}],
    },
    "text": {
        "validation text": MEASURES,
        "stateless": MEASURES,
        "last token only": MEASURES,
        "stateful": MEASURES,
        ...: MEASURES,
    },
    "date": str,
    "hardware": str,
}
RUN = {
    "config": str,
    "changes": dict,
    "seed": WHOLE,
    "parameters": WHOLE,
    "epochs": [EPOCH],
    "study": STUDY,
}
"""What each holds at least: `[x]` is one x or more, `(x, y)` these two, `...` any other name."""


def load_metrics(path: Path) -> list[Record]:
    """The records of a run's epochs, from its metrics.jsonl.

    Raises:
      RecordError: it cannot be read, or is not what a run writes.
    """
    try:
        records = [json.loads(line) for line in _read(path).splitlines()]
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is not lines of JSON: {error}.") from error
    return _check(path, records, [EPOCH])


def load_record(path: Path) -> Record:
    """What `study.save_record` wrote, from a run's study.json. Raises as `load_metrics` does."""
    return _check(path, _load(path), STUDY)


def load_kept(path: Path) -> list[Record]:
    """The runs in docs/study.json. Raises as `load_metrics` does."""
    runs = _check(path, _load(path), {"runs": [RUN]})["runs"]
    fields = {name for name in dotted_names() if name.startswith(("model.", "data."))}
    for run in runs:
        if run["config"] not in config_names() or not run["changes"].keys() <= fields:
            raise RecordError(f"{path} has a run of {run['config']!r}, {run['changes']!r}.")
    return runs


def _read(path: Path) -> str:
    try:
        return read_bytes(path, at_most=MAX_BYTES).decode()
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}.") from error


def _load(path: Path) -> Any:
    try:
        return json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is not JSON: {error}.") from error


def _check(path: Path, value: Any, like: Any) -> Any:
    """The value, if it is like that; the message says where it is not."""
    wrong = _difference(value, like)
    if wrong:
        raise RecordError(f"{path} is not what a run writes: {wrong}.")
    return value


def _difference(value: Any, like: Any, where: str = "it") -> str | None:
    if like in (NUMBER, WHOLE):
        whole = type(value) is int and 0 <= value < 2**63  # JSON knows no bound
        fits = whole or (like == NUMBER and type(value) is float)
        return None if fits else f"{where} is not {like}"
    if like == MEASURES:
        if not isinstance(value, dict):
            return f"{where} is not a table"
        measured = [name for name in value if value[name] is not None]
        likes = {name: str if name in TEXTS else NUMBER for name in measured}
        return _difference(value, likes, where)
    if isinstance(like, type):
        return None if isinstance(value, like) else f"{where} is not a {like.__name__}"
    if isinstance(like, dict):
        names = [name for name in like if name is not ...]
        if not (isinstance(value, dict) and value.keys() >= set(names)):
            return f"{where} lacks one of {', '.join(names)}"
        others = like.get(...)
        parts = [(f"{where}'s {n}", n, like.get(n, others)) for n in (value if others else names)]
    else:
        if not isinstance(value, list) or not value:
            return f"{where} is not a list of anything"
        if isinstance(like, tuple) and len(value) != len(like):
            return f"{where} has {len(value)} entries, not {len(like)}"
        likes = like if isinstance(like, tuple) else like * len(value)
        parts = [(f"{where}[{i}]", i, part) for i, part in enumerate(likes)]
    return next(filter(None, (_difference(value[k], part, at) for at, k, part in parts)), None)
