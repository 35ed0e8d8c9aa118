"""Typed, frozen configuration: one TOML file per model, whose fields can be overridden.

A config has three sections. `model` alone decides the parameters, `data` the tokens, `training` the
optimisation. Each field has a role: `recipe`, `placement` or `setting`. A section checks its values
when it is made, so nobody needs to check them again.
"""

from jaxgru.lm.config.fields import ConfigError, choices, field_types
from jaxgru.lm.config.reading import (
    about,
    config_dir,
    config_names,
    from_dict,
    load_config,
    override,
    parse_toml,
    to_dict,
)
from jaxgru.lm.config.sections import (
    OWNERS,
    SECTIONS,
    Config,
    DataConfig,
    ModelConfig,
    TrainingConfig,
    default_value,
    dotted_names,
    field_value,
)

__all__ = [
    "OWNERS",
    "SECTIONS",
    "Config",
    "ConfigError",
    "DataConfig",
    "ModelConfig",
    "TrainingConfig",
    "about",
    "choices",
    "config_dir",
    "config_names",
    "default_value",
    "dotted_names",
    "field_types",
    "field_value",
    "from_dict",
    "load_config",
    "override",
    "parse_toml",
    "to_dict",
]
