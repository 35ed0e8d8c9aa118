"""Pages that people write, and the tables and outputs in them that scripts make.

A table is between the lines `<!-- table NAME -->` and `<!-- end -->` of a page, with empty lines
around it if the site shows the page. The output of code is the ```text block after it: the code is
its name, and markers would say nothing more. All else, a person writes.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgru.lm.files import write_text

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TABLE = re.compile(r"(<!-- table (.+?) -->\n(\n?))(?:.*?\n\3)??(<!-- end -->)", re.DOTALL)
CODE = re.compile(
    r"(^```(?P<language>python|bash)\n(?P<code>.*?)^```\n)(?:\n```text\n.*?^```\n)?",
    re.DOTALL | re.MULTILINE,
)


def fill(page: str, make: Callable[[str], str]) -> str:
    """Return the page with each of its tables made anew, from its name."""

    def filled(found: re.Match) -> str:
        made = make(found[2]).strip("\n")
        return found[1] + (f"{made}\n{found[3]}" if made else "") + found[4]

    return TABLE.sub(filled, page)


def fill_outputs(page: str, run: Callable[[str, str, int], str]) -> str:
    """Return the page with the output of each block of Python and Bash made anew, in order.

    Args:
      run: from a block's language, its code and the line of the page on which the code begins, to
        what it prints.
    """

    def filled(found: re.Match) -> str:
        line = page.count("\n", 0, found.start("code")) + 1
        lines = run(found["language"], found["code"], line).rstrip("\n").splitlines()
        printed = "".join(f"{line.rstrip()}\n" for line in lines)
        return found[1] + f"\n```text\n{printed}```\n" * bool(lines)

    return CODE.sub(filled, page)


def write_page(path: Path, tables: Mapping[str, str]) -> None:
    """Write a page with these tables.

    A page that is not there yet gets the text of the page of that name in docs/.
    """
    text = (path if path.exists() else DOCS / path.name).read_text(encoding="utf-8")
    write_text(path, fill(text, tables.__getitem__))


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], align: str = "l") -> str:
    """Return a Markdown table, or nothing if there are no rows.

    "|" is escaped, and a line break becomes a space.

    Args:
      align: "l" or "r" per column; the last letter also applies to all further columns.
    """
    if not (rows := list(rows)):
        return ""
    letters = itertools.chain(align, itertools.repeat(align[-1]))
    rules = ["---:" if letter == "r" else "---" for _, letter in zip(head, letters, strict=False)]
    lines = ([" ".join(str(cell).splitlines()) for cell in line] for line in (head, rules, *rows))
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each package, or "absent"."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found
