"""Print text while it is generated."""

from __future__ import annotations

import dataclasses

from jaxgru.errors import UserError, needs
from jaxgru.lm.data.tokenizers import Tokenizer
from jaxgru.lm.generation import NGramModel, Options, stream_text
from jaxgru.lm.model import Params


def print_samples(
    model: Params | NGramModel,
    tokenizer: Tokenizer,
    prompt: str,
    options: Options,
    num_samples: int = 1,
) -> None:
    """Print samples in turn, each while it is generated. Raises what `stream_text` raises."""
    if num_samples < 1:
        raise UserError(f"num_samples is {num_samples}; it must be at least 1.")
    for sample in range(num_samples):
        text = stream_text(model, tokenizer, prompt, options, sample)
        if num_samples > 1:
            print(f"--- sample {sample + 1} of {num_samples}, seed {options.seed}")
        for piece in text:
            print(piece, end="", flush=True)
        print()


def print_comparison(params: Params, tokenizer: Tokenizer, prompt: str, options: Options) -> None:
    """Print text without and with the state side by side, of the same prompt and options.

    Raises what `stream_text` raises, and MissingPackage where Rich is not installed.
    """
    with needs("train"):
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

    table = Table(show_lines=True, title=f"seed {options.seed}, temperature {options.temperature}")
    texts, unit = [], "character" if tokenizer.kind == "characters" else "token"
    for name, stateful in ((f"reset before every {unit}", False), ("state kept", True)):
        table.add_column(name, ratio=1)
        option = dataclasses.replace(options, stateful=stateful)
        texts.append(Text("".join(stream_text(params, tokenizer, prompt, option))))
    table.add_row(*texts)
    Console().print(table)
