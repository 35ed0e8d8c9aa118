"""Find a corpus, print its source, size and SHA-256, and write it to a file."""

from __future__ import annotations

import startup  # noqa: F401

from jaxgru.cli.corpus import main
from jaxgru.cli.options import run_script

if __name__ == "__main__":
    run_script(main)
