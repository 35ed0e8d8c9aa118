"""Load, verify, tokenise and split the corpus of a config."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int

from jaxgru.errors import UserError
from jaxgru.lm.config import Config
from jaxgru.lm.data.batching import check_length
from jaxgru.lm.data.corpus import TINY_SHAKESPEARE, load_corpus, split
from jaxgru.lm.data.tokenizers import Tokenizer, learn_tokenizer


@dataclass(frozen=True)
class Dataset:
    """Both splits as int32 tokens, their tokenizer, where the text came from, and its SHA-256.

    `num_characters` counts the text that validation[1:] stands for, the targets of its predictions.
    """

    train: Int[np.ndarray, "N"]
    validation: Int[np.ndarray, "M"]
    tokenizer: Tokenizer
    source: str
    num_characters: int
    sha256: str


def load_dataset(
    config: Config,
    tokenizer: Tokenizer | None = None,
    sha256: str = "",
    option: str = "--data.corpus",
) -> tuple[Config, Dataset]:
    """Load the text that a config trains on; tokenizer None: learn one from the whole corpus.

    Returns the config, with what the corpus decides (its absolute path, the size of a character
    vocabulary), and the dataset.

    Args:
      sha256: the one that the text must have; "": any.
      option: what an error names as the way to give the text, where it was moved or is another.

    Raises:
      UserError: the corpus cannot be read, does not have that SHA-256, or is too short for
        one batch or for validation.
    """
    data = config.data
    if sha256 and data.corpus != TINY_SHAKESPEARE and not os.path.exists(data.corpus):
        raise UserError(f"there is no text {data.corpus}; give its place with {option}.")
    corpus = load_corpus(data.corpus)
    if sha256 not in ("", corpus.sha256):
        raise UserError(
            f"the corpus {data.corpus} has changed or is another text: its SHA-256 is "
            f"{corpus.sha256}, not {sha256}; give the right one with {option}."
        )
    if tokenizer is None:
        tokenizer = learn_tokenizer(
            data.tokenizer, corpus.text, config.model.vocab_size, data.min_count
        )
    tokens = tokenizer.encode(corpus.text)
    train, validation = split(tokens, data.validation_fraction)
    check_length(len(train), config.training, data.batches, "the training split")
    if len(validation) < 2:
        raise UserError(
            f"the validation split has {len(validation)} tokens, but a loss needs at least 2."
        )
    place = data.corpus  # absolute, so that it is found from any folder; a name stays
    if place != TINY_SHAKESPEARE:
        place = str(Path(place).resolve())
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size),
        data=dataclasses.replace(data, corpus=place),
    )
    before = tokenizer.num_characters(tokens[: len(train) + 1], corpus.text)
    num_characters = len(corpus.text) - before
    source, sha256 = corpus.source, corpus.sha256
    return config, Dataset(train, validation, tokenizer, source, num_characters, sha256)
