"""Sample text from a trained model."""

import startup  # noqa: F401

from jaxgru.cli.options import run_command

if __name__ == "__main__":
    run_command("sample")
