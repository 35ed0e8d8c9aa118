"""From a TOML file, or a name and overrides, to a config. A wrong name finds the nearest one."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxgru.errors import shown
from jaxgru.lm.config.fields import ConfigError
from jaxgru.lm.config.sections import MAX_NAME, SECTIONS, Config, dotted_names
from jaxgru.lm.files import read_bytes

MAX_BYTES, MAX_DOTS = 2**16, 2000
"""Limits on a config's TOML. `tomllib` needs memory that grows with the square of a dotted key's
length: 500 MB for a key of 20 kB."""


def config_names() -> list[str]:
    """Return the names that `load_config` knows, sorted."""
    return sorted(path.stem for path in config_dir().glob("*.toml"))


def load_config(name_or_path: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """Return a config that comes with the package, by name, or that of a TOML file, by path.

    If the overrides change the corpus, the config is named after both: `astra_alpha-my_text`. The
    tokenizer `sentencepiece` of a config of the package, which loses line breaks, then becomes
    `subwords`, which loses nothing, unless the overrides name one, or a tokenizer's file.

    Args:
      name_or_path: one of `config_names()`, or a path that ends in `.toml`.
      overrides: values by dotted name (`{"training.epochs": 5}`); "name" is the config's name.

    Raises:
      ConfigError: the name is unknown; the file is missing, cannot be read or is not TOML; or a
        section, field or value cannot be used.
    """
    path = Path(name_or_path)
    overrides = dict(overrides or {})
    of_study = path.suffix != ".toml"
    if of_study:
        known = config_names()
        if str(name_or_path) not in known:
            meant = nearest(str(name_or_path), known)
            others = f"the known ones are {', '.join(known)}, or give the path of a .toml file"
            raise ConfigError(
                f"there is no config {str(name_or_path)!r}; "
                f"{f'the nearest is {meant}' if meant else others}."
            )
        path = config_dir() / f"{name_or_path}.toml"
    try:
        table = parse_toml(read_bytes(path, at_most=MAX_BYTES))
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except ConfigError as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error
    config = from_dict({"name": path.stem, **table})
    another = overrides.get("data.corpus", config.data.corpus) != config.data.corpus
    learns = config.data.tokenizer == "sentencepiece" and not overrides.get("data.tokenizer_file")
    if of_study and another and learns:
        overrides.setdefault("data.tokenizer", "subwords")
    return override(config, overrides)


def override(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return the config with these values changed, named as by `load_config`.

    Raises:
      ConfigError: a field is unknown, or a value cannot be used; or a fraction to validate on is
        given beside a text to validate on.
    """
    corpus = config.data.corpus
    table = to_dict(config)
    overrides = dict(overrides)
    if overrides.get("data.tokenizer_file"):  # it says its kind, whatever the config's was
        overrides.setdefault("data.tokenizer", type(config.data).tokenizer)
    validation = overrides.get("data.validation", config.data.validation)
    if validation and overrides.get("data.validation_fraction"):
        raise ConfigError(
            "with data.validation, all of the corpus is for training; leave out "
            "data.validation_fraction."
        )
    given_name = overrides.pop("name", None)
    for dotted, value in overrides.items():
        if dotted not in dotted_names():
            raise ConfigError(_unknown("field", dotted, dotted_names()))
        section, field = dotted.split(".")
        table[section][field] = value
    config = from_dict(table)
    if given_name is None and config.data.corpus != corpus:
        stem = Path(config.data.corpus).stem if config.data.corpus != "-" else "stdin"
        text = re.sub(r"[^A-Za-z0-9_.-]+", "_", stem)
        if not stem.isascii() or not text.strip("_"):  # 日本, глава 1 and роман 1: not alike
            digest = hashlib.sha256(stem.encode(errors="surrogatepass")).hexdigest()[:8]
            text = f"{text.strip('_')[:100]}-{digest}".lstrip("-")
        given_name = f"{config.name}-{text}"[:MAX_NAME]
    return config if given_name is None else dataclasses.replace(config, name=given_name)


def parse_toml(data: bytes) -> dict[str, Any]:
    """Return the nested dictionaries of a config's TOML, in UTF-8 with or without a mark (BOM).

    Raises:
      ConfigError: it is not TOML, or larger than any config.
    """
    if len(data) > MAX_BYTES or data.count(b".") > MAX_DOTS:
        raise ConfigError(
            f"it is too large for a config: {len(data):,} bytes and {data.count(b'.'):,} dots; "
            f"at most {MAX_BYTES:,} and {MAX_DOTS:,} are allowed."
        )
    if b"\0" in data:
        raise ConfigError("it contains bytes of 0, as UTF-16 does; save it as UTF-8.")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))  # Windows begins files with a mark
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8; brackets in brackets
        raise ConfigError(f"{error}.") from error


def from_dict(table: Mapping[str, Any]) -> Config:
    """Return a config from nested dictionaries, as `tomllib` and `to_dict` return them.

    Raises:
      ConfigError: a section, field or value cannot be used; if unknown, the nearest one is named.
    """
    for key in table:
        if key not in SECTIONS and key != "name":
            raise ConfigError(_unknown("section", key, SECTIONS))
    sections = {}
    for section, cls in SECTIONS.items():
        fields = table.get(section, {})
        if not isinstance(fields, Mapping):
            raise ConfigError(f"{section} is {shown(fields)}; it must be a table ([{section}]).")
        for field in fields:
            if (dotted := f"{section}.{field}") not in dotted_names():
                raise ConfigError(_unknown("field", dotted, dotted_names()))
        sections[section] = cls(**fields)
    return Config(name=table.get("name", "custom"), **sections)


def to_dict(config: Config) -> dict[str, Any]:
    """Return the config as nested dictionaries; `from_dict` is the inverse."""
    return dataclasses.asdict(config)


def about(name: str) -> str:
    """Return what a config that comes with the package is for: the comment that begins its file."""
    first = (config_dir() / f"{name}.toml").read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("# ") if first.startswith("# ") else ""


def config_dir() -> Path:
    """Return the folder of the configs: inside an installed wheel, or beside the package."""
    package = Path(__file__).parents[2]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


ALSO_CALLED = {
    "model.cell": "rnn_type cell_type model_type arch",
    "model.embedding_dim": "embed_dim embedding_size embed_size emb_size emsize n_embd d_model",
    "model.hidden_dim": "rnn_size hidden_size num_hidden n_hidden nhid units num_units state_size",
    "model.num_layers": "n_layers n_layer nlayers layers depth",
    "data.corpus": "text dataset input file path train_file",
    "data.validation": "val validation_file val_file valid test",
    "data.encoding": "charset codec",
    "data.tokenizer_file": "model_file tokenizer_model spm",
    "data.validation_fraction": "val_fraction val_frac val_split valid_split test_split",
    "training.epochs": "num_epochs n_epochs max_epochs nepoch",
    "training.steps_per_epoch": "steps max_steps num_steps max_iters",
    "training.batch_size": "batch bs bsz minibatch_size",
    "training.gradient_accumulation": "grad_accum accumulation_steps accumulate",
    "training.sequence_length": "seq_len seq_length block_size context bptt",
    "training.learning_rate": "lr step_size rate",
    "training.schedule": "scheduler lr_scheduler lr_schedule",
    "training.warmup_steps": "warmup warmup_iters",
    "training.weight_decay": "wd decay l2",
    "training.beta1": "b1 momentum",
    "training.beta2": "b2",
    "training.epsilon": "eps",
    "training.max_grad_norm": "clip grad_clip clip_norm gradient_clipping",
    "training.dropout": "dropout_rate drop p_drop",
    "training.input_dropout": "dropouti emb_dropout embedding_dropout embd_pdrop",
    "training.between_dropout": "dropouth hidden_dropout",
    "training.output_dropout": "head_dropout",
    "training.weight_drop": "wdrop weight_dropout dropconnect drop_connect",
    "training.ema_decay": "ema ema_rate weight_ema averaging",
    "training.compute_dtype": "precision bf16 dtype amp mixed_precision",
    "training.implementation": "unroll backend",
    "training.remat": "gradient_checkpointing",
    "training.patience": "early_stopping",
    "training.seed": "random_seed",
    "training.init": "pretrained init_from finetune",
}
"""Names of the fields in other programs that are not spelled like ours."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is probably meant, or None.

    Best is the same word in another section, or a field that other programs give that name; then a
    field that begins with it or is spelled much alike, rather in the same section than in another.
    """

    def split(dotted: str) -> tuple[str, str]:
        # a longer one is not a misspelling, and takes seconds
        section, _, word = dotted.strip("-")[:200].replace("-", "_").rpartition(".")
        return section, word

    section, word = split(name)

    def likeness(other: str) -> float:
        theirs, field = split(other)
        if word == field or word in ALSO_CALLED.get(f"{theirs}.{field}", "").split():
            return 3
        alike = difflib.SequenceMatcher(None, word, field).ratio()
        if len(word) >= 3 and field.startswith(word):
            alike = 0.9
        return (alike + (theirs == section)) * (alike >= 0.7)

    best = max(known, key=likeness)
    return best if likeness(best) > 0 else None


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    known = list(known)
    meant = nearest(name, known)
    meant = f"the nearest is {meant!r}" if meant else f"the {kind}s are {', '.join(known)}"
    return f"a config has no {kind} {name!r}; {meant}."
