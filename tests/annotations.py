"""How annotations are checked while tests run, by jaxtyping's import hook and beartype.

install_import_hook("jaxgru", "annotations.checked")  # before jaxgru is imported
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import jaxtyping
from beartype import BeartypeConf, beartype


def checked(function: Callable) -> Callable:
    """Check a function's annotations at each call; an int is a float, as PEP 484 has it.

    The `__init__` of a class is not checked. JAX calls that of a `struct` with leaves of any
    kind (shapes, shardings, placeholders), and a config refuses wrong values itself. Functions
    within functions are not checked either: each call makes them anew, and the suite would take a
    twelfth longer.
    """
    if function.__name__ == "__init__" or "<locals>" in function.__qualname__:
        return function
    return beartype(conf=BeartypeConf(is_pep484_tower=True))(function)


@contextmanager
def unchecked() -> Generator[None]:
    """Let a test pass wrong values, to see what the function itself says."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)
