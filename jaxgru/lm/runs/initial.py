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


def config_from(model: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """Return a config that trains a model further: the model's own, with these values changed.

    With another corpus, its encoding and what it was validated on are left out, and with another
    schedule, for example, what is only for the old one (`OWNERS`).
    """
    theirs = find_model(model).config()  # JAX must not start before a CPU's cores are shared
    of_tokenizer = {"data.tokenizer_file": "", "data.min_count": 0}  # it comes with the model
    changes = {**of_tokenizer, **(overrides or {}), "training.init": _source(model)}
    if "data.corpus" in changes:
        for name in ("encoding", "validation", "validation_fraction"):
            changes.setdefault(f"data.{name}", getattr(DataConfig, name))
    for name, (owner, value) in OWNERS.items():
        if changes.get(owner, value) != value:
            changes.setdefault(name, default_value(name))
    return override(theirs, changes)


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

    expected: the SHA-256 that it must have; "": any.
    """
    name = config.training.init
    if not name:
        return None
    params, theirs, tokenizer = load(name)
    for field in dataclasses.fields(ModelConfig):
        have, want = getattr(theirs.model, field.name), getattr(config.model, field.name)
        if field.name != "vocab_size" and have != want:
            raise UserError(
                f"training cannot start from {name}: its model.{field.name} is {have}, and this "
                f"config's is {want}; they must be the same, as with --model.{field.name} "
                f"{str(have).lower()}."
            )
    digest = hashlib.sha256(tokenizer.to_bytes())
    for leaf in flatten(params).values():
        digest.update(np.asarray(leaf).tobytes())
    sha256 = digest.hexdigest()
    if expected not in ("", sha256):
        raise UserError(
            f"the model {name} has changed: its SHA-256 is {sha256}, not {expected}, as when the "
            "run began."
        )
    return InitialModel(name, params, tokenizer, sha256)


def load_text(config: Config, sha256: str = "") -> tuple[Config, Dataset, InitialModel | None]:
    """Load the text of a run as `load_dataset`, and the model that it starts from, if any.

    The model's tokenizer is kept if it is of the config's kind and size, no data.min_count is set,
    and the text is its own or has no more tokens that are unknown to it than to a new one.
    """
    if config.training.init:
        config = override(config, {"training.init": _source(config.training.init)})
    model, data, kept = load_initial(config), config.data, None
    makes_one = data.tokenizer_file or data.min_count
    if model and model.tokenizer.kind == data.tokenizer and not makes_one:
        if not model.tokenizer.is_sized or model.tokenizer.vocab_size == config.model.vocab_size:
            with contextlib.suppress(TokenizerError):
                kept = load_dataset(config, model.tokenizer, sha256)
    lacks = kept[1].unknown_share() if kept else 0.0
    if kept and (sha256 or not lacks):
        return *kept, model
    learned = load_dataset(config, sha256=sha256)
    if kept and lacks <= learned[1].unknown_share():
        return *kept, model
    return *learned, model and dataclasses.replace(model, lacks=lacks)


def initial_params(fresh: Params, model: InitialModel, tokenizer: Tokenizer) -> tuple[Params, str]:
    """Return the weights that a run starts from, and a sentence that describes them.

    The layers and the norm are the model's. So are the rows of the embedding and the columns of the
    head for tokens that both vocabularies have; the others are those of `fresh`.
    """
    params, theirs = model.params, model.tokenizer
    pieces = theirs.pieces if theirs.kind == tokenizer.kind else []
    token_of = {piece: token for token, piece in enumerate(pieces)}
    common = [(i, token_of[p]) for i, p in enumerate(tokenizer.pieces) if p in token_of]
    ours, kept = np.array(common, int).reshape(-1, 2).T
    embedding, Wo = fresh.embedding.at[ours].set(params.embedding[kept]), None
    if fresh.head.Wo is not None:
        Wo = fresh.head.Wo.at[:, ours].set(params.Wo[:, kept])
    head = HeadParams(Wo, bo=fresh.head.bo.at[ours].set(params.head.bo[kept]))
    others = tokenizer.vocab_size - len(ours)
    rest = f"; for the other {others:,} they are random." if others else "."
    sentence = (
        f"training starts from {model.name} (SHA-256 {model.sha256[:12]}…): its layers, and its "
        f"embedding and head for the {counted(len(ours), 'token')} that both vocabularies have"
        f"{rest}"
    )
    if model.lacks:
        sentence += f" Its own vocabulary lacks {model.lacks:.1%} of the text's tokens."
    return dataclasses.replace(params, embedding=embedding, head=head), sentence


def _source(model: str) -> str:
    """Return what the model is called wherever it is loaded again: a name, or an absolute path.

    The folder of a run's versions is left for its newest one, because the new run may become that.
    A file keeps its name, which says its format, though it may be a link.
    """
    path, format = find_model(model)
    if model in pretrained_names():
        return model
    return str(path.parent.resolve() / path.name if format else path.resolve())
