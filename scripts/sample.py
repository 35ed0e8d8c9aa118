"""Sample text from a trained model."""

from __future__ import annotations

import startup  # noqa: F401

from jaxgru.cli.options import run_script
from jaxgru.cli.sample import main

if __name__ == "__main__":
    run_script(main)
