"""Compute what a training step on n devices holds, sends and computes; see docs/scaling.md.

These are formulas; only `Machine.step` comes from measurements. With P parameters, n devices,
N = training.gradient_accumulation micro-steps, and all numbers in float32:

- A device holds 4·P bytes of parameters and 8·P of AdamW's moments, or 1/n of both if they are
  sharded (ZeRO stage 3, Rajbhandari et al. 2020, arXiv 1910.02054); during a step, also 4·P bytes
  of gradients.
- An optimizer step sends 2·(n − 1)/n · 4·P bytes from each device, whatever the number of rows: a
  ring all-reduce (Patarasuk & Yuan 2009, J. Parallel Distrib. Comput. 69(2), 117–124). Its two
  halves are a ring's reduce-scatter and all-gather, which sharded parameters need.
- A device computes the operations of its rows (3 times `timing.operations_per_token`: forward, and
  backward for inputs and for weights). At each time step of each layer, forward and again backward,
  it also reads U (H × G·H) and launches a few kernels, whatever the number of rows. The time is the
  sum of the three.
"""

from __future__ import annotations

import startup  # noqa: F401

import argparse
import dataclasses
import math
import shlex
from dataclasses import dataclass
from pathlib import Path

from bench.timing import operations_per_token, parameter_shapes, recurrent_shapes
from jaxgru.cli.options import Parser, run_script
from jaxgru.errors import UserError
from jaxgru.lm.config import Config, load_config
from jaxgru.lm.files import write_text
from jaxgru.parallel.sharding import partition_spec
from pages.markdown import fill
from pages.markdown import table as markdown_table

BYTES = 4  # of a float32
COMMAND = "python -m scripts.bench.roofline"


@dataclass(frozen=True)
class Machine:
    """Peak rates per second, and the time of a step; the defaults are those of an NVIDIA H200 SXM.

    flops: dense TF32, which JAX uses by default for float32 products on recent GPUs (docs.jax.dev,
      "Matmul precision"); half of the data sheet's 989e12, which assume sparsity.
    memory: bytes read, 4.8e12 in the data sheet.
    link: bytes to another device of the node, one way; NVLink's 900e9 are both ways together.
    network: bytes from a device to another node: one 400 Gbit/s port per GPU, as in a DGX H200.
    step: seconds of a layer's time step in one direction, in which nothing is read or computed;
      chosen so that the training steps of four models take what was measured, to within 9 %
      (docs/performance.md).
    devices_per_node: eight in an HGX or DGX H200.
    """

    flops: float = 494e12
    memory: float = 4.8e12
    link: float = 450e9
    network: float = 50e9
    step: float = 15e-6
    devices_per_node: int = 8


@dataclass(frozen=True)
class Estimate:
    """One optimizer step on `devices` devices: bytes and seconds of each device."""

    devices: int
    rows: int
    parameters: int
    moments: int
    sharded_parameters: int
    sharded_moments: int
    gradients: int
    sent: int
    computing: float
    sending: float

    @property
    def accumulation(self) -> int:
        """Micro-steps per step with which sending takes no longer than computing."""
        return max(1, math.ceil(self.sending / self.computing))


def estimate(config: Config, devices: int, rows: int | None, machine: Machine) -> Estimate:
    """Estimate one micro-step and the sending of gradients.

    rows: of each device; None: its share of the config's batch.

    Raises:
      UserError: there are no devices or rows, the batch does not divide, or the model has no
        recurrence.
    """
    if rows is None:
        rows, rest = divmod(config.training.batch_size, max(devices, 1))
        if rest:
            raise UserError(f"a batch of {config.training.batch_size} rows cannot be shared by "
                            f"{devices} devices.")  # fmt: skip
    if devices < 1 or rows < 1:
        raise UserError(f"{devices} devices with {rows} rows each: both must be at least 1.")
    shapes, n = parameter_shapes(config.model).values(), devices
    P = BYTES * sum(map(math.prod, shapes))
    piece = BYTES * sum(math.prod(s) // (n if len(partition_spec(s, n)) else 1) for s in shapes)
    sent = 2 * (n - 1) * P // n
    return Estimate(
        devices=n,
        rows=rows,
        parameters=P,
        moments=2 * P,
        sharded_parameters=piece,
        sharded_moments=2 * piece,
        gradients=P,
        sent=sent,
        computing=sum(seconds_of(config, rows, machine).values()),
        sending=sent / (machine.link if n <= machine.devices_per_node else machine.network),
    )


def seconds_of(config: Config, rows: int, machine: Machine) -> dict[str, float]:
    """Return the three parts of the time that a training step takes."""
    T, Us = config.training.sequence_length, recurrent_shapes(config.model)
    return {
        "arithmetic": 3 * operations_per_token(config.model) * rows * T / machine.flops,
        "memory": 2 * T * BYTES * sum(map(math.prod, Us)) / machine.memory,
        "launches": 2 * T * config.model.num_layers * machine.step,
    }


def first_bound_by_sending(
    config: Config, machine: Machine, rows: int | None, most: int = 4096
) -> int | None:
    """Return the fewest devices on which sending takes longer than computing; None: above `most`.

    rows: of each device; None: its share of the config's batch, for the numbers that divide it.
    """
    for n in range(2, most + 1):
        if rows is None and config.training.batch_size % n:
            continue
        one = estimate(config, n, rows, machine)
        if one.sending > one.computing:
            return n
    return None


def table(config: Config, devices: list[int], rows: int | None, machine: Machine) -> str:
    """Return a Markdown table, a row per number of devices, and from where on sending dominates.

    Raises:
      UserError: as `estimate` does.
    """
    lines = []
    for e in (estimate(config, n, rows, machine) for n in devices):
        kept, sharded = e.parameters + e.moments, e.sharded_parameters + e.sharded_moments
        sizes = (f"{size / 1e6:.1f}" for size in (kept, sharded, e.gradients, e.sent))
        seconds = (f"{1e3 * s:.2f}" for s in (e.computing, e.sending))
        slowest = bound(config, e, machine)
        lines.append([e.devices, e.rows, *sizes, *seconds, slowest, e.accumulation])
    first = first_bound_by_sending(config, machine, rows)
    head = ["devices", "rows per device", "parameters + moments, MB", "sharded, MB",
            "gradients, MB", "sent per step, MB", "computing, ms", "sending, ms", "the bound",
            "accumulation"]  # fmt: skip
    made = markdown_table(head, lines, "r" * 8 + "lr")
    if first is None:
        tried = "Up to 4,096 devices" if rows else "On any number of devices that divides the batch"
        return f"{made}\n{tried}, sending takes no longer than computing."
    return f"{made}\nSending takes longer than computing from {first} devices on."


def bound(config: Config, step: Estimate, machine: Machine) -> str:
    """Return what takes longest."""
    if step.sending > step.computing:
        return "network" if step.devices > machine.devices_per_node else "link"
    seconds = seconds_of(config, step.rows, machine)
    return max(seconds, key=lambda name: seconds[name])


# --- The command


def main() -> None:
    """Read the arguments and make one call."""
    arguments = make_parser().parse_args()
    if arguments.update:
        path = Path(arguments.update)
        try:
            write_text(path, fill(path.read_text(), answer_in_page))
        except OSError as error:
            raise UserError(f"{path} cannot be used: {error.strerror}.") from error
    else:
        print(answer(arguments))


def make_parser() -> Parser:
    """Return the parser; each rate of `Machine` is an option."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--config", default="leviathan", help="a config's name, or a .toml file")
    add("--devices", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    add("--rows", type=int, help="per device (default: its share of the config's batch)")
    for field in dataclasses.fields(Machine):
        add(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default,
            help="of the machine (%(default)s)")  # fmt: skip
    add("--update", metavar="PAGE", help="remake the tables in a page")
    return parser


def answer(arguments: argparse.Namespace) -> str:
    """Return the table that the arguments ask for."""
    rates = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Machine)}
    wrong = [name for name, value in rates.items() if not value > 0]
    if wrong:
        raise UserError(f"{wrong[0]} is {rates[wrong[0]]}; it must be above 0.")
    config = load_config(arguments.config)
    return table(config, arguments.devices, arguments.rows, Machine(**rates))


def answer_in_page(options: str) -> str:
    """Return the command with these options, and what it prints."""
    answered = answer(make_parser().parse_args(shlex.split(options)))
    return f"```\n{COMMAND} {options}\n```\n\n{answered}"


if __name__ == "__main__":
    run_script(main)
