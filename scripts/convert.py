"""Convert a model between a run folder, .safetensors, .onnx (whole models) and the study's .pth."""

import startup  # noqa: F401

from jaxgru.cli.options import run_command

if __name__ == "__main__":
    run_command("convert")
