"""Train a published model, or any config, or resume a run."""

from __future__ import annotations

import startup  # noqa: F401

from jaxgru.cli.options import run_script
from jaxgru.cli.train import main

if __name__ == "__main__":
    run_script(main)
