"""Measuring speed: contestants timed side by side, operations counted, the machine's own ceiling.

Nothing here knows who the contestants are; contestants.py builds them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxgru.config import Config, ModelConfig
from jaxgru.errors import UserError
from jaxgru.model import flatten, init
from pages.records import Measurement

KINDS = ("training", "forward", "sampling")
SAMPLING = {1: 128, 64: 64, 512: 32}
"""Batch sizes that are sampled, and how many tokens a row in one call."""

PRECISIONS = {
    "float32": "float32",
    "tf32": "tensorfloat32",
    "bfloat16": "BF16_BF16_F32",
}
"""Of matrix products, all else being float32: our names, and JAX's."""

MIN_SECONDS = 0.05  # a repeat makes at least so many calls that it takes this long


# --- What is done, and how many operations it takes


@dataclass(frozen=True)
class Task:
    """What every contestant does: a training step, a forward pass, or sampling.

    Training and forward: on (batch_size, num_tokens) tokens. Sampling: num_tokens, one after
    another, in each of batch_size rows.
    """

    config: Config
    what: str
    batch_size: int
    num_tokens: int

    @property
    def kind(self) -> str:
        """What is done, and in sampling with how many rows: "training", "sampling_64"."""
        return f"sampling_{self.batch_size}" if self.what == "sampling" else self.what

    @property
    def operations(self) -> int:
        """Floating-point operations of one call: see `operations_per_token`; training is 3 times.

        Each product x·W of the forward pass has two of the same size in the backward pass: one for
        the gradient of x and one for that of W.
        """
        per_token = operations_per_token(self.config.model)
        per_token *= 3 if self.what == "training" else 1
        return per_token * self.batch_size * self.num_tokens


def tasks(config: Config, what: str) -> list[Task]:
    """What is measured of a config: one task, or, for sampling, one a batch size."""
    if what == "sampling":
        return [Task(config, what, batch, tokens) for batch, tokens in SAMPLING.items()]
    return [Task(config, what, config.training.batch_size, config.training.sequence_length)]


@functools.cache
def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter by its path, "layers.0.Wz"; nothing is computed."""
    params = jax.eval_shape(lambda: init(jax.random.key(0), model))
    return {path: leaf.shape for path, leaf in flatten(params).items()}


def recurrent_shapes(model: ModelConfig) -> list[tuple[int, ...]]:
    """The shapes of the matrices that multiply a layer's state: those whose name begins with U.

    Raises:
      UserError: the model has none.
    """
    shapes = parameter_shapes(model).items()
    recurrent = [shape for path, shape in shapes if path.split(".")[-1].startswith("U")]
    if not recurrent:
        raise UserError(f"only recurrences are measured; this config's cell is {model.cell}.")
    return recurrent


def operations_per_token(model: ModelConfig) -> int:
    """Floating-point operations of a forward pass per token: those of its matrix products.

    2 per entry of every weight matrix, a multiplication and an addition. The embedding is looked
    up, which costs none; nor does anything elementwise.

    Raises:
      UserError: the model has no recurrence.
    """
    recurrent_shapes(model)
    shapes = parameter_shapes(model).items()
    return 2 * sum(math.prod(s) for path, s in shapes if len(s) > 1 and path != "embedding")


# --- Time


@dataclass(frozen=True)
class Contestant:
    """Something to be timed.

    run: makes so many calls one after another and returns when the device has finished the last.
    compile_seconds: where compiling is timed apart; None: the first call less a later one.
    memory: the bytes it takes on an accelerator, asked for after the first call; None: unknown.
    """

    run: Callable[[int], Any]
    compile_seconds: float | None = None
    memory: Callable[[], int | None] = lambda: None


@dataclass(frozen=True)
class Started:
    """A contestant that has been called twice: seconds of the first call and of the next."""

    contestant: Contestant
    first: float
    later: float

    @property
    def compile_seconds(self) -> float:
        """What compiling took."""
        apart = self.contestant.compile_seconds
        return max(self.first - self.later, 0.0) if apart is None else apart


@dataclass(frozen=True)
class Timing:
    """Seconds a call, one figure a repeat, each the mean of so many calls."""

    seconds: tuple[float, ...]
    calls: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def min(self) -> float:
        return min(self.seconds)

    @property
    def max(self) -> float:
        return max(self.seconds)


Clock = Callable[[], float]


def start(build: Callable[[], Contestant], clock: Clock = time.perf_counter) -> Started:
    """Builds a contestant and calls it twice: compiling and warming up are over after that."""
    contestant = build()
    return Started(
        contestant, first=_timed(contestant, 1, clock), later=_timed(contestant, 1, clock)
    )


def measure(
    started: Mapping[str, Started],
    repeats: int,
    min_seconds: float = MIN_SECONDS,
    clock: Clock = time.perf_counter,
    on_repeat: Callable[[str, int], None] = lambda name, repeat: None,
) -> dict[str, Timing]:
    """Times contestants in turn, `repeats` rounds, so that what disturbs one disturbs them all.

    Each repeat makes as many calls as take `min_seconds`, judged by the warm call before.
    """
    calls = {
        name: max(1, math.ceil(min_seconds / s.later)) if s.later > 0 else 1
        for name, s in started.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in started}
    for repeat in range(repeats):
        for name, s in started.items():
            on_repeat(name, repeat)
            seconds[name].append(_timed(s.contestant, calls[name], clock) / calls[name])
    return {name: Timing(tuple(seconds[name]), calls[name]) for name in started}


def _timed(contestant: Contestant, calls: int, clock: Clock) -> float:
    began = clock()
    contestant.run(calls)
    return clock() - began


def make_record(
    run: str,
    task: Task,
    precision: str,
    contestant: str,
    result: tuple[Started, Timing] | str,
    memory: int | None,
) -> Measurement:
    """One contestant at one task, for docs/benchmarks.json; the result: its timing, or why not."""
    training = task.config.training
    steps = training.epochs * training.steps_per_epoch
    if isinstance(result, str):
        outcome: dict[str, Any] = {"failed": result}
    else:
        started, timing = result
        outcome = {
            "median": timing.median,
            "min": timing.min,
            "max": timing.max,
            "repeats": len(timing.seconds),
            "calls": timing.calls,
            "compile_seconds": started.compile_seconds,
            "memory_bytes": memory,
        }
    return Measurement(
        run=run,
        config=task.config.name,
        kind=task.kind,
        batch_size=task.batch_size,
        num_tokens=task.num_tokens,
        precision=precision,
        contestant=contestant,
        operations=task.operations,
        steps_of_a_run=steps if task.what == "training" else None,
        **outcome,
    )


class TooSlow(BaseException):
    """A time limit has passed. No Exception: a compiler's own `except` shall not swallow it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TooSlow inside after so long; whole seconds or parts of them, in the main thread."""

    def late(number: int, frame: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- The machine's ceiling

Maker = Callable[[int], Contestant]


def product_ceiling(makers: Sequence[Maker], sizes: Sequence[int], repeats: int) -> float:
    """Operations a second of the fastest product of two square matrices, of any size and maker.

    2·n³ operations for n × n matrices; the fastest repeat counts, for it is a ceiling.
    """
    return max(2 * size**3 / _fastest(make, size, repeats) for make in makers for size in sizes)


def copy_ceiling(makers: Sequence[Maker], num_bytes: int, repeats: int) -> float:
    """Bytes a second, read and written ones together, of copying so many within the device."""
    return max(2 * num_bytes / _fastest(make, num_bytes, repeats) for make in makers)


def _fastest(make: Maker, size: int, repeats: int) -> float:
    return measure({"": start(lambda: make(size))}, repeats)[""].min


def jax_product(size: int, precision: str) -> Contestant:
    """A matrix product through JAX, float32, or bfloat16 where the precision is that."""
    dtype = jnp.bfloat16 if precision == "bfloat16" else jnp.float32
    a, b = jax.random.normal(jax.random.key(0), (2, size, size), dtype)
    with jax.default_matmul_precision(PRECISIONS[precision] if dtype == jnp.float32 else None):
        program, _ = compiled(jnp.matmul, a, b)
    return Contestant(calling(lambda: program(a, b)))


def jax_copy(num_bytes: int) -> Contestant:
    """Copying so many bytes within the device through JAX; adding 1 keeps it from being elided."""
    x = jnp.zeros(num_bytes // 4, jnp.float32)
    program, _ = compiled(lambda x: x + 1, x)
    return Contestant(calling(lambda: program(x)))


# --- JAX: compiling and calling


def compiled(
    function: Callable, *arguments: Any, donate: tuple[int, ...] = ()
) -> tuple[jax.stages.Compiled, float]:
    """The function compiled for these arguments, and the seconds it took, tracing included."""
    began = time.perf_counter()
    program = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
    return program, time.perf_counter() - began


def calling(call: Callable[[], Any]) -> Callable[[int], Any]:
    """A `Contestant.run` that waits for the last call's result and returns it."""

    def run(calls: int) -> Any:
        for _ in range(calls):
            result = call()
        return jax.block_until_ready(result)

    return run


def planned_memory(program: jax.stages.Compiled) -> int | None:
    """Bytes of device memory that XLA has planned for a program: all it is given, makes and uses.

    The device's own statistics cannot tell: their peak is the process's, and cannot be reset.
    """
    plan = program.memory_analysis()
    if plan is None:
        return None
    return (
        plan.argument_size_in_bytes
        + plan.output_size_in_bytes
        + plan.temp_size_in_bytes
        - plan.alias_size_in_bytes
    )
