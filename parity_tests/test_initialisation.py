"""Fresh parameters of both frameworks: the same bounds, moments, distributions, zeros and ones."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import torch
from flax import linen as nn

import jaxgru
from jaxgru.libraries.flax_linen import from_linen
from jaxgru.lm.config import ModelConfig
from parity_tests import conversion
from parity_tests.conversion import VARIANTS

CONFIGS = {
    cell: ModelConfig(cell, 65, 48, 96, 2, init_scheme="pytorch", **VARIANTS[cell])
    for cell in VARIANTS
}
FLAX = {
    jaxgru.init_gru: nn.GRUCell,
    jaxgru.init_lstm: nn.OptimizedLSTMCell,
    jaxgru.init_rnn: nn.SimpleCell,
}


@pytest.mark.parametrize("init", FLAX)
def test_layers_start_as_flaxs(init):
    """The same W, an orthogonal U per gate; zeros, but ones in our LSTM's forget gate."""
    E = 48
    H = 96
    cell = FLAX[init](H)
    carry = jnp.zeros((1, H))
    x = jnp.zeros((1, E))
    carry = (carry, carry) if init is jaxgru.init_lstm else carry
    theirs = from_linen(cell.init(jax.random.key(0), carry, x)["params"])
    ours = init(jax.random.key(1), E, H)
    for name in "WU":
        a, b = (np.asarray(getattr(layer, name)) for layer in (ours, theirs))
        p_value = scipy.stats.ks_2samp(a.ravel(), b.ravel()).pvalue
        conversion.agree_in_distribution(
            f"{init.__name__}: {name}", p_value, a.size + b.size, "flax"
        )
        for U in np.split(np.stack([a, b]), len(ours.gates), -1) if name == "U" else []:
            np.testing.assert_allclose(U.mT @ U, np.stack([np.eye(H)] * 2), atol=2e-6)
    in_forget_gate = jnp.zeros(len(theirs.b)).at[:H].set(init is jaxgru.init_lstm)
    np.testing.assert_array_equal(ours.b, theirs.b + in_forget_gate)
    np.testing.assert_array_equal(getattr(ours, "cn", 0), getattr(theirs, "cn", 0))


def named_leaves(params) -> dict[str, np.ndarray]:
    """Return the arrays by name; each gate of a layer's is one of its own, such as Wz."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        of_layer = len(path) == 3  # layers, a number, a field
        gates = params.layers[path[1].idx].gates if of_layer else [""]
        gates = gates[:2] if of_layer and path[2].name == "c" else gates
        for gate, part in zip(gates, np.split(np.asarray(leaf), len(gates), axis=-1), strict=True):
            found[jax.tree_util.keystr(path) + gate] = part
    return found


@functools.lru_cache
def both(cell: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return every parameter of a fresh model by name, ours and torchref's."""
    params = jaxgru.lm.init(jax.random.key(1), CONFIGS[cell])
    with torch.random.fork_rng():
        torch.manual_seed(1)
        fresh = type(conversion.torch_model(params))(65, 48, 96, 2)
    theirs = conversion.from_state_dict(conversion.model_keys(params), fresh.state_dict())
    return named_leaves(params), named_leaves(theirs)


@pytest.mark.parametrize("cell", CONFIGS)
def test_same_distributions(cell):
    """Leaf by leaf: constants are equal; others pass a two-sample Kolmogorov-Smirnov test.

    No two are drawn from one key: their numbers would be the same, up to a factor.
    """
    ours, theirs = both(cell)
    assert list(ours) == list(theirs)
    for name, a in ours.items():
        b = theirs[name]
        assert a.shape == b.shape and a.dtype == b.dtype == np.float32
        if np.ptp(b) == 0:
            np.testing.assert_array_equal(a, b, err_msg=name)
        else:
            p_value = scipy.stats.ks_2samp(a.ravel(), b.ravel()).pvalue
            quantity = f"{cell}: initialisation of {name}"
            conversion.agree_in_distribution(quantity, p_value, a.size + b.size)
            if "embedding" not in name:  # uniform, up to one bound
                assert abs(np.abs(a).max() / np.abs(b).max() - 1) < 8 / a.size
    drawn = [leaf.ravel() for leaf in ours.values() if np.ptp(leaf) > 0]
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            n = min(a.size, b.size)
            assert abs(np.corrcoef(a[:n], b[:n])[0, 1]) < 5 / n**0.5
