"""What a step on many devices holds, sends and computes, by formula; see docs/scaling.md."""

from __future__ import annotations

import startup  # noqa: F401

import dataclasses
import re
import shlex
from pathlib import Path

from jaxgru.command_line import Parser, run_script
from jaxgru.config import load_config
from jaxgru.errors import UserError
from jaxgru.files import write_text
from jaxgru.scaling import Machine, table

BLOCK = re.compile(
    r"(```\npython scripts/scaling\.py ([^\n]*)\n```\n\n).*?(\n\n<!-- end -->)", re.DOTALL
)


def main() -> None:
    """Reads the arguments and makes one call."""
    parser = make_parser()
    arguments = parser.parse_args()
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
            help="see jaxgru/scaling.py; default: %(default)s",
        )
    parser.add_argument("--update", metavar="PAGE", help="makes a page's tables again")
    return parser


def answer(arguments) -> str:
    """The table that the arguments ask for."""
    rates = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Machine)}
    wrong = [name for name, value in rates.items() if not value > 0]
    if wrong:
        raise UserError(f"{wrong[0]} is {rates[wrong[0]]}; it must be above 0.")
    config = load_config(arguments.config)
    return table(config, arguments.devices, arguments.rows, Machine(**rates))


def updated(page: str) -> str:
    """The page with the table below each of its commands made again."""

    def again(found: re.Match) -> str:
        arguments = make_parser().parse_args(shlex.split(found[2]))
        return found[1] + answer(arguments) + found[3]

    return BLOCK.sub(again, page)


if __name__ == "__main__":
    run_script(main)
