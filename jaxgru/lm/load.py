"""Load and save whole models: a name, a run or a file → parameters, config and tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, NamedTuple

from jaxgru.errors import UserError
from jaxgru.lm.config import Config, config_names, load_config
from jaxgru.lm.data.tokenizers import Tokenizer
from jaxgru.lm.formats import FORMATS, NAMES, Format, format_of, format_to_write
from jaxgru.lm.model import Params, check_params
from jaxgru.lm.pretrained import find_pretrained, measured_losses, pretrained_files
from jaxgru.lm.runs.folders import find_run, load_info
from jaxgru.printing import nearest

Which = Literal["best", "last"]  # epoch of a run


class Found(NamedTuple):
    """Where a model is: the file and its format, or a run's folder. Its methods raise as `load`."""

    path: Path
    format: Format | None  # None: a run

    def __str__(self) -> str:
        """What the user calls it: the name of a pretrained model, or else the path."""
        return self.path.stem if self.is_pretrained() else str(self.path)

    def is_pretrained(self) -> bool:
        """Return whether it is one of the models that have names."""
        return self.path in pretrained_files().values()

    def load(self, epoch: Which | None = None) -> tuple[Params, Config, Tokenizer]:
        """Load it."""
        if self.format:
            if epoch:
                raise UserError(f"{self} holds one model; only a run has a {epoch} epoch.")
            return self.format.load(self.path)
        from jaxgru.lm.runs.checkpoints import load_folder  # needs Optax

        return load_folder(self.path, epoch)

    def config(self) -> Config:
        """Return its config; JAX is started for a .pth only."""
        if self.format:
            return self.format.config(self.path)
        return load_config(self.path / "config.toml")

    def text_sha256(self) -> str:
        """Return the SHA-256 of its text, or "" if unknown."""
        if self.format:
            return self.format.text_sha256(self.path)
        return load_info(self.path).text_sha256


def find_model(model: str | Path) -> Found:
    """Return where the model is that the user named, as for `load`.

    Raises:
      UserError: there is none, or it is not installed.
    """
    pretrained = find_pretrained(model) if isinstance(model, str) else None
    if pretrained:
        return Found(pretrained, FORMATS[".safetensors"])
    format = format_of(model)
    if format:
        return Found(Path(model), format)
    if not os.path.lexists(model):
        raise _no_such_model(model)
    if os.path.isfile(model):
        raise UserError(f"{model} is neither a run's folder nor a {NAMES} file.")
    return Found(find_run(model), None)


def _no_such_model(model: str | Path) -> UserError:
    """Return the error that says what the user may have meant."""
    pretrained = sorted(measured_losses())
    choices = f"a run's folder, a {NAMES} file, or a pretrained model: {', '.join(pretrained)}"
    meant = f"it must be {choices}"
    if "/" not in str(model):
        meant = nearest(str(model), pretrained, meant)
    if model in config_names():
        meant = f"it is a config, which jaxgru train {model} trains"
    return UserError(f"there is no model {str(model)!r}; {meant}.")


def load(model: str | Path, epoch: Which | None = None) -> tuple[Params, Config, Tokenizer]:
    """Load the parameters, config and tokenizer of a model.

    The parameters of a run are its result: with early stopping (`training.patience`) the best
    epoch's, else the last. A run that is still being trained, or was interrupted, gives those of
    its newest intact checkpoint; a sentence on stderr names each broken one. Nothing is written.
    For a .pth, which holds no tokenizer, see `formats.pth.load_pth`.

    Args:
      model: a pretrained model's name ("astra_beta"), a run's folder ("runs/astra_alpha/v1", or
        "runs/astra_alpha" for its newest version), or a file in one of `jaxgru.lm.formats.FORMATS`.
        Write "./NAME" for a file or folder that is called like a pretrained model.
      epoch: of a run, "best" or "last": the epoch with the lowest validation loss, or the newest
        parameters; None: its result.

    Raises:
      UserError: there is no such model, it has no such epoch, or it is damaged, which the message
        locates; or a package is not installed: for a run the extra `[train]`, for an .onnx
        `[onnx]`, for a .pth PyTorch, for a tokenizer SentencePiece, for a pretrained model of more
        than 3 MB jaxgru-models.
    """
    return find_model(model).load(epoch)


def save(
    path: str | Path, params: Params, config: Config, tokenizer: Tokenizer, text_sha256: str = ""
) -> None:
    """Write a whole model into one file.

    Args:
      path: its suffix says the format, one of `jaxgru.lm.formats.FORMATS`.
      text_sha256: of the text that the model was trained on, by which `jaxgru evaluate` knows it;
        "": unknown, unless it is Tiny Shakespeare. A .pth does not hold it.

    Raises:
      UserError: the parts do not fit together or cannot be written in that format, or a package is
        not installed.
      OSError: the file cannot be written, which leaves an older one untouched.
    """
    check_params(params)
    format_to_write(path).save(path, params, config, tokenizer, text_sha256)
