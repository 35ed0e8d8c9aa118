"""List the models: their sizes, losses, and what each is for."""

from startup import run_command

run_command("models")
