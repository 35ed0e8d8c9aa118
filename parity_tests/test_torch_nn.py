"""jaxgru against torch.nn.LSTM, torch.nn.RNN and, with the reset after the product, torch.nn.GRU.

PyTorch has two biases where jaxgru has one, so one of them is set to zero. Only the GRU's candidate
needs both.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jaxgru.cells import GRUParams, LSTMParams, RNNParams
from parity_tests.bridge import DTYPES, REPEATED, to_torch
from parity_tests.foreign import (
    SIZES,
    blocks_from_struct,
    case_of,
    struct_from_blocks,
    z_reversed,
)

GATES = {"lstm": "ifgo", "rnn": ("",)}  # PyTorch's order
STRUCT = {"lstm": LSTMParams, "rnn": RNNParams}
MODULE = {"lstm": torch.nn.LSTM, "rnn": torch.nn.RNN}


@pytest.mark.parametrize("dtype", REPEATED)
@pytest.mark.parametrize("size, silent", [(size, "hh") for size in SIZES] + [(SIZES[0], "ih")])
@pytest.mark.parametrize("cell", ["lstm", "rnn"])
def test_forward_and_gradients(cell, size, silent, dtype):
    """Two layers. Either bias of each pair holds ours, and the other is zero.

    Only the sum of the two counts, so the gradient of either is the gradient of our one bias.
    """
    E, H = size[2:]
    case = case_of(cell, size, dtype, layers=2)
    module = MODULE[cell](E, H, num_layers=2, batch_first=True, dtype=getattr(torch, dtype))
    loud = "hh" if silent == "ih" else "ih"
    with torch.no_grad():
        for i, layer in enumerate(case.layers):
            W, U, b = blocks_from_struct(layer, GATES[cell])
            getattr(module, f"weight_ih_l{i}").copy_(to_torch(W.T))
            getattr(module, f"weight_hh_l{i}").copy_(to_torch(U.T))
            getattr(module, f"bias_{loud}_l{i}").copy_(to_torch(b))
            getattr(module, f"bias_{silent}_l{i}").zero_()

    x = to_torch(case.x).requires_grad_()
    # PyTorch has one array per kind of state, (layers, B, H); ours is a tuple by layer.
    stack = lambda carry: [
        to_torch(np.stack([np.asarray(part) for part in kind]))
        for kind in (zip(*carry, strict=True) if cell == "lstm" else [carry])
    ]
    unstack = lambda kinds: [kind[i] for i in range(2) for kind in kinds]
    start = [kind.requires_grad_() for kind in stack(case.carry)]
    output, final = module(x, tuple(start) if cell == "lstm" else start[0])
    final = final if cell == "lstm" else (final,)
    of_carry = sum((w * c).sum() for w, c in zip(stack(case.of_carry), final, strict=True))
    ((to_torch(case.of_output) * output).sum() + of_carry).backward()

    gradients = [
        struct_from_blocks(
            STRUCT[cell],
            GATES[cell],
            getattr(module, f"weight_ih_l{i}").grad.T,
            getattr(module, f"weight_hh_l{i}").grad.T,
            getattr(module, f"bias_{silent}_l{i}").grad,
        )
        for i in range(2)
    ]
    case.check(
        f"torch.nn.{MODULE[cell].__name__}",
        (output, unstack(final)),
        (gradients, x.grad, unstack([kind.grad for kind in start])),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_gru_that_resets_after(size, dtype):
    """Two layers of torch.nn.GRU: gates r, z, n; its z weights the OLD state."""
    E, H = size[2:]
    case = case_of("gru", size, dtype, layers=2, reset_gate="after")
    module = torch.nn.GRU(E, H, num_layers=2, batch_first=True, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for i, layer in enumerate(case.layers):
            W, U, b = blocks_from_struct(layer, "rzn", z_reversed)
            getattr(module, f"weight_ih_l{i}").copy_(to_torch(W.T))
            getattr(module, f"weight_hh_l{i}").copy_(to_torch(U.T))
            getattr(module, f"bias_ih_l{i}").copy_(to_torch(b))
            getattr(module, f"bias_hh_l{i}").zero_()[2 * H :] = to_torch(layer.cn)

    x = to_torch(case.x).requires_grad_()
    stack = lambda carry: to_torch(np.stack([np.asarray(h) for h in carry]))
    start = stack(case.carry).requires_grad_()
    output, final = module(x, start)
    objective = (to_torch(case.of_output) * output).sum() + (stack(case.of_carry) * final).sum()
    objective.backward()

    gradients = [
        struct_from_blocks(
            GRUParams,
            "rzn",
            getattr(module, f"weight_ih_l{i}").grad.T,
            getattr(module, f"weight_hh_l{i}").grad.T,
            getattr(module, f"bias_ih_l{i}").grad,
            z_reversed,
        ).replace(cn=getattr(module, f"bias_hh_l{i}").grad[2 * H :].numpy())
        for i in range(2)
    ]
    case.check("torch.nn.GRU", (output, list(final)), (gradients, x.grad, list(start.grad)))
