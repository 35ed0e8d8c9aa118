"""Tokens and numbers that users pass to language models, checked and converted."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Shaped

from jaxgru.cells.carry import AnyArray
from jaxgru.errors import UserError
from jaxgru.layers.validate import as_array, is_known
from jaxgru.printing import shown


def as_tokens(name: str, tokens: Any) -> AnyArray:
    """Return tokens: an array, or lists of whole numbers. No tokens, (0,), may be of any dtype."""
    tokens = as_array(name, tokens)
    if tokens.shape == (0,):  # an empty list would be float32
        return tokens.astype(np.int32)
    if not (jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.dtype == bool):
        raise UserError(f"{name} is {tokens.dtype} {tokens.shape}; it must be integers.")
    dtype = jax.dtypes.canonicalize_dtype(tokens.dtype)
    if dtype != tokens.dtype and tokens.size:  # NumPy's, in 64 bits
        _check_limits(name, np.asarray(tokens), dtype)
    return tokens


def _check_limits(name: str, tokens: Shaped[np.ndarray, "..."], dtype: np.dtype) -> None:
    """Raise UserError if a token does not fit into a dtype."""
    limits = np.iinfo(dtype)
    smallest = tokens.min()
    largest = tokens.max()
    outside = largest if largest > limits.max else smallest
    if not limits.min <= outside <= limits.max:
        raise UserError(f"{name} contains {outside}, which does not fit into {dtype}.")


def check_tokens(name: str, tokens: AnyArray, vocab_size: int) -> None:
    """Raise UserError if the tokens' values are known and one is outside the vocabulary."""
    if not is_known(tokens):
        return
    values = np.asarray(tokens)
    outside = values[(values < 0) | (values >= vocab_size)]
    if outside.size:
        raise UserError(
            f"{name} contains {outside[0]}; the vocabulary's tokens are 0 to {vocab_size - 1}."
        )


def as_sequence(name: str, tokens: Any, vocab_size: int) -> AnyArray:
    """Return tokens as one sequence (N,), which may be empty."""
    tokens = as_tokens(name, tokens)
    if tokens.ndim != 1:
        raise UserError(f"{name} is {tokens.dtype} {tokens.shape}; it must be one sequence, (N,).")
    check_tokens(name, tokens, vocab_size)
    return tokens


def check_string(name: str, value: object) -> None:
    """Raise UserError if a value is no string."""
    if not isinstance(value, str):
        raise UserError(f"{name} is {shown(value)}; it must be a string.")


def check_number(name: str, value: Any, allowed: Callable[[float], bool], wanted: str) -> Any:
    """Return an allowed number as Python's; a traced one as it is."""
    if isinstance(value, Tracer):
        return value
    number = math.nan
    is_bool = getattr(value, "dtype", type(value)) in (bool,)
    if not (is_bool or isinstance(value, str | bytes)):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)
    if not allowed(number):
        raise UserError(f"{name} is {shown(value)}; it must be {wanted}.")
    return number
