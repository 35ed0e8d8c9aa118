"""Train a model from a config, train a model further, or resume a run."""

from startup import run_command

run_command("train")
