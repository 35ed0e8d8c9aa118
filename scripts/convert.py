"""Converts a model between a run folder, .safetensors (a whole model) and the study's .pth."""

from __future__ import annotations

import startup  # noqa: F401

from pathlib import Path

from jaxgru import load_run
from jaxgru.command_line import Parser, run_script
from jaxgru.interop import InteropError
from jaxgru.interop.safetensors import load_safetensors, save_safetensors
from jaxgru.interop.study import load_study_run, save_study
from jaxgru.run_folders import find_run
from jaxgru.tokenizers import Tokenizer, load_tokenizer, read_tokenizer


def main() -> None:
    """Reads the arguments, checks that they make sense, and makes two calls: load and save."""
    parser = Parser(__doc__)
    parser.add_argument("source", metavar="IN", type=Path, help="run folder, .safetensors or .pth")
    parser.add_argument("target", metavar="OUT", type=Path, help=".safetensors or .pth")
    parser.add_argument(
        "--tokenizer",
        metavar="RUN_OR_FILE",
        type=Path,
        help="for a .pth, which holds none: a run, .safetensors, tokenizer.json or tokenizer.model "
        "(default: Tiny Shakespeare's, for 65 or 1,000 tokens)",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    arguments = parser.parse_args()
    source, target = arguments.source, arguments.target
    given = arguments.tokenizer
    check(source, target, arguments.force)
    if source.is_dir() or source.suffix == ".safetensors":
        if given is not None:
            parser.error(f"--tokenizer is for a .pth: {source} has its own.")
        params, config, tokenizer = load_run(source)
    else:
        tokenizer = None if given is None else find_tokenizer(given)
        params, config, tokenizer = load_study_run(source, tokenizer)
    try:
        if target.suffix == ".pth":
            save_study(target, params, config)
        else:
            save_safetensors(target, params, config, tokenizer)
    except OSError as error:
        raise InteropError(f"{target} cannot be written: {error.strerror}.") from error
    print(f"{config.name} written to {target}")


def check(source: Path, target: Path, force: bool) -> None:
    """Raises InteropError before anything slow starts where source and target make no sense."""
    if not source.exists():
        raise InteropError(f"there is no {source}.")
    kind = "" if source.is_dir() else source.suffix
    if not source.is_dir() and kind not in (".pth", ".safetensors"):
        raise InteropError(f"{source} is neither a run folder nor a .safetensors or .pth file.")
    if target.suffix not in (".pth", ".safetensors"):
        raise InteropError(f"{target} must end in .safetensors or .pth, which say what to write.")
    if kind == target.suffix:
        raise InteropError(f"{source} is a {kind} file already; copy it.")
    if target.is_dir():
        raise InteropError(f"{target} is a folder.")
    if target.exists() and not force:
        raise InteropError(f"{target} exists; to replace it, add --force.")


def find_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a run, of a .safetensors file, or in a file of its own."""
    if path.suffix in (".json", ".model"):
        return read_tokenizer(path)
    if path.suffix == ".safetensors":
        return load_safetensors(path)[2]
    return load_tokenizer(find_run(path))


if __name__ == "__main__":
    run_script(main)
