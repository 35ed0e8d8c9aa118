"""What a config's field is: its role, its type and its bounds, which are checked when it is set."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import numpy as np

from jaxgru.errors import UserError, shown


class ConfigError(UserError):
    """A config, or a value of one, cannot be used; the message says why."""


field_types = functools.cache(get_type_hints)  # of a section's class, by name


Role = Literal["recipe", "placement", "setting"]


def _field(role: Role, default: Any, help: str, known: Iterable[str] = (), **bounds: float) -> Any:
    """Return a dataclass field with a help text.

    Args:
      known: the values that it can have, if they are the names in a registry.
      bounds: `at_least`, `above` or `below`.
    """
    metadata = {"role": role, "help": help, "known": known, "bounds": bounds}
    return dataclasses.field(default=default, metadata=metadata)


recipe = functools.partial(_field, "recipe")
"""A field that is part of the numbers, and must not change within a run."""
placement = functools.partial(_field, "placement")
"""A field that says where and how the numbers are computed. It changes them by rounding at most, as
other hardware does, so it may change within a run."""
setting = functools.partial(_field, "setting")
"""A field that says where something lies or what is kept. It may change within a run."""


@dataclass(frozen=True)
class Section:
    """A section of a config; checks every field's type and bounds on construction."""

    section: ClassVar[str]

    def __post_init__(self) -> None:
        types = field_types(type(self))
        for field in dataclasses.fields(self):
            name = f"{self.section}.{field.name}"
            value = _as_type(name, getattr(self, field.name), types[field.name])
            _check_bounds(name, value, field.metadata["bounds"])
            if (known := field.metadata["known"]) and value not in known:
                raise ConfigError(
                    f"{name} is {shown(value)}; it must be one of {', '.join(known)}."
                )
            object.__setattr__(self, field.name, value)

    def _check_product(self, *names: str) -> None:
        """Raise ConfigError if a product of sizes, as of a batch or a matrix, exceeds 32 bits."""
        values = [getattr(self, name) for name in names]
        if math.prod(values) >= 2**31:
            product = " × ".join(f"{self.section}.{name}" for name in names)
            raise ConfigError(
                f"{product} is {' × '.join(map(str, values))}; it must be below 2^31, because "
                "JAX's integers have 32 bits."
            )


def _as_type(name: str, value: Any, type_: Any) -> Any:
    """Return `value` as the field's type. Raises a ConfigError that says what would be right."""
    if get_origin(type_) is Literal:
        if value not in get_args(type_):
            choices = ", ".join(get_args(type_))
            raise ConfigError(f"{name} is {shown(value)}; it must be one of {choices}.")
        return value
    if (type_, type(value)) == (float, int):
        value = float(value) if abs(value) < 2**1023 else math.inf  # float() would raise
    if not isinstance(value, type_) or (type_, type(value)) == (int, bool):
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
        raise ConfigError(f"{name} is {shown(value)}; it must be {words[type_]}.")
    if type_ is str and re.search("[\ud800-\udfff]", value):  # of a file name
        raise ConfigError(f"{name} is {value!r}, which is not UTF-8.")
    if type_ is int and abs(value) >= 2**40:
        raise ConfigError(f"{name} is too large; it must be below 2^40.")
    if type_ is float and not math.isfinite(value):
        raise ConfigError(f"{name} is {value}; it must be finite.")
    return value


def _in_float32(value: float) -> float:
    """Return the value that a float has on a device: rounded, and 0 below float32's normal ones."""
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(value))
    return rounded if abs(rounded) >= np.finfo(np.float32).tiny else 0.0


_BOUNDS = {"at_least": operator.ge, "above": operator.gt, "below": operator.lt}


def _holds(value: Any, bounds: Mapping[str, float]) -> bool:
    return all(_BOUNDS[bound](value, limit) for bound, limit in bounds.items())


def _check_bounds(name: str, value: Any, bounds: Mapping[str, float]) -> None:
    on_device = _in_float32(value) if isinstance(value, float) else value
    too_large = on_device in (math.inf, -math.inf)
    if too_large or not _holds(on_device, bounds):
        limits = [f"{bound.replace('_', ' ')} {limit}" for bound, limit in bounds.items()]
        wanted = " and ".join(limits + ["below 2^128"] * too_large)
        rounded = f", which is {on_device} in float32" if _holds(value, bounds) else ""
        raise ConfigError(f"{name} is {value}{rounded}; it must be {wanted}.")
