"""Find a corpus, print its source, size and SHA-256, and write it to a file."""

from startup import run_command

run_command("corpus")
