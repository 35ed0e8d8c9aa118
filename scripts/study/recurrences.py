"""Compare recurrences at equal parameters: on a text, on a task that needs memory, and in time.

    python -m scripts.study.recurrences      # hours; what is measured already stays

Each cell has the initial values that its paper recommends, and a size that gives it about as many
parameters as the GRU. The text is Tiny Shakespeare with a part of astra_beta's steps and without
dropout, and the learning rate is the best of RATES_OF_TEXT with the first seed. The task is that of
examples/recurrent_ppo.py, with the best of RATES_OF_TASK over all seeds.
"""

from __future__ import annotations

import startup  # noqa: F401

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from bench import timing
from jaxgru import lm
from jaxgru.cells import CELLS, linear_recurrence
from jaxgru.cli.options import Parser, run_script, typed
from jaxgru.files import write_text
from jaxgru.lm.runs.folders import find_run
from jaxgru.records import Number, Record, Whole
from pages.markdown import DOCS, ROOT, table, write_page
from pages.measurements import dumps, grouped, load_or
from study.study_records import load_metrics

sys.path.insert(0, str(ROOT / "examples"))
import recurrent_ppo as ppo  # noqa: E402

BLOCKS = {"gru": 1, "lstm": 1, "min_gru": 1, "min_lstm": 1, "rg_lru": 16, "slstm": 4}
"""The cells, and the number of diagonal blocks that their papers have."""

RATES_OF_TEXT = (2e-3, 4e-3)
RATES_OF_TASK = (1e-3, 2e-3, 4e-3)

TIMES = 20
HEAD = [
    "cell", "units", "parameters", "learning rate", "validation loss", "memory task",
    "training step, in turn", "in parallel", "acting",
]  # fmt: skip
SOLVED = 0.9
"""The mean return of a policy that has solved the memory task."""


class Loss(Record):
    """The lowest validation loss of a language model's epochs."""

    cell: str
    rate: Number
    seed: Whole
    loss: Number


class Return(Record):
    """The mean return of a policy's last tenth of updates."""

    cell: str
    rate: Number
    seed: Whole
    mean_return: Number


class Times(Record):
    """Seconds of a training step, in turn and in parallel, and of one of acting."""

    cell: str
    in_turn: Number
    in_parallel: Number | None
    acting: Number


class Measured(Record):
    """What the file holds."""

    losses: list[Loss]
    returns: list[Return]
    times: list[Times]


def blocks_of(cell: str) -> dict[str, int]:
    """Return the cell's option for its paper's blocks, if it has any."""
    return {"num_blocks": BLOCKS[cell]} if BLOCKS[cell] > 1 else {}


def as_large(count: Callable[[int], int], wanted: int) -> int:
    """Return the number of units, a multiple of 16, that comes nearest to a number of weights."""
    return min(range(16, 1025, 16), key=lambda units: abs(count(units) - wanted))


def overrides(cell: str, hidden_dim: int) -> dict[str, Any]:
    """Return what changes in astra_beta for a cell."""
    of_gru = {"second_bias": False, "reset_gate": "after", "init_scheme": "orthogonal"}
    fields = of_gru | {"cell": cell, "hidden_dim": hidden_dim} | blocks_of(cell)
    # Its state grows with the number of steps, so that Griffin, too, normalises what it returns
    fields |= {"final_norm": cell == "rg_lru"}
    return {f"model.{name}": value for name, value in fields.items()}


def model_of(cell: str, hidden_dim: int) -> lm.ModelConfig:
    return lm.load_config("astra_beta", overrides(cell, hidden_dim)).model


def num_params(cell: str, hidden_dim: int) -> int:
    """Return the number of parameters of a language model."""
    shapes = jax.eval_shape(lambda key: lm.init(key, model_of(cell, hidden_dim)), jax.random.key(0))
    return lm.num_params(shapes)


@cache
def units_of(cell: str) -> int:
    """Return the units that give a cell about as many parameters as a GRU with 256."""
    return as_large(partial(num_params, cell), num_params("gru", 256))


def validation_loss(arguments: Any, cell: str, rate: float, seed: int) -> float:
    """Train a language model, and return the lowest validation loss of its epochs."""
    name = f"recurrence_{cell}_{rate:g}_{seed}"
    fields = overrides(cell, units_of(cell))
    fields |= {"name": name, "training.learning_rate": rate, "training.seed": seed}
    # Nothing bounds the state of a linear recurrence, and dropout at each step makes it grow
    fields |= {"training.state_dropout": 0.0}
    fields |= {"training.epochs": arguments.epochs, "training.steps_per_epoch": arguments.steps}
    command = [sys.executable, "-m", "jaxgru", "train", "astra_beta", "--runs", str(arguments.runs)]
    for field, value in fields.items():
        command += [f"--{field}", typed(value)]
    subprocess.run(command, check=True, cwd=ROOT)
    epoch_records = load_metrics(find_run(arguments.runs / name) / "metrics.jsonl")
    return min(epoch.val_loss for epoch in epoch_records)


def mean_returns(arguments: Any, cell: str, rate: float, seeds: range) -> Iterator[float]:
    """Train policies on the memory task, and yield the mean return of each one's last tenth."""
    init = partial(CELLS[cell], **blocks_of(cell))
    rnn = ppo.RNNS["jaxgru"]._replace(init=init)

    def count(units: int, init: Any = init) -> int:
        shapes = jax.eval_shape(lambda: init(jax.random.key(0), units, units))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    units = as_large(count, count(128, CELLS["gru"]))
    s = ppo.Settings(delay=40, updates=arguments.updates, hidden_dim=units, learning_rate=rate)
    train = jax.jit(partial(ppo.train, rnn=rnn, s=s))
    for seed in seeds:
        init_key, key = jax.random.split(jax.random.key(seed))
        _, curve = train(ppo.init_policy(init_key, rnn, units), key)
        last = curve[-max(len(curve) // 10, 1) :]
        yield float(last.mean())


def seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Return the median time of a compiled call."""
    run = timing.calling(partial(function, *arguments))
    started = timing.start(lambda: timing.Contestant(run))
    return statistics.median(timing.measure({"": started}, TIMES, 0)[""])


def times_of(cell: str) -> Times:
    """Measure a gradient of 64 × 128 tokens, in turn and in parallel, and a step."""
    params = lm.init(jax.random.key(0), model_of(cell, units_of(cell)))
    tokens = jnp.zeros((64, 128), int)
    loss = lambda params: lm.apply(params, tokens)[0].var()
    in_turn = seconds(jax.jit(jax.grad(loss)), params)
    in_parallel = None
    if isinstance(params.layers[0], linear_recurrence.LinearCell):
        jax.clear_caches()
        way = linear_recurrence.in_parallel
        with mock.patch.object(linear_recurrence, "in_turn", way):
            in_parallel = seconds(jax.jit(jax.grad(loss)), params)
        jax.clear_caches()
    token = jnp.zeros(1, int)
    acting = seconds(jax.jit(lm.step), params, token, lm.initial_carry(params, 1))
    return Times(cell, in_turn, in_parallel, acting)


def measure_losses(arguments: Any, measured: Measured, cell: str) -> None:
    """Try each rate, and train with the best one and every seed."""

    def measure(rate: float, seed: int) -> float:
        for m in measured.losses:
            if (m.cell, m.rate, m.seed) == (cell, rate, seed):
                return m.loss
        loss = validation_loss(arguments, cell, rate, seed)
        measured.losses.append(Loss(cell, rate, seed, loss))
        write(arguments.out, measured)
        return loss

    by_rate = {rate: measure(rate, 0) for rate in RATES_OF_TEXT}
    best_rate = min(by_rate, key=by_rate.__getitem__)
    for seed in range(1, arguments.seeds):
        measure(best_rate, seed)


def measure_returns(arguments: Any, measured: Measured, cell: str) -> None:
    """Train policies with each rate and every seed."""
    for rate in RATES_OF_TASK:
        done = sum((m.cell, m.rate) == (cell, rate) for m in measured.returns)
        seeds = range(done, arguments.task_seeds)
        for seed, value in zip(seeds, mean_returns(arguments, cell, rate, seeds), strict=True):
            measured.returns.append(Return(cell, rate, seed, value))
            write(arguments.out, measured)


def measure_times(arguments: Any, measured: Measured, cell: str) -> None:
    """Measure a cell's times."""
    if cell not in [m.cell for m in measured.times]:
        measured.times.append(times_of(cell))
        write(arguments.out, measured)


PARTS = {"times": measure_times, "losses": measure_losses, "returns": measure_returns}


def write(path: Path, measured: Measured) -> None:
    write_text(path, dumps(measured, 1) + "\n")


def tables(measured: Measured) -> dict[str, str]:
    """Return the table of docs/guide/choosing.md, with the cells that have been measured."""
    every = [*measured.losses, *measured.returns, *measured.times]
    cells = {m.cell for m in every}
    rows = [row(measured, cell) for cell in BLOCKS if cell in cells]
    columns = [column for column in zip(HEAD, *rows, strict=True) if {*column[1:]} != {"–"}]
    head, *rows = zip(*columns, strict=True) if rows else [HEAD]
    return {"recurrences": table(head, rows, "lr")}


def row(measured: Measured, cell: str) -> list[str]:
    """Return a cell's row of the table; what is not measured yet is a dash."""
    losses = grouped((m for m in measured.losses if m.cell == cell), lambda m: m.rate)
    returns = grouped((m for m in measured.returns if m.cell == cell), lambda m: m.rate)
    times = [m for m in measured.times if m.cell == cell]
    return [
        cell,
        f"{units_of(cell)}",
        f"{num_params(cell, units_of(cell)):,}",
        *best_losses(losses),
        best_returns(returns.values()),
        *(times_in_ms(times[0]) if times else ["–"] * 3),
    ]


def best_losses(by_rate: dict[float, list[Loss]]) -> tuple[str, str]:
    """Return the rate that is best with the first seed, and the losses of all seeds."""
    if not by_rate:
        return "–", "–"
    rate = min(by_rate, key=lambda rate: by_rate[rate][0].loss)
    return f"{rate:g}", ", ".join(f"{m.loss:.3f}" for m in by_rate[rate])


def best_returns(by_rate: Iterable[list[Return]]) -> str:
    """Return how many policies solve the task with the best rate, and their median return."""
    returns = max(
        ([m.mean_return for m in of_rate] for of_rate in by_rate), key=statistics.mean, default=[]
    )
    if not returns:
        return "–"
    solved = sum(value >= SOLVED for value in returns)
    return f"{solved} of {len(returns)}, {statistics.median(returns):.2f}"


def times_in_ms(m: Times) -> list[str]:
    seconds = m.in_turn, m.in_parallel, m.acting
    return ["–" if value is None else f"{1e3 * value:.3g} ms" for value in seconds]


def main() -> None:
    """Measure what the file does not have, and print the table."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--docs", type=Path, default=DOCS, help="where to write (%(default)s)")
    add("--runs", type=Path, default="runs", help="the folder of the runs (%(default)s)")
    add("--only", nargs="+", choices=BLOCKS, default=[*BLOCKS], help="only these cells")
    add("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="only these (all)")
    add("--seeds", type=int, default=3, help="of the text (%(default)s)")
    add("--epochs", type=int, default=2, help="of the text (%(default)s)")
    add("--steps", type=int, default=175, help="of an epoch (%(default)s)")
    add("--task-seeds", type=int, default=10, help="of the memory task (%(default)s)")
    add("--updates", type=int, default=60, help="of the memory task (%(default)s)")
    arguments = parser.parse_args()
    arguments.out = arguments.docs / "recurrences.json"
    measured = load_or(Measured([], [], []), arguments.out, Measured)
    for part in arguments.parts:
        for cell in arguments.only:
            PARTS[part](arguments, measured, cell)
    made = tables(measured)
    print(made["recurrences"])
    page = arguments.docs / "guide" / "choosing.md"
    if page.exists():
        write_page(page, made)


if __name__ == "__main__":
    run_script(main)
