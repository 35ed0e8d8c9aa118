"""How a training step's time and memory grow with T, B and H: measured, and docs/cost.md."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgru.benchmarking import Contestant, calling, compiled, measure, planned_memory, start
from jaxgru.config import Config, load_config
from jaxgru.files import write_text
from jaxgru.plotting import plot_cost
from jaxgru.training import init_state, train_step

Point = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Series:
    """One size that grows while the others stand still; all else is astra_alpha's."""

    letter: str
    field: str
    what: str
    fixed: dict[str, int]
    values: tuple[int, ...]


SERIES = (
    Series("T", "training.sequence_length", "tokens in a sequence",
           {"training.batch_size": 16}, tuple(2**i for i in range(7, 15))),
    Series("B", "training.batch_size", "sequences in a batch", {}, tuple(2**i for i in range(10))),
    Series("H", "model.hidden_dim", "length of the hidden state", {},
           tuple(2**i for i in range(5, 11))),
)  # fmt: skip


def sized(series: Series, value: int, remat: bool) -> Config:
    """astra_alpha with the series' sizes."""
    fields = {**series.fixed, series.field: value, "training.remat": str(remat).lower()}
    return load_config("astra_alpha", {name: str(size) for name, size in fields.items()})


def measure_step(config: Config, repeats: int) -> Point:
    """One optimizer step on one device: median seconds, and the bytes that XLA plans for it."""
    model, training = config.model, config.training
    length = 2 * training.sequence_length + 1000
    tokens = np.random.default_rng(0).integers(model.vocab_size, size=length).astype(np.int32)
    state = init_state(model, training)
    program, _ = compiled(
        lambda state, tokens: train_step(model, training, state, tokens), state, jnp.asarray(tokens)
    )
    step = Contestant(calling(lambda: program(state, tokens)[1]))
    seconds = measure({"": start(lambda: step)}, repeats)[""].median
    return {"seconds": seconds, "bytes": planned_memory(program)}


def measure_all(
    repeats: int, largest: int, on_point: Callable[[Series, Point], None]
) -> list[Point]:
    """Every series with and without remat (T alone has it), up to `largest` of each size."""
    points = []
    for series in SERIES:
        for value in (value for value in series.values if value <= largest):
            for remat in (False, True) if series.letter == "T" else (False,):
                measured = measure_step(sized(series, value, remat), repeats)
                point = {"letter": series.letter, "value": value, "remat": remat, **measured}
                on_point(series, point)
                points.append(point)
    return points


def curve(points: Sequence[Point], letter: str, remat: bool, what: str) -> dict[int, float]:
    """`what` ("seconds" or "bytes") by size, of one series."""
    chosen = (p for p in points if p["letter"] == letter and p["remat"] == remat)
    return {p["value"]: p[what] for p in chosen if p[what] is not None}


def exponent(values: dict[int, float]) -> float:
    """The k of y ∝ sizeᵏ over the larger half of the sizes: the slope in a log-log plot."""
    sizes = sorted(values)[len(values) // 2 - 1 :] if len(values) > 2 else sorted(values)
    if len(sizes) < 2:
        return math.nan
    return float(np.polyfit(np.log(sizes), np.log([values[s] for s in sizes]), 1)[0])


def save(docs: Path, run: dict[str, Any]) -> None:
    """Keeps a run, one a kind of device, in cost.json, and makes cost.md and its figures anew."""
    path = docs / "cost.json"
    runs = json.loads(path.read_text()) if path.exists() else {}
    runs[jax.default_backend()] = run
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(runs, indent=1) + "\n")
    for name, kept in runs.items():
        plot_cost(docs / "figures" / f"cost_{name}.png", panels(kept["points"]), kept["hardware"])
    write_text(docs / "cost.md", page(runs))


def panels(points: Sequence[Point]) -> dict[str, dict[str, list[dict[int, float]]]]:
    """What `plot_cost` draws: by axis label, by what is measured, the plain curve and remat's."""
    return {
        f"{series.letter}: {series.what}": {
            what: [curve(points, series.letter, remat, what) for remat in (False, True)]
            for what in ("seconds", "bytes")
        }
        for series in SERIES
    }


def page(runs: dict[str, Any]) -> str:
    """docs/cost.md."""
    parts = [
        "# What grows with what\n",
        "One training step of astra_alpha (one GRU layer, H = 128; B = 64, T = 128) on one device,"
        " one size changed at a time; B = 16 in the series of T. Memory is what XLA plans for the "
        "step, parameters and optimizer state included. *remat* is `--training.remat true`. Made "
        "by `python scripts/cost.py`.\n",
    ]
    for name, run in runs.items():
        parts.append(f"## {run['hardware']}, {run['date']}\n")
        parts.append(f"![time and memory against T, B and H](figures/cost_{name}.png)\n")
        parts += _findings(run["points"])
        for series in SERIES:
            parts.append("\n".join(_table(series, run["points"])) + "\n")
    return "\n".join(parts)


def _findings(points: Sequence[Point]) -> Iterator[str]:
    def power(letter: str, what: str, remat: bool = False) -> str:
        return f"{exponent(curve(points, letter, remat, what)):.2f}"

    yield (
        f"Time grows as T^{power('T', 'seconds')}, B^{power('B', 'seconds')} and "
        f"H^{power('H', 'seconds')}, memory as T^{power('T', 'bytes')}, "
        f"B^{power('B', 'bytes')} and H^{power('H', 'bytes')} (slopes over the larger half of the "
        f"sizes); with remat memory as T^{power('T', 'bytes', True)}.\n"
    )
    plain, remat = (curve(points, "T", r, "bytes") for r in (False, True))
    last = max(remat, default=0)
    if plain.get(1024) and last > 1024:
        again = (
            curve(points, "T", True, "seconds")[last] / curve(points, "T", False, "seconds")[last]
        )
        yield (
            f"With remat, T = {last:,} needs {remat[last] / plain[1024]:.2f} times the memory of "
            f"T = 1,024 without it, and {remat[last] / remat[1024]:.2f} times that of T = 1,024 "
            f"with it; without, {plain[last] / plain[1024]:.1f} times. It takes {again:.2f} times "
            "the time.\n"
        )


def _table(series: Series, points: Sequence[Point]) -> Iterator[str]:
    kinds = (False, True) if series.letter == "T" else (False,)
    head = [series.letter]
    for remat in kinds:
        head += [f"{what}{', remat' * remat}" for what in ("ms a step", "µs a token", "MB")]
    yield "| " + " | ".join(head) + " |"
    yield "| ---: " * len(head) + "|"
    chosen = [p for p in points if p["letter"] == series.letter]
    for value in sorted({p["value"] for p in chosen}):
        cells = [f"{value:,}"]
        for remat in kinds:
            seconds = curve(points, series.letter, remat, "seconds")[value]
            training = sized(series, value, remat).training
            tokens = training.batch_size * training.sequence_length
            memory = curve(points, series.letter, remat, "bytes").get(value)
            cells += [f"{1e3 * seconds:,.1f}", f"{1e6 * seconds / tokens:.2f}",
                      "–" if memory is None else f"{memory / 1e6:,.1f}"]  # fmt: skip
        yield "| " + " | ".join(cells) + " |"
