"""The architecture as a table: a row for each parameter."""

from __future__ import annotations

import math

import jax
from rich.console import Console
from rich.table import Table

from jaxgru.config import Config
from jaxgru.model import flatten, init, num_params


def print_summary(config: Config) -> None:
    """Prints every parameter's name, shape, count and float32 size in MB of 2²⁰ bytes."""
    params = jax.eval_shape(lambda: init(jax.random.key(0), config.model))
    model = config.model
    site = f", dropout {model.dropout} ({model.dropout_site})" if model.dropout else ""
    total = num_params(params)
    table = Table(title=f"{config.name}: {model.num_layers} × {model.cell}{site}", show_footer=True)
    table.add_column("parameter", "total")
    table.add_column("shape")
    table.add_column("count", f"{total:,}", justify="right")
    table.add_column("MB", f"{_megabytes(total):.2f}", justify="right")
    for name, leaf in flatten(params).items():
        count = math.prod(leaf.shape)
        table.add_row(
            name,
            " × ".join(map(str, leaf.shape)),
            f"{count:,}",
            f"{_megabytes(count):.3f}",
        )
    Console().print(table)


def _megabytes(count: int) -> float:
    return 4 * count / 2**20
