"""Arrays, tokens and numbers that users pass, checked and converted."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from jaxgru.arrays import AnyArray
from jaxgru.errors import LibraryError, UserError
from jaxgru.printing import shown, type_name


def as_array(name: str, value: object) -> AnyArray:
    """Return JAX's and NumPy's arrays as they are, anything like an array as JAX's."""
    if isinstance(value, jax.Array):
        return value
    try:
        array = value if type(value) is np.ndarray else jnp.asarray(value)
        jax.typeof(array)
    except OverflowError:
        raise ValueError(f"{name} contains a whole number that is too large for JAX.") from None
    except (TypeError, ValueError):
        is_array = type(value) is np.ndarray
        seen = f"{value.dtype} {value.shape}" if is_array else type_name(value)
        raise ValueError(
            f"{name} is {seen}; it must be an array of a dtype that JAX supports."
        ) from None
    return array


def one_array(name: str, value: object) -> AnyArray:
    """Return `as_array`, but refuse several arrays, which it would stack in silence."""
    is_container = isinstance(value, list | tuple)
    if is_container and any(getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(value)):
        raise ValueError(
            f"{name} is a {type_name(value)} of arrays; it must be one array, so join them first, "
            "with jnp.concatenate or jnp.stack."
        )
    return as_array(name, value)


def as_jax(name: str, value: object) -> Array:
    """Return `as_array` as a JAX array. `jnp.asarray` takes 15 µs even if it is one already."""
    if isinstance(value, jax.Array):
        return value
    array = as_array(name, value)
    check_fits(name, array)
    return jnp.asarray(array)


def check_fits(name: str, array: AnyArray) -> None:
    """Raise UserError if one of NumPy's whole numbers of 64 bits does not fit into JAX's dtype."""
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    is_whole = jnp.issubdtype(array.dtype, jnp.integer)
    if dtype == array.dtype or not is_whole or not array.size:
        return
    limits = np.iinfo(dtype)
    smallest = array.min()
    largest = array.max()
    outside = largest if largest > limits.max else smallest
    if not limits.min <= outside <= limits.max:
        raise UserError(f"{name} contains {outside}, which does not fit into {dtype}.")


def is_known(array: AnyArray) -> bool:
    """Return whether the values can be read here: not traced, and all on this process's devices."""
    return not isinstance(array, Tracer) and getattr(array, "is_fully_addressable", True)


def check_shapes(
    where: str,
    have: Mapping[str, tuple[int, ...]],
    want: Mapping[str, tuple[int, ...]],
    error: type[UserError] = LibraryError,
) -> None:
    """Compare tensors' shapes by name, first the names.

    Raises:
      error: they differ; the message begins with `where`.
    """
    for name in sorted(have.keys() ^ want.keys()):
        if name in want:
            raise error(f"{where}: the tensor {name} is missing.")
        raise error(f"{where}: the tensor {name} does not belong there.")
    for name in sorted(want):
        if have[name] != want[name]:
            raise error(
                f"{where}: the tensor {name} has shape {have[name]}; it must be {want[name]}."
            )


def as_tokens(name: str, tokens: Any) -> AnyArray:
    """Return tokens: an array, or lists of whole numbers. No tokens, (0,), may be of any dtype."""
    tokens = as_array(name, tokens)
    if tokens.shape == (0,):  # an empty list would be float32
        return tokens.astype(np.int32)
    if not (jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.dtype == bool):
        raise UserError(f"{name} is {tokens.dtype} {tokens.shape}; it must be integers.")
    check_fits(name, tokens)
    return tokens


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
