"""The completion scripts of shells: `jaxgru --print-completion bash`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable

from jaxgru.cli.options import Parser, field_choices
from jaxgru.errors import needs
from jaxgru.lm.config import config_names, dotted_names
from jaxgru.lm.pretrained import pretrained_names

PATHS = ("--resume", "--runs", "--data.corpus", "--data.validation",
         "--data.tokenizer_file", "--corpus", "--output", "--text", "--prompts",
         "target")  # fmt: skip


def completion_script(
    shell: str, names: Iterable[str], join: Callable[[dict[str, Parser]], Parser]
) -> str:
    """Return a script that completes the commands, their options and the values of these.

    The shell needs no Python while it completes, so nobody waits for JAX's import. `join` returns
    the parser of `jaxgru`, given those of the commands.
    """
    with needs("completion"):
        import shtab

    values = dict.fromkeys(("config", "--config"), config_names())
    values |= dict.fromkeys(("model", "source", "--init"), pretrained_names())
    values |= {f"--{name}": field_choices(*name.split(".")) for name in dotted_names()}
    parsers = {name: importlib.import_module(f"jaxgru.cli.{name}").make_parser() for name in names}
    for action in (action for parser in parsers.values() for action in parser._actions):
        name = (action.option_strings or [action.dest])[0]
        if values.get(name):  # where none fits, bash offers files
            action.choices = values[name]
        elif name in PATHS:
            action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]  shtab reads it
    return shtab.complete(join(parsers), shell)
