"""Convert a model between a run folder, .safetensors, .onnx (whole models) and the study's .pth."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from jaxgru.cli.options import Parser, early_value
from jaxgru.config import Config
from jaxgru.data.tokenizers import Tokenizer, load_tokenizer, read_tokenizer
from jaxgru.interop import SUFFIXES, InteropError, model_suffix
from jaxgru.interop.pth import load_pth, save_pth
from jaxgru.interop.safetensors import save_safetensors
from jaxgru.model import Params
from jaxgru.pretrained import load_pretrained
from jaxgru.runs import load_run
from jaxgru.runs.folders import find_run

FORMATS = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"


def make_parser() -> Parser:
    """Return the parser of this command's options."""
    parser = Parser(
        __doc__,
        ["convert runs/astra_alpha astra_alpha.safetensors",
         "convert Astra-alpha.pth astra_alpha.safetensors",
         "convert --pretrained astra_beta astra_beta.onnx"],
    )  # fmt: skip
    parser.add_argument(
        "--pretrained", metavar="NAME", help="model that ships with jaxgru, in place of IN"
    )
    if early_value("--pretrained") is None:
        parser.add_argument("source", metavar="IN", type=Path, help=f"run folder, {FORMATS}")
    parser.add_argument("target", metavar="OUT", type=Path, help=FORMATS)
    parser.add_argument(
        "--tokenizer",
        metavar="RUN_OR_FILE",
        type=Path,
        help="tokenizer for a .pth, which holds none: a run, .safetensors, .onnx, tokenizer.json "
        "or tokenizer.model (default: Tiny Shakespeare's, for 65 or 1,000 tokens)",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    return parser


def main() -> None:
    """Parse and check the arguments, load the model and save it."""
    parser = make_parser()
    arguments = parser.parse_args()
    name, source = arguments.pretrained, getattr(arguments, "source", None)
    target, given = arguments.target, arguments.tokenizer
    check(source, target, arguments.force)
    if given is not None and (source is None or model_suffix(source) != ".pth"):
        parser.error(f"--tokenizer is for a .pth; {source or name} has its own.")
    save = saver(target.suffix)
    if source is None:
        params, config, tokenizer = load_pretrained(name)
    elif given is None:
        params, config, tokenizer = load_run(source)
    else:
        params, config, tokenizer = load_pth(source, find_tokenizer(given))
    place = Path(os.path.realpath(target)) if os.path.islink(target) else target  # keep the link
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leave no part
    try:
        save(place, params, config, tokenizer)
    except OSError as error:
        raise InteropError(f"{target} cannot be written: {error.strerror}.") from error
    print(f"{config.name} written to {target}")


def check(source: Path | None, target: Path, force: bool) -> None:
    """Raise InteropError, before anything slow starts, if source and target do not fit together."""
    if source is not None:
        check_source(source, target)
    if target.suffix not in SUFFIXES:
        raise InteropError(f"{target} must end in {FORMATS}, the format to write.")
    if os.path.isdir(target):
        raise InteropError(f"{target} is a folder; OUT must be a file.")
    if os.path.exists(target) and not os.path.isfile(target):
        raise InteropError(f"{target} is not a regular file.")
    if os.path.exists(target) and not force:
        raise InteropError(f"{target} exists; to replace it, add --force.")


def check_source(source: Path, target: Path) -> None:
    """Raise InteropError if there is no such model, or the target is of the same format."""
    try:
        os.stat(source)
    except FileNotFoundError:
        raise InteropError(f"there is no {source}.") from None
    except OSError as error:
        raise InteropError(f"{source} cannot be read: {error.strerror}.") from error
    kind = model_suffix(source)
    if not kind and not os.path.isdir(source):
        raise InteropError(f"{source} is neither a run folder nor a {FORMATS} file.")
    if kind == target.suffix:
        raise InteropError(f"{source} is already a {kind} file; copy it instead.")
    if os.path.exists(target) and source.samefile(target):
        raise InteropError(f"{target} is the same file as {source}.")


def saver(suffix: str) -> Callable[[Path, Params, Config, Tokenizer], None]:
    """Return the function that writes this format. Raises MissingPackage for .onnx."""
    if suffix == ".onnx":
        from jaxgru.interop.onnx import save_onnx

        return save_onnx
    if suffix == ".pth":
        return lambda path, params, config, tokenizer: save_pth(path, params, config)
    return save_safetensors


def find_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a run, a .safetensors or an .onnx file, or from a file of its own."""
    if path.suffix in (".json", ".model"):
        return read_tokenizer(path)
    if path.suffix in (".safetensors", ".onnx"):
        return load_run(path)[2]
    return load_tokenizer(find_run(path))
