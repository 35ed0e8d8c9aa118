"""The completion scripts of shells: `jaxgru --print-completion bash`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Literal, get_args, get_origin

from jaxgru.cli.options import Parser
from jaxgru.errors import needs
from jaxgru.lm.config import SECTIONS, config_names, dotted_names, field_types
from jaxgru.lm.data.tokenizers import TOKENIZERS
from jaxgru.lm.pretrained import pretrained_names

PATHS = ("--run", "--resume", "--runs", "--data.corpus", "--data.validation",
         "--data.tokenizer_file", "--corpus", "--path", "--output", "--text",
         "--tokenizer")  # fmt: skip


def completion_script(
    shell: str, names: Iterable[str], join: Callable[[dict[str, Parser]], Parser]
) -> str:
    """Return a script that completes the commands, their options and the values of these.

    The shell needs no Python while it completes, so nobody waits for JAX's import.

    Args:
      names: the commands, each a module of `jaxgru.cli`.
      join: returns the parser of `jaxgru`, given the parsers of the commands.

    Raises:
      MissingPackage: shtab, or what a command needs, is not installed.
    """
    with needs("completion"):
        import shtab

    values = {"--config": config_names()}
    values |= dict.fromkeys(("--init", "--pretrained"), pretrained_names())
    values |= {f"--{name}": _values(name) for name in dotted_names()}
    values["--data.tokenizer"] = list(TOKENIZERS)
    parsers = {name: importlib.import_module(f"jaxgru.cli.{name}").make_parser() for name in names}
    for action in (action for parser in parsers.values() for action in parser._actions):
        name = (action.option_strings or PATHS)[0]  # words without an option are paths
        if name in PATHS:
            action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]  shtab reads it
        elif values.get(name):
            action.choices = values[name]
    return shtab.complete(join(parsers), shell)


def _values(name: str) -> list[str]:
    """Return the values of a config's field, if they are few."""
    section, _, field = name.partition(".")
    kind = field_types(SECTIONS[section])[field]
    if kind is bool:
        return ["true", "false"]
    return list(get_args(kind)) if get_origin(kind) is Literal else []
