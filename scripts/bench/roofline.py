"""What a training step on n devices holds, sends and computes, by formula; see docs/scaling.md.

Nothing is measured.

P parameters, n devices, N = training.gradient_accumulation micro-steps, all numbers float32:

- a device holds 4·P bytes of parameters and 8·P of AdamW's moments, or 1/n of both where they are
  cut (ZeRO stage 3, Rajbhandari et al. 2020, arXiv 1910.02054), and during a step 4·P of gradients;
- an optimizer step sends 2·(n − 1)/n · 4·P bytes from each device, however many rows it sees: a
  ring's all-reduce (Patarasuk & Yuan 2009, J. Parallel Distrib. Comput. 69(2), 117–124). A ring's
  all-gather and reduce-scatter, which are what cut parameters take, are its two halves;
- a device computes its rows' operations (`timing.operations_per_token`, 3 times: forward, and
  backward for inputs and for weights), and reads U (H × G·H a layer) at each time step forward and
  again backward, however few its rows are. The longer of the two is the time (the roofline,
  Williams et al. 2009, Commun. ACM 52(4), 65–76).
"""

from __future__ import annotations

import sys
from os.path import dirname

sys.path.insert(0, dirname(dirname(__file__)))

import startup  # noqa: F401

import argparse
import dataclasses
import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from bench.timing import operations_per_token, parameter_shapes, recurrent_shapes
from jaxgru.cli.options import Parser, run_script
from jaxgru.config import Config, load_config
from jaxgru.errors import UserError
from jaxgru.files import write_text
from jaxgru.parallel.sharding import cut
from pages.markdown import table as markdown_table

BYTES = 4  # of a float32


@dataclass(frozen=True)
class Machine:
    """Peak rates, a second; of an NVIDIA H200 SXM unless said otherwise.

    flops: dense TF32, half of the data sheet's 989e12, which is with sparsity; on recent GPUs JAX
      computes products of float32 so by default (docs.jax.dev, "Matmul precision").
    memory: bytes read, 4.8e12 in the data sheet.
    link: bytes to another device of the node, each way; NVLink's 900e9 are both ways together.
    network: bytes from a device to another node; one 400 Gbit/s port a GPU, as in a DGX H200.
    devices_a_node: eight in an HGX or DGX H200.
    """

    flops: float = 494e12
    memory: float = 4.8e12
    link: float = 450e9
    network: float = 50e9
    devices_a_node: int = 8


@dataclass(frozen=True)
class Estimate:
    """One optimizer step on so many devices: bytes and seconds of each device."""

    devices: int
    rows: int
    parameters: int
    moments: int
    cut_parameters: int
    cut_moments: int
    gradients: int
    sent: int
    computing: float
    sending: float

    @property
    def accumulation(self) -> int:
        """Micro-steps a step with which sending takes no longer than computing."""
        return max(1, math.ceil(self.sending / self.computing))


def estimate(config: Config, devices: int, rows: int, machine: Machine) -> Estimate:
    """What one micro-step and the sending cost; `rows` are those of each device.

    Raises:
      UserError: there are no devices or rows, or the model has no recurrence.
    """
    if devices < 1 or rows < 1:
        raise UserError(f"{devices} devices with {rows} rows each: both must be at least 1.")
    shapes, n = parameter_shapes(config.model).values(), devices
    P = BYTES * sum(map(math.prod, shapes))
    piece = BYTES * sum(math.prod(s) // (n if len(cut(s, n)) else 1) for s in shapes)
    sent = 2 * (n - 1) * P // n
    return Estimate(
        devices=n,
        rows=rows,
        parameters=P,
        moments=2 * P,
        cut_parameters=piece,
        cut_moments=2 * piece,
        gradients=P,
        sent=sent,
        computing=max(arithmetic(config, rows, machine), reading(config, machine)),
        sending=sent / (machine.link if n <= machine.devices_a_node else machine.network),
    )


def arithmetic(config: Config, rows: int, machine: Machine) -> float:
    """Seconds that a training step's products take, so many rows of them."""
    tokens = rows * config.training.sequence_length
    return 3 * operations_per_token(config.model) * tokens / machine.flops


def reading(config: Config, machine: Machine) -> float:
    """Seconds that reading each layer's U takes, once a time step each way."""
    U = BYTES * sum(map(math.prod, recurrent_shapes(config.model)))
    return 2 * config.training.sequence_length * U / machine.memory


def first_bound_by_sending(
    config: Config, machine: Machine, rows: int | None, most: int = 4096
) -> int | None:
    """The fewest devices on which sending takes longer than computing; None: not up to `most`.

    rows: of each device; None: the config's batch shared out, as far as it divides.
    """
    batch = config.training.batch_size
    for n in range(2, most + 1):
        if rows is None and batch % n:
            continue
        one = estimate(config, n, rows or batch // n, machine)
        if one.sending > one.computing:
            return n
    return None


def table(config: Config, devices: list[int], rows: int | None, machine: Machine) -> str:
    """Markdown: a row for each number of devices, and where sending begins to be the bound.

    Raises:
      UserError: as `estimate` does, or the batch does not divide.
    """
    batch = config.training.batch_size
    lines = []
    for n in devices:
        if rows is None and n > 0 and batch % n:
            raise UserError(f"a batch of {batch} rows cannot be shared by {n} devices.")
        e = estimate(config, n, rows if rows is not None else batch // max(n, 1), machine)
        sizes = e.parameters + e.moments, e.cut_parameters + e.cut_moments, e.gradients, e.sent
        seconds = e.computing, e.sending
        lines.append([n, e.rows, *(f"{size / 1e6:.1f}" for size in sizes),
                      *(f"{1e3 * s:.2f}" for s in seconds), bound(config, e, machine),
                      e.accumulation])  # fmt: skip
    first = first_bound_by_sending(config, machine, rows)
    where = f"from {first} devices on" if first else "on no number of devices up to 4096"
    head = ["devices", "rows per device", "parameters + moments, MB", "cut, MB", "gradients, MB",
            "sent per step, MB", "computing, ms", "sending, ms", "the bound",
            "accumulation"]  # fmt: skip
    made = markdown_table(head, lines, "r" * 8 + "lr")
    return f"{made}\nSending takes longer than computing {where}."


def bound(config: Config, step: Estimate, machine: Machine) -> str:
    """What takes longest."""
    if step.sending > step.computing:
        return "network" if step.devices > machine.devices_a_node else "link"
    return "memory" if step.computing > arithmetic(config, step.rows, machine) else "arithmetic"


# --- The command

BLOCK = re.compile(
    r"(```\npython scripts/bench/roofline\.py ([^\n]*)\n```\n\n).*?(\n\n<!-- end -->)", re.DOTALL
)


def main() -> None:
    """Reads the arguments and makes one call."""
    arguments = make_parser().parse_args()
    if arguments.update:
        path = Path(arguments.update)
        try:
            write_text(path, updated(path.read_text()))
        except OSError as error:
            raise UserError(f"{path} cannot be used: {error.strerror}.") from error
    else:
        print(answer(arguments))


def make_parser() -> Parser:
    """The options; each rate of `Machine` is one."""
    parser = Parser(__doc__)
    parser.add_argument("--config", default="leviathan", help="a config's name, or a .toml file")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--rows", type=int, help="of each device; else the config's batch, shared")
    for field in dataclasses.fields(Machine):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=type(field.default),
            default=field.default,
            help="see `Machine`; default: %(default)s",
        )
    parser.add_argument("--update", metavar="PAGE", help="remake the tables of a page")
    return parser


def answer(arguments: argparse.Namespace) -> str:
    """The table that the arguments ask for."""
    rates = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Machine)}
    wrong = [name for name, value in rates.items() if not value > 0]
    if wrong:
        raise UserError(f"{wrong[0]} is {rates[wrong[0]]}; it must be above 0.")
    config = load_config(arguments.config)
    return table(config, arguments.devices, arguments.rows, Machine(**rates))


def updated(page: str) -> str:
    """The page, with the table below each of its commands remade."""

    def again(found: re.Match) -> str:
        arguments = make_parser().parse_args(shlex.split(found[2]))
        return found[1] + answer(arguments) + found[3]

    return BLOCK.sub(again, page)


if __name__ == "__main__":
    run_script(main)
