"""Convert a run or a whole model into a .safetensors file, an .onnx file or the study's .pth."""

import startup  # noqa: F401

from jaxgru.cli.options import run_command

if __name__ == "__main__":
    run_command("convert")
