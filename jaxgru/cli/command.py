"""The command `jaxgru`: find the command that is meant, and run it."""

from __future__ import annotations

import argparse
import platform
import sys
from importlib.metadata import version
from typing import NoReturn

import jax

from jaxgru.cli.completion import completion_script
from jaxgru.cli.options import Parser, run_command, run_script
from jaxgru.printing import nearest

COMMANDS = {
    "train": "train a model, train it further, or resume a run",
    "sample": "generate text with a trained model",
    "evaluate": "measure a model's loss, with and without its state",
    "convert": "write a run or a model file in another format",
    "models": "list the models: size, loss, and what each is for",
    "corpus": "find a corpus, verify it and write it to a file",
    "playground": "show in the browser what a model's state is for",
}
"""Each is a module of `jaxgru.cli`, which is imported only if it is chosen."""


def main() -> NoReturn:
    """Run `jaxgru COMMAND …`, or print what `jaxgru`'s own options ask for."""
    words = sys.argv[1:]
    if words[:1] == ["help"]:  # as git and uv take it
        words = [*words[1:], "--help"]
    elif words[:1] == ["version"]:
        words = ["--version", *words[1:]]
    if words and words[0] in COMMANDS:
        sys.argv = [f"jaxgru {words[0]}", *words[1:]]
        run_command(words[0])
    sys.argv = ["jaxgru", *words]
    run_script(_without_command)


def _without_command() -> None:
    """Print a completion script or the help, or refuse a command that there is not."""
    parser = make_parser()
    name = "".join(sys.argv[1:2])
    if name and not name.startswith("-"):
        suggestion = nearest(name, COMMANDS, f"the commands are {', '.join(COMMANDS)}")
        parser.error(f"there is no command {name}; {suggestion}.")
    shell = parser.parse_args().print_completion
    if shell is None:
        parser.print_help()
    else:
        print(completion_script(shell, COMMANDS, make_parser))


def make_parser(parsers: dict[str, Parser] | None = None) -> Parser:
    """Return the parser of `jaxgru`; given the parsers of the commands, with their options."""
    parser = Parser(
        "Recurrent language models in JAX. `jaxgru help COMMAND` lists a command's options.",
        ["sample --prompt 'ROMEO: '", "train astra_alpha", "evaluate runs/astra_alpha"],
        usage="COMMAND [options]",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=_versions(),
        help="print the versions of jaxgru, JAX and Python, and exit",
    )
    parser.add_argument(
        "--print-completion",
        choices=["bash", "zsh", "fish"],
        help="print a shell's completion script; bash looks for it in "
        "~/.local/share/bash-completion/completions/jaxgru",
    )
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", parser_class=argparse.ArgumentParser
    )
    for name, line in COMMANDS.items():
        parents = [parsers[name]] if parsers else []
        commands.add_parser(name, help=line, parents=parents, add_help=False)
    return parser


def _versions() -> str:
    python = platform.python_version()
    return f"jaxgru {version('jaxgru')}, JAX {jax.__version__}, Python {python}"
