"""Compare recurrences at equal parameters: on a text, on a task that needs memory, and in time.

    python -m scripts.study.recurrences                   # hours; what is measured stays in --out

Each cell has the initial values that its paper recommends, and a size that gives it about as many
parameters as the GRU. Its learning rate is the best of RATES with the first seed. The text is Tiny
Shakespeare with astra_beta's recipe, and the task is that of examples/recurrent_ppo.py.
"""

from __future__ import annotations

import startup  # noqa: F401

import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
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
from jaxgru.records import Count, Number, Record, Whole
from pages.markdown import ROOT, table
from pages.measurements import dumps, load_or
from study.study_records import load_metrics

sys.path.insert(0, str(ROOT / "examples"))
import recurrent_ppo as ppo  # noqa: E402

BLOCKS = {"gru": 1, "lstm": 1, "min_gru": 1, "min_lstm": 1, "rg_lru": 16, "slstm": 4}
"""The cells, and the number of diagonal blocks that their papers have."""

RATES = (1e-3, 2e-3, 4e-3)
TIMES = 20
HEAD = [
    "cell", "units", "parameters", "learning rate", "validation loss", "memory task",
    "training step, in turn", "in parallel", "acting",
]  # fmt: skip


class Row(Record):
    """What was measured of one cell; times are in seconds."""

    cell: str
    hidden_dim: Count
    num_params: Count
    losses_by_rate: dict[str, Number]  # of the first seed
    losses: list[Number]  # of every seed, at the best rate
    returns: list[Number]  # of every seed of the memory task, its last tenth
    rates_of_task: dict[str, Whole]  # how many seeds solve it
    in_turn: Number
    in_parallel: Number | None
    acting: Number

    def columns(self) -> list[str]:
        """Return the row of the table."""
        milliseconds = lambda seconds: "–" if seconds is None else f"{1e3 * seconds:.3g} ms"
        rate = min(self.losses_by_rate, key=self.losses_by_rate.__getitem__)
        solved = sum(value >= 0.9 for value in self.returns)
        return [
            self.cell,
            f"{self.hidden_dim}",
            f"{self.num_params:,}",
            rate,
            ", ".join(f"{loss:.3f}" for loss in self.losses),
            f"{solved} of {len(self.returns)}, {statistics.median(self.returns):.2f}",
            *map(milliseconds, (self.in_turn, self.in_parallel, self.acting)),
        ]


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
    return {f"model.{name}": value for name, value in fields.items()}


def model_of(cell: str, hidden_dim: int) -> lm.ModelConfig:
    return lm.load_config("astra_beta", overrides(cell, hidden_dim)).model


def num_params(cell: str, hidden_dim: int) -> int:
    """Return the number of parameters of a language model."""
    shapes = jax.eval_shape(lambda key: lm.init(key, model_of(cell, hidden_dim)), jax.random.key(0))
    return lm.num_params(shapes)


def validation_loss(arguments: Any, cell: str, hidden_dim: int, rate: float, seed: int) -> float:
    """Train a language model, and return the lowest validation loss of its epochs."""
    name = f"recurrence_{cell}_{rate:g}_{seed}"
    fields = overrides(cell, hidden_dim) | {"training.learning_rate": rate, "training.seed": seed}
    fields |= {"name": name, "training.epochs": arguments.epochs}
    fields["training.steps_per_epoch"] = arguments.steps
    command = [sys.executable, "-m", "jaxgru", "train", "astra_beta", "--runs", str(arguments.runs)]
    for field, value in fields.items():
        command += [f"--{field}", typed(value)]
    subprocess.run(command, check=True, cwd=ROOT)
    epochs = load_metrics(find_run(arguments.runs / name) / "metrics.jsonl")
    return min(epoch.val_loss for epoch in epochs)


def memory_returns(arguments: Any, cell: str, rate: float) -> list[float]:
    """Train policies on the memory task, and return the mean return of each one's last tenth."""
    init = partial(CELLS[cell], **blocks_of(cell))
    rnn = ppo.RNNS["jaxgru"]._replace(init=init)

    def count(units: int, init: Any = init) -> int:
        shapes = jax.eval_shape(lambda: init(jax.random.key(0), units, units))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    units = as_large(count, count(128, CELLS["gru"]))
    s = ppo.Settings(delay=40, updates=arguments.updates, hidden_dim=units, learning_rate=rate)
    train = jax.jit(partial(ppo.train, rnn=rnn, s=s))
    returns = []
    for seed in range(arguments.task_seeds):
        init_key, key = jax.random.split(jax.random.key(seed))
        _, curve = train(ppo.init_policy(init_key, rnn, units), key)
        last = curve[-max(len(curve) // 10, 1) :]
        returns.append(float(last.mean()))
    return returns


def seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Return the median time of a compiled call."""
    run = timing.calling(partial(function, *arguments))
    started = timing.start(lambda: timing.Contestant(run))
    return statistics.median(timing.measure({"": started}, TIMES, 0)[""])


def times_of(cell: str, hidden_dim: int) -> tuple[float, float | None, float]:
    """Return the times of a gradient of 64 × 128 tokens, in turn and in parallel, and of a step."""
    params = lm.init(jax.random.key(0), model_of(cell, hidden_dim))
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
    return in_turn, in_parallel, acting


def measure(arguments: Any, cell: str) -> Row:
    """Measure one cell."""
    hidden_dim = as_large(partial(num_params, cell), num_params("gru", 256))
    loss = partial(validation_loss, arguments, cell, hidden_dim)
    by_rate = {rate: loss(rate, 0) for rate in RATES}
    rate = min(by_rate, key=by_rate.__getitem__)
    losses = [by_rate[rate], *(loss(rate, seed) for seed in range(1, arguments.seeds))]
    by_task_rate = {rate: memory_returns(arguments, cell, rate) for rate in RATES}
    returns = max(by_task_rate.values(), key=statistics.mean)
    solved = {f"{rate:g}": sum(r >= 0.9 for r in every) for rate, every in by_task_rate.items()}
    in_turn, in_parallel, acting = times_of(cell, hidden_dim)
    return Row(
        cell=cell,
        hidden_dim=hidden_dim,
        num_params=num_params(cell, hidden_dim),
        losses_by_rate={f"{rate:g}": loss for rate, loss in by_rate.items()},
        losses=losses,
        returns=returns,
        rates_of_task=solved,
        in_turn=in_turn,
        in_parallel=in_parallel,
        acting=acting,
    )


def main() -> None:
    """Measure each cell that the file does not have, and print the table."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--out", type=Path, default="recurrences.json", help="the measurements (%(default)s)")
    add("--runs", type=Path, default="runs", help="the folder of the runs (%(default)s)")
    add("--only", nargs="+", choices=BLOCKS, default=[*BLOCKS], help="only these cells")
    add("--seeds", type=int, default=3, help="of the text (%(default)s)")
    add("--epochs", type=int, default=15, help="of the text (%(default)s)")
    add("--steps", type=int, default=250, help="of an epoch (%(default)s)")
    add("--task-seeds", type=int, default=10, help="of the memory task (%(default)s)")
    add("--updates", type=int, default=60, help="of the memory task (%(default)s)")
    arguments = parser.parse_args()
    rows = load_or([], arguments.out, list[Row])
    for cell in arguments.only:
        if cell not in [row.cell for row in rows]:
            rows.append(measure(arguments, cell))
            write_text(arguments.out, dumps(rows, 1) + "\n")
    print(table(HEAD, [row.columns() for row in rows], "lrrrrrrrr"))


if __name__ == "__main__":
    run_script(main)
