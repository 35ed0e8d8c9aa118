"""Which commits trained a run: `commits.txt` in its folder, a line for each, oldest first."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from jaxgru.lm.files import read_bytes, write_text

FILE_NAME = "commits.txt"
ROOT = Path(__file__).parents[3]
LINE = re.compile(r"^([0-9a-f]{40,64}(?:-dirty)?|unknown) from step \d+$", re.MULTILINE)


def current_commit() -> str | None:
    """Return the git commit of the checkout that this package is part of; None if there is none.

    "-dirty" is appended where `jaxgru/` or `configs/` differ from the commit.
    """
    environment = {name: x for name, x in os.environ.items() if not name.startswith("GIT_")}

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
            check=True, timeout=5,
        ).stdout.decode().strip()  # fmt: skip

    try:
        top, commit = git("rev-parse", "--show-toplevel", "HEAD").splitlines()
        if not os.path.samefile(top, ROOT):  # installed below another project's checkout
            return None
        return commit + "-dirty" * bool(git("status", "--porcelain", "--", "jaxgru", "configs"))
    except (OSError, ValueError, subprocess.SubprocessError):  # no git, no checkout, or no answer
        return None


def record_commit(run: Path, commit: str | None, step: int) -> None:
    """Append the commit that trains the run from this step on, unless it is the last entry.

    None is recorded as "unknown", but only if the run already names commits.

    Raises:
      OSError: the file cannot be written; an older one is then untouched.
    """
    lines = _lines(run)
    if (lines or commit) and not (lines and lines[-1][1] == (commit or "unknown")):
        text = "".join(f"{line[0]}\n" for line in lines)
        write_text(run / FILE_NAME, f"{text}{commit or 'unknown'} from step {step}\n")


def trained_by(run: Path) -> list[str]:
    """Return the commits that trained a run, oldest first; none where it does not say."""
    return [line[1] for line in _lines(run)]


def _lines(run: Path) -> list[re.Match[str]]:
    try:
        text = read_bytes(run / FILE_NAME, at_most=2**20).decode()
    except (OSError, ValueError):
        return []
    return list(LINE.finditer(text))
