"""Find a corpus, print its source, size and SHA-256, and write it to a file."""

import startup  # noqa: F401

from jaxgru.cli.options import run_command

if __name__ == "__main__":
    run_command("corpus")
