"""One layer over time, and a stack of layers; the choice of the implementation.

`unroll_plain` and `unroll` have one contract. The first is the shortest code, the second is fast:

    unroll(params, x (T, B, E), carry, mask) -> (h' of every step (T, B, H), carry)

Arrays are time-major. A mask is dropout inside the recurrence: h' is multiplied by keep · scale,
and the masked h' is both the output and the state of the next step.

`unroll` is fast for two reasons. x·W of all steps is ONE product before the scan. The backward scan
carries only the gradient of the state and stores `da`, the gradients of the gates' pre-activations,
so the gradient of each weight is ONE product after the scan. Autodiff would instead add an (H, H)
product to an accumulator at each step. See Appleyard et al. 2016 (arXiv 1604.01946), sections 3.2
and 3.4.

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
"""How layers can be computed. "scan" is `unroll`; "plain" is `unroll_plain`, which forward mode
needs; "wavefront" and "hopper" are for GPUs, in `kernels/`, and fall back to "scan" if they do not
support the layers or the device. "auto" is "scan" until those two have been timed on a GPU."""


def unroll_plain(
    params: CellParams,
    x: Float[Array, "T B E"] | Lookup,
    carry: Carry,
    mask: Mask | None = None,
) -> tuple[Float[Array, "T B H"], Carry]:
    """Compute a layer by its definition: the cell at each step, differentiated by JAX. Slow."""
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
    """Compute a layer over time, equal to `unroll_plain` up to rounding, with its own gradient.

    The hand-written gradient supports reverse mode: `grad`, and `grad` of `grad`. Forward mode
    (`jvp`, `jacfwd`, `hessian`) needs the implementation "plain".

    Args:
      params: one layer's parameters.
      x: the layer's input, as an array or as a `Lookup`.
      carry: the state before the first step.
      mask: dropout inside the recurrence, or None. It is not differentiated.
      implementation: one of IMPLEMENTATIONS; for a single layer, "wavefront" is "scan".

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
    """Compute a stack of layers: the input of each is the output of the one below.

    Args:
      masks: a pair for each layer: dropout inside its recurrence, and on its output.
      implementation: one of IMPLEMENTATIONS.

    Returns:
      The last layer's (masked) output, and the carry of every layer.

    Raises:
      ValueError: the implementation is not one of IMPLEMENTATIONS.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"the implementation is {implementation!r}; it must be one of "
            f"{', '.join(IMPLEMENTATIONS)}."
        )
    if implementation == "wavefront":
        T = len(x.ids if isinstance(x, Lookup) else x)
        fast = [make(layer) for layer in layers if (make := cell_of(layer).fast)]
        gated = [layer for layer in fast if isinstance(layer, Gated)]
        if len(gated) == len(layers) and wavefront.supports(gated, T):
            return wavefront.unroll_layers(gated, x, carry, masks)
    new_carry = []
    for layer, c, (state_mask, output_mask) in zip(layers, carry, masks, strict=True):
        h, c = unroll(layer, x, c, state_mask, implementation)
        x = apply_mask(h, output_mask)
        new_carry.append(c)
    return _looked_up(x), tuple(new_carry)


def layer_stepper(
    params: CellParams, table: Float[Array, "V E"] | None = None
) -> Callable[[Carry, Array], Carry]:
    """Return a one-step function with its step-independent products precomputed.

    Args:
      params: one layer's parameters.
      table: if given, each step takes row numbers (B,) of this table in place of the input (B, E).

    Returns:
      A function (carry, input) → next carry, equal to `cells.cell` up to rounding.
    """
    cell = cell_of(params)
    layer = cell.fast(params) if cell.fast else None
    if not isinstance(layer, Gated):
        return lambda carry, x: cell.step(params, carry, x if table is None else rows(table, x))
    step, W, b, U = layer.step, layer.W, layer.b, layer.U
    if table is None:
        return lambda carry, x: step(IN_ROWS, U, carry, dot(x, W) + b)[0]
    a = dot(table, W) + b
    return lambda carry, ids: step(IN_ROWS, U, carry, rows(a, ids))[0]


def _looked_up(x: Array | Lookup) -> Array:
    return x.rows() if isinstance(x, Lookup) else x
