"""Stream text from an ONNX file without jaxgru or JAX, in Python or in a web page of forty lines.

    python examples/onnx_stream.py
    python examples/onnx_stream.py --model runs/astra_alpha --prompt "JULIET: "
    python examples/onnx_stream.py --page page && python -m http.server --directory page

jaxgru exports a model to an .onnx file. The file's inputs are tokens and the carry, and its outputs
are logits and the next carry. Each call writes one character, and takes the carry that the call
before returned. A model that was trained in documents, such as lines, writes one.

`--page` makes a folder with the file, its characters and these options, and
`examples/onnx_page.html`, in which onnxruntime-web does the same. The page loads that package from
cdn.jsdelivr.net and the model from the folder, so any file server can serve it.

It needs two packages, `pip install onnx onnxruntime`. Once the file is written, only the second is
needed.
"""

import argparse
import itertools
import json
import math
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime

from jaxgru import UserError
from jaxgru.lm.data.documents import documents_of, encode_text, separator_token_of
from jaxgru.lm.formats.onnx import save_onnx
from jaxgru.lm.generation import default_prompt
from jaxgru.lm.load import find_model

PAGE = Path(__file__).with_name("onnx_page.html")


def stream(
    path: Path, tokens: list[int], separator_token: int | None, temperature: float, seed: int
) -> Iterator[str]:
    """Read a prompt's tokens, then write characters until `separator_token`, which ends a document.

    Needs NumPy and ONNX Runtime alone.
    """
    session = onnxruntime.InferenceSession(path)
    metadata = session.get_modelmeta().custom_metadata_map
    characters = json.loads(metadata["tokenizer_data"])["characters"]
    _, *states = session.get_inputs()  # tokens, then the carry
    carry = {state.name: np.zeros((1, *state.shape[1:]), np.float32) for state in states}
    rng = np.random.default_rng(seed)
    while True:
        inputs = {"tokens": np.array([tokens], np.int32), **carry}  # tokens (B, T)
        logits, *carries = session.run(None, inputs)  # (B, T, V)
        carry = dict(zip(carry, carries, strict=True))
        # The argmax of logits plus Gumbel noise is a draw from their softmax.
        noise = rng.gumbel(size=logits.shape[2])
        token = (logits[0, -1] / temperature + noise).argmax()
        if token == separator_token:
            return
        yield characters[token]
        tokens = [token]


class Export(NamedTuple):
    """A model in an ONNX file, and how a text of it begins and ends."""

    path: Path
    characters: list[str]
    prompt: str
    tokens: list[int]  # of the prompt
    separator_token: int | None


def export(name: str, prompt: str | None, path: Path) -> Export:
    """Write a character model into an ONNX file.

    Raises:
      UserError: it is not a character model, it does not know the prompt, or ONNX lacks some of it.
    """
    model = find_model(name)
    params, config, tokenizer = model.load()
    if config.data.tokenizer != "characters":
        raise UserError(f"{name} is not a character model.")
    separator = config.data.separator
    if prompt is None:
        prompt = "" if separator else default_prompt(model.text_sha256(), tokenizer)
    # It begins from a zero state.
    last_document = documents_of(prompt, separator)[-1] if separator else prompt
    tokens, _ = encode_text(tokenizer, last_document, separator)
    if not len(tokens):
        raise UserError("the prompt needs a character.")
    separator_token = separator_token_of(tokenizer, separator)
    save_onnx(path, params, config, tokenizer)
    return Export(path, tokenizer.pieces, prompt, tokens.tolist(), separator_token)


def make_page(folder: Path, model: Export, temperature: float, num_tokens: int) -> None:
    """Write the page, its model and what it reads into a folder."""
    folder.mkdir(exist_ok=True)
    shutil.copy(model.path, folder)
    page = {
        "characters": model.characters,
        "prompt": model.tokens,
        "separator_token": model.separator_token,
        "temperature": temperature,
        "num_tokens": num_tokens,
    }
    (folder / "page.json").write_text(json.dumps(page))
    shutil.copy(PAGE, folder / "index.html")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="astra_beta", help="name, run or file (%(default)s)")
    add(
        "--prompt",
        help="text to continue (as of jaxgru sample: 'ROMEO: ', a newline or a letter; "
        "of a model of documents, none)",
    )
    add(
        "--num-tokens",
        type=int,
        default=1000,
        metavar="N",
        help="characters to write (%(default)s)",
    )
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="N",
        help="divisor of the logits, above 0 (%(default)s)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the random choices, not of the page's (%(default)s)",
    )
    add("--page", type=Path, metavar="FOLDER", help="make the page in this new folder")
    return parser


def main() -> None:
    """Parse the arguments, export a model, and stream a text or make the page."""
    parser = make_parser()
    arguments = parser.parse_args()
    if not 0 < arguments.temperature < math.inf:
        parser.error("the temperature must be finite, above 0.")
    if min(arguments.num_tokens, arguments.seed) < 0:
        parser.error("--num-tokens and --seed must be 0 or more.")
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "model.onnx"
        try:
            model = export(arguments.model, arguments.prompt, path)
        except UserError as error:
            parser.error(str(error))
        folder = arguments.page
        if folder:
            make_page(folder, model, arguments.temperature, arguments.num_tokens)
            print(shlex.join(["python", "-m", "http.server", "--directory", str(folder)]))
            return
        text = stream(
            path, model.tokens, model.separator_token, arguments.temperature, arguments.seed
        )
        print(model.prompt, end="")
        for character in itertools.islice(text, arguments.num_tokens):
            print(character, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
