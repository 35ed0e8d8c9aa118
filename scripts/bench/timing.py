"""What is measured, and the timing of contestants side by side.

This module does not know who the contestants are; contestants.py builds them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.cells import CELLS
from jaxgru.lm.config import Config

ONE_CORE = ("layer", "resets", "step")  # measured on one core
KINDS = ("training", "forward", "sampling", "ppo", *ONE_CORE)
SAMPLING = {1: 128, 64: 64, 512: 32}
"""Batch sizes for sampling, and the number of tokens per row in one call."""

PRECISIONS = {"float32": "float32", "tf32": "tensorfloat32", "bfloat16": "BF16_BF16_F32"}
"""Precisions of matrix products (all else is float32): our names, and JAX's."""

# Of sampling
TEMPERATURE = 0.8
TOP_K = 30

MIN_SECONDS = 0.05  # a round makes as many calls as take at least this long


# --- Tasks


@dataclass(frozen=True)
class Task:
    """What every contestant does: a training step, a forward pass, or sampling.

    Training and forward process (batch_size, num_tokens) tokens. Sampling draws num_tokens tokens,
    one after another, in each of batch_size rows.
    """

    config: Config
    what: str
    batch_size: int
    num_tokens: int

    @property
    def kind(self) -> str:
        """`what`, for sampling with the number of rows: "training", "sampling_64"."""
        if self.what == "sampling":
            return f"sampling_{self.batch_size}"
        return self.what

    @property
    def name(self) -> str:
        """The config's name."""
        return self.config.name


@dataclass(frozen=True)
class LayerTask:
    """One layer, x (T, B, H) → y (T, B, H): its gradients, with or without resets, or one step."""

    what: str
    cell: str
    batch_size: int
    hidden_dim: int
    num_tokens: int = 64

    @property
    def kind(self) -> str:
        """The kind in a record: "layer", "resets", "step"."""
        return self.what

    @property
    def name(self) -> str:
        """The name in a table."""
        return f"{self.cell}, H {self.hidden_dim}"


LAYER_TASKS = [
    *(LayerTask("layer", *size) for size in product(CELLS, (1, 4, 16, 64), (32, 64, 128, 256))),
    *(LayerTask("resets", *size) for size in product([*CELLS][:3], (4, 16, 64), (64, 128))),
    *(LayerTask("step", "GRU", *size) for size in product((1, 16), (64, 128), [1])),
]


@dataclass(frozen=True)
class PPOTask:
    """A whole training of examples/recurrent_ppo.py, or one per seed in one program, by `vmap`.

    A minibatch has batch_size rows of num_tokens steps.
    """

    hidden_dim: int
    batch_size: int
    seeds: int = 1
    num_tokens: int = 128
    updates: int = 4
    what: str = "ppo"

    @property
    def kind(self) -> str:
        """The kind in a record, with the number of seeds: "ppo", "ppo_8"."""
        return f"ppo_{self.seeds}" if self.seeds > 1 else "ppo"

    @property
    def name(self) -> str:
        """The name in a table."""
        return f"GRU, H {self.hidden_dim}"


PPO_TASKS = [
    *(PPOTask(128, B) for B in (1, 4, 16)),
    *(PPOTask(128, B, seeds=8) for B in (1, 4)),
    *(PPOTask(512, B) for B in (1, 4, 16)),  # the slowest come last
]
WITHOUT_CONFIG = {what: [task for task in LAYER_TASKS if task.what == what] for what in ONE_CORE}
WITHOUT_CONFIG["ppo"] = PPO_TASKS
"""The tasks that no config describes."""

AnyTask = Task | LayerTask | PPOTask


def tasks(config: Config, what: str) -> list[Task]:
    """Return a config's tasks: one, for sampling one per batch size; none of WITHOUT_CONFIG."""
    if what in WITHOUT_CONFIG:
        return []
    if what == "sampling":
        return [Task(config, what, batch, tokens) for batch, tokens in SAMPLING.items()]
    return [Task(config, what, config.training.batch_size, config.training.sequence_length)]


def random_tokens(task: Task) -> jax.Array:
    """Return random tokens: a corpus for training, a batch for the forward pass, a prompt each."""
    B = task.batch_size
    T = task.num_tokens
    shapes = {
        "training": (100_000 + 2 * T,),
        "forward": (B, T),
        "sampling": (B, 1),
    }
    vocab_size = task.config.model.vocab_size
    tokens = np.random.default_rng(0).integers(vocab_size, size=shapes[task.what])
    return jnp.asarray(tokens, jnp.int32)


# --- Time


@dataclass(frozen=True)
class Contestant:
    """Something to be timed.

    Attributes:
      run: makes that many calls and returns when the device has finished the last one.
      compile_seconds: if compiling is timed separately; None: the first call minus the second.
    """

    run: Callable[[int], Any]
    compile_seconds: float | None = None


@dataclass(frozen=True)
class Started:
    """A contestant that was called twice: seconds of the first and of the second call."""

    contestant: Contestant
    first_call: float
    second_call: float

    @property
    def compile_seconds(self) -> float:
        """Seconds that compiling took."""
        if self.contestant.compile_seconds is not None:
            return self.contestant.compile_seconds
        return max(self.first_call - self.second_call, 0.0)

    def calls_of(self, min_seconds: float) -> int:
        """Return how many calls take at least this long."""
        if self.second_call <= 0:
            return 1
        return max(1, math.ceil(min_seconds / self.second_call))


def start(
    build: Callable[[], Contestant], clock: Callable[[], float] = time.perf_counter
) -> Started:
    """Build a contestant and call it twice, so that it is compiled and warm."""
    contestant = build()
    first_call = _seconds(contestant, 1, clock)
    second_call = _seconds(contestant, 1, clock)
    return Started(contestant, first_call, second_call)


def measure(
    started: Mapping[str, Started],
    rounds: int,
    min_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    on_round: Callable[[str, int], None] = lambda name, number: None,
) -> dict[str, list[float]]:
    """Time contestants in turn, so that a disturbance hits all of them.

    Returns:
      each contestant's seconds per call, one value per round: the mean of as many calls as take
      `min_seconds`, judged by the second call of `start`.
    """
    seconds: dict[str, list[float]] = {name: [] for name in started}
    for number in range(rounds):
        for name, entry in started.items():
            on_round(name, number)
            calls = entry.calls_of(min_seconds)
            seconds[name].append(_seconds(entry.contestant, calls, clock) / calls)
    return seconds


def _seconds(contestant: Contestant, calls: int, clock: Callable[[], float]) -> float:
    """Return how long this many calls take."""
    start_time = clock()
    contestant.run(calls)
    return clock() - start_time


# --- JAX: compiling and calling


def on_cpu() -> bool:
    """Return whether JAX computes on a CPU."""
    return jax.default_backend() == "cpu"


def compiled(
    function: Callable, *arguments: Any, donate: tuple[int, ...] = ()
) -> tuple[jax.stages.Compiled, float]:
    """Compile a function for these arguments; return it and the seconds, tracing included."""
    start_time = time.perf_counter()
    program = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
    return program, time.perf_counter() - start_time


def calling(call: Callable[[], Any]) -> Callable[[int], Any]:
    """Return a `Contestant.run` that waits for the last call's result and returns it."""

    def run(calls: int) -> Any:
        for _ in range(calls):
            result = call()
        return jax.block_until_ready(result)

    return run
