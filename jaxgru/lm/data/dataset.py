"""Load, verify, tokenise and split the corpus of a config."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxgru.errors import UserError
from jaxgru.lm.config import Config, DataConfig, override
from jaxgru.lm.data.batching import check_length
from jaxgru.lm.data.corpus import TINY_SHAKESPEARE, load_corpus, split
from jaxgru.lm.data.documents import (
    encode_documents,
    held_out,
    separator_character,
    separator_text,
    separator_token_of,
    split_documents,
)
from jaxgru.lm.data.sources import STDIN, Corpus, find_files
from jaxgru.lm.data.tokenizers import TOKENIZERS, Tokenizer, read_tokenizer
from jaxgru.printing import counted, shown

__all__ = [
    "Dataset",
    "load_dataset",
    "reads_newlines",
]


@dataclass(frozen=True)
class Dataset:
    """Both splits as int32 tokens, their tokenizer, where the text came from, and its SHA-256.

    `num_characters` is the length of the text that validation[1:], the targets, stands for.
    `sha256` is the corpus's; with `data.validation`, a space and that text's follow.
    `separator_token` is the separator token, with which both splits begin; None: the text is not
    read in documents.
    """

    train: Int[np.ndarray, "N"]
    validation: Int[np.ndarray, "M"]
    tokenizer: Tokenizer
    source: str
    num_characters: int
    sha256: str
    separator_token: int | None = None

    def unknown_share(self) -> float:
        """Return the share of the tokens that are the unknown one."""
        unknown = self.tokenizer.unknown
        splits = self.train, self.validation
        num_unknown = sum(int((split == unknown).sum()) for split in splits)
        return num_unknown / sum(map(len, splits))


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

    Returns:
      The config with what the text decides (absolute paths, the size of the vocabulary), and the
      dataset.

    Raises:
      UserError: the text does not fit the config, such as one that is too short.
      CorpusError: a text cannot be read.
      TokenizerError: a tokenizer cannot be read or learned, or does not have the text's characters.
    """
    data = config.data
    kind = data.tokenizer
    if tokenizer is None and data.tokenizer_file:
        tokenizer = _tokenizer_of_file(data)
        kind = tokenizer.kind
    class_or_tokenizer = TOKENIZERS[kind] if tokenizer is None else tokenizer
    corpora = _load_corpora(data, class_or_tokenizer, sha256, options)
    texts = [corpus.text for corpus in corpora]
    documents = _documents_of_texts(data, corpora)
    if documents:
        end_of_document = separator_character(data.separator)
        texts = [end_of_document.join([*of_text, ""]) for of_text in documents]
    if tokenizer is None:
        tokenizer = _learn_tokenizer(config, texts, corpora[0].source)
    separator_token = separator_token_of(tokenizer, data.separator)
    if documents:
        splits = _split_documents(config, tokenizer, documents)
    else:
        splits = _split_text(config, tokenizer, texts)
    _check_lengths(config, splits)
    dataset = Dataset(
        splits.train,
        splits.validation,
        tokenizer,
        source=" and ".join(corpus.source for corpus in corpora),
        num_characters=splits.num_characters,
        sha256=" ".join(corpus.sha256 for corpus in corpora),
        separator_token=separator_token,
    )
    return _complete_config(config, kind, tokenizer.vocab_size), dataset


def _tokenizer_of_file(data: DataConfig) -> Tokenizer:
    """Read data.tokenizer_file, which may contradict data.tokenizer only at its default."""
    tokenizer = read_tokenizer(Path(data.tokenizer_file))
    if data.tokenizer not in (DataConfig.tokenizer, tokenizer.kind):
        raise UserError(
            f"data.tokenizer is {data.tokenizer}, but {data.tokenizer_file} is a tokenizer of "
            f"kind {tokenizer.kind}; set data.tokenizer to {tokenizer.kind}, or leave out one "
            "of the two."
        )
    return tokenizer


def _documents_of_texts(data: DataConfig, corpora: list[Corpus]) -> list[list[str]]:
    """Return a list of documents for each text; no lists if the texts are not read in documents."""
    if not data.separator:
        return []
    documents = [split_documents(corpus.text, data.separator) for corpus in corpora]
    if len(documents[0]) < 2:
        raise UserError(
            f"data.separator is {shown(data.separator)}, but {corpora[0].source} has no two "
            f"documents with {separator_text(data.separator)!r} between them."
        )
    return documents


def _learn_tokenizer(config: Config, texts: list[str], source: str) -> Tokenizer:
    """Learn the config's tokenizer from all texts; `source` is the first one's, for an error."""
    data = config.data
    cls = TOKENIZERS[data.tokenizer]
    min_count = data.min_count or cls.min_count
    tokenizer = cls.learn("".join(texts), config.model.vocab_size, min_count)
    pieces = [piece for token, piece in enumerate(tokenizer.pieces) if token != tokenizer.unknown]
    if data.min_count and all(map(str.isspace, pieces)):
        raise UserError(
            f"data.min_count is {data.min_count}, but nothing in {source} occurs that often."
        )
    return tokenizer


class _Splits(NamedTuple):
    """The tokens to train and validate on, and the characters of the latter's targets."""

    train: Int[np.ndarray, "N"]
    validation: Int[np.ndarray, "M"]
    num_characters: int


def _split_text(config: Config, tokenizer: Tokenizer, texts: list[str]) -> _Splits:
    """Return the splits of a corpus and, if there is one, a validation text."""
    tokens, *validations = map(tokenizer.encode, texts)
    if validations:
        train = tokens
        [validation] = validations
        before_targets = validation[:1]
    else:
        fraction = config.data.validation_fraction
        beginning, validation = split(tokens, fraction or 0.1)
        train = beginning if fraction else tokens
        before_targets = tokens[: len(beginning) + 1]
    num_before = tokenizer.num_characters(before_targets, texts[-1])
    return _Splits(train, validation, len(texts[-1]) - num_before)


def _split_documents(config: Config, tokenizer: Tokenizer, texts: list[list[str]]) -> _Splits:
    """Return the splits of texts in documents; without a validation text, some are drawn."""
    separator = config.data.separator
    train, *validations = texts
    if validations:
        [validation] = validations
    else:
        train, validation = _draw_documents(config.data, train)
    train_tokens, _ = encode_documents(tokenizer, train, separator)
    if config.training.random_offset:
        # The text is a ring, whose last token comes before its first one.
        train_tokens = train_tokens[1:]
    validation_tokens, num_characters = encode_documents(tokenizer, validation, separator)
    return _Splits(train_tokens, validation_tokens, num_characters)


def _draw_documents(data: DataConfig, documents: list[str]) -> tuple[list[str], list[str]]:
    """Return the documents to train on, and those that are drawn to validate on."""
    mask = held_out(len(documents), data.validation_fraction or 0.1, data.validation_seed)
    validation = list(itertools.compress(documents, mask))
    if not data.validation_fraction:
        return documents, validation
    return list(itertools.compress(documents, ~mask)), validation


def _check_lengths(config: Config, splits: _Splits) -> None:
    check_length(len(splits.train), config.training, config.data.batches, "the training split")
    if len(splits.validation) < 2:
        raise UserError(
            f"the validation split has {counted(len(splits.validation), 'token')}, but a loss "
            "needs at least 2; give a longer text."
        )


def _complete_config(config: Config, kind: str, vocab_size: int) -> Config:
    """Return the config with what the text and the tokenizer decide."""
    data = config.data
    values = {
        "name": config.name,
        "model.vocab_size": vocab_size,
        "data.tokenizer": kind,
        "data.corpus": _absolute(data.corpus),
        "data.validation": _absolute(data.validation),
        "data.tokenizer_file": _absolute(data.tokenizer_file),
    }
    return override(config, values)


def _absolute(place: str) -> str:
    """Return the absolute path; a name that is no path stays."""
    if place in ("", STDIN, TINY_SHAKESPEARE):
        return place
    return str(Path(place).resolve())


def reads_newlines(data: DataConfig, tokenizer: Tokenizer | type[Tokenizer]) -> bool:
    """Return whether the line ends of Windows and old Macs become \\n in a model's texts.

    They do not if data.line_ends keeps them, if the tokens are bytes, or if \\r is in
    data.separator or in the vocabulary. A vocabulary has it only if it was learned from a text that
    kept it, as each text was before there was data.line_ends.
    """
    if data.line_ends == "unchanged" or tokenizer.reads_bytes:
        return False
    # A class, whose tokenizer is still to be learned, has no pieces.
    vocabulary_has_returns = "\r" in getattr(tokenizer, "pieces", ())
    separator_has_returns = "\r" in separator_text(data.separator)
    return not vocabulary_has_returns and not separator_has_returns


def _load_corpora(
    data: DataConfig, tokenizer: Tokenizer | type[Tokenizer], sha256: str, options: tuple[str, str]
) -> list[Corpus]:
    """Read the corpus and, if there is one, the validation text; compare their SHA-256s.

    The arguments but for `data` are as for `load_dataset`; a tokenizer that is still to be learned
    is its class.
    """
    places = [place for place in (data.corpus, data.validation) if place]
    hashes = sha256.split() or [""] * len(places)
    if len(hashes) != len(places):
        has_validation = len(hashes) > 1
        how = "on another text; give it with" if has_validation else "on its own text; leave out"
        raise UserError(f"the model was validated {how} {options[1]}.")
    return [
        _load_corpus(place, data, tokenizer, sha256_of_text, option)
        for place, sha256_of_text, option in zip(places, hashes, options, strict=False)
    ]


def _load_corpus(
    place: str, data: DataConfig, tokenizer: Tokenizer | type[Tokenizer], sha256: str, option: str
) -> Corpus:
    """Read one text, which has this SHA-256 if one is given."""
    is_path = place not in (TINY_SHAKESPEARE, STDIN)
    if sha256 and is_path and not find_files(place):
        raise UserError(f"there is no text {place}; give its place with {option}.")
    corpus = load_corpus(
        place,
        encoding=data.encoding,
        reads_bytes=tokenizer.reads_bytes,
        newlines=reads_newlines(data, tokenizer),
    )
    if sha256 and corpus.sha256 != sha256:
        raise UserError(
            f"{place} has changed or is another text: its SHA-256 is {corpus.sha256}, not "
            f"{sha256}; give the right one with {option}."
        )
    return corpus
