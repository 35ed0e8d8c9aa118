"""Timing of contestants side by side, counts of operations, and the machine's ceiling.

This module does not know who the contestants are; contestants.py builds them.
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
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bench.records import ContestantTime
from jaxgru.errors import UserError
from jaxgru.lm.config import Config, ModelConfig
from jaxgru.lm.model import flatten, init

KINDS = ("training", "forward", "sampling", "layer", "ppo")
SAMPLING = {1: 128, 64: 64, 512: 32}
"""Batch sizes for sampling, and the number of tokens per row in one call."""

PRECISIONS = {"float32": "float32", "tf32": "tensorfloat32", "bfloat16": "BF16_BF16_F32"}
"""Precisions of matrix products (all else is float32): our names, and JAX's."""

TEMPERATURE, TOP_K = 0.8, 30  # of sampling
MIN_SECONDS = 0.05  # a repeat makes as many calls as take at least this long


# --- Tasks, and how many operations they take


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
        return f"sampling_{self.batch_size}" if self.what == "sampling" else self.what

    @property
    def operations(self) -> int:
        """Floating-point operations of one call: of `operations_per_token`, or 3 times in training.

        Each product x·W of the forward pass has two of the same size in the backward pass: one for
        the gradient of x and one for that of W.
        """
        per_token = operations_per_token(self.config.model)
        per_token *= 3 if self.what == "training" else 1
        return per_token * self.batch_size * self.num_tokens

    @property
    def name(self) -> str:
        """The config's name."""
        return self.config.name

    @property
    def steps_of_a_run(self) -> int | None:
        """The number of training steps that the config asks for."""
        training = self.config.training
        return training.epochs * training.steps_per_epoch if self.what == "training" else None


@dataclass(frozen=True)
class LayerTask:
    """One layer forward and backward, x (T, B, F) → y (T, B, H); T is num_tokens."""

    cell: str
    batch_size: int
    num_tokens: int
    features: int
    hidden_dim: int
    resets: bool = False
    what: str = "layer"
    steps_of_a_run: ClassVar[None] = None  # a layer has no run

    @property
    def kind(self) -> str:
        """The kind in a record."""
        return "layer_resets" if self.resets else "layer"

    @property
    def name(self) -> str:
        """The name in a table."""
        return f"{self.cell}, H {self.hidden_dim}"

    @property
    def operations(self) -> int:
        """Floating-point operations of one call, in matrix products: as a training step's."""
        gates = 4 if self.cell == "lstm" else 3
        weights = (self.features + self.hidden_dim) * gates * self.hidden_dim
        return 3 * 2 * weights * self.batch_size * self.num_tokens


LAYER_TASKS = [
    LayerTask(cell, B, T, H, H, resets)
    for B, T, H in ((16, 128, 128), (64, 128, 128), (64, 128, 512), (1024, 32, 128))
    for resets in (False, True)
    for cell in ("gru", "gru, reset after", "lstm")
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
    steps_of_a_run: ClassVar[None] = None  # it is a whole one

    @property
    def kind(self) -> str:
        """The kind in a record, with the number of seeds: "ppo", "ppo_8"."""
        return f"ppo_{self.seeds}" if self.seeds > 1 else "ppo"

    @property
    def name(self) -> str:
        """The name in a table."""
        return f"GRU, H {self.hidden_dim}"

    @property
    def operations(self) -> int:
        """Floating-point operations in the GRU's matrix products: acting, and 4 epochs learning."""
        steps = self.updates * 4 * self.batch_size * self.num_tokens  # in 4 minibatches
        return self.seeds * steps * (1 + 4 * 3) * 2 * 6 * self.hidden_dim**2


PPO_TASKS = [PPOTask(128, B) for B in (1, 4, 16)]
PPO_TASKS += [PPOTask(128, B, seeds=8) for B in (1, 4)]
PPO_TASKS += [PPOTask(512, B) for B in (1, 4, 16)]  # the slowest come last
WITHOUT_CONFIG = {"layer": LAYER_TASKS, "ppo": PPO_TASKS}
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
    B, T = task.batch_size, task.num_tokens
    shape = {"training": (100_000 + 2 * T,), "forward": (B, T), "sampling": (B, 1)}[task.what]
    tokens = np.random.default_rng(0).integers(task.config.model.vocab_size, size=shape)
    return jnp.asarray(tokens, jnp.int32)


@functools.cache
def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by its path, "layers.0.W", without computing any."""
    params = jax.eval_shape(lambda: init(jax.random.key(0), model))
    return {path: leaf.shape for path, leaf in flatten(params).items()}


def recurrent_shapes(model: ModelConfig) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices that multiply a state: those whose name begins with U.

    Raises:
      UserError: the model has none.
    """
    shapes = parameter_shapes(model).items()
    recurrent = [shape for path, shape in shapes if path.split(".")[-1].startswith("U")]
    if not recurrent:
        raise UserError(f"only recurrences are measured; this config's cell is {model.cell}.")
    return recurrent


def operations_per_token(model: ModelConfig) -> int:
    """Return the floating-point operations of a forward pass per token, in matrix products.

    They are 2 per entry of every weight matrix, a multiplication and an addition. The lookup of the
    embedding and elementwise operations are not counted.

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

    run: makes that many calls and returns when the device has finished the last one.
    compile_seconds: if compiling is timed separately; None: the first call minus a later one.
    memory: the bytes it takes on an accelerator, called after the first call; None: unknown.
    """

    run: Callable[[int], Any]
    compile_seconds: float | None = None
    memory: Callable[[], int | None] = lambda: None


@dataclass(frozen=True)
class Started:
    """A contestant that was called twice: seconds of the first and of the second call."""

    contestant: Contestant
    first: float
    later: float

    @property
    def compile_seconds(self) -> float:
        """Seconds that compiling took."""
        timed = self.contestant.compile_seconds
        return max(self.first - self.later, 0.0) if timed is None else timed


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one value per repeat, each the mean over `calls`."""

    seconds: tuple[float, ...]
    calls: int

    median = property(lambda self: statistics.median(self.seconds))
    min = property(lambda self: min(self.seconds))
    max = property(lambda self: max(self.seconds))


Clock = Callable[[], float]


def start(build: Callable[[], Contestant], clock: Clock = time.perf_counter) -> Started:
    """Build a contestant and call it twice, so that it is compiled and warm."""
    contestant = build()
    return Started(contestant, _timed(contestant, 1, clock), _timed(contestant, 1, clock))


def measure(
    started: Mapping[str, Started],
    repeats: int,
    min_seconds: float = MIN_SECONDS,
    clock: Clock = time.perf_counter,
    on_repeat: Callable[[str, int], None] = lambda name, repeat: None,
) -> dict[str, Timing]:
    """Time contestants in turn, `repeats` rounds, so that a disturbance hits all of them.

    Each repeat makes as many calls as take `min_seconds`, judged by the second call of `start`.
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
    task: AnyTask,
    precision: str,
    contestant: str,
    result: tuple[Started, Timing] | str,
    memory: int | None,
) -> ContestantTime:
    """Return a record for docs/benchmarks.json; `result` is the timing, or why there is none."""
    if isinstance(result, str):
        outcome: dict[str, Any] = {"failed": result}
    else:
        started, timing = result
        outcome = {name: getattr(timing, name) for name in ("median", "min", "max", "calls")}
        outcome |= {"repeats": len(timing.seconds), "memory_bytes": memory}
        outcome["compile_seconds"] = started.compile_seconds
    sizes = "kind", "batch_size", "num_tokens", "operations", "steps_of_a_run"
    outcome |= {name: getattr(task, name) for name in sizes}
    return ContestantTime(
        run=run, config=task.name, precision=precision, contestant=contestant, **outcome
    )


class TooSlow(BaseException):
    """A time limit has passed. Not an Exception, which a compiler's own `except` would catch."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooSlow inside after so many seconds; works in the main thread only."""

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

KNOWN_CEILINGS = {
    "NVIDIA H200": {"float32": 51.1e12, "tf32": 401e12, "bfloat16": 802e12, "copy": 4.24e12}
}
"""Ceilings by device, for a run that measures none. Those of an H200 are what this script measured
in November 2026 with JAX 0.11.2 and PyTorch 2.11."""

Maker = Callable[[int], Contestant]


def product_ceiling(makers: Sequence[Maker], sizes: Sequence[int], repeats: int) -> float:
    """Return the operations per second of the fastest square matrix product, 2·n³ for n × n.

    The fastest repeat over all sizes and makers counts: it is a ceiling.
    """
    return max(2 * size**3 / _fastest(make, size, repeats) for make in makers for size in sizes)


def copy_ceiling(makers: Sequence[Maker], num_bytes: int, repeats: int) -> float:
    """Return the bytes per second, read plus written, of copying within the device."""
    return max(2 * num_bytes / _fastest(make, num_bytes, repeats) for make in makers)


def _fastest(make: Maker, size: int, repeats: int) -> float:
    return measure({"": start(lambda: make(size))}, repeats)[""].min


def jax_product(size: int, precision: str) -> Contestant:
    """Return a matrix product in JAX; its operands are float32, or bfloat16 for that precision."""
    dtype = jnp.bfloat16 if precision == "bfloat16" else jnp.float32
    a, b = jax.random.normal(jax.random.key(0), (2, size, size), dtype)
    with jax.default_matmul_precision(PRECISIONS[precision] if dtype == jnp.float32 else None):
        program, _ = compiled(jnp.matmul, a, b)
    return Contestant(calling(lambda: program(a, b)))


def jax_copy(num_bytes: int) -> Contestant:
    """Return a copy within the device in JAX; it adds 1, or the copy would be elided."""
    x = jnp.zeros(num_bytes // 4, jnp.float32)
    program, _ = compiled(lambda x: x + 1, x)
    return Contestant(calling(lambda: program(x)))


# --- JAX: compiling and calling


def on_cpu() -> bool:
    """Return whether JAX computes on a CPU."""
    return jax.default_backend() == "cpu"


def compiled(
    function: Callable, *arguments: Any, donate: tuple[int, ...] = ()
) -> tuple[jax.stages.Compiled, float]:
    """Compile a function for these arguments; return it and the seconds, tracing included."""
    began = time.perf_counter()
    program = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
    return program, time.perf_counter() - began


def calling(call: Callable[[], Any]) -> Callable[[int], Any]:
    """Return a `Contestant.run` that waits for the last call's result and returns it."""

    def run(calls: int) -> Any:
        for _ in range(calls):
            result = call()
        return jax.block_until_ready(result)

    return run


def planned_memory(program: jax.stages.Compiled) -> int | None:
    """Return the bytes that XLA plans for a program: its inputs, outputs and temporaries.

    The device's own statistics are of no use here: their peak is the process's and cannot be reset.
    """
    plan = program.memory_analysis()
    if plan is None:
        return None
    held = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    return held + plan.temp_size_in_bytes
