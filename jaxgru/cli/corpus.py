"""Find a corpus, print its source, size and SHA-256, and optionally write it to a file."""

from __future__ import annotations

from pathlib import Path

from jaxgru.cli.options import Parser, written
from jaxgru.files import write_bytes
from jaxgru.lm.data.corpus import TINY_SHAKESPEARE, load_corpus
from jaxgru.lm.data.sources import CorpusError


def make_parser() -> Parser:
    """Return the parser of this command's options."""
    parser = Parser(
        __doc__,
        [
            "corpus",
            "corpus --output tiny_shakespeare.txt",
            "corpus --corpus my_text.txt",
        ],
    )
    parser.add_argument(
        "--corpus",
        metavar="NAME_OR_PATH",
        default=TINY_SHAKESPEARE,
        help="%(default)s (the default), or a UTF-8 text of your own: a file, folder or pattern",
    )
    parser.add_argument("--output", type=Path, help="file to write the text to")
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace an --output file that holds another text",
    )
    return parser


def main() -> None:
    """Parse the arguments, load the corpus, write it if asked, and print what it is."""
    arguments = make_parser().parse_args()
    corpus = load_corpus(arguments.corpus)
    path = arguments.output
    if path is not None:
        write(path, corpus.text.encode(), arguments.force)
    lines = corpus.text.count("\n")
    if not corpus.text.endswith("\n"):
        lines += 1
    print(f"source      {corpus.source}")
    print(f"characters  {len(corpus.text)}")
    print(f"lines       {lines}")
    print(f"SHA-256     {corpus.sha256}")
    if path is not None:
        print(f"written to  {path}")


def write(path: Path, data: bytes, force: bool) -> None:
    """Write the text to a file.

    Raises:
      CorpusError: the path is no regular file, or a file with other content, without `force`.
    """
    with written(path):
        if path.exists() and not path.is_file():
            raise CorpusError(f"{path} is not a regular file; give --output another name.")
        if path.exists() and not force and path.read_bytes() != data:
            raise CorpusError(f"{path} has other content; to replace it, add --force.")
        write_bytes(path.resolve(), data)  # a link stays
