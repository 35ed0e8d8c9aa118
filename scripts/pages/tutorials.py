"""Run the code in the pages of docs/ and write what it prints, and its figures, into them.

    python -m scripts.pages.tutorials [PAGE …]

All blocks of a page run in one new folder: ```python in one namespace, and ```bash with the command
`jaxgru`. What a block prints is in the ```text block after it. The SVG figures that the code saves
are kept in docs/figures/tutorials/. Blocks of other kinds are not run (```sh, to install things).
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

from jaxgru.files import write_text
from pages.figures import for_both_schemes, style
from pages.markdown import DOCS, ROOT, fill_outputs

FIGURES = DOCS / "figures" / "tutorials"
PAGES = [
    *sorted((DOCS / "tutorials").glob("*.md")),
    *(DOCS / f"{name}.md" for name in ("index", "coming_from", "from_pytorch", "how_it_works")),
]


def run(page: Path, folder: Path) -> str:
    """Run a page's code in a folder; return the page with the output of the code."""
    namespace = {"__name__": "__main__"}
    run_bash = bash(folder)

    def run_block(language: str, code: str, line: int) -> str:
        if language == "bash":
            output = run_bash(code)
        else:
            # So that the lines of a traceback are the page's
            program = compile("\n" * (line - 1) + code, str(page), "exec")
            output = run_python(program, namespace, folder)
        return output.replace(f"{folder}{os.sep}", "")

    return fill_outputs(page.read_text(), run_block)


def run_python(program: CodeType, namespace: dict[str, Any], folder: Path) -> str:
    """Run compiled code in a folder, with figures in the pages' style; return what it prints."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.chdir(folder),
        style(),
    ):
        exec(program, namespace)
    return out.getvalue()


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
        process = subprocess.run(
            ["bash", "-e", "-c", code], cwd=folder, env=environment, text=True, capture_output=True
        )
        if process.returncode:
            raise RuntimeError(f"{code}\n{process.stdout}{process.stderr}")
        return process.stdout

    return run


def main() -> None:
    """Run the pages named on the command line, or all."""
    FIGURES.mkdir(parents=True, exist_ok=True)
    for page in [Path(name).resolve() for name in sys.argv[1:]] or PAGES:
        with tempfile.TemporaryDirectory() as folder:
            write_text(page, run(page, Path(folder)))
            for figure in Path(folder).glob("*.svg"):
                write_text(FIGURES / figure.name, for_both_schemes(figure.read_text()))
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
