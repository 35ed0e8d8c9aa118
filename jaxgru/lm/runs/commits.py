"""Which git commit trains a run."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]


def current_commit() -> str | None:
    """Return the commit of the checkout that this package is part of; None if there is none.

    "-dirty" is appended where files differ from the commit.
    """
    command = ["git", f"--git-dir={ROOT / '.git'}", f"--work-tree={ROOT}", "--no-optional-locks",
               "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=5, text=True)
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, or no answer
        return None
    return done.stdout.strip()
