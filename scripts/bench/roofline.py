"""What a training step on n devices holds, moves and computes, by formula: nothing is measured.

P parameters, n devices, N = training.gradient_accumulation micro-steps, all numbers float32:

- a device holds 4·P bytes of parameters and 8·P of AdamW's moments, or 1/n of both where they are
  cut (ZeRO stage 3, Rajbhandari et al. 2020, arXiv 1910.02054), and during a step 4·P of gradients;
- an optimizer step sends 2·(n − 1)/n · 4·P bytes from each device, however many rows it sees: a
  ring's all-reduce (Patarasuk & Yuan 2009, J. Parallel Distrib. Comput. 69(2), 117–124). A ring's
  all-gather and reduce-scatter, which are what cut parameters take, are its two halves;
- a device computes its rows' operations (`benchmarking.operations_per_token`, 3 times: forward, and
  backward for inputs and for weights), and reads U (H × G·H a layer) at each time step forward and
  again backward, however few its rows are. The longer of the two is the time (the roofline,
  Williams et al. 2009, Commun. ACM 52(4), 65–76).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax

from jaxgru.benchmarking import operations_per_token
from jaxgru.config import Config, ModelConfig
from jaxgru.errors import UserError
from jaxgru.model import init
from jaxgru.sharding import cut

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
class Cost:
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


def cost(config: Config, devices: int, rows: int, machine: Machine) -> Cost:
    """What one micro-step and the sending cost; `rows` are those of each device.

    Raises:
      UserError: there are no devices or rows, or the model has no recurrence.
    """
    if devices < 1 or rows < 1:
        raise UserError(f"{devices} devices with {rows} rows each: both must be at least 1.")
    shapes, n = _shapes(config.model), devices
    P = BYTES * sum(map(math.prod, shapes))
    piece = BYTES * sum(math.prod(s) // (n if len(cut(s, n)) else 1) for s in shapes)
    sent = 2 * (n - 1) * P // n
    return Cost(
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


@functools.cache
def _shapes(model: ModelConfig) -> list[tuple[int, ...]]:
    params = jax.eval_shape(lambda: init(jax.random.key(0), model))
    return [leaf.shape for leaf in jax.tree.leaves(params)]


def arithmetic(config: Config, rows: int, machine: Machine) -> float:
    """Seconds that a training step's products take, so many rows of them."""
    tokens = rows * config.training.sequence_length
    return 3 * operations_per_token(config.model) * tokens / machine.flops


def reading(config: Config, machine: Machine) -> float:
    """Seconds that reading each layer's U takes, once a time step each way."""
    H, gates = config.model.hidden_dim, {"gru": 3, "lstm": 4, "rnn": 1}[config.model.cell]
    U = BYTES * config.model.num_layers * gates * H * H
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
        one = cost(config, n, rows or batch // n, machine)
        if one.sending > one.computing:
            return n
    return None


def table(config: Config, devices: list[int], rows: int | None, machine: Machine) -> str:
    """Markdown: a line for each number of devices, and where sending begins to be the bound.

    Raises:
      UserError: as `cost` does, or the batch does not divide.
    """
    batch = config.training.batch_size
    lines = [
        "| devices | rows a device | parameters + moments, MB | cut, MB | gradients, MB "
        "| sent a step, MB | computing, ms | sending, ms | the bound | accumulation |",
        "| ---: " * 8 + "| --- | ---: |",
    ]
    for n in devices:
        if rows is None and n > 0 and batch % n:
            raise UserError(f"a batch of {batch} rows cannot be shared by {n} devices.")
        c = cost(config, n, rows if rows is not None else batch // max(n, 1), machine)
        cells = [
            n,
            c.rows,
            *(
                f"{size / 1e6:.1f}"
                for size in (
                    c.parameters + c.moments,
                    c.cut_parameters + c.cut_moments,
                    c.gradients,
                    c.sent,
                )
            ),
            f"{1e3 * c.computing:.2f}",
            f"{1e3 * c.sending:.2f}",
            bound(config, c, machine),
            c.accumulation,
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    first = first_bound_by_sending(config, machine, rows)
    where = f"from {first} devices on" if first else "on no number of devices up to 4096"
    return "\n".join([*lines, "", f"Sending takes longer than computing {where}."])


def bound(config: Config, cost: Cost, machine: Machine) -> str:
    """What takes longest."""
    if cost.sending > cost.computing:
        return "network" if cost.devices > machine.devices_a_node else "link"
    return "memory" if cost.computing > arithmetic(config, cost.rows, machine) else "arithmetic"
