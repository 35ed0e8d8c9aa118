"""Training runs on disk: folders, checkpoints, starting and resuming."""

from __future__ import annotations

from pathlib import Path

from jaxgru.config import Config
from jaxgru.data.tokenizers import Tokenizer
from jaxgru.interop import model_suffix
from jaxgru.interop.safetensors import load_safetensors
from jaxgru.model import Params


def load_run(path: str | Path) -> tuple[Params, Config, Tokenizer]:
    """Load parameters, config and tokenizer from a run folder or a file.

    A file is a .safetensors, an .onnx or a .pth; for a .pth, `interop.pth.load_pth` chooses the
    tokenizer. A run folder is `runs/<config>/v<N>`, or `runs/<config>` for its newest version. The
    parameters are the run's result: the best epoch's where training stops early, else the last. A
    run that is still being trained, or was interrupted, gives those of its newest intact
    checkpoint; a sentence on stderr names each broken one. Nothing is written.

    Raises:
      RunError: there is no run or no finished checkpoint, or it does not fit its config.
      InteropError: the file is missing or broken.
      TokenizerError: the tokenizer is missing or broken.
      MissingPackage: it needs a package that is not installed: for a run folder, the extra
        `[train]`; for an .onnx, `[onnx]`.
    """
    path = Path(path)
    suffix = model_suffix(path)
    if suffix == ".safetensors":
        return load_safetensors(path)
    if suffix == ".onnx":
        from jaxgru.interop.onnx import load_onnx  # needs onnx

        return load_onnx(path)
    if suffix == ".pth":
        from jaxgru.interop.pth import load_pth

        return load_pth(path)
    from jaxgru.runs.checkpoints import load_folder  # needs Optax

    return load_folder(path)
