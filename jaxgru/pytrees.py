"""`struct`: frozen dataclasses that are pytrees, such as the parameters of a layer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias, TypeVar, dataclass_transform

import jax
from jax import export
from jax.tree_util import GetAttrKey

from jaxgru.printing import shown

T = TypeVar("T")
Values: TypeAlias = tuple[Any, ...]  # of fields


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def struct(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass and a pytree, with a method `replace`, as `flax.struct` does.

    Its fields are the pytree's children, in their order. A field with `metadata={"static": True}`
    is part of the tree's structure instead. Its `repr` shows arrays by their dtypes and shapes.
    """
    cls = dataclass(frozen=True, repr=False)(cls)
    cls.replace = replace  # pyright: ignore[reportAttributeAccessIssue]  a new attribute
    if cls.__repr__ is object.__repr__:
        cls.__repr__ = sizes_of_fields  # pyright: ignore[reportAttributeAccessIssue]
    all_fields = fields(cls)  # pyright: ignore[reportArgumentType]  a dataclass by now
    static = [f.name for f in all_fields if f.metadata.get("static")]
    data = [f.name for f in all_fields if f.name not in static]

    def flatten(p: T) -> tuple[Values, Values]:
        value = vars(p).__getitem__
        return tuple(map(value, data)), tuple(map(value, static))

    def flatten_with_keys(p: T) -> tuple[Values, Values]:
        leaves, kept = flatten(p)
        return tuple(zip(map(GetAttrKey, data), leaves, strict=True)), kept

    def unflatten(kept: Values, leaves: Iterable[object]) -> T:
        return cls(**dict(zip(data, leaves, strict=True)), **dict(zip(static, kept, strict=True)))

    # Not `register_dataclass`: to it, two classes with the same fields are equal, and `jit` then
    # sometimes runs what it has compiled for the other one (47 of 300 times with JAX 0.10.2)
    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    exportable(cls)
    for hook in _HOOKS:
        hook(cls)
    _STRUCTS.append(cls)
    return cls


_STRUCTS: list[type] = []
_HOOKS: list[Callable[[type], None]] = []


def for_every_struct(hook: Callable[[type], None]) -> None:
    """Call a function with every `struct` class, also with those that are defined later."""
    for cls in _STRUCTS:
        hook(cls)
    _HOOKS.append(hook)


def options_of(layer: Any) -> dict[str, Any]:
    """Return a struct's static fields that are not at their defaults, such as an activation.

    They change what is computed. So each gradient, format and conversion says which of them it can
    express, and any other is refused.
    """
    static = [field for field in fields(layer) if field.metadata.get("static")]
    values = [(field, getattr(layer, field.name)) for field in static]
    return {field.name: value for field, value in values if value != field.default}


def is_array(leaf: object) -> bool:
    """Return whether a leaf has a shape and a dtype."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def described(params: object) -> str:
    """Return the fields of a struct for a message, with arrays as their dtypes and shapes."""

    def value(leaf: Any) -> str:
        return f"{leaf.dtype} {leaf.shape}" if is_array(leaf) else shown(leaf)

    return ", ".join(f"{name} {value(leaf)}" for name, leaf in vars(params).items())


def sizes_of_fields(params: object) -> str:
    """Return a struct's `repr`."""
    return f"{type(params).__name__}({described(params)})"


def exportable(cls: type) -> None:
    """Let `jax.export` serialize functions that take this class of pytrees as an argument.

    Of a class that is defined again, as in a notebook, it knows only the first.
    """
    with contextlib.suppress(ValueError):
        export.register_pytree_node_serialization(
            cls,
            serialized_name=f"{cls.__module__}.{cls.__qualname__}",
            serialize_auxdata=lambda fields: json.dumps(fields).encode(),
            deserialize_auxdata=lambda text: tuple(json.loads(text)),
        )
