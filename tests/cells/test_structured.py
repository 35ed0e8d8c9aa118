"""Structured and regularised cells against what others computed: PyTorch, and NumPy in float64.

`tests/layers` compares every way to compute them with the definition in `jaxgru/cells`.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from against import normal, randomized, torch_gradients, value_and_gradients
from equations import block_diagonal, gru, lstm, mogrifier, numbers, sigma
from random_models import by_gate

import jaxgru
from jaxgru import cells
from jaxgru.cells.layout import IN_COLUMNS, IN_ROWS
from jaxgru.libraries import LibraryError
from jaxgru.libraries.common import dense
from jaxgru.libraries.flax_linen import to_linen
from jaxgru.libraries.flax_nnx import from_nnx, to_nnx
from jaxgru.libraries.torch_nn import from_torch, to_torch

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("B, T, E, H, p", [(3, 5, 3, 7, 4), (1, 1, 1, 2, 1)])
def test_an_lstm_with_a_projection_is_pytorchs(B, T, E, H, p):
    """Two layers: outputs, states, and every gradient."""
    torch.manual_seed(0)
    module = torch.nn.LSTM(E, H, 2, proj_size=p, batch_first=True, dtype=torch.float64)
    x = normal(B, T, E)
    h = normal(2, B, p, seed=2)
    c = normal(2, B, H, seed=3)
    leaves = [torch.tensor(a, requires_grad=True) for a in (x, h, c)]
    y, (h_end, c_end) = module(leaves[0], tuple(leaves[1:]))
    outputs = [y, h_end[0], c_end[0], h_end[1], c_end[1]]

    def weights(i, y):
        return torch.cos(torch.arange(y.numel(), dtype=y.dtype) + i).reshape(y.shape)

    sum(torch.sum(y * weights(i, y)) for i, y in enumerate(outputs)).backward()

    layers = from_torch(module)
    carry = tuple(map(jaxgru.LSTMState, h, c))
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


def LN(x):
    """Of the paper's equation 4, with the ε that all libraries add."""
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5)


def stacked(p, name, gates):
    return np.concatenate([getattr(p, name + gate) for gate in gates], axis=-1)


def layer_norm_gru(p, h, x):
    """Equations 23 to 26 of the paper; z weights the candidate."""
    of_h = LN(h @ stacked(p, "U", "zr")) * stacked(p, "u", "zr")
    of_x = LN(x @ stacked(p, "W", "zr")) * stacked(p, "w", "zr")
    z, r = np.split(sigma(of_h + of_x + stacked(p, "b", "zr")), 2)
    of_x = LN(x @ p.Wn) * p.wn + p.bn
    n = np.tanh(of_x + r * (LN(h @ p.Un) * p.un + p.cn))
    return (1 - z) * h + z * n


def layer_norm_lstm(p, carry, x):
    """Equations 20 to 22 of the paper."""
    h, c = carry
    of_h = LN(h @ stacked(p, "U", "fiog")) * stacked(p, "u", "fiog")
    of_x = LN(x @ stacked(p, "W", "fiog")) * stacked(p, "w", "fiog")
    f, i, o, g = np.split(of_h + of_x + stacked(p, "b", "fiog"), 4)
    c = sigma(f) * c + sigma(i) * np.tanh(g)
    return sigma(o) * np.tanh(LN(c) * p.wc + p.bc), c


def peephole_lstm(p, carry, x):
    """Equations 7 to 11 of Graves 2013 (arXiv 1308.0850); coupled: of Greff et al. 2017."""
    h, c = carry
    i = sigma(x @ p.Wi + h @ p.Ui + p.pi * c + p.bi)
    f = sigma(x @ p.Wf + h @ p.Uf + p.pf * c + p.bf) if hasattr(p, "Wf") else 1 - i
    c = f * c + i * p.phi(x @ p.Wg + h @ p.Ug + p.bg)
    return sigma(x @ p.Wo + h @ p.Uo + p.po * c + p.bo) * p.phi(c), c


def min_gru(p, h, x):
    """Algorithm 3 of the paper (arXiv 2410.01201)."""
    z = sigma(x @ p.Wz + p.bz)
    return (1 - z) * h + z * (x @ p.Wn + p.bn)


def min_lstm(p, h, x):
    """Section 3.2 of the same paper: Algorithm 7 has its equations."""
    f, i = sigma(x @ p.Wf + p.bf), sigma(x @ p.Wi + p.bi)
    return f / (f + i) * h + i / (f + i) * (x @ p.Wn + p.bn)


def rg_lru(p, h, x):
    """Equations 1 to 4 of the paper (arXiv 2402.19427), of an input that is projected first."""
    u = x @ p.P + p.bp
    r, i = sigma(u @ p.Wr + p.br), sigma(u @ p.Wi + p.bi)
    a = np.exp(-8 * np.log1p(np.exp(p.Lambda)) * r)
    return a * h + np.sqrt(1 - a**2) * (i * u)


def slstm(p, carry, x):
    """Of the paper (arXiv 2405.04517, section 2.2), with the stabiliser; at the start, n is 0."""
    h, c, n, m = carry
    i, f, z, o = (
        x @ getattr(p, "W" + g) + h @ getattr(p, "U" + g) + getattr(p, "b" + g) for g in "ifzo"
    )
    log_f = np.log(sigma(f))
    new_m = np.where(n == 0, i, np.maximum(log_f + m, i))
    i, f = np.exp(i - new_m), np.where(n == 0, 0, np.exp(log_f + m - new_m))
    c, n = f * c + i * np.tanh(z), f * n + i
    return sigma(o) * c / n, c, n, new_m


def rnn(p, h, x):
    return p.phi(x @ p.Wh + h @ p.Uh + p.bh)


def mlp(p, carry, x):
    """The oldest input is lost."""
    inputs = [*carry[1], x]
    return np.tanh(sum(x @ W for x, W in zip(inputs, p.W, strict=True)) + p.b), inputs[1:]


GRU = jaxgru.init_gru
LSTM = jaxgru.init_lstm
MOGRIFIER = jaxgru.init_mogrifier_gru
RELU = {"activation": "relu"}


@pytest.mark.parametrize("B, T, E, H, n", [(2, 5, 3, 6, 3), (1, 1, 1, 1, 1), (1, 2, 2, 33, 11)])
@pytest.mark.parametrize(
    "init, options, equations",
    [
        (GRU, {"num_blocks": 0}, gru),  # n of them
        (GRU, {"num_blocks": 0, "layer_norm": True}, layer_norm_gru),
        (GRU, {"reset_gate": "before", "second_bias": True}, gru),
        (GRU, {"reset_gate": "before", **RELU}, gru),
        (LSTM, {"num_blocks": 0}, lstm),
        (LSTM, {"num_blocks": 0, "layer_norm": True}, layer_norm_lstm),
        (LSTM, RELU, lstm),
        (jaxgru.init_peephole_lstm, {}, peephole_lstm),
        (jaxgru.init_peephole_lstm, RELU, peephole_lstm),
        (jaxgru.init_coupled_lstm, {}, peephole_lstm),
        (jaxgru.init_coupled_lstm, {"peepholes": True}, peephole_lstm),
        (jaxgru.init_rnn, {}, rnn),
        (jaxgru.init_rnn, RELU, rnn),
        (cells.init_mlp, {"context_length": 3}, mlp),
        (jaxgru.init_min_gru, {}, min_gru),
        (jaxgru.init_min_lstm, {}, min_lstm),
        (jaxgru.init_rg_lru, {}, rg_lru),
        (jaxgru.init_rg_lru, {"num_blocks": 0}, rg_lru),
        (jaxgru.init_slstm, {}, slstm),
        (jaxgru.init_slstm, {"num_blocks": 0}, slstm),
        (MOGRIFIER, {}, mogrifier),
        *[(MOGRIFIER, {"num_rounds": rounds, "rank": 2}, mogrifier) for rounds in (2, 3, 6)],
    ],
)
def test_it_is_what_numpy_computes(init, options, equations, B, T, E, H, n):
    """Every step, from its equations; with blocks, a state that is not zero, random gains."""
    options = {name: n if name == "num_blocks" else value for name, value in options.items()}

    def make():
        return init(jax.random.key(0), E, H, dtype="float64", **options)

    layer = randomized(jax.eval_shape(make))
    x = normal(B, T, E)
    carry = randomized(jaxgru.initial_carry(layer, B), 2)
    y, _ = jax.jit(jaxgru.unroll)(layer, x, carry)
    for b in range(B):
        state = jax.tree.map(lambda leaf, b=b: np.asarray(leaf[b]), carry)
        for t in range(T):
            state = equations(numbers(layer), state, x[b, t])
            h = state[0] if isinstance(state, tuple) else state
            np.testing.assert_allclose(y[b, t], h, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    "init, options, equations",
    [
        (jaxgru.init_min_gru, {}, min_gru),
        (jaxgru.init_min_lstm, {}, min_lstm),
        (jaxgru.init_rg_lru, {"num_blocks": 2}, rg_lru),
        (jaxgru.init_slstm, {"num_blocks": 2}, slstm),
    ],
)
def test_its_gradient_is_the_slope_of_what_numpy_computes(init, options, equations):
    """Of every weight, of the input and of the carry, each in a random direction."""
    make = lambda: init(jax.random.key(0), 3, 4, dtype="float64", **options)
    layer, x = randomized(jax.eval_shape(make)), normal(1, 5, 3)
    carry = jax.tree.map(abs, randomized(jaxgru.initial_carry(layer, 1), 2))
    weights = normal(5, 4, seed=3)

    def loss(layer, x, carry):
        state = jax.tree.map(lambda leaf: np.asarray(leaf[0]), carry)
        total = 0
        for t in range(5):
            state = equations(numbers(layer), state, np.asarray(x[0, t]))
            total += weights[t] @ (state[0] if isinstance(state, tuple) else state)
        return total

    ours = lambda *args: (jaxgru.unroll(*args)[0][0] * weights).sum()
    arguments, structure = jax.tree.flatten((layer, jnp.asarray(x), carry))
    gradients = jax.tree.leaves(jax.jit(jax.grad(ours, (0, 1, 2)))(layer, jnp.asarray(x), carry))
    for i, (leaf, gradient) in enumerate(zip(arguments, gradients, strict=True)):
        direction = normal(*leaf.shape, seed=i)
        ends = []
        for step in (1e-6, -1e-6):
            moved = [*arguments[:i], leaf + step * direction, *arguments[i + 1 :]]
            ends.append(loss(*jax.tree.unflatten(structure, moved)))
        slope = (ends[0] - ends[1]) / 2e-6
        np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", cells.CELLS)
@pytest.mark.parametrize("implementation", ["scan", "autodiff"])
def test_every_static_option_changes_what_is_computed(name, implementation):
    """By each way through; an option that this table lacks has no value to try."""
    other = {"activation": "relu", "clip": 0.1}
    needs = {"context_length": 3} if name == "mlp" else {}

    def make():
        return cells.CELLS[name](jax.random.key(0), 3, 4, dtype="float64", **needs)

    layer = randomized(jax.eval_shape(make))
    x = normal(2, 5, 3)

    def run(layer):
        return jaxgru.unroll(layer, x, implementation=implementation)[0]

    for field in dataclasses.fields(layer):
        if field.metadata.get("static"):
            changed = layer.replace(**{field.name: other[field.name]})
            assert np.abs(run(changed) - run(layer)).max() > 1e-3, field.name


@pytest.mark.parametrize("B, G, n", [(2, 3, 2), (3, 1, 3), (1, 4, 1)])
def test_a_product_with_blocks_is_that_with_their_matrix(B, G, n):
    """In rows and in columns, and with the transposed weights, as gradients need it."""
    U = normal(n, 6 // n, G * 6 // n)
    h = normal(B, 6, seed=2)
    d = normal(B, G * 6, seed=3)
    gates = map(block_diagonal, np.split(U, G, axis=-1))
    matrix = np.concatenate(list(gates), axis=-1)
    for layout in (IN_ROWS, IN_COLUMNS):
        for weights, x, expected in ((U, h, h @ matrix), (U.mT, d, d @ matrix.T)):
            factors = layout.transpose((jnp.asarray(weights), jnp.asarray(x)))
            seen = layout.transpose(layout.matmul(*factors))
            np.testing.assert_allclose(seen, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("init", [jaxgru.init_gru, jaxgru.init_lstm])
def test_each_block_is_drawn_by_itself(init):
    """Orthogonal blocks; PyTorch's bounds of k inputs; one block is the matrix."""
    key = jax.random.key(0)
    p = init(key, 3, 6, num_blocks=2, dtype="float64")
    blocks = [U for name, U in vars(by_gate(p)).items() if name[0] == "U"]
    for block in (block for U in blocks for block in np.asarray(U)):
        np.testing.assert_allclose(block @ block.T, np.eye(3), atol=1e-14)
    assert 0.49 < np.abs(init(key, 1, 64, num_blocks=16, init_scheme="pytorch").U).max() <= 0.5
    chex.assert_trees_all_equal(init(key, 3, 6, num_blocks=1), init(key, 3, 6))


@pytest.mark.parametrize("init", [jaxgru.init_gru, jaxgru.init_lstm])
def test_in_other_libraries_blocks_are_a_matrix(init):
    """PyTorch computes the same; a norm inside the cell is refused."""

    def make(**options):
        return randomized(init(jax.random.key(0), 3, 4, dtype="float64", **options))

    layer = make(num_blocks=2)
    x = normal(2, 5, 3)
    expected = to_torch(layer)(torch.tensor(x).swapaxes(0, 1))[0].detach().swapaxes(0, 1)
    np.testing.assert_allclose(jaxgru.unroll(layer, jnp.asarray(x))[0], expected, rtol=1e-10)
    for convert in (to_torch, to_linen, to_nnx):
        with pytest.raises(LibraryError, match="LayerNorm"):
            convert(make(layer_norm=True))
    if init is jaxgru.init_gru:
        layer = layer.replace(cn=jnp.zeros_like(layer.cn))
    matrices = dense(layer)
    for convert in (to_linen, lambda p: from_nnx(to_nnx(p)), lambda p: from_torch(to_torch(p))):
        chex.assert_trees_all_equal(convert(layer), convert(matrices))
