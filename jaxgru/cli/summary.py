"""Print the architecture as a table, with a row per layer or per parameter."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

from jaxgru.errors import needs
from jaxgru.lm.config import Config
from jaxgru.lm.data.corpus import TINY_SHAKESPEARE
from jaxgru.lm.data.tokenizers import CORPUS_TOKENIZERS
from jaxgru.lm.model import flatten, num_params, shapes
from jaxgru.lm.runs.initial import load_text

with needs("train"):
    from rich.console import Console
    from rich.table import Table

MEBI = 2**20 / 4  # float32 numbers in a MiB


def as_trained(config: Config, text_sha256: str = "") -> Config:
    """Return the config with the sizes that training gives it, some of which depend on the text.

    Tiny Shakespeare is read only if the config's vocabulary is none of the study's.
    """
    data = config.data
    changed = data.min_count or data.unit or data.tokenizer_file or config.training.init
    of_study = CORPUS_TOKENIZERS.get(config.model.vocab_size) == data.tokenizer
    if data.corpus == TINY_SHAKESPEARE and of_study and not changed:
        return config
    return load_text(config, text_sha256)[0]


def print_summary(config: Config, full: bool = False) -> None:
    """Print a layer's shapes, number of parameters and float32 MiB a row; `full`: an array's."""
    params, members_of = shapes(config.model), defaultdict(list)
    for name, leaf in flatten(params).items():
        parts = name.split(".")  # "embedding", "layers", "0", "W"
        layer = ".".join(parts[: 2 if parts[0] == "layers" else 1])
        members_of[name if full else layer].append(leaf.shape)
    model, training = config.model, config.training
    dropouts = "".join(f", {site} dropout {rate}" for site, rate in training.dropouts.items())
    total = num_params(params)
    table = Table(
        title=f"{config.name}: {model.num_layers} × {model.cell}{dropouts}", show_footer=True
    )
    table.add_column("parameter" if full else "layer", "total")
    table.add_column("shape" if full else "shapes")
    table.add_column("count", f"{total:,}", justify="right")
    table.add_column("MiB", f"{total / MEBI:.2f}", justify="right")
    times = " × " if full else "×"  # a layer's shapes have to share a line
    for name, members in members_of.items():
        each = [(n, times.join(map(str, shape))) for shape, n in Counter(members).items()]
        shown = ", ".join(f"{n} of {shape}" if n > 1 else shape for n, shape in each)
        count = sum(map(math.prod, members))
        table.add_row(name, shown, f"{count:,}", f"{count / MEBI:.3f}")
    Console().print(table)
