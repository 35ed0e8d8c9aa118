"""Cells that jaxgru does not know are computed by their library's own code, as without jaxgru."""

from __future__ import annotations

import math
from functools import partial

import chex
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import equinox_cell, nnx_cell, normal, refused, resets, scanned
from flax import linen as nn
from flax import nnx

from jaxgru.libraries import dm_haiku, equinox_nn, flax_linen, flax_nnx

KEY = jax.random.key(0)
RESET = resets(3, 5)
X = normal(3, 5, 4, dtype=np.float32)
IMAGES = normal(2, 3, 6, 6, 2, dtype=np.float32)


def alike(ours, theirs):
    chex.assert_trees_all_close(ours, theirs, rtol=1e-6, atol=1e-6)


# --- Flax


class Counting(nnx.RNNCellBase):
    """A cell of a user's own, without what Flax's cells have: `carry_init`, `dtype`."""

    def __init__(self):
        self.weight = nnx.Param(jnp.full((4,), 0.5))

    def __call__(self, carry, x):
        carry = carry + x * self.weight
        return carry, jnp.tanh(carry)

    def initialize_carry(self, input_shape, rngs=None, carry_init=None):
        return jnp.ones(input_shape)

    @property
    def num_feature_axes(self):
        return 1


class Subclass(nnx.GRUCell):
    def __call__(self, carry, x):
        carry, y = super().__call__(carry, x)
        return carry, 2 * y


class DroppingLSTM(nnx.LSTMCell):
    """A cell that drops the same units of its state in all steps of a call."""

    def __init__(self):
        super().__init__(4, 6, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1), rng_collection="dropout")

    def __call__(self, carry, x):
        carry, y = super().__call__(carry, x)
        return jax.tree.map(self.dropout, carry), y


def cell_with(**parts):
    """A GRUCell of which parts are replaced."""
    cell = nnx_cell("GRUCell")
    for name, part in parts.items():
        setattr(cell, name, part)
    return cell


def low_rank_cell():
    part = nnx.LoRALinear(4, 18, lora_rank=2, rngs=nnx.Rngs(0))
    part.lora.lora_b.set_value(jnp.ones((2, 18)))
    return cell_with(dense_i=part)


def linear(**options):
    return nnx.Linear(4, 18, rngs=nnx.Rngs(0), **options)


def doubled(*args, **options):
    return 2 * jax.lax.dot_general(*args, **options)


NNX = {
    "own": Counting,
    "subclass": lambda: Subclass(4, 6, rngs=nnx.Rngs(0)),
    "function": lambda: nnx_cell("LSTMCell", activation_fn=jax.nn.elu),
    "dropout": DroppingLSTM,
    "parameter": low_rank_cell,
    "no parameter": lambda: cell_with(dense_i=linear(use_bias=False)),
    "product": lambda: cell_with(dense_i=linear(dot_general=doubled)),
}


@pytest.mark.parametrize("kind", NNX)
def test_nnx(kind):
    options = dict(return_carry=True, reverse=True, seq_lengths=np.array([5, 1, 3]))

    def results(rnn):
        """Twice, because a call also counts what it draws."""
        model = rnn(NNX[kind](), broadcast_rngs="dropout")
        return model(X, **options), model(X, **options)

    alike(results(flax_nnx.RNN), results(nnx.RNN))


class LinenSubclass(nn.GRUCell):
    """Its parameters fit a GRUCell."""

    @nn.compact
    def __call__(self, carry, x):
        carry, y = super().__call__(carry, x)
        return carry, 2 * y


class Dropping(nn.RNNCellBase):
    """A cell with recurrent dropout, around another cell."""

    cell: nn.RNNCellBase
    num_feature_axes = 1  # pyright: ignore[reportAssignmentType]

    @nn.compact
    def __call__(self, carry, x):
        carry, y = self.cell(carry, x)
        return nn.Dropout(0.5, deterministic=False)(carry), y

    def initialize_carry(self, key, input_shape):
        return self.cell.initialize_carry(key, input_shape)


LINEN = {
    "subclass": (LinenSubclass(6), X, {}),
    "function": (nn.SimpleCell(6, residual=True), X, {}),
    "images": (nn.ConvLSTMCell(3, (3, 3)), IMAGES, {}),
    "dropout": (Dropping(nn.GRUCell(6)), X, dict(split_rngs={"params": False, "dropout": True})),
}


@pytest.mark.parametrize("kind", LINEN)
def test_linen(kind):
    cell, x, options = LINEN[kind]
    keys = {"params": KEY, "dropout": jax.random.key(1)}
    ours, theirs = (rnn(cell, return_carry=True, **options) for rnn in (flax_linen.RNN, nn.RNN))
    variables = theirs.init(keys, x)
    alike(ours.init(keys, x), variables)
    alike(*(rnn.apply(variables, x, rngs=keys) for rnn in (ours, theirs)))


@pytest.mark.parametrize("cell", [nn.MGUCell, partial(nn.OptimizedLSTMCell, gate_fn=nn.elu)])
def test_scanned_rnn(cell):
    x = X.swapaxes(0, 1)
    dones = RESET.T
    model = flax_linen.ScannedRNN(cell)
    first = model.initialize_carry(3, 6, cell)
    carry = jax.tree.map(lambda leaf: leaf + 0.5, first)
    variables = jax.jit(model.init)(KEY, carry, (x, dones))
    (name,) = variables["params"]
    assert name == f"{type(cell(6)).__name__}_1"
    step = partial(cell(6).apply, {"params": variables["params"][name]})
    alike(model.apply(variables, carry, (x, dones)), scanned(step, first, carry, x, dones))


# --- Equinox and Haiku


class Pair(eqx.Module):
    """Two cells, one above the other, whose state is a pair of states."""

    below: eqx.nn.GRUCell
    above: eqx.nn.GRUCell

    def __call__(self, x, state):
        below = self.below(x, state[1])
        return self.above(below, state[0]), below


@pytest.mark.parametrize("reverse", [False, True])
def test_equinox(reverse):
    cell = Pair(equinox_cell("GRUCell"), equinox_cell("GRUCell", 6))
    state = (normal(3, 6, dtype=np.float32), jnp.zeros((3, 6)))

    def one(state, x):
        after = cell(x, state)
        return after, after

    theirs = jax.vmap(lambda state, xs: jax.lax.scan(one, state, xs, reverse=reverse))
    last, states = theirs(state, X)
    ours = equinox_nn.unroll(cell, X, state, reverse=reverse, return_states=True)
    alike(ours, (last, states[0], states))
    first = jax.tree.map(lambda leaf: leaf[0], state)
    alike(equinox_nn.unroll(cell, X[0], first, reverse=reverse)[1], states[0][0])


class Halved(eqx.Module):
    """Half of a matrix, as what takes the place of a weight: a product that is not an array."""

    matrix: jax.Array

    def __matmul__(self, x):
        return 0.5 * (self.matrix @ x)


def test_equinox_with_a_replaced_weight():
    cell = equinox_cell("GRUCell")
    halved = eqx.tree_at(lambda cell: cell.weight_hh, cell, replace_fn=Halved)
    plain = eqx.tree_at(lambda cell: cell.weight_hh, cell, replace_fn=lambda weight: weight / 2)
    state = jnp.zeros((3, 6))
    alike(equinox_nn.unroll(halved, X, state), equinox_nn.unroll(plain, X, state))


class Summing(hk.RNNCore):
    """A toy core: its input is a number, its outputs are a dict, and it has no parameters."""

    def __call__(self, inputs, prev_state):
        state = prev_state + inputs[..., None]
        return {"sum": state, "inputs": inputs}, state

    def initial_state(self, batch_size):
        return jnp.zeros((2,) if batch_size is None else (batch_size, 2))


CORES = {
    "vanilla": lambda: hk.VanillaRNN(6),
    "deep": lambda: hk.DeepRNN([hk.GRU(5), jnp.tanh, hk.LSTM(6)]),
    "reset": lambda: hk.ResetCore(hk.VanillaRNN(6)),
    "subclass": lambda: type("Own", (hk.GRU,), {})(6),
}


@pytest.mark.parametrize("kind", CORES)
def test_haiku(kind):
    inputs = (X, RESET) if kind == "reset" else X

    def results(unroll):
        def run():
            core = CORES[kind]()
            return unroll(core, inputs, core.initial_state(3), False, return_all_states=True)

        model = hk.transform(run)
        return model.apply(model.init(KEY), None)

    alike(results(dm_haiku.dynamic_unroll), results(hk.dynamic_unroll))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_toy_core(batch, reverse):
    numbers = jnp.arange(5 * math.prod(batch)).reshape(5, *batch)
    first = jnp.ones((*batch, 2))

    def run(unroll):
        core = hk.ResetCore(Summing())
        return unroll(core, (numbers, numbers % 2 == 1), first, reverse=reverse, unroll=2)

    run = hk.testing.transform_and_run(run)
    alike(run(dm_haiku.dynamic_unroll), run(hk.dynamic_unroll))


def test_a_function_as_core(monkeypatch):
    """Outside of `hk.transform`, and with the name in Haiku itself replaced."""
    monkeypatch.setattr(hk, "dynamic_unroll", dm_haiku.dynamic_unroll)
    outputs, state = hk.dynamic_unroll(lambda x, state: (x + 1, state + x), jnp.arange(5), 0)
    assert outputs.tolist() == [1, 2, 3, 4, 5] and state == 10


def linen_rnn(**options):
    return flax_linen.RNN(nn.MGUCell(6)).init(KEY, X, **options)


def nnx_rnn(**options):
    return flax_nnx.RNN(Counting())(X, **options)


unroll = partial(equinox_nn.unroll, Pair(equinox_cell("GRUCell"), equinox_cell("GRUCell", 6)), X)


def haiku():
    return dm_haiku.dynamic_unroll(hk.VanillaRNN(6), X, X[0], implementation="scan")


def scanned_rnn(**options):
    return flax_linen.ScannedRNN(nn.MGUCell).init(
        KEY, X[:, 0, :3], (X.swapaxes(0, 1), RESET.T), **options
    )


known = "needs a cell that jaxgru knows: the cell is "

test_what_jaxgru_alone_has = refused(
    (partial(linen_rnn, reset=RESET), f"reset {known}MGUCell; it must be one of Flax's GRUCell"),
    (partial(linen_rnn, implementation="scan"), f"implementation {known}MGUCell"),
    (partial(nnx_rnn, reset=RESET), f"reset {known}Counting"),
    (partial(nnx_rnn, implementation="autodiff"), f"implementation {known}Counting"),
    (partial(scanned_rnn, implementation="scan"), f"implementation {known}MGUCell"),
    (partial(unroll, reset=RESET), f"reset {known}Pair; it must be one of Equinox's GRUCell, LSTM"),
    (partial(unroll, lengths=np.array([1, 2, 3])), f"lengths {known}Pair"),
    (partial(unroll, implementation="scan"), f"implementation {known}Pair"),
    (unroll, "the state is None; with Pair, whose state jaxgru does not know, it must be given"),
    (lambda: hk.transform(haiku).init(KEY), "jaxgru knows: the core is VanillaRNN; it must be"),
)
