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

    Raises:
      ConfigError: there is no such config, or the file or a value cannot be used.
    """
    overrides = dict(overrides or {})
    path = Path(name_or_path)
    if path.suffix == ".toml":
        return _overridden(_file_values(path), overrides)
    values = _file_values(_packaged_path(str(name_or_path)))
    corpus = values.get("data.corpus")
    is_another_text = overrides.get("data.corpus", corpus) != corpus
    learns_pieces = values.get("data.tokenizer") == "sentencepiece"
    if is_another_text and learns_pieces and not overrides.get("data.tokenizer_file"):
        overrides.setdefault("data.tokenizer", "subwords")
    return _overridden(values, overrides)


def _packaged_path(name: str) -> Path:
    """Return the path of a config that comes with the package."""
    names = config_names()
    if name not in names:
        others = f"the known ones are {', '.join(names)}, or give the path of a .toml file"
        raise ConfigError(f"there is no config {name!r}; {nearest(name, names, others)}.")
    return config_dir() / f"{name}.toml"


def _file_values(path: Path) -> dict[str, Any]:
    """Return the values in a TOML file by dotted name; by default its name is the config's."""
    try:
        table = parse_toml(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except ConfigError as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error
    return _by_dotted_name({"name": path.stem, **table})


def override(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return the config with these values changed, named as by `load_config`."""
    return _overridden(_by_dotted_name(to_dict(config)), overrides)


def _overridden(values: dict[str, Any], overrides: Mapping[str, Any]) -> Config:
    """Return the config of these values with the overrides, named after another corpus, too."""
    corpus = values.get("data.corpus", DataConfig.corpus)
    # A tokenizer's file says its kind, whatever the config's was.
    if overrides.get("data.tokenizer_file"):
        values = values | {"data.tokenizer": DataConfig.tokenizer}
    config = _from_values(values | dict(overrides))
    if "name" in overrides or config.data.corpus == corpus:
        return config
    name = f"{config.name}-{_text_name(config.data.corpus)}"
    return dataclasses.replace(config, name=name[:MAX_NAME])


def _text_name(corpus: str) -> str:
    """Return a corpus's name for use in a config's."""
    stem = "stdin" if corpus == "-" else Path(corpus).stem
    ascii_name = re.sub(r"[^A-Za-z0-9_.-]+", "_", stem)
    if stem.isascii() and ascii_name.strip("_"):
        return ascii_name
    # 日本, глава 1 and роман 1 need different names.
    digest = hashlib.sha256(stem.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{ascii_name.strip('_')[:100]}-{digest}".lstrip("-")


def parse_toml(data: bytes) -> dict[str, Any]:
    """Return the nested dictionaries of a config's TOML, in UTF-8 with or without a mark (BOM)."""
    try:
        # Windows begins files with a mark.
        return tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        # It is not UTF-8 or not TOML, or it has many brackets in brackets.
        raise ConfigError(f"{error}.") from error


def from_dict(table: Mapping[str, Any]) -> Config:
    """Return a config from nested dictionaries, as `tomllib` and `to_dict` return them."""
    return _from_values(_by_dotted_name(table))


def _by_dotted_name(table: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for name, value in table.items():
        if name in SECTIONS and isinstance(value, Mapping):
            for field, field_value in value.items():
                values[f"{name}.{field}"] = field_value
        else:
            # It is the config's name, or a name that is unknown.
            values[name] = value
    return values


def _from_values(values: Mapping[str, Any]) -> Config:
    """Return the config of these values by dotted name; each is checked once."""
    names = dotted_names()
    fields = {section: {} for section in SECTIONS}
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
    text = (config_dir() / f"{name}.toml").read_text(encoding="utf-8")
    first_line = text.splitlines()[0]
    if not first_line.startswith("# "):
        return ""
    return first_line.removeprefix("# ")


def config_dir() -> Path:
    """Return the folder of the configs: inside an installed wheel, or beside the package."""
    package = Path(__file__).parents[2]
    inside = package / "configs"
    beside = package.parent / "configs"
    return inside if inside.is_dir() else beside
