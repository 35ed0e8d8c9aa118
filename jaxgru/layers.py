"""One layer over time, and a stack of layers: which implementation runs.

The contract, which `unroll_plain` fulfils in the fewest lines and `unroll` fulfils fast:

    unroll(params, x (T, B, E), carry, mask) -> (h' of every step (T, B, H), carry)

Everything here is time-major. A mask is dropout inside the recurrence: h' is multiplied by
keep · scale, and the masked h' is both the output and the next step's state.

Why `unroll` is fast. x·W for all steps is ONE product before the scan. The backward scan carries
only the state's gradient and writes down the gradients `da` of the gates' pre-activations, so that
each weight's gradient is ONE product after it; autodiff would instead add a (H, H) product to an
accumulator at each step. See Appleyard et al. 2016 (arXiv 1604.01946), sections 3.2 and 3.4.

Weights may be bfloat16 beside biases and states of float32: see `cells.base.dot`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jaxtyping import Array, Float

from jaxgru.cells import Carry, CellParams, cell_of, hidden
from jaxgru.cells.base import (
    IN_ROWS,
    AtOnce,
    Gated,
    Lookup,
    Mask,
    apply_mask,
    dot,
    product,
    rows,
    with_hidden,
)
from jaxgru.kernels import wavefront

IMPLEMENTATIONS = ("auto", "scan", "plain", "wavefront", "hopper")
"""How layers may be computed: "scan" is `unroll`; "plain" the definition,
which forward mode needs; "wavefront" and "hopper"
are for GPUs, in `kernels/`, and where they do not support the layers or the device, `unroll` does
it. Neither has been timed on a GPU; until they are, "auto" is "scan"."""


def unroll_plain(
    params: CellParams,
    x: Float[Array, "T B E"] | Lookup,
    carry: Carry,
    mask: Mask | None = None,
) -> tuple[Float[Array, "T B H"], Carry]:
    """Compute the definition of an unroll: the cell, step by step, differentiated by JAX. Slow."""
    cell = cell_of(params)

    def step(carry: Carry, x_keep: tuple) -> tuple[Carry, Array]:
        x, keep = x_keep
        carry = cell.step(params, carry, x)
        h = IN_ROWS.masked(hidden(carry), mask, keep)
        return with_hidden(carry, h), h

    carry, h = jax.lax.scan(step, carry, (_looked_up(x), mask and mask.keep))
    return h, carry


def unroll(
    params: CellParams,
    x: Float[Array, "T B E"] | Lookup,
    carry: Carry,
    mask: Mask | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "T B H"], Carry]:
    """Compute the same as `unroll_plain`, to rounding, with a hand-written gradient.

    It is for reverse mode: `grad`, and `grad` of that. Forward mode (`jvp`, `jacfwd`, `hessian`)
    needs the implementation "plain".

    Args:
      params: one layer's.
      x: the layer's input, time-major, or the table and the rows that it consists of.
      carry: the state before the first step.
      mask: dropout inside the recurrence, or None. It is not differentiated.
      implementation: one of IMPLEMENTATIONS; a single layer has no wavefront.

    Returns:
      The (masked) h' of every step, and the carry after the last one.
    """
    cell = cell_of(params)
    if implementation == "plain" or cell.fast is None:
        return unroll_plain(params, x, carry, mask)
    layer = cell.fast(params)
    if isinstance(layer, AtOnce):
        return layer.all_steps(_looked_up(x), carry, mask)
    if implementation == "hopper":
        from jaxgru.kernels import gru_hopper  # Pallas takes 0.6 s to import

        layer = gru_hopper.accelerated(layer, hidden(carry))
    return layer.over_time(layer.U, carry, product(x, layer.W) + layer.b, mask)


def unroll_layers(
    layers: Sequence[CellParams],
    x: Float[Array, "T B E"] | Lookup,
    carry: Sequence[Carry],
    masks: Sequence[tuple[Mask | None, Mask | None]],
    implementation: str = "auto",
) -> tuple[Float[Array, "T B H"], tuple[Carry, ...]]:
    """Compute layers one on top of another: each one's input is the output of the one below.

    Args:
      masks: each layer's pair: dropout inside its recurrence, and on its output.
      implementation: one of IMPLEMENTATIONS.

    Returns:
      The last layer's output, masked, and every layer's carry.

    Raises:
      ValueError: the implementation is none of these.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"the implementation is {implementation!r}; it must be one of "
            f"{', '.join(IMPLEMENTATIONS)}."
        )
    if implementation == "wavefront":
        T = len(x.index if isinstance(x, Lookup) else x)
        fast = [make(layer) for layer in layers if (make := cell_of(layer).fast)]
        if len(fast) == len(layers) and wavefront.supports(fast, T):
            return wavefront.unroll_layers(fast, x, carry, masks)
    new_carry = []
    for layer, c, (state_mask, output_mask) in zip(layers, carry, masks, strict=True):
        h, c = unroll(layer, x, c, state_mask, implementation)
        x = apply_mask(h, output_mask)
        new_carry.append(c)
    return x, tuple(new_carry)


def layer_stepper(
    params: CellParams, table: Float[Array, "V E"] | None = None
) -> Callable[[Carry, Array], Carry]:
    """Return a one-step function with its step-independent products precomputed.

    Args:
      params: one layer's.
      table: where the input is rows of a table, the table; the steps then take the rows' numbers.

    Returns:
      A function from the carry and the input, (B, E) or (B,), to the next carry: `cells.cell`, to
      rounding.
    """
    cell = cell_of(params)
    layer = cell.fast(params) if cell.fast else None
    if not isinstance(layer, Gated):
        return lambda carry, x: cell.step(params, carry, x if table is None else rows(table, x))
    step, W, b, U = layer.step, layer.W, layer.b, layer.U
    if table is None:
        return lambda carry, x: step(IN_ROWS, U, carry, dot(x, W) + b)[0]
    a = dot(table, W) + b
    return lambda carry, index: step(IN_ROWS, U, carry, rows(a, index))[0]


def _looked_up(x: Array | Lookup) -> Array:
    return x.rows() if isinstance(x, Lookup) else x
