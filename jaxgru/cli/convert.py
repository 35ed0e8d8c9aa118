"""Convert a run or a whole model into a .safetensors file, an .onnx file or the study's .pth."""

from __future__ import annotations

import os
from pathlib import Path

from jaxgru.cli.options import Parser
from jaxgru.libraries import InteropError
from jaxgru.lm.data.tokenizers import Tokenizer, load_tokenizer, read_tokenizer
from jaxgru.lm.formats import FORMATS, NAMES
from jaxgru.lm.formats.pth import load_pth
from jaxgru.lm.load import Found, find_model, load
from jaxgru.lm.pretrained import FOLDER
from jaxgru.lm.runs.folders import find_run


def make_parser() -> Parser:
    """Return the parser of this command's options."""
    parser = Parser(
        __doc__,
        ["convert runs/astra_alpha astra_alpha.safetensors",
         "convert Astra-alpha.pth astra_alpha.safetensors", "convert astra_beta astra_beta.onnx"],
        usage="IN OUT [options]",
    )  # fmt: skip
    parser.add_argument(
        "source", metavar="IN", help=f"a pretrained model, the folder of a run, or a {NAMES} file"
    )
    parser.add_argument("target", metavar="OUT", type=Path, help=f"a {NAMES} file")
    parser.add_argument(
        "--tokenizer",
        metavar="RUN_OR_FILE",
        type=Path,
        help="tokenizer for a .pth, which holds none: a run, .safetensors, .onnx, or a "
        "tokenizer's .json or .model (default: Tiny Shakespeare's, for 65 or 1,000 tokens)",
    )
    parser.add_epoch(parser)
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    return parser


def main() -> None:
    """Parse and check the arguments, load the model and save it."""
    parser = make_parser()
    arguments = parser.parse_args()
    target, given = arguments.target, arguments.tokenizer
    model = find_model(arguments.source)
    check(model, target, arguments.force)
    if given is not None and (model.format is None or model.format.has_metadata):
        parser.error(f"--tokenizer is for a .pth; {arguments.source} has its own.")
    if given is None:
        params, config, tokenizer = model.load(arguments.epoch)
    else:
        params, config, tokenizer = load_pth(model.path, find_tokenizer(given))
    save, place = FORMATS[target.suffix].save, target.resolve()  # a link stays
    try:
        save(place, params, config, tokenizer, model.text_sha256())
    except OSError as error:
        raise InteropError(f"{target} cannot be written: {error.strerror}.") from error
    print(f"{config.name} written to {target}")


def check(model: Found, target: Path, force: bool) -> None:
    """Raise InteropError, before anything slow starts, if the target cannot be written."""
    if target.suffix not in FORMATS:
        raise InteropError(f"{target} must end in {NAMES}, the format to write.")
    if model.format is FORMATS[target.suffix] and model.path.parent != FOLDER:
        raise InteropError(f"{model.path} is already a {target.suffix} file; copy it instead.")
    if os.path.exists(target):
        if os.path.exists(model.path) and model.path.samefile(target):
            raise InteropError(f"{target} is the same file as {model}.")
        if not force:
            raise InteropError(f"{target} exists; to replace it, add --force.")
    FORMATS[target.suffix].module()  # raises MissingPackage


def find_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a run, a .safetensors or an .onnx file, or from a file of its own."""
    if path.suffix in (".json", ".model"):
        return read_tokenizer(path)
    if path.suffix in (".safetensors", ".onnx"):
        return load(path)[2]
    return load_tokenizer(find_run(path))
