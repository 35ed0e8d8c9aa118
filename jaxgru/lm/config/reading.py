"""From a TOML file, or a name and overrides, to a config."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxgru.lm.config.fields import ConfigError
from jaxgru.lm.config.sections import MAX_NAME, SECTIONS, Config, DataConfig, dotted_names
from jaxgru.printing import nearest


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

    Raises ConfigError if there is no such config, or the file or a value cannot be used.
    """
    path, name, overrides = Path(name_or_path), str(name_or_path), dict(overrides or {})
    of_study = path.suffix != ".toml"
    if of_study:
        if name not in (names := config_names()):
            others = f"the known ones are {', '.join(names)}, or give the path of a .toml file"
            raise ConfigError(f"there is no config {name!r}; {nearest(name, names, others)}.")
        path = config_dir() / f"{name}.toml"
    try:
        table = parse_toml(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except ConfigError as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error
    values = _by_dotted_name({"name": path.stem, **table})
    corpus = values.get("data.corpus")
    another = overrides.get("data.corpus", corpus) != corpus
    learns = values.get("data.tokenizer") == "sentencepiece"
    if of_study and another and learns and not overrides.get("data.tokenizer_file"):
        overrides.setdefault("data.tokenizer", "subwords")
    return _overridden(values, overrides)


def override(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return the config with these values changed, named as by `load_config`."""
    return _overridden(_by_dotted_name(to_dict(config)), overrides)


def _overridden(values: dict[str, Any], overrides: Mapping[str, Any]) -> Config:
    corpus = values.get("data.corpus", DataConfig.corpus)
    if overrides.get("data.tokenizer_file"):  # it says its kind, whatever the config's was
        values = values | {"data.tokenizer": DataConfig.tokenizer}
    values = values | dict(overrides)
    config = _from_values(values)
    if "name" in overrides or config.data.corpus == corpus:
        return config
    stem = Path(config.data.corpus).stem if config.data.corpus != "-" else "stdin"
    text = re.sub(r"[^A-Za-z0-9_.-]+", "_", stem)
    if not stem.isascii() or not text.strip("_"):  # 日本, глава 1 and роман 1: not alike
        digest = hashlib.sha256(stem.encode(errors="surrogatepass")).hexdigest()[:8]
        text = f"{text.strip('_')[:100]}-{digest}".lstrip("-")
    return dataclasses.replace(config, name=f"{config.name}-{text}"[:MAX_NAME])


def parse_toml(data: bytes) -> dict[str, Any]:
    """Return the nested dictionaries of a config's TOML, in UTF-8 with or without a mark (BOM)."""
    try:
        return tomllib.loads(data.decode("utf-8-sig"))  # Windows begins files with a mark
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8; brackets in brackets
        raise ConfigError(f"{error}.") from error


def from_dict(table: Mapping[str, Any]) -> Config:
    """Return a config from nested dictionaries, as `tomllib` and `to_dict` return them."""
    return _from_values(_by_dotted_name(table))


def _by_dotted_name(table: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for name, value in table.items():
        if name in SECTIONS and isinstance(value, Mapping):
            values |= {f"{name}.{field}": of_field for field, of_field in value.items()}
        else:  # the config's name, or one that is unknown
            values[name] = value
    return values


def _from_values(values: Mapping[str, Any]) -> Config:
    """Return the config of these values by dotted name; each is checked once."""
    names, fields = dotted_names(), {section: {} for section in SECTIONS}
    for dotted, value in values.items():
        if dotted == "name":
            continue
        if dotted not in names:
            meant = nearest(dotted, names, f"the fields are {', '.join(names)}")
            raise ConfigError(f"a config has no field {dotted!r}; {meant}.")
        section, _, field = dotted.partition(".")
        fields[section][field] = value
    sections: dict[str, Any] = {name: cls(**fields[name]) for name, cls in SECTIONS.items()}
    return Config(values.get("name", Config.name), **sections)


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
