"""Files of measurements, as the scripts that make docs/ read them: either refused, or a page."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

from fuzzing import Made
from msgspec import convert
from msgspec.structs import replace
from mutations import mutate, text

from bench import benchmark_page
from bench.records import Benchmarks
from pages import records
from study import study_page
from study.records import Kept, Run, RunMeasures, load_metrics
from study.sentences import expected_sentences

ROOT = Path(__file__).resolve().parents[2]
KEPT = json.loads((ROOT / "docs" / "study.json").read_text())
RUN = KEPT["runs"][0]
BENCHMARKS = json.loads((ROOT / "docs" / "benchmarks.json").read_text())
VALID = {
    "metrics.jsonl": "".join(json.dumps(epoch) + "\n" for epoch in RUN["epochs"][:3]).encode(),
    "study.json": json.dumps(RUN["study"]).encode(),
    "kept.json": json.dumps(KEPT | {"runs": KEPT["runs"][:2]}).encode(),
    "benchmarks.json": json.dumps(BENCHMARKS | {"records": BENCHMARKS["records"][:9]}).encode(),
}
VALID_RUN = convert(RUN, Run)


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
    """Makes the page of it, without the figures."""
    match path.name:
        case "metrics.jsonl":
            _page(replace(VALID_RUN, epochs=load_metrics(path)))
        case "study.json":
            _page(replace(VALID_RUN, measured=records.load(path, RunMeasures)))
        case "kept.json":
            _page(*records.load(path, Kept).runs)
        case "benchmarks.json":
            benchmark_page.tables(records.load(path, Benchmarks))


def _page(*runs: Run) -> None:
    page = study_page.Page(runs, KEPT["ngrams"])
    page.tables(), expected_sentences(page)


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
