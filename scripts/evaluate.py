"""Measure a model's loss with and without its state, or the loss of each token of a text."""

import startup  # noqa: F401

from jaxgru.cli.options import run_command

if __name__ == "__main__":
    run_command("evaluate")
