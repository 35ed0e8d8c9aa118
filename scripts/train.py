"""Train a published model, or any config, or resume a run."""

import startup  # noqa: F401

from jaxgru.cli.options import run_command

if __name__ == "__main__":
    run_command("train")
