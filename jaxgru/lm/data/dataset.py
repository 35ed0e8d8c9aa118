"""Load, verify, tokenise and split the corpus of a config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from jaxtyping import Int

from jaxgru.errors import UserError
from jaxgru.lm.config import Config, DataConfig, override
from jaxgru.lm.data.batching import check_length
from jaxgru.lm.data.corpus import TINY_SHAKESPEARE, load_corpus, split
from jaxgru.lm.data.sources import STDIN, Corpus, find_files
from jaxgru.lm.data.tokenizers import TOKENIZERS, Tokenizer, read_tokenizer
from jaxgru.lm.data.units import encode_units, end_of, end_token, held_out, separator, split_units
from jaxgru.printing import counted, shown


@dataclass(frozen=True)
class Dataset:
    """Both splits as int32 tokens, their tokenizer, where the text came from, and its SHA-256.

    `num_characters` is the length of the text that validation[1:], the targets, stands for.
    `sha256` is the corpus's; with `data.validation`, a space and that text's follow. `end` is the
    end-of-unit token, with which both splits begin; None: the text is not read in units.
    """

    train: Int[np.ndarray, "N"]
    validation: Int[np.ndarray, "M"]
    tokenizer: Tokenizer
    source: str
    num_characters: int
    sha256: str
    end: int | None = None

    def unknown_share(self) -> float:
        """Return the share of the tokens that are the unknown one."""
        splits, unknown = (self.train, self.validation), self.tokenizer.unknown
        return sum(int((split == unknown).sum()) for split in splits) / sum(map(len, splits))


def load_dataset(
    config: Config,
    tokenizer: Tokenizer | None = None,
    sha256: str = "",
    options: tuple[str, str] = ("--data.corpus", "--data.validation"),
) -> tuple[Config, Dataset]:
    """Load the text that a config trains on.

    Args:
      tokenizer: None: the one of data.tokenizer_file, or one learned from the whole text, which
        includes the validation text.
      sha256: the one that the dataset must have; "": any.
      options: what an error names as the way to give either text, if it has moved.

    Returns the config with what the text decides (absolute paths, the size of the vocabulary), and
    the dataset.
    """
    data = config.data
    of_file = tokenizer is None and data.tokenizer_file
    if of_file:
        tokenizer = read_tokenizer(Path(data.tokenizer_file))
        if data.tokenizer not in (DataConfig.tokenizer, tokenizer.kind):
            raise UserError(
                f"data.tokenizer is {data.tokenizer}, but {data.tokenizer_file} is a tokenizer of "
                f"kind {tokenizer.kind}; set data.tokenizer to {tokenizer.kind}, or leave out one "
                "of the two."
            )
    kind = TOKENIZERS[data.tokenizer] if tokenizer is None else tokenizer
    corpora = _corpora(config, kind, sha256, options)
    texts = [corpus.text for corpus in corpora]
    units = [split_units(text, data.unit) for text in texts] if data.unit else []
    if units and len(units[0]) < 2:
        raise UserError(
            f"data.unit is {shown(data.unit)}, but {corpora[0].source} has no two units with "
            f"{separator(data.unit)!r} between them."
        )
    texts = [end_of(data.unit).join([*each, ""]) for each in units] or texts
    if tokenizer is None:
        min_count = data.min_count or kind.min_count
        tokenizer = kind.learn("".join(texts), config.model.vocab_size, min_count)
        pieces = (t for i, t in enumerate(tokenizer.pieces) if i != tokenizer.unknown)
        if data.min_count and all(map(str.isspace, pieces)):
            raise UserError(
                f"data.min_count is {data.min_count}, but nothing in {corpora[0].source} occurs "
                "that often."
            )
    end = end_token(tokenizer, data.unit)
    if units:
        train, validation, num_characters = _in_units(config, tokenizer, units)
    else:
        train, validation, num_characters = _in_one(config, tokenizer, texts)
    check_length(len(train), config.training, data.batches, "the training split")
    if len(validation) < 2:
        raise UserError(
            f"the validation split has {counted(len(validation), 'token')}, but a loss needs at "
            "least 2; give a longer text."
        )
    decided = {"name": config.name, "model.vocab_size": tokenizer.vocab_size}
    decided["data.tokenizer"] = tokenizer.kind if of_file else data.tokenizer
    for name in ("corpus", "validation", "tokenizer_file"):
        decided[f"data.{name}"] = _place(getattr(data, name))
    config = override(config, decided)
    source = " and ".join(corpus.source for corpus in corpora)
    hashes = " ".join(corpus.sha256 for corpus in corpora)
    return config, Dataset(train, validation, tokenizer, source, num_characters, hashes, end)


Split: TypeAlias = tuple[Int[np.ndarray, "N"], Int[np.ndarray, "M"], int]


def _in_one(config: Config, tokenizer: Tokenizer, texts: list[str]) -> Split:
    """Return the tokens to train and validate on, and the characters of the latter's targets."""
    fraction = config.data.validation_fraction
    tokens, *validations = map(tokenizer.encode, texts)
    if validations:
        train, [validation] = tokens, validations
        before = validation[:1]
    else:
        begun, validation = split(tokens, fraction or 0.1)
        train = begun if fraction else tokens
        before = tokens[: len(begun) + 1]
    return train, validation, len(texts[-1]) - tokenizer.num_characters(before, texts[-1])


def _in_units(config: Config, tokenizer: Tokenizer, texts: list[list[str]]) -> Split:
    """Return what `_in_one` returns, of texts in units; without a second text, some are drawn."""
    data, (train, *validations) = config.data, texts
    if validations:
        [validation] = validations
    else:
        drawn = held_out(len(train), data.validation_fraction or 0.1, data.validation_seed)
        validation = [unit for unit, out in zip(train, drawn, strict=True) if out]
        if data.validation_fraction:
            train = [unit for unit, out in zip(train, drawn, strict=True) if not out]
    tokens, _ = encode_units(tokenizer, train, data.unit)
    if config.training.random_offset:  # a ring, whose last token comes before its first one
        tokens = tokens[1:]
    return tokens, *encode_units(tokenizer, validation, data.unit)


def reads_newlines(data: DataConfig, tokenizer: Tokenizer | type[Tokenizer]) -> bool:
    """Return whether the line ends of Windows and old Macs become \\n in a model's texts.

    They do not if data.line_ends keeps them, if the tokens are bytes, or if \\r is in data.unit or
    in the vocabulary. A vocabulary has it only if it was learned from a text that kept it, as each
    text was before there was data.line_ends.
    """
    of_texts_with_returns = "\r" in getattr(tokenizer, "pieces", ())  # a class has none yet
    keeps_returns = of_texts_with_returns or "\r" in separator(data.unit)
    return data.line_ends == "newlines" and not tokenizer.reads_bytes and not keeps_returns


def _corpora(
    config: Config, kind: Tokenizer | type[Tokenizer], sha256: str, options: tuple[str, str]
) -> list[Corpus]:
    """Read the corpus and, if there is one, the validation text; compare their SHA-256s."""
    data, corpora = config.data, []
    places = [place for place in (data.corpus, data.validation) if place]
    wanted = sha256.split() or [""] * len(places)
    if len(wanted) != len(places):
        how = "on another text; give it with" if len(wanted) > 1 else "on its own text; leave out"
        raise UserError(f"the model was validated {how} {options[1]}.")
    for place, want, option in zip(places, wanted, options, strict=False):
        if sha256 and place not in (TINY_SHAKESPEARE, STDIN) and not find_files(place):
            raise UserError(f"there is no text {place}; give its place with {option}.")
        corpus = load_corpus(
            place,
            encoding=data.encoding,
            reads_bytes=kind.reads_bytes,
            newlines=reads_newlines(data, kind),
        )
        if want not in ("", corpus.sha256):
            raise UserError(
                f"{place} has changed or is another text: its SHA-256 is {corpus.sha256}, not "
                f"{want}; give the right one with {option}."
            )
        corpora.append(corpus)
    return corpora


def _place(name: str) -> str:
    """Return the absolute path; a name that is no path stays."""
    return name if name in ("", STDIN, TINY_SHAKESPEARE) else str(Path(name).resolve())
