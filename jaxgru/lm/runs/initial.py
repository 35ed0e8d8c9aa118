"""Start a run from the weights of another model: `jaxgru train --init MODEL`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxgru.errors import UserError
from jaxgru.lm.config import (
    OWNERS,
    Config,
    DataConfig,
    ModelConfig,
    default_value,
    override,
)
from jaxgru.lm.data.dataset import Dataset, load_dataset
from jaxgru.lm.data.tokenizers import Tokenizer, TokenizerError
from jaxgru.lm.load import find_model, load
from jaxgru.lm.model import HeadParams, Params, flatten
from jaxgru.lm.pretrained import pretrained_names
from jaxgru.printing import counted

__all__ = [
    "config_from",
    "load_text",
]


def config_from(model: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """Return a config that trains a model further: the model's own, with these values changed.

    With another corpus, its encoding and what it was validated on are left out, and with another
    schedule, for example, what is only for the old one (`OWNERS`).
    """
    # Not `load`: JAX must not start before a CPU's cores are shared
    config = find_model(model).config()
    # The tokenizer comes with the model
    of_tokenizer = {"data.tokenizer_file": "", "data.min_count": 0}
    changes = {**of_tokenizer, **(overrides or {}), "training.init_from": _source(model)}
    if "data.corpus" in changes:
        for name in ("encoding", "validation", "validation_fraction"):
            changes.setdefault(f"data.{name}", getattr(DataConfig, name))
    for name, (owner, value) in OWNERS.items():
        if changes.get(owner, value) != value:
            changes.setdefault(name, default_value(name))
    return override(config, changes)


@dataclass(frozen=True)
class InitialModel:
    """The model that a run starts from, and the SHA-256 of its weights and tokenizer."""

    name: str
    params: Params
    tokenizer: Tokenizer
    sha256: str
    lacks: float = 0.0  # share of the text's tokens, if that is why its vocabulary is not kept


def load_initial(config: Config, expected: str = "") -> InitialModel | None:
    """Load the model that a run starts from; None: the run starts from random weights.

    Args:
      expected: the SHA-256 that it must have; "": any.
    """
    name = config.training.init_from
    if not name:
        return None
    params, theirs, tokenizer = load(name)
    _check_same_model(name, theirs.model, config.model)
    sha256 = _sha256(params, tokenizer)
    if expected not in ("", sha256):
        raise UserError(
            f"the model {name} has changed: its SHA-256 is {sha256}, not {expected}, as when the "
            "run began."
        )
    return InitialModel(name, params, tokenizer, sha256)


def _check_same_model(name: str, theirs: ModelConfig, ours: ModelConfig) -> None:
    """Raise UserError where a model differs from a config's in more than the vocabulary's size."""
    for field in dataclasses.fields(ModelConfig):
        value = getattr(theirs, field.name)
        wanted = getattr(ours, field.name)
        if field.name != "vocab_size" and value != wanted:
            raise UserError(
                f"training cannot start from {name}: its model.{field.name} is {value}, and this "
                f"config's is {wanted}; they must be the same, as with --model.{field.name} "
                f"{str(value).lower()}."
            )


def _sha256(params: Params, tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of a model's weights and tokenizer."""
    digest = hashlib.sha256(tokenizer.to_bytes())
    for leaf in flatten(params).values():
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def load_text(config: Config, sha256: str = "") -> tuple[Config, Dataset, InitialModel | None]:
    """Load the text of a run as `load_dataset`, and the model that it starts from, if any.

    The model's tokenizer is kept if it is of the config's kind and size, no data.min_count is set,
    and the text is its own or has no more tokens that are unknown to it than to a new one.
    """
    if config.training.init_from:
        config = override(config, {"training.init_from": _source(config.training.init_from)})
    model = load_initial(config)
    if model is None:
        return *load_dataset(config, sha256=sha256), None

    of_model = _load_with_tokenizer_of(model, config, sha256)
    if of_model is None:
        return *load_dataset(config, sha256=sha256), model
    _, dataset = of_model
    unknown_share = dataset.unknown_share()
    if sha256 or not unknown_share:
        return *of_model, model

    config, dataset = load_dataset(config, sha256=sha256)
    if unknown_share <= dataset.unknown_share():
        return *of_model, model
    return config, dataset, dataclasses.replace(model, lacks=unknown_share)


def _load_with_tokenizer_of(
    model: InitialModel, config: Config, sha256: str
) -> tuple[Config, Dataset] | None:
    """Load the text as tokens of the model's tokenizer; None if that does not suit the config."""
    data = config.data
    tokenizer = model.tokenizer
    makes_its_own = data.tokenizer_file or data.min_count
    if tokenizer.kind != data.tokenizer or makes_its_own:
        return None
    if tokenizer.is_sized and tokenizer.vocab_size != config.model.vocab_size:
        return None
    with contextlib.suppress(TokenizerError):
        return load_dataset(config, tokenizer, sha256)
    return None


def initial_params(fresh: Params, model: InitialModel, tokenizer: Tokenizer) -> tuple[Params, str]:
    """Return the weights that a run starts from, and a sentence that describes them.

    The layers and the norm are the model's. So are the rows of the embedding and the columns of the
    head for tokens that both vocabularies have; the others are those of `fresh`.
    """
    params = model.params
    ours, theirs = _common_tokens(tokenizer, model.tokenizer)
    embedding = fresh.embedding.at[ours].set(params.embedding[theirs])
    bo = fresh.head.bo.at[ours].set(params.head.bo[theirs])
    Wo = None
    if fresh.head.Wo is not None:
        Wo = fresh.head.Wo.at[:, ours].set(params.Wo[:, theirs])
    params = dataclasses.replace(params, embedding=embedding, head=HeadParams(Wo, bo=bo))
    return params, _description(model, tokenizer, len(ours))


def _common_tokens(ours: Tokenizer, theirs: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens for the pieces that both tokenizers have: in ours, and in theirs."""
    token_of: dict[str, int] = {}
    if ours.kind == theirs.kind:
        token_of = {piece: token for token, piece in enumerate(theirs.pieces)}
    our_tokens = [token for token, piece in enumerate(ours.pieces) if piece in token_of]
    their_tokens = [token_of[ours.pieces[token]] for token in our_tokens]
    return np.array(our_tokens, int), np.array(their_tokens, int)


def _description(model: InitialModel, tokenizer: Tokenizer, num_common: int) -> str:
    """Return a sentence on what is the model's, for this many tokens in both vocabularies."""
    num_others = tokenizer.vocab_size - num_common
    rest = "."
    if num_others:
        rest = f"; for the other {num_others:,} they are random."
    sentence = (
        f"training starts from {model.name} (SHA-256 {model.sha256[:12]}…): its layers, and its "
        f"embedding and head for the {counted(num_common, 'token')} that both vocabularies have"
        f"{rest}"
    )
    if model.lacks:
        sentence += f" Its own vocabulary lacks {model.lacks:.1%} of the text's tokens."
    return sentence


def _source(model: str) -> str:
    """Return what the model is called wherever it is loaded again: a name, or an absolute path.

    The folder of a run's versions is left for its newest one, because the new run may become that.
    A file keeps its name, which says its format, though it may be a link.
    """
    path, format = find_model(model)
    if model in pretrained_names():
        return model
    if format:
        return str(path.parent.resolve() / path.name)
    return str(path.resolve())
