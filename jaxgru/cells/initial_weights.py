"""Initial weights: how W, U and b are drawn, gate by gate. Letters as in `contract.py`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer, lecun_normal, orthogonal, zeros
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from jaxgru.arrays import widest
from jaxgru.errors import UserError, check_one_of, check_whole
from jaxgru.printing import shown, type_name

DEFAULTS: dict[str, tuple[Initializer | None, ...]] = {
    "orthogonal": (lecun_normal(), orthogonal(), zeros),
    "pytorch": (None, None, None),  # uniform in ±1/√fan_in, drawn in the parameters' dtype
}
"""How W, U and b are drawn if no initializer is given. See `initializers`."""


def initializers(
    E: int,
    H: int,
    dtype: DTypeLike,
    init_scheme: str = "orthogonal",
    kernel_init: Initializer | None = None,
    recurrent_kernel_init: Initializer | None = None,
    bias_init: Initializer | None = None,
    state_size: int | None = None,
    num_blocks: int = 1,
) -> tuple[Callable[[PRNGKeyArray], Array], ...]:
    """Return functions that draw W, U and b from a key, for one gate.

    W is (E, H) and b (H,). U is (H, H); or (S, H) for a state h of `state_size` S; or the n blocks
    (n, H/n, H/n) of a block-diagonal matrix, each drawn by itself.

    With `init_scheme` "orthogonal", the defaults are those of Flax's cells: U has orthonormal rows
    or columns (Saxe et al. 2013, arXiv 1312.6120), so a product with it keeps the length of h; W is
    normal with the variance 1/E (LeCun et al. 1998, Efficient BackProp), truncated; b is zeros.
    With "pytorch", all three are uniform in ±1/√fan_in, as in PyTorch's `nn.Linear`. An initializer
    draws in float32 or wider, because some of JAX's cannot draw narrower numbers.
    """
    check_whole("in_features", E)
    check_whole("hidden_dim", H)
    check_floating(dtype)
    check_one_of("init_scheme", init_scheme, DEFAULTS)
    check_whole("num_blocks", num_blocks)
    if H % num_blocks:
        raise UserError(f"num_blocks is {num_blocks}; it must divide hidden_dim, {H}.")
    shape_of_U = H // num_blocks, H // num_blocks
    if state_size is not None:
        check_whole("proj_size", state_size)
        shape_of_U = state_size, H

    for_W, for_U, for_b = DEFAULTS[init_scheme]
    for_W = for_W if kernel_init is None else kernel_init
    for_U = for_U if recurrent_kernel_init is None else recurrent_kernel_init
    for_b = for_b if bias_init is None else bias_init
    W = drawing("kernel_init", for_W, (E, H), E, dtype)
    U = drawing("recurrent_kernel_init", for_U, shape_of_U, shape_of_U[0], dtype)
    b = drawing("bias_init", for_b, (H,), E, dtype)
    if num_blocks == 1:
        return W, U, b

    def U_of_blocks(key: PRNGKeyArray) -> Array:
        return jnp.stack([U(key) for key in jax.random.split(key, num_blocks)])

    return W, U_of_blocks, b


def check_floating(dtype: DTypeLike) -> None:
    """Raise ValueError unless this is a floating-point dtype."""
    try:
        is_floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:  # it names none
        is_floating = False
    if not is_floating:
        raise ValueError(f"dtype is {shown(dtype)}; it must be a floating-point dtype.")


def drawing(
    name: str,
    initializer: Initializer | None,
    shape: tuple[int, ...],
    fan_in: int,
    dtype: DTypeLike,
) -> Callable[[PRNGKeyArray], Array]:
    """Return a function that draws a weight from a key.

    Args:
      name: of the argument that passed the initializer, for messages.
      initializer: None: uniform in ±1/√fan_in.
    """
    if initializer is None:
        bound = fan_in**-0.5
        return lambda key: jax.random.uniform(key, shape, dtype, -bound, bound)
    if not callable(initializer):
        raise ValueError(
            f"{name} is {type_name(initializer)}; it must be an initializer, such as "
            "jax.nn.initializers.orthogonal()."
        )

    def draw(key: PRNGKeyArray) -> Array:
        try:
            values = initializer(key, shape, widest(dtype, jnp.float32))
        except ValueError as error:  # such as orthogonal(), of a bias
            why = str(error).rstrip(".")
            raise ValueError(f"{name} cannot draw numbers {shape}: {why}.") from error
        drawn_dtype = getattr(values, "dtype", None)
        if drawn_dtype is None:
            result = type(values).__name__
        elif values.shape != shape or not jnp.issubdtype(drawn_dtype, jnp.floating):
            result = f"{drawn_dtype} {values.shape}"
        else:
            return values.astype(dtype)
        raise ValueError(
            f"{name} returns {result}; it must return floating-point numbers {shape} "
            "(pass jax.nn.initializers.orthogonal(), not orthogonal)."
        )

    return draw


def check_defaults(option: str, init: Callable[..., object], **values: object) -> None:
    """Raise UserError unless the values that `option` excludes are the defaults of `init`."""
    for name, value in values.items():
        default = inspect.signature(init).parameters[name].default
        if value != default:
            raise UserError(f"{name} must be {default!r} with {option}; it is {shown(value)}.")


def gates(parts: Iterable[Array]) -> Array:
    """Join the gates of a weight or bias on the last axis."""
    return jnp.concatenate(list(parts), axis=-1)


def linear_weights(
    key: PRNGKeyArray,
    E: int,
    H: int,
    dtype: DTypeLike,
    num_gates: int,
    kernel_init: Initializer | None,
    bias_init: Initializer | None,
) -> dict[str, Array]:
    """Draw W and b of gates that do not read h; by default uniform in ±1/√E."""
    W, _, b = initializers(E, H, dtype, "pytorch", kernel_init, bias_init=bias_init)
    k = jax.random.split(key, 2 * num_gates)
    return dict(W=gates(map(W, k[::2])), b=gates(map(b, k[1::2])))


def gru_weights(
    key: PRNGKeyArray, E: int, H: int, dtype: DTypeLike = jnp.float32, **options: Any
) -> dict[str, Array]:
    """Draw W, U and b of a GRU's gates z, r and n, with the options of `initializers`."""
    W, U, b = initializers(E, H, dtype, **options)
    k = jax.random.split(key, 9)
    return dict(W=gates(map(W, k[::3])), U=gates(map(U, k[1::3])), b=gates(map(b, k[2::3])))


def lstm_weights(
    key: PRNGKeyArray,
    E: int,
    H: int,
    dtype: DTypeLike = jnp.float32,
    bias_init: Initializer | None = None,
    **options: Any,
) -> dict[str, Array]:
    """Draw W, U and b of an LSTM's gates f, i, o and g, with the options of `initializers`.

    Without a `bias_init`, b is zeros, but ones in the forget gate.
    """
    for_b = zeros if bias_init is None else bias_init
    W, U, b = initializers(E, H, dtype, bias_init=for_b, **options)
    k = jax.random.split(key, 8)
    k_bias = jax.random.split(jax.random.fold_in(key, 8), 4)
    biases = [b(key) for key in k_bias]
    if bias_init is None:
        biases[0] = jnp.ones(H, dtype)
    return dict(W=gates(map(W, k[::2])), U=gates(map(U, k[1::2])), b=gates(biases))
