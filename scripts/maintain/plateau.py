"""Train the first steps of a GRU model: how long is its loss that of the frequencies, and why?

scribe_gamma predicts each token by its frequency alone for hundreds of steps, and most units of its
upper layers become constant. This trains the same model by jaxgru, or by the PyTorch reference with
PyTorch's own initial weights, batches and dropout. Batch size, learning rate and seeds can be
changed. The result is added to docs/plateau.json every 25 steps: their mean loss, and the share of
each layer's units that are constant after them.
"""

from __future__ import annotations

import startup  # noqa: F401

import datetime
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float, Int
from msgspec.structs import replace
from rich.console import Console
from rich.progress import track

import torchref
from jaxgru import unroll
from jaxgru.cli.options import Parser, run_script
from jaxgru.errors import UserError
from jaxgru.lm.config import Config, load_config
from jaxgru.lm.data.dataset import load_dataset
from jaxgru.lm.files import check_writable
from jaxgru.lm.runs.commits import current_commit
from jaxgru.lm.training import init_state, train_steps
from jaxgru.lm.training.step import state_shardings
from jaxgru.parallel.hardware import describe_hardware
from jaxgru.parallel.sharding import data_mesh, one_copy, shard
from pages.records import add_to, load_or
from study.records import PLATEAU_MEAN, Plateau

NUM_WINDOWS = 8  # of the validation split, in which the states are compared
CONSTANT = 1e-3  # a standard deviation below this; states are between −1 and 1
RECIPE = {
    "model.cell": "gru",
    "model.reset_gate": "before",
    "model.final_norm": False,
    "training.dropout_site": "state",
    "training.compute_dtype": "float32",
    "data.batches": "crops",
    "training.gradient_accumulation": 1,
    "training.beta1": 0.9,
    "training.beta2": 0.999,
    "training.epsilon": 1e-8,
    "training.init": "",
}
"""What both frameworks train; a config with something else is refused."""


class Trainer(Protocol):
    """A model in training, with a framework's own random numbers."""

    def train(self, steps: int) -> list[float]:
        """Take training steps; return the loss before each of them."""
        ...

    def states(self, tokens: Int[np.ndarray, "B T"]) -> list[Float[np.ndarray, "B T H"]]:
        """Return each layer's states, without dropout."""
        ...


def main() -> None:
    """Read the arguments, train, and write the losses of each seed beside those of other runs."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--config", default="scribe_gamma", help="of a GRU (%(default)s)")
    add("--framework", choices=TRAINERS, default="jaxgru", help="(%(default)s)")
    add("--batch-size", type=int, help="rows (the config's)")
    add("--learning-rate", type=float, help="(the config's)")
    add("--seeds", type=int, nargs="+", default=[0], help="one training each (0)")
    add("--steps", type=int, default=450, help="of training (%(default)s)")
    add("--output", type=Path, default=Path("docs/plateau.json"), help="(%(default)s)")
    arguments = parser.parse_args()
    given = {"batch_size": arguments.batch_size, "learning_rate": arguments.learning_rate}
    options = {f"training.{name}": v for name, v in given.items() if v is not None}
    configs = [load_config(arguments.config, options | {"training.seed": seed})
               for seed in arguments.seeds]  # fmt: skip
    check(configs[0], arguments.steps)
    if arguments.framework == "PyTorch" and jax.devices()[0].platform != "cpu":
        raise UserError("The PyTorch reference trains on the CPU; JAX_PLATFORMS=cpu says so.")
    output = arguments.output
    try:
        check_writable(output.parent)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}.") from error
    for config in configs:
        empty = record(config, arguments.framework)
        known = [run for run in load_or([], output, list[Plateau]) if run.key == empty.key]
        if known and known[0].steps > arguments.steps:
            raise UserError(f"{output} has {known[0].steps} steps of seed {empty.seed}; "
                            f"{arguments.steps} would replace them.")  # fmt: skip
    for config in configs:
        for run in first_steps(config, arguments.framework, arguments.steps):
            add_to(output, run, lambda run: run.key)
        Console(highlight=False, markup=False).print(f"{run}\n{output} written")


def check(config: Config, steps: int) -> None:
    """Raise UserError if the config is not the study's recipe, or the steps not whole parts."""
    for name, value in RECIPE.items():
        section, field = name.split(".")
        if (given := getattr(getattr(config, section), field)) != value:
            raise UserError(f"{config.name} has {name} {given!r}; it must be {value!r} here.")
    most = config.training.epochs * config.training.steps_per_epoch
    if not 0 < steps <= most or steps % PLATEAU_MEAN:
        raise UserError(f"--steps is {steps}; it must be a multiple of {PLATEAU_MEAN} "
                        f"and at most {most}.")  # fmt: skip


def record(config: Config, framework: str) -> Plateau:
    """Return the record of a training before its first step."""
    hardware, training = describe_hardware(), config.training
    if framework == "PyTorch":
        hardware = f"{hardware.rpartition(', ')[0]}, PyTorch {torch.__version__}"
    return Plateau(
        config=config.name, framework=framework, batch_size=training.batch_size,
        learning_rate=training.learning_rate, seed=training.seed, losses=[], constant=[],
        date=str(datetime.date.today()), hardware=hardware, commit=current_commit(),
    )  # fmt: skip


def first_steps(config: Config, framework: str, steps: int) -> Iterator[Plateau]:
    """Yield what a training has given so far, every PLATEAU_MEAN steps."""
    run = record(config, framework)
    config, dataset = load_dataset(config)
    trainer = TRAINERS[framework](config, dataset.train)
    tokens = windows(dataset.validation, config.training.sequence_length)
    parts = range(steps // PLATEAU_MEAN)
    for _ in track(parts, f"seed {run.seed}, {PLATEAU_MEAN} steps each"):
        loss = statistics.mean(trainer.train(PLATEAU_MEAN))
        if not math.isfinite(loss):
            raise UserError(f"the training loss is {loss} after {run.steps} steps.")
        shares = [round(constant_units(h), 3) for h in trainer.states(tokens)]
        run = replace(run, losses=[*run.losses, round(loss, 3)], constant=[*run.constant, shares])
        yield run


def windows(tokens: Int[np.ndarray, "N"], length: int) -> Int[np.ndarray, "B T"]:
    """Return the first windows, one after another."""
    count = min(NUM_WINDOWS, len(tokens) // length)
    return tokens[: count * length].reshape(count, length)


def constant_units(states: Float[np.ndarray, "B T H"]) -> float:
    """Return the share of the units whose states differ by almost nothing, whatever the tokens.

    The first eighth of the steps does not count: from zeros, any unit moves.
    """
    after = states[:, states.shape[1] // 8 :]
    return float((after.std(axis=(0, 1)) < CONSTANT).mean())


class InJaxgru:
    """The steps of `train.py`, on all devices."""

    def __init__(self, config: Config, tokens: Int[np.ndarray, "N"]) -> None:
        self.config, training = config, config.training
        self.mesh = data_mesh(training.batch_size)
        state = init_state(config.model, training, config.data.batches)
        self.state = shard(state, state_shardings(state, self.mesh, training))
        self.tokens = shard(jnp.asarray(tokens), NamedSharding(self.mesh, PartitionSpec()))

    def train(self, steps: int) -> list[float]:
        """Take training steps; return the loss before each of them."""
        self.state, losses, n = train_steps(
            self.config.training, self.state, self.tokens, np.int32(steps), self.mesh
        )
        return np.asarray(losses)[: int(n)].tolist()

    def states(self, tokens: Int[np.ndarray, "B T"]) -> list[Float[np.ndarray, "B T H"]]:
        """Return each layer's states, without dropout."""
        params = one_copy(self.state.params, self.mesh)
        embedded = params.embedding[tokens]
        return list(map(np.asarray, unroll(params.layers, embedded, return_carries=True)[2]))


class InPyTorch:
    """The study's recipe; all random numbers are PyTorch's."""

    def __init__(self, config: Config, tokens: Int[np.ndarray, "N"]) -> None:
        self.training, m = config.training, config.model
        self.tokens = torch.from_numpy(tokens.astype(np.int64))
        torch.manual_seed(self.training.seed)
        self.model = torchref.MyGRUModel(
            m.vocab_size, m.embedding_dim, m.hidden_dim, m.num_layers, self.training.dropout,
            second_bias=m.second_bias,
        )  # fmt: skip
        self.optimizer, self.schedule = torchref.make_optimizer(
            self.model, self.training.learning_rate, self.training.epochs,
            self.training.weight_decay,
        )  # fmt: skip
        self.step = 0

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw random crops; return their inputs and targets."""
        T, B = self.training.sequence_length, self.training.batch_size
        starts = torch.randint(0, len(self.tokens) - T - 1, (B,))
        crops = self.tokens[starts[:, None] + torch.arange(T + 1)]
        return crops[:, :-1], crops[:, 1:]

    def train(self, steps: int) -> list[float]:
        """Take training steps; return the loss before each of them."""
        self.model.train()
        losses, clip = [], {"max_grad_norm": self.training.max_grad_norm}
        for _ in range(steps):
            losses.append(torchref.train_step(self.model, self.optimizer, *self.batch(), **clip))
            self.step += 1
            if self.step % self.training.steps_per_epoch == 0:
                self.schedule.step()
        return losses

    @torch.no_grad()
    def states(self, tokens: Int[np.ndarray, "B T"]) -> list[Float[np.ndarray, "B T H"]]:
        """Return each layer's states, without dropout."""
        embedding, cells, _, _ = self.model.parts()
        x = embedding(torch.from_numpy(tokens.astype(np.int64)))
        states = []
        for cell, start in zip(cells, self.model.initial_carry(len(tokens)), strict=True):
            x, _ = torchref.models.unroll(cell, x, start)
            states.append(x.numpy())
        return states


TRAINERS: dict[str, type[Trainer]] = {"jaxgru": InJaxgru, "PyTorch": InPyTorch}

if __name__ == "__main__":
    run_script(main)
