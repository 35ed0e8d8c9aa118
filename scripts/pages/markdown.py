"""Markdown: the one table helper, and the pages' templates."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxgru.errors import UserError

TEMPLATES = Path(__file__).parent / "templates"


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], align: str = "l") -> str:
    """Return a Markdown table; "|" is escaped, and a line break becomes a space.

    Args:
      align: "l" or "r" for each column; the last letter holds for all columns after it.
    """
    letters = itertools.chain(align, itertools.repeat(align[-1]))
    rules = ["---:" if letter == "r" else "---" for _, letter in zip(head, letters, strict=False)]
    lines = ([" ".join(str(cell).splitlines()) for cell in line] for line in (head, rules, *rows))
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


def render(template: str, **values: Any) -> str:
    """Return a page: the template with these values, in which `table` and the filter `f` work.

    `{{ loss | f(3) }}` is the number with three decimals.

    Raises:
      UserError: Jinja is not installed.
    """
    page = _environment().get_template(template).render(table=table, **values)
    return page.rstrip("\n") + "\n"


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
