"""Sample text from a trained model."""

from startup import run_command

run_command("sample")
