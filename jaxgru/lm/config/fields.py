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


field_types = functools.cache(get_type_hints)
"""The types of a section's fields, by name."""

Role = Literal["recipe", "placement", "setting"]


def _field(
    role: Role,
    default: Any,
    help: str,
    registry: Iterable[str] = (),
    escaped: bool = False,
    **bounds: float,
) -> Any:
    """Return a dataclass field with a help text; its values are the names of the registry, if any.

    Args:
      escaped: a newline in it is typed as \\n on the command line, and a tab as \\t.
      **bounds: `at_least`, `above` or `below`; a whole number is also below 2^31, as JAX's are.
    """
    metadata = dict(role=role, help=help, registry=registry, escaped=escaped, bounds=bounds)
    return dataclasses.field(default=default, metadata=metadata)


recipe = functools.partial(_field, "recipe")
"""A field that is part of the numbers, and must not change within a run."""

from_one = functools.partial(recipe, at_least=1)
"""A recipe's number from 1."""

from_zero = functools.partial(recipe, 0, at_least=0)
"""A recipe's number from 0, which is the default."""

zero_to_one = functools.partial(recipe, 0.0, at_least=0, below=1)
"""A recipe's probability or decay, by default 0."""

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
            value = _as_field(type(self), field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @classmethod
    def help_of(cls, field: dataclasses.Field[Any]) -> str:
        """Return what a field is for."""
        return field.metadata["help"]


def choices(section: type[Section], field: dataclasses.Field[Any]) -> list[str]:
    """Return the strings that a field can be, if they are few."""
    literals = get_args(field_types(section)[field.name])
    return list(literals or field.metadata["registry"])


def _as_field(section: type[Section], field: dataclasses.Field[Any], value: Any) -> Any:
    """Return the value as the field's type.

    Raises:
      ConfigError: the field cannot be the value; the message says what would be right.
    """
    name = f"{section.section}.{field.name}"
    names = choices(section, field)
    if names:
        if value not in names:
            raise ConfigError(f"{name} is {shown(value)}; it must be one of {', '.join(names)}.")
        return value
    type_ = field_types(section)[field.name]
    value = _as_type(name, type_, value)
    bounds = field.metadata["bounds"]
    if type_ is int:
        bounds = {"below": 2**31} | bounds
    _check_bounds(name, type_, value, bounds)
    return value


def _as_type(name: str, type_: type[Any], value: Any) -> Any:
    """Return the value as this type: a whole number is a float, too, but true is no number."""
    if type_ is float and type(value) is int:
        value = _as_float(name, value)
    is_flag = type_ is int and type(value) is bool
    if is_flag or not isinstance(value, type_):
        raise ConfigError(f"{name} is {shown(value)}; it must be {WORDS[type_]}.")
    # The name of a file that is not UTF-8 has such characters.
    if isinstance(value, str) and re.search("[\ud800-\udfff]", value):
        raise ConfigError(f"{name} is {value!r}, which is not UTF-8.")
    return value


def _as_float(name: str, number: int) -> float:
    try:
        return float(number)
    except OverflowError as error:
        most = f"{sys.float_info.max:.1e}"
        raise ConfigError(f"{name} is {shown(number)}; it must be at most {most}.") from error


def _check_bounds(name: str, type_: type[Any], value: Any, bounds: dict[str, float]) -> None:
    is_infinite = type_ is float and not math.isfinite(value)
    is_within = all(BOUNDS[bound](value, limit) for bound, limit in bounds.items())
    if is_within and not is_infinite:
        return
    if type_ is int:
        wanted = f"{WORDS[int]} from {bounds['at_least']} to {bounds['below'] - 1}"
    else:
        limits = [f"{bound.replace('_', ' ')} {limit}" for bound, limit in bounds.items()]
        if is_infinite:
            limits.append("finite")
        wanted = " and ".join(limits)
    raise ConfigError(f"{name} is {shown(value)}; it must be {wanted}.")
