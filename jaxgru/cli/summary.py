"""Print the architecture as a table, with a row per layer or per parameter."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

from jaxgru.errors import needs
from jaxgru.lm import flatten, num_params, shapes
from jaxgru.lm.config import Config
from jaxgru.lm.data.corpus import TINY_SHAKESPEARE
from jaxgru.lm.data.tokenizers import CORPUS_TOKENIZERS
from jaxgru.lm.runs.initial import load_text

with needs("train"):
    from rich.console import Console
    from rich.table import Table

Shape = tuple[int, ...]
MEBI = 2**20 / 4  # float32 numbers in a MiB


def as_trained(config: Config, text_sha256: str = "") -> Config:
    """Return the config with the sizes that training gives it, some of which depend on the text.

    Tiny Shakespeare is read only if the config's vocabulary is none of the study's.
    """
    data = config.data
    has_options = (
        data.min_count or data.separator or data.tokenizer_file or config.training.init_from
    )
    is_of_study = CORPUS_TOKENIZERS.get(config.model.vocab_size) == data.tokenizer
    if data.corpus == TINY_SHAKESPEARE and is_of_study and not has_options:
        return config
    config, _, _ = load_text(config, text_sha256)
    return config


def print_summary(config: Config, full: bool = False) -> None:
    """Print a layer's shapes, number of parameters and float32 MiB a row; `full`: an array's."""
    params = shapes(config.model)
    total = num_params(params)
    shapes_of_row: dict[str, list[Shape]] = defaultdict(list)
    for name, leaf in flatten(params).items():
        title = name if full else _layer_of(name)
        shapes_of_row[title].append(leaf.shape)

    table = Table(title=_title(config), show_footer=True)
    if full:
        table.add_column("parameter", "total")
        table.add_column("shape")
        times = " × "
    else:
        table.add_column("layer", "total")
        table.add_column("shapes")
        times = "×"  # they have to share a line
    table.add_column("count", f"{total:,}", justify="right")
    table.add_column("MiB", f"{total / MEBI:.2f}", justify="right")
    for title, row in shapes_of_row.items():
        count = sum(map(math.prod, row))
        table.add_row(title, _joined(row, times), f"{count:,}", f"{count / MEBI:.3f}")
    Console().print(table)


def _layer_of(name: str) -> str:
    """Return the layer of an array, such as "layers.0" of "layers.0.W" or "head" of "head.Wo"."""
    parts = name.split(".")
    if parts[0] == "layers":
        return ".".join(parts[:2])
    return parts[0]


def _title(config: Config) -> str:
    """Return the config's name, its layers and their dropout."""
    model = config.model
    rates = config.training.dropouts
    dropouts = "".join(f", {site} dropout {rate}" for site, rate in rates.items())
    return f"{config.name}: {model.num_layers} × {model.cell}{dropouts}"


def _joined(row: list[Shape], times: str) -> str:
    """Return the shapes of a row, each of them once with its number."""
    texts: list[str] = []
    for shape, number in Counter(row).items():
        sizes = times.join(map(str, shape))
        texts.append(f"{number} of {sizes}" if number > 1 else sizes)
    return ", ".join(texts)
