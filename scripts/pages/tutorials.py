"""Run the code in the pages of docs/ and write what it prints, and its figures, into them.

    python -m scripts.pages.tutorials [PAGE …]

All blocks of a page run in one new folder: ```python in one namespace, and ```bash with the command
`jaxgru`. What a block prints is in the ```text block after it. The figures that the code saves are
kept in docs/figures/tutorials/. Blocks of other kinds are not run (```sh, for installing things).
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

from jaxgru.lm.files import write_text

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FIGURES = DOCS / "figures" / "tutorials"
PAGES = [
    *sorted((DOCS / "tutorials").glob("*.md")),
    *(DOCS / f"{name}.md" for name in ("index", "from_pytorch", "how_it_works")),
]


class Block(NamedTuple):
    """A block of code in a page, and the lines between which its output is."""

    language: str
    code: str
    line: int  # of the page, from 1, on which the code begins
    output: slice


def blocks(page: str) -> list[Block]:
    """Return the blocks of code that are run, in order."""
    fences = [token for token in MarkdownIt().parse(page) if token.type == "fence"]
    lines, found = page.splitlines(), []
    for i, fence in enumerate(fences):
        if fence.info not in ("python", "bash") or fence.map is None:
            continue
        start, end = fence.map
        output = slice(end, end)
        if i + 1 < len(fences) and fences[i + 1].info == "text":
            first, last = fences[i + 1].map or (end, end)
            if not "".join(lines[end:first]).strip():
                output = slice(end, last)
        found.append(Block(fence.info, fence.content, start + 2, output))
    return found


def run(page: Path, folder: Path) -> str:
    """Run a page's code in a folder; return the page with the output of the code."""
    text = page.read_text()
    lines, namespace = text.splitlines(), {"__name__": "__main__"}
    run_bash = bash(folder)
    printed = []
    for block in blocks(text):
        if block.language == "bash":
            printed.append((block, run_bash(block.code)))
        else:
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.chdir(folder):
                exec(code, namespace)
            printed.append((block, out.getvalue()))
    for block, output in reversed(printed):
        output = output.replace(f"{folder}{os.sep}", "")
        shown = [line.rstrip() for line in output.rstrip("\n").splitlines()]
        lines[block.output] = ["", "```text", *shown, "```"] if shown else []
    return "\n".join(lines) + "\n"


def bash(folder: Path) -> Callable[[str], str]:
    """Return a function that runs commands in a folder, with `jaxgru`, and returns their output."""
    programs = folder / ".bin"
    programs.mkdir()
    for name, module in {"python": "", "jaxgru": "-m jaxgru"}.items():
        (programs / name).write_text(f'#!/bin/bash\nexec "{sys.executable}" {module} "$@"\n')
        (programs / name).chmod(0o755)
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}

    def run(code: str) -> str:
        done = subprocess.run(
            ["bash", "-e", "-c", code], cwd=folder, env=environment, text=True, capture_output=True
        )
        if done.returncode:
            raise RuntimeError(f"{code}\n{done.stdout}{done.stderr}")
        return done.stdout

    return run


def main() -> None:
    """Run the pages named on the command line, or all."""
    FIGURES.mkdir(parents=True, exist_ok=True)
    for page in [Path(name).resolve() for name in sys.argv[1:]] or PAGES:
        with tempfile.TemporaryDirectory() as folder:
            write_text(page, run(page, Path(folder)))
            for figure in Path(folder).glob("*.png"):
                shutil.copy(figure, FIGURES)
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
