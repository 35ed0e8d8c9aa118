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

from jaxgru.files import write_text

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TABLE = re.compile(r"(<!-- table (.+?) -->\n(\n?))(?:.*?\n\3)??(<!-- end -->)", re.DOTALL)
CODE = re.compile(
    r"(^```(?P<language>python|bash)\n(?P<code>.*?)^```\n)(?:\n```text\n.*?^```\n)?",
    re.DOTALL | re.MULTILINE,
)


def fill(page: str, make: Callable[[str], str]) -> str:
    """Return the page with each of its tables made anew, from its name."""

    def filled(match: re.Match) -> str:
        opening, name, empty_line, end = match.groups()
        content = make(name).strip("\n")
        if not content:
            return opening + end
        return f"{opening}{content}\n{empty_line}{end}"

    return TABLE.sub(filled, page)


def fill_outputs(page: str, run: Callable[[str, str, int], str]) -> str:
    """Return the page with the output of each block of Python and Bash made anew, in order.

    Args:
      run: from a block's language, its code and the line of the page on which the code begins, to
        what it prints.
    """

    def filled(match: re.Match) -> str:
        block = match[1]
        line_number = page.count("\n", 0, match.start("code")) + 1
        output = run(match["language"], match["code"], line_number)
        lines = output.rstrip("\n").splitlines()
        if not lines:
            return block
        text = "".join(f"{line.rstrip()}\n" for line in lines)
        return f"{block}\n```text\n{text}```\n"

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
    rows = list(rows)
    if not rows:
        return ""
    letters = itertools.chain(align, itertools.repeat(align[-1]))
    rules = ["---:" if letter == "r" else "---" for _, letter in zip(head, letters, strict=False)]
    return "".join(map(_line, (head, rules, *rows)))


def _line(cells: Sequence[Any]) -> str:
    """Return a line of a table."""
    texts = (" ".join(str(cell).splitlines()) for cell in cells)
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |\n"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each package, or "absent"."""
    by_package = {}
    for package in packages:
        try:
            by_package[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            by_package[package] = "absent"
    return by_package
