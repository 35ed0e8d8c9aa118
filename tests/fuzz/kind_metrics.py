"""A run's metrics.jsonl and study.json, and docs/study.json, as report.py reads them."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

from fuzzing import Made
from mutations import mutate, text

from jaxgru.records import load_kept, load_metrics, load_record
from jaxgru.study import TEXT_MEASURES

ROOT = Path(__file__).resolve().parents[2]
KEPT = json.loads((ROOT / "docs" / "study.json").read_text())
RUN = KEPT["runs"][0]
VALID = {
    "metrics.jsonl": "".join(json.dumps(epoch) + "\n" for epoch in RUN["epochs"][:3]).encode(),
    "study.json": json.dumps(RUN["study"]).encode(),
    "kept.json": json.dumps(KEPT | {"runs": KEPT["runs"][:2]}).encode(),
}


def prepare(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")


def make(rng: random.Random, folder: Path) -> Made:
    name = rng.choice(list(VALID))
    way = rng.choice((_spoilt, _changed, _changed, _odd))
    data = way(rng, VALID[name])
    (folder / "input").write_bytes(data)
    path = folder / name
    path.unlink(missing_ok=True)
    if rng.random() < 0.03:
        path.symlink_to(rng.choice(("pipe", "loop", "missing", "/dev/zero", "/")))
    else:
        path.write_bytes(data)
    return Made(path, len(data))


def load(path: Path) -> None:
    if path.name == "metrics.jsonl":
        for epoch in load_metrics(path):
            _ = f"{epoch['epoch']} {epoch['step']:,} {epoch['train_loss']:.4f}"
            _ = f"{epoch['val_loss']:.4f} {epoch['tokens_per_second'] / 3:.2f}"
            _ = sum((epoch["seconds"], epoch["tokens_per_second"]))
    elif path.name == "study.json":
        _use(load_record(path))
    else:
        for run in load_kept(path):
            _ = f"{run['config']} {run['seed']} {run['parameters']:,} {sorted(run['changes'])}"
            _use(run["study"])


def _use(record: dict) -> None:
    for what in ("windows", "stream", "stateless", "sensitivity"):
        _ = f"{record[what] * record['num_tokens'] / record['num_characters']:.4f}"
    _ = [f"{k} {loss:.3f}" for k, loss in record["memory_curve"]]
    _ = max(record["recovery"]), record["chain"]["kl_to_bigram"] + 1
    _ = [cycle["text"] + f"{cycle['basin']:.0%}" for cycle in record["chain"]["cycles"]]
    for values in record["text"].values():
        _ = [f"{v:.3g}" for m in TEXT_MEASURES if (v := values.get(m)) is not None]
    _ = record["date"] + record["hardware"]


def _spoilt(rng: random.Random, data: bytes) -> bytes:
    return mutate(rng, data)


def _changed(rng: random.Random, data: bytes) -> bytes:
    """Whole JSON in which something is missing or another thing."""
    odd = rng.choice((
        None, 0, -1, 1e308, float("nan"), float("inf"), True, "", text(rng), "x" * 5000, [], {},
        [[]], [1], {"a": 1}, 2**62, 10**400, [[1, 2, 3]], [None], [{}], "3", 0.5,
    ))  # fmt: skip
    lines = [json.loads(line) for line in data.decode().splitlines()]
    at: object = lines
    for _ in range(rng.choice((1, 2, 2, 3, 4))):
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            break
        key = rng.choice(keys)
        if not isinstance(at[key], (dict, list)) or rng.random() < 0.25:
            if rng.random() < 0.5:
                del at[key]
            else:
                at[key] = odd
            break
        at = at[key]
    else:
        if isinstance(at, dict):
            at[text(rng)] = odd
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _odd(rng: random.Random, data: bytes) -> bytes:
    n = rng.choice((1, 1000, 100_000))
    return rng.choice((
        b"[" * n, b'{"a":' * n, b"9" * n, b"", b"\n" * n, b"null", b"[]", b"{}", b"\0" * n,
        b"\xff", data.decode().encode("utf-16"), b"\xef\xbb\xbf" + data, data.replace(b"\n", b"\r"),
        data * 2, b'"' + b"x" * n + b'"', data.replace(b"{", b"[").replace(b"}", b"]"),
        b'{"epoch": 1e999}', b'{"runs": ' + b"[" * n, b'{"runs": [[]]}', b'{"runs": {}}',
    ))  # fmt: skip
