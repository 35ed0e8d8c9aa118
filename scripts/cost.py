"""Measures how a training step's time and memory grow with T, B and H; writes docs/cost.md."""

from __future__ import annotations

import startup  # noqa: F401

import datetime
import shlex
import sys
from pathlib import Path

from rich.console import Console

from jaxgru import cost
from jaxgru.command_line import Parser, run_script
from jaxgru.hardware import describe_hardware, keep_freed_memory

console = Console(highlight=False)


def main() -> None:
    """Reads the arguments; measures; writes the page."""
    parser = Parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="%(default)s")
    parser.add_argument("--largest", type=int, default=2**14, metavar="SIZE",
                        help="of T, B or H that is measured (%(default)s)")  # fmt: skip
    parser.add_argument("--docs", default="docs", metavar="FOLDER", help="where to write")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}; it must be at least 1.")
    if arguments.largest < 256:
        parser.error(f"--largest is {arguments.largest}; it must be at least 256, for two T's.")
    keep_freed_memory()

    def on_point(series: cost.Series, point: cost.Point) -> None:
        memory = "" if point["bytes"] is None else f"{point['bytes'] / 1e6:,.1f} MB"
        console.print(
            f"{series.letter} = {point['value']:>6}{', remat' * point['remat']}: "
            f"{1e3 * point['seconds']:,.1f} ms  {memory}"
        )

    points = cost.measure_all(arguments.repeats, arguments.largest, on_point)
    run = {
        "hardware": describe_hardware(),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "scripts/cost.py", *sys.argv[1:]]),
        "points": points,
    }
    cost.save(Path(arguments.docs), run)
    console.print(f"written to {Path(arguments.docs) / 'cost.md'}")


if __name__ == "__main__":
    run_script(main)
