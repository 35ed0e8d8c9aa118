"""Measure a model's loss with and without its state, or the loss of each token of a text."""

from startup import run_command

run_command("evaluate")
