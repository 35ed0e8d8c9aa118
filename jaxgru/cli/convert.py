"""Convert a model between a run folder, .safetensors, .onnx (whole models) and the study's .pth."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from jaxgru.cli.options import Parser, early_value
from jaxgru.libraries import InteropError
from jaxgru.lm.data.tokenizers import Tokenizer, load_tokenizer, read_tokenizer
from jaxgru.lm.formats import FORMATS, NAMES, format_of
from jaxgru.lm.formats.pth import load_pth
from jaxgru.lm.load import find_model, load
from jaxgru.lm.pretrained import pretrained_names
from jaxgru.lm.runs.folders import find_run


def make_parser() -> Parser:
    """Return the parser of this command's options."""
    parser = Parser(
        __doc__,
        ["convert runs/astra_alpha astra_alpha.safetensors",
         "convert Astra-alpha.pth astra_alpha.safetensors",
         "convert --pretrained astra_beta astra_beta.onnx"],
    )  # fmt: skip
    parser.add_argument(
        "--pretrained",
        metavar="NAME",
        choices=pretrained_names(),
        help="model that ships with jaxgru, in place of IN",
    )
    if early_value("--pretrained") is None:
        parser.add_argument("source", metavar="IN", type=Path, help=f"run folder, {NAMES}")
    parser.add_argument("target", metavar="OUT", type=Path, help=NAMES)
    parser.add_argument(
        "--tokenizer",
        metavar="RUN_OR_FILE",
        type=Path,
        help="tokenizer for a .pth, which holds none: a run, .safetensors, .onnx, or a "
        "tokenizer's .json or .model (default: Tiny Shakespeare's, for 65 or 1,000 tokens)",
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
    kind = format_of(source) if source else None
    if given is not None and (kind is None or kind.has_metadata):
        parser.error(f"--tokenizer is for a .pth; {source or name} has its own.")
    model = find_model(source or name)
    if given is None:
        params, config, tokenizer = model.load()
    else:
        params, config, tokenizer = load_pth(model.path, find_tokenizer(given))
    place = Path(os.path.realpath(target)) if os.path.islink(target) else target  # keep the link
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leave no part
    try:
        FORMATS[target.suffix].save(place, params, config, tokenizer, model.text_sha256())
    except OSError as error:
        raise InteropError(f"{target} cannot be written: {error.strerror}.") from error
    print(f"{config.name} written to {target}")


def check(source: Path | None, target: Path, force: bool) -> None:
    """Raise InteropError, before anything slow starts, if source and target do not fit together."""
    if source is not None:
        check_source(source, target)
    if target.suffix not in FORMATS:
        raise InteropError(f"{target} must end in {NAMES}, the format to write.")
    if os.path.isdir(target):
        raise InteropError(f"{target} is a folder; OUT must be a file.")
    if os.path.exists(target) and not os.path.isfile(target):
        raise InteropError(f"{target} is not a regular file.")
    if os.path.exists(target) and not force:
        raise InteropError(f"{target} exists; to replace it, add --force.")
    FORMATS[target.suffix].module()  # raises MissingPackage


def check_source(source: Path, target: Path) -> None:
    """Raise InteropError if there is no such model, or the target is of the same format."""
    try:
        os.stat(source)
    except FileNotFoundError:
        raise InteropError(f"there is no {source}.") from None
    except OSError as error:
        raise InteropError(f"{source} cannot be read: {error.strerror}.") from error
    kind = format_of(source)
    if not kind and not os.path.isdir(source):
        raise InteropError(f"{source} is neither a run folder nor a {NAMES} file.")
    if kind and kind.suffix == target.suffix:
        raise InteropError(f"{source} is already a {kind.suffix} file; copy it instead.")
    if os.path.exists(target) and source.samefile(target):
        raise InteropError(f"{target} is the same file as {source}.")


def find_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a run, a .safetensors or an .onnx file, or from a file of its own."""
    if path.suffix in (".json", ".model"):
        return read_tokenizer(path)
    if path.suffix in (".safetensors", ".onnx"):
        return load(path)[2]
    return load_tokenizer(find_run(path))
