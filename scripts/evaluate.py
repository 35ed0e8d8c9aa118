"""Measure what a trained model loses without its state, on the whole validation split."""

import startup  # noqa: F401

from jaxgru.cli.options import run_command

if __name__ == "__main__":
    run_command("evaluate")
