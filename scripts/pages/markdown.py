"""Markdown: tables, the pages' templates, and what pages say of installed packages."""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxgru.errors import UserError

TEMPLATES = Path(__file__).parent / "templates"


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], align: str = "l") -> str:
    """Return a Markdown table; "|" is escaped, and a line break becomes a space.

    Args:
      align: "l" or "r" per column; the last letter also applies to all further columns.
    """
    letters = itertools.chain(align, itertools.repeat(align[-1]))
    rules = ["---:" if letter == "r" else "---" for _, letter in zip(head, letters, strict=False)]
    lines = ([" ".join(str(cell).splitlines()) for cell in line] for line in (head, rules, *rows))
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


def render(template: str, **values: Any) -> str:
    """Return a page: a template with these values, `table` and the filter `f`.

    `{{ loss | f(3) }}` is the number with three decimals.

    Raises:
      UserError: Jinja is not installed.
    """
    page = _environment().get_template(template).render(table=table, **values)
    return page.rstrip("\n") + "\n"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each package, or "absent"."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


@functools.cache
def _environment() -> Any:
    try:
        import jinja2
    except ImportError:
        raise UserError("jinja2 is not installed; pip install -e '.[docs]' installs it.") from None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["f"] = lambda number, decimals: f"{number:,.{decimals}f}"
    return environment
