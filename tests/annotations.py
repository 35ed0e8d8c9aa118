"""How jaxgru's annotations are checked while tests run, by jaxtyping's import hook and beartype."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

jaxtyped = jaxtyping.jaxtyped


def install() -> None:
    """Check each annotated function of jaxgru, which must not be imported yet."""
    jaxtyping.jaxtyped = decorated  # with which the hook decorates all functions and classes
    jaxtyping.install_import_hook("jaxgru", "annotations.checked")


def checked(function: Callable) -> Callable:
    """Check a function's annotations at each call; an int is a float, as PEP 484 has it."""
    return beartype(conf=BeartypeConf(is_pep484_tower=True))(function)


def decorated(*target: Any, **options: Any) -> Any:
    """Be jaxtyping's decorator, but leave alone what is not checked.

    Its wrapper alone would take a tenth of the suite's time. The `__init__` of a class is not
    checked. JAX calls that of a `struct` with leaves of any kind (shapes, shardings,
    placeholders), and a config refuses wrong values itself. Functions within functions are not
    checked either: each call makes them anew.
    """
    if not target:
        return partial(decorated, **options)
    (function,) = target
    within = inspect.isfunction(function) and "<locals>" in function.__qualname__
    if inspect.isclass(function) or within or getattr(function, "__name__", "") == "__init__":
        return function
    return jaxtyped(function, **options)


@contextmanager
def unchecked() -> Iterator[None]:
    """Let a test pass wrong values, to see what the function itself says."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)
