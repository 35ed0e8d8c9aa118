"""Structured and regularised cells against what others computed: PyTorch, and NumPy in float64.

`tests/layers` compares every way to compute them with the definition in `jaxgru/cells`.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from against import randomized, torch_gradients, value_and_gradients
from annotations import unchecked
from random_models import by_gate

import jaxgru
from jaxgru import cells
from jaxgru.cells.layout import IN_COLUMNS, IN_ROWS
from jaxgru.cells.products import dense
from jaxgru.libraries import InteropError
from jaxgru.libraries.flax_linen import to_linen
from jaxgru.libraries.flax_nnx import from_nnx, to_nnx
from jaxgru.libraries.torch_nn import from_torch, to_torch


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("B, T, E, H, p", [(3, 5, 3, 7, 4), (1, 1, 1, 2, 1)])
def test_an_lstm_with_a_projection_is_pytorchs(B, T, E, H, p):
    """Two layers: outputs, states, and every gradient."""
    torch.manual_seed(0)
    module = torch.nn.LSTM(E, H, 2, proj_size=p, batch_first=True, dtype=torch.float64)
    x, h, c = normal(B, T, E), normal(2, B, p, seed=2), normal(2, B, H, seed=3)
    leaves = [torch.tensor(a, requires_grad=True) for a in (x, h, c)]
    y, (h_end, c_end) = module(leaves[0], tuple(leaves[1:]))
    outputs = [y, h_end[0], c_end[0], h_end[1], c_end[1]]
    weight = lambda y: torch.cos(torch.arange(y.numel(), dtype=y.dtype)).reshape(y.shape)
    sum(torch.sum(y * weight(y)) for y in outputs).backward()

    layers, carry = from_torch(module), tuple(map(jaxgru.LSTMState, h, c))
    seen, gradients = value_and_gradients(jaxgru.unroll, layers, jnp.asarray(x), carry)
    expected = [y.detach().numpy() for y in outputs]
    chex.assert_trees_all_close(jax.tree.leaves(seen), expected, rtol=1e-10, atol=1e-11)
    dx, dh, dc = (leaf.grad.numpy() for leaf in leaves)
    expected = torch_gradients(module), dx, tuple(map(jaxgru.LSTMState, dh, dc))
    chex.assert_trees_all_close(gradients, expected, rtol=1e-10, atol=1e-11)
    chex.assert_trees_all_equal(from_torch(to_torch(layers)), layers)


def test_a_projection_without_biases_and_one_that_pytorch_has_not():
    module = torch.nn.LSTM(3, 4, proj_size=2, bias=False, bidirectional=True, dtype=torch.float64)
    x = normal(5, 2, 3)
    y, _ = jaxgru.bidirectional(*from_torch(module), jnp.asarray(x), time_major=True)
    np.testing.assert_allclose(y, module(torch.tensor(x))[0].detach(), rtol=1e-10)
    with pytest.raises(ValueError, match="proj_size has to be smaller than hidden_size"):
        to_torch(jaxgru.init_lstm(jax.random.key(0), 3, 4, proj_size=4, dtype="float64"))


# --- Layer normalisation and blocks, in NumPy


def sigma(x):
    return 1 / (1 + np.exp(-x))


def LN(x):
    """Of the paper's equation 4, with the ε that all libraries add."""
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5)


def block_diagonal(U):
    """The matrix (H, H) of blocks (n, k, k), entry by entry; a matrix is itself."""
    if U.ndim == 2:
        return U
    n, k, _ = U.shape
    matrix = np.zeros((n * k, n * k))
    for i, row, column in np.ndindex(U.shape):
        matrix[i * k + row, i * k + column] = U[i, row, column]
    return matrix


def numbers(p):
    """The layer's parameters in NumPy, gate by gate, the recurrent weights as matrices."""
    p = {name: np.asarray(leaf, np.float64) for name, leaf in vars(by_gate(p)).items()}
    return {name: block_diagonal(leaf) if name[0] == "U" else leaf for name, leaf in p.items()}


def layer_norm_gru(p, h, x):
    """Equations 23 to 26 of the paper, one row; z weights the candidate."""
    p = numbers(p)
    stacked = lambda name: np.concatenate([p[f"{name}z"], p[f"{name}r"]], axis=-1)
    of_h, of_x = LN(h @ stacked("U")) * stacked("u"), LN(x @ stacked("W")) * stacked("w")
    z, r = np.split(of_h + of_x + stacked("b"), 2)
    of_x = LN(x @ p["Wn"]) * p["wn"] + p["bn"]
    n = np.tanh(of_x + sigma(r) * (LN(h @ p["Un"]) * p["un"] + p["cn"]))
    return (1 - sigma(z)) * h + sigma(z) * n


def layer_norm_lstm(p, carry, x):
    """Equations 20 to 22 of the paper, one row."""
    p, (h, c) = numbers(p), carry
    stacked = lambda name: np.concatenate([p[name + gate] for gate in "fiog"], axis=-1)
    of_h, of_x = LN(h @ stacked("U")) * stacked("u"), LN(x @ stacked("W")) * stacked("w")
    f, i, o, g = np.split(of_h + of_x + stacked("b"), 4)
    c = sigma(f) * c + sigma(i) * np.tanh(g)
    return sigma(o) * np.tanh(LN(c) * p["wc"] + p["bc"]), c


def gru(p, h, x):
    p = numbers(p)
    z = sigma(x @ p["Wz"] + h @ p["Uz"] + p["bz"])
    r = sigma(x @ p["Wr"] + h @ p["Ur"] + p["br"])
    n = np.tanh(x @ p["Wn"] + r * (h @ p["Un"] + p["cn"]) + p["bn"])
    return (1 - z) * h + z * n


def lstm(p, carry, x):
    p, (h, c) = numbers(p), carry
    f, i, o = (sigma(x @ p[f"W{k}"] + h @ p[f"U{k}"] + p[f"b{k}"]) for k in "fio")
    c = f * c + i * np.tanh(x @ p["Wg"] + h @ p["Ug"] + p["bg"])
    return o * np.tanh(c), c


def min_gru(p, h, x):
    """Algorithm 3 of the paper (arXiv 2410.01201), one row."""
    p = numbers(p)
    z = sigma(x @ p["Wz"] + p["bz"])
    return (1 - z) * h + z * (x @ p["Wn"] + p["bn"])


def mogrifier(p, h, x):
    """Equations 1 and 2 of the paper (arXiv 1909.01792) before a GRU, one row."""
    p = numbers(p)
    before, rounds = h, p["Qa"].shape[0] + p["Ra"].shape[0]
    for i in range(1, rounds + 1):
        if i % 2:
            Q = p["Qa"][(i - 1) // 2] @ p["Qb"][(i - 1) // 2]
            x = 2 * sigma(Q.T @ h) * x
        else:
            R = p["Ra"][i // 2 - 1] @ p["Rb"][i // 2 - 1]
            h = 2 * sigma(R.T @ x) * h
    z, r = (sigma(x @ p["W" + k] + h @ p["U" + k] + p["b" + k]) for k in "zr")
    n = np.tanh(x @ p["Wn"] + r * (h @ p["Un"] + p["cn"]) + p["bn"])
    return (1 - z) * before + z * n


@pytest.mark.parametrize("B, T, E, H, n", [(2, 5, 3, 6, 3), (1, 1, 1, 1, 1), (1, 2, 2, 33, 11)])
@pytest.mark.parametrize(
    "init, options, equations",
    [
        (jaxgru.init_gru, {}, gru),
        (jaxgru.init_lstm, {}, lstm),
        (jaxgru.init_gru, {"layer_norm": True}, layer_norm_gru),
        (jaxgru.init_lstm, {"layer_norm": True}, layer_norm_lstm),
        (jaxgru.init_min_gru, None, min_gru),
        (jaxgru.init_mogrifier_gru, None, mogrifier),
        *[
            (partial(jaxgru.init_mogrifier_gru, num_rounds=rounds, rank=2), None, mogrifier)
            for rounds in (2, 3, 6)
        ],
    ],
)
def test_it_is_what_numpy_computes(init, options, equations, B, T, E, H, n):
    """Every step, from its equations; with blocks, a state that is not zero, random gains."""
    options = {} if options is None else {"num_blocks": n, **options}
    make = lambda: init(jax.random.key(0), E, H, dtype="float64", **options)
    layer, x = randomized(jax.eval_shape(make)), normal(B, T, E)
    carry = randomized(jaxgru.initial_carry(layer, B), 2)
    y, _ = jax.jit(jaxgru.unroll)(layer, x, carry)
    for b in range(B):
        state = jax.tree.map(lambda leaf, b=b: np.asarray(leaf[b]), carry)
        for t in range(T):
            state = equations(layer, state, x[b, t])
            h = state[0] if isinstance(state, tuple) else state
            np.testing.assert_allclose(y[b, t], h, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("B, G, n", [(2, 3, 2), (3, 1, 3), (1, 4, 1)])
def test_a_product_with_blocks_is_that_with_their_matrix(B, G, n):
    """In rows and in columns, and with the transposed weights, as gradients need it."""
    U, h, d = normal(n, 6 // n, G * 6 // n), normal(B, 6, seed=2), normal(B, G * 6, seed=3)
    gates = map(block_diagonal, np.split(U, G, axis=-1))
    matrix = np.concatenate(list(gates), axis=-1)
    for layout in (IN_ROWS, IN_COLUMNS):
        for weights, x, expected in ((U, h, h @ matrix), (U.mT, d, d @ matrix.T)):
            turned = layout.turned((jnp.asarray(weights), jnp.asarray(x)))
            seen = layout.turned(layout.product(*turned))
            np.testing.assert_allclose(seen, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("init", [jaxgru.init_gru, jaxgru.init_lstm])
def test_each_block_is_drawn_by_itself(init):
    """Orthogonal blocks; PyTorch's bounds of k inputs; one block is the matrix."""
    key = jax.random.key(0)
    p = init(key, 3, 6, num_blocks=2, dtype="float64")
    blocks = [U for name, U in vars(by_gate(p)).items() if name[0] == "U"]
    for block in (block for U in blocks for block in np.asarray(U)):
        np.testing.assert_allclose(block @ block.T, np.eye(3), atol=1e-14)
    assert 0.49 < np.abs(init(key, 1, 64, num_blocks=16, init="pytorch").U).max() <= 0.5
    chex.assert_trees_all_equal(init(key, 3, 6, num_blocks=1), init(key, 3, 6))


@pytest.mark.parametrize("init", [jaxgru.init_gru, jaxgru.init_lstm])
def test_in_other_libraries_blocks_are_a_matrix(init):
    """PyTorch computes the same; a norm inside the cell is refused."""
    make = lambda **options: randomized(init(jax.random.key(0), 3, 4, dtype="float64", **options))
    layer, x = make(num_blocks=2), normal(2, 5, 3)
    expected = to_torch(layer)(torch.tensor(x).swapaxes(0, 1))[0].detach().swapaxes(0, 1)
    np.testing.assert_allclose(jaxgru.unroll(layer, jnp.asarray(x))[0], expected, rtol=1e-10)
    for convert in (to_torch, to_linen, to_nnx):
        with pytest.raises(InteropError, match="LayerNorm"):
            convert(make(layer_norm=True))
    if init is jaxgru.init_gru:
        layer = layer.replace(cn=jnp.zeros_like(layer.cn))
    matrices = dense(layer)
    for convert in (to_linen, lambda p: from_nnx(to_nnx(p)), lambda p: from_torch(to_torch(p))):
        chex.assert_trees_all_equal(convert(layer), convert(matrices))


@pytest.mark.parametrize(
    "init, options, says",
    [
        ("gru", {"num_blocks": 4}, "num_blocks is 4; it must divide hidden_dim, 6"),
        ("lstm", {"num_blocks": 0}, "num_blocks is 0; it must be a whole number from 1"),
        ("gru", {"layer_norm": 1}, "layer_norm is an int; it must be True or False"),
        (
            "gru",
            {"layer_norm": True, "reset_gate": "before"},
            "they are False, 'before', 'tanh' and None",
        ),
        (
            "gru",
            {"layer_norm": True, "second_bias": True},
            "they are True, 'after', 'tanh' and None",
        ),
        ("mogrifier_gru", {"num_rounds": 1}, "num_rounds is 1; it must be a whole number from 2"),
        ("mogrifier_gru", {"rank": 0}, "rank is 0; it must be a whole number from 1"),
        ("mogrifier_gru", {"dtype": int}, "dtype is <class 'int'>; it must be a floating-point"),
        ("lstm", {"proj_size": 0}, "proj_size is 0; it must be a whole number from 1"),
        ("lstm", {"proj_size": 2, "layer_norm": True}, "they are True and 1"),
    ],
)
def test_what_no_layer_can_be(init, options, says):
    with unchecked(), pytest.raises(ValueError, match=says):
        getattr(jaxgru, f"init_{init}")(jax.random.key(0), 3, 6, **options)


@pytest.mark.parametrize("T", [1, 7])
def test_steps_in_parallel_are_steps_one_by_one(T, monkeypatch):
    """Also those that forget (a = 0) and those that keep (a = 1): values and gradients."""
    a, b, first = normal(T, 2, 3), normal(T, 2, 3, seed=2), normal(2, 3, seed=3)
    a[T // 2], b[T // 2, 0], a[-1] = 0, 0, 1
    h, expected = first, np.zeros_like(a)
    for t in range(T):
        expected[t] = h = a[t] * h + b[t]
    arguments = tuple(map(jnp.asarray, (a, b, first)))
    plain = value_and_gradients(partial(cells.min_gru.one_by_one, False), *arguments)
    np.testing.assert_allclose(plain[0], expected, rtol=1e-12)
    for way in (cells.min_gru.one_by_one, cells.min_gru.in_parallel):
        monkeypatch.setattr(cells.min_gru, "one_by_one", way)
        seen = value_and_gradients(cells.min_gru.linear_recurrence, *arguments)
        chex.assert_trees_all_close(seen, plain, rtol=1e-12, atol=1e-13)
