"""What a config's field is: its role, its type and its bounds, which are checked when it is set."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args, get_type_hints

from jaxgru.errors import UserError
from jaxgru.printing import shown


class ConfigError(UserError):
    """A config, or a value of one, cannot be used; the message says why."""


field_types = functools.cache(get_type_hints)  # of a section's class, by name


Role = Literal["recipe", "placement", "setting"]


def _field(
    role: Role, default: Any, help: str, registry: Iterable[str] = (), escaped: bool = False,
    **bounds: float,
) -> Any:  # fmt: skip
    """Return a dataclass field with a help text; its values are the names of the registry, if any.

    escaped: a newline in it is typed as \\n on the command line, and a tab as \\t.
    bounds: `at_least`, `above` or `below`; a whole number is also below 2^31, as JAX's are.
    """
    metadata = dict(role=role, help=help, registry=registry, escaped=escaped, bounds=bounds)
    return dataclasses.field(default=default, metadata=metadata)


recipe = functools.partial(_field, "recipe")
"""A field that is part of the numbers, and must not change within a run."""
from_one = functools.partial(recipe, at_least=1)
from_zero = functools.partial(recipe, 0, at_least=0)
zero_to_one = functools.partial(recipe, 0.0, at_least=0, below=1)
"""Such fields: a number from 1, one from 0, which is the default, and a probability or a decay."""
placement = functools.partial(_field, "placement")
"""A field that says where and how the numbers are computed. It changes them by rounding at most, as
other hardware does, so it may change within a run."""
setting = functools.partial(_field, "setting")
"""A field that says where something lies or what is kept. It may change within a run."""

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
BOUNDS = {"at_least": operator.ge, "above": operator.gt, "below": operator.lt}


@dataclass(frozen=True)
class Section:
    """A section of a config; checks every field's type and bounds on construction."""

    section: ClassVar[str]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            object.__setattr__(self, field.name, _checked(type(self), field, value))


def choices(section: type[Section], field: dataclasses.Field[Any]) -> list[str]:
    """Return the strings that a field can be, if they are few."""
    return list(get_args(field_types(section)[field.name]) or field.metadata["registry"])


def _as_float(name: str, number: int) -> float:
    try:
        return float(number)
    except OverflowError as error:
        most = f"{sys.float_info.max:.1e}"
        raise ConfigError(f"{name} is {shown(number)}; it must be at most {most}.") from error


def _checked(section: type[Section], field: dataclasses.Field[Any], value: Any) -> Any:
    """Return the value as the field's type. Raises a ConfigError that says what would be right."""
    name, type_ = f"{section.section}.{field.name}", field_types(section)[field.name]
    if allowed := choices(section, field):
        if value not in allowed:
            raise ConfigError(f"{name} is {shown(value)}; it must be one of {', '.join(allowed)}.")
        return value
    if (type_, type(value)) == (float, int):
        value = _as_float(name, value)
    if not isinstance(value, type_) or (type_, type(value)) == (int, bool):
        raise ConfigError(f"{name} is {shown(value)}; it must be {WORDS[type_]}.")
    if type_ is str and re.search("[\ud800-\udfff]", value):  # of a file name
        raise ConfigError(f"{name} is {value!r}, which is not UTF-8.")
    bounds = ({"below": 2**31} if type_ is int else {}) | field.metadata["bounds"]
    infinite = type_ is float and not math.isfinite(value)
    if infinite or not all(BOUNDS[bound](value, limit) for bound, limit in bounds.items()):
        if type_ is int:
            wanted = f"{WORDS[int]} from {bounds['at_least']} to {bounds['below'] - 1}"
        else:
            limits = [f"{bound.replace('_', ' ')} {limit}" for bound, limit in bounds.items()]
            wanted = " and ".join([*limits, *["finite"] * infinite])
        raise ConfigError(f"{name} is {shown(value)}; it must be {wanted}.")
    return value
