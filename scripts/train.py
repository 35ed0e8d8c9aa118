"""Train a model from a config, train a model further, or resume a run."""

import startup  # noqa: F401

from jaxgru.cli.options import run_command

if __name__ == "__main__":
    run_command("train")
