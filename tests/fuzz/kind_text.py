"""A user's own text, from the file to tokens and back: any bytes, any line ends, any script."""

from __future__ import annotations

import os
import random
from pathlib import Path

from fuzzing import Finding, Made
from mutations import mutate, text

from jaxgru.cli.options import parse_fields
from jaxgru.lm.config import load_config
from jaxgru.lm.data.dataset import load_dataset
from jaxgru.lm.data.tokenizers import TokenizerError

PLAIN = "But soft, what light through yonder window breaks?\nIt is the east – né.\n" * 20
SPECIAL = (
    "<unk>",
    "<s> ",
    "</s>\n",
    "▅",
    "▁",
    "\ufeff",
    "\u0301",
    "\x1c",
    "<<unk>>",
)  # to SentencePiece
NAMES = ("text.txt", "caf\udce9.txt", "[red].txt", "a\nb.txt", " ", "\u202etxt", "x" * 200, "a'\".")


def prepare(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "endless").symlink_to("/dev/zero")


def make(rng: random.Random, folder: Path) -> Made:
    data = rng.choice((_bytes, _text, _text))(rng)
    for old in NAMES:
        (folder / old).unlink(missing_ok=True)
    path = folder / (rng.choice(NAMES) if rng.random() < 0.2 else "text.txt")
    path.write_bytes(data)
    (folder / "input").write_bytes(data)
    given, size = str(path), len(data)
    if rng.random() < 0.1:
        given = str(folder / rng.choice((
            "pipe", "folder", "loop", "loop/x", "endless", "missing", "x" * 300, "x/" * 3000,
            "text.txt/", "text.txt/x", "../" * 50 + "dev/zero", "a\0b", "\ud800",
        )))  # fmt: skip
    options = {
        "data.corpus": given,
        "training.sequence_length": rng.choice(("1", "2", "16")),
        "data.validation_fraction": rng.choice(("0.1", "0.1", "0.5", "0.5", "1e-9", "0.999")),
    }
    if rng.random() < 0.3:
        sizes = ("1", "4", "20", "40", "40", "60", "60", "1000", "100000")
        options |= {"data.tokenizer": "sentencepiece", "model.vocab_size": rng.choice(sizes)}
    return Made((options, data), size)


def load(made: tuple[dict[str, str], bytes]) -> None:
    options, data = made
    try:
        config, dataset = load_dataset(load_config("astra_alpha", parse_fields(options)))
    except TokenizerError as error:
        if "lacks" in str(error):
            raise Finding(f"learned from this very text: {error}") from error
        raise
    tokenizer = dataset.tokenizer
    text = data.removeprefix(b"\xef\xbb\xbf").decode()
    for split in (dataset.train, dataset.validation):
        said = tokenizer.decode(split)
        said.encode()
        if tokenizer.kind == "characters" and tokenizer.encode(said).tolist() != split.tolist():
            raise Finding("decode and encode change the tokens")
    if tokenizer.kind == "characters":
        if tokenizer.decode(dataset.train) + said != text:
            raise Finding("the text is not what is in the file")
        if dataset.num_characters != len(dataset.validation) - 1:
            raise Finding("the characters are miscounted")
        again = type(tokenizer).from_bytes(tokenizer.to_bytes())
        if again.vocabulary != tokenizer.vocabulary:
            raise Finding("another vocabulary when written and read")
    if not 0 <= dataset.num_characters < len(text):
        raise Finding(f"{dataset.num_characters} characters of {len(text)}")
    load_config("astra_alpha", {"data.corpus": config.data.corpus})
    str(dataset.source).encode()


def _bytes(rng: random.Random) -> bytes:
    return rng.choice((
        lambda: b"", lambda: b"\0", lambda: b"\xff", lambda: b"\xef\xbb\xbf",
        lambda: mutate(rng, PLAIN.encode()),
        lambda: PLAIN.encode("utf-16"), lambda: PLAIN.encode("latin-1", "replace"),
        lambda: PLAIN.encode() + b"\xe2\x82", lambda: b"\xed\xa0\x80" * 20,
        lambda: b"\xc0\x80" * 30, lambda: b"\xf4\x90\x80\x80" * 20,
        lambda: rng.randbytes(rng.choice((1, 10, 1000))),
        lambda: bytes(rng.choice((30, 5000))),
    ))()  # fmt: skip


def _text(rng: random.Random) -> bytes:
    count = rng.choice((1, 1, 20, 300))
    made = rng.choice((
        lambda: "".join(text(rng) for _ in range(count)),
        lambda: text(rng) * rng.choice((1, 50, 1000)),
        lambda: PLAIN.replace("\n", rng.choice(("\r\n", "\r", "\x0b", "\x0c", "\u2028", "\x85",
                                                "\0", " ", ""))),
        lambda: PLAIN + text(rng) * 5,
        lambda: PLAIN + rng.choice(SPECIAL) + text(rng) + rng.choice(SPECIAL),
        lambda: rng.choice("ab\n \u200f\u0661") * rng.choice((1, 2, 18, 5000, 200_000)),
        lambda: "".join(chr(rng.randrange(32, 0xD7FF)) for _ in range(rng.choice((30, 3000)))),
        lambda: "".join(chr(rng.randrange(0x10000, 0x10FFFF)) for _ in range(300)),
        lambda: "".join(rng.choice(PLAIN) for _ in range(1000)),
    ))()  # fmt: skip
    return made.encode("utf-8", rng.choice(("surrogatepass", "replace")))
