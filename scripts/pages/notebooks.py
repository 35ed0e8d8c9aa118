"""The tutorials as notebooks, made from their pages, whose code and output the tests check.

    python -m scripts.pages.notebooks

A block of Python is a cell, with what it prints and draws; one of Bash is a cell of the shell. The
first cell installs the package. An exercise has an empty cell, and its solution stays folded.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import v4

from jaxgru.files import write_text
from pages.markdown import DOCS, ROOT

PAGES = [page for page in sorted((DOCS / "tutorials").glob("*.md")) if page.stem != "index"]
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]

PART = re.compile(
    r"^```(?P<language>python|bash|sh(?=\npip install ))\n(?P<code>.*?)^```\n"
    r"(?:\n```text\n(?P<printed>.*?)^```\n)?"
    r"(?:\n!\[(?P<alt>.*?)\]\((?P<figure>\S+\.svg)\)\n)?"
    r"|^<details markdown>\n(?P<solution>.*?^</details>\n)",
    re.DOTALL | re.MULTILINE,
)
CHECKOUT = re.compile(r'"\.(\[[\w,]+\])"|(?<= )\.(?= |$)')
"""The folder that pip installs from: `.`, or `".[extras]"`."""

LINK = re.compile(r"\]\((?!https?:)(?P<page>[\w./]+)\.md(?P<anchor>#\S+?)?\)")


def notebook(page: Path) -> str:
    """Return the notebook of a page."""
    cells = [*_cells(page)]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"  # not a random one
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    result = v4.new_notebook(cells=cells, metadata={"kernelspec": python})
    nbformat.validate(result)
    return nbformat.writes(result) + "\n"


def _cells(page: Path) -> Iterator[nbformat.NotebookNode]:
    text = page.read_text(encoding="utf-8")
    end = 0
    for part in PART.finditer(text):
        yield from _prose(text[end : part.start()], page)
        end = part.end()
        if part["solution"]:
            yield v4.new_code_cell("# your code\n")
            yield v4.new_markdown_cell("<details>\n" + _absolute(part["solution"], page).strip())
        else:
            yield v4.new_code_cell(_code(part), outputs=[*_outputs(part, page)])
    yield from _prose(text[end:], page)


def _prose(text: str, page: Path) -> Iterator[nbformat.NotebookNode]:
    """Yield a cell of the text, unless it is empty."""
    text = text.strip()
    if text:
        yield v4.new_markdown_cell(_absolute(text, page))


def _code(part: re.Match) -> str:
    """Return a block's code as a cell."""
    code = part["code"].strip()
    if part["language"] == "bash":
        return f"%%bash\n{code}"
    if part["language"] == "sh":
        from_checkout = CHECKOUT.sub(r'"../..\1"', code)
        from_repository = CHECKOUT.sub(rf'"jaxgru\1 @ git+{URLS["Repository"]}"', code)
        return f"%{from_checkout}\n# once the repository is public: %{from_repository}"
    return code


def _outputs(part: re.Match, page: Path) -> Iterator[nbformat.NotebookNode]:
    """Yield what a block prints and draws."""
    if part["printed"]:
        yield v4.new_output("stream", name="stdout", text=part["printed"])
    if part["figure"]:
        svg = (page.parent / part["figure"]).read_text(encoding="utf-8")
        yield v4.new_output("display_data", {"image/svg+xml": svg, "text/plain": part["alt"]})


def _absolute(text: str, page: Path) -> str:
    """Let the links to other pages lead to the site."""

    def to_the_site(link: re.Match) -> str:
        path = (page.parent / link["page"]).resolve().relative_to(DOCS)
        return f"]({URLS['Documentation']}{path.as_posix()}/{link['anchor'] or ''})"

    return LINK.sub(to_the_site, text).replace('href="../../', f'href="{URLS["Documentation"]}')


def main() -> None:
    """Make every notebook."""
    for page in PAGES:
        write_text(page.with_suffix(".ipynb"), notebook(page))
        print(page.with_suffix(".ipynb").relative_to(ROOT))


if __name__ == "__main__":
    main()
