"""List the models: their sizes, losses, and what each is for."""

import startup  # noqa: F401

from jaxgru.cli.options import run_command

if __name__ == "__main__":
    run_command("models")
