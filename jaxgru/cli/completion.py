"""The completion scripts of shells: `jaxgru --print-completion bash`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path

from jaxgru.cli.options import Parser
from jaxgru.errors import needs
from jaxgru.lm import pretrained_names
from jaxgru.lm.config import config_names


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
    parsers: dict[str, Parser] = {}
    for command in names:
        module = importlib.import_module(f"jaxgru.cli.{command}")
        parsers[command] = module.make_parser()
        for action in parsers[command]._actions:
            name = (action.option_strings or [action.dest])[0]
            if name in values:  # where none fits, bash offers files
                action.choices = values[name]
            elif _takes_text(action):
                action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]  shtab reads it
    return shtab.complete(join(parsers), shell)


def _takes_text(action: argparse.Action) -> bool:
    """Return whether an option or a word may be any text, such as the name of a file."""
    takes_value = action.nargs != 0 and not action.choices
    return takes_value and action.type in (None, Path, str)
