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

from jaxgru.cells.promotion import widest
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
    init: str = "orthogonal",
    kernel_init: Initializer | None = None,
    recurrent_kernel_init: Initializer | None = None,
    bias_init: Initializer | None = None,
    state_size: int | None = None,
    num_blocks: int = 1,
) -> tuple[Callable[[PRNGKeyArray], Array], ...]:
    """Return functions that draw W, U and b from a key, for one gate.

    W is (E, H) and b (H,). U is (H, H); or (S, H) for a state h of `state_size` S; or the n blocks
    (n, H/n, H/n) of a block-diagonal matrix, each drawn by itself.

    With `init` "orthogonal", the defaults are those of Flax's cells: U has orthonormal rows or
    columns (Saxe et al. 2013, arXiv 1312.6120), so a product with it keeps the length of h; W is
    normal with the variance 1/E (LeCun et al. 1998, Efficient BackProp), truncated; b is zeros.
    With "pytorch", all three are uniform in ±1/√fan_in, as in PyTorch's `nn.Linear`. An initializer
    draws in float32 or wider, because some of JAX's cannot draw narrower numbers.
    """
    for name, size in (("in_features", E), ("hidden_dim", H)):
        check_whole(name, size)
    try:
        floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:  # it names none
        floating = False
    if not floating:
        raise ValueError(f"dtype is {shown(dtype)}; it must be a floating-point dtype.")

    check_one_of("init", init, DEFAULTS)
    check_whole("num_blocks", num_blocks)
    if H % num_blocks:
        raise UserError(f"num_blocks is {num_blocks}; it must divide hidden_dim, {H}.")
    rows = columns = H // num_blocks
    if state_size is not None:
        check_whole("proj_size", state_size)
        rows, columns = state_size, H

    def draw(
        name: str,
        given: Initializer | None,
        default: Initializer | None,
        shape: tuple[int, ...],
        fan_in: int,
    ) -> Callable[[PRNGKeyArray], Array]:
        given = default if given is None else given
        if given is None:
            bound = fan_in**-0.5
            return lambda key: jax.random.uniform(key, shape, dtype, -bound, bound)
        if not callable(given):
            raise ValueError(
                f"{name} is {type_name(given)}; it must be an initializer, such as "
                "jax.nn.initializers.orthogonal()."
            )

        def drawn(key: PRNGKeyArray) -> Array:
            try:
                values = given(key, shape, widest(dtype, jnp.float32))
            except ValueError as error:  # such as orthogonal(), of a bias
                why = str(error).rstrip(".")
                raise ValueError(f"{name} cannot draw numbers {shape}: {why}.") from error
            kind = getattr(values, "dtype", None)
            if kind is None or values.shape != shape or not jnp.issubdtype(kind, jnp.floating):
                seen = type(values).__name__ if kind is None else f"{kind} {values.shape}"
                raise ValueError(
                    f"{name} returns {seen}; it must return floating-point numbers {shape} "
                    "(pass jax.nn.initializers.orthogonal(), not orthogonal)."
                )
            return values.astype(dtype)

        return drawn

    of_W, of_U, of_b = DEFAULTS[init]
    W = draw("kernel_init", kernel_init, of_W, (E, H), E)
    U = draw("recurrent_kernel_init", recurrent_kernel_init, of_U, (rows, columns), rows)
    b = draw("bias_init", bias_init, of_b, (H,), E)
    if num_blocks == 1:
        return W, U, b
    return W, lambda key: jnp.stack([U(k) for k in jax.random.split(key, num_blocks)]), b


def check_defaults(option: str, init: Callable[..., object], **values: object) -> None:
    """Raise UserError unless the values that `option` excludes are the defaults of `init`."""
    for name, value in values.items():
        default = inspect.signature(init).parameters[name].default
        if value != default:
            raise UserError(f"{name} must be {default!r} with {option}; it is {shown(value)}.")


def gates(parts: Iterable[Array]) -> Array:
    """Join the gates of a weight or bias on the last axis."""
    return jnp.concatenate(list(parts), axis=-1)


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
    given = zeros if bias_init is None else bias_init
    W, U, b = initializers(E, H, dtype, bias_init=given, **options)
    k, k_bias = jax.random.split(key, 8), jax.random.split(jax.random.fold_in(key, 8), 4)
    biases = [b(key) for key in k_bias]
    if bias_init is None:
        biases[0] = jnp.ones(H, dtype)
    return dict(W=gates(map(W, k[::2])), U=gates(map(U, k[1::2])), b=gates(biases))
