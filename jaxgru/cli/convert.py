"""Convert a run or a whole model into a file of another format, which its suffix says."""

from __future__ import annotations

import os
from pathlib import Path

from jaxgru.cli.options import Parser, written
from jaxgru.errors import UserError
from jaxgru.lm import Found, find_model
from jaxgru.lm.formats import NAMES, format_to_write


def make_parser() -> Parser:
    """Return the parser of this command's options."""
    parser = Parser(
        __doc__,
        [
            "convert runs/astra_alpha astra_alpha.safetensors",
            "convert Astra-alpha.pth astra_alpha.safetensors",
            "convert astra_beta astra_beta.onnx",
        ],
        usage="IN OUT [options]",
    )
    parser.add_argument(
        "source", metavar="IN", help=f"a pretrained model, the folder of a run, or a {NAMES} file"
    )
    parser.add_argument("target", metavar="OUT", type=Path, help=f"a {NAMES} file")
    parser.add_epoch(parser)
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    return parser


def main() -> None:
    """Parse and check the arguments, load the model and save it."""
    arguments = make_parser().parse_args()
    model = find_model(arguments.source)
    target = arguments.target
    check(model, target, arguments.force)
    params, config, tokenizer = model.load(arguments.epoch)
    format = format_to_write(target)
    with written(target):
        # Resolved, so that a link stays one.
        format.save(target.resolve(), params, config, tokenizer, model.text_sha256())
    print(f"{config.name} written to {target}")


def check(model: Found, target: Path, force: bool) -> None:
    """Check, before anything slow starts, that the target can be written.

    Raises:
      UserError: the target exists, or would be a mere copy.
      MissingPackage: its format needs a package that is not installed.
    """
    format = format_to_write(target)
    if model.format is format and not model.is_pretrained():
        raise UserError(f"{model.path} is already a {target.suffix} file; copy it instead.")
    if os.path.exists(target):
        if os.path.exists(model.path) and model.path.samefile(target):
            raise UserError(f"{target} is the same file as {model}.")
        if not force:
            raise UserError(f"{target} exists; to replace it, add --force.")
    format.module()  # raises MissingPackage
