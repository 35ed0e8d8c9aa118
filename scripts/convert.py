"""Convert a run or a whole model into a .safetensors file, an .onnx file or the study's .pth."""

from startup import run_command

run_command("convert")
