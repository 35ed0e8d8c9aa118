"""What is flax.nnx's own: resets, lengths, directions of its RNN, modules of Params, refusals."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import carry_of, close, layer, nnx_cell, normal, refused, resets, same_numbers, scanned
from annotations import unchecked
from flax import nnx
from random_models import same_bits

import jaxgru
from jaxgru import Dropout
from jaxgru.libraries import LibraryError
from jaxgru.libraries.flax_nnx import RNN, Layer, from_nnx


@pytest.mark.parametrize(
    "cell_class, start",
    [("GRUCell", None), ("OptimizedLSTMCell", jax.nn.initializers.constant(0.3))],
)
def test_resets_as_in_a_scan_of_the_cell(cell_class, start):
    T = 6
    B = 4
    E = 3
    H = 5
    with jax.enable_x64(True):
        with pytest.warns(UserWarning, match="carry_init") if start else nullcontext():
            cell = nnx_cell(cell_class, E, H, np.float64, carry_init=start)
        x = normal(B, T, E, dtype=np.float64)
        carry = carry_of(B, H, np.float64, cell_class != "GRUCell")
        reset = resets(B, T)
        graph, params, rest = nnx.split(RNN(cell, return_carry=True), nnx.Param, ...)

        def ours(params, x, carry):
            rnn = nnx.merge(graph, params, rest)
            return rnn(x, initial_carry=carry, reset=reset, rngs=nnx.Rngs(0))

        def theirs(params, x, carry):
            cell = nnx.merge(graph, params, rest).cell
            first = cell.initialize_carry((B, E), nnx.Rngs(0))
            carry, y = scanned(cell, first, carry, x.swapaxes(0, 1), reset.T)
            return carry, y.swapaxes(0, 1)

        same_numbers(ours, theirs, params, x, carry)


@pytest.mark.parametrize("lengths", [None, np.array([5, 2, 1])])
@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("batch", [(3,), (1, 3)])
def test_resets_backward_are_those_of_unroll(lengths, time_major, batch):
    cell = nnx_cell("GRUCell")
    x = normal(*batch, 5, 4, dtype=np.float32)
    reset = resets(3, 5).reshape(*batch, 5)
    lengths = None if lengths is None else lengths.reshape(batch)
    there = (len(batch), 0) if time_major else (0, 0)
    turn = lambda a: np.moveaxis(a, *there)
    rnn = RNN(cell, reverse=True, keep_order=True, time_major=time_major)
    y = rnn(turn(x), seq_lengths=lengths, reset=turn(reset).astype(int), rngs=nnx.Rngs(0))
    y = np.moveaxis(y, *there[::-1])
    real = np.arange(5) < (5 if lengths is None else lengths[..., None])
    expected, _ = jaxgru.unroll(from_nnx(cell), x, reset=reset, reverse=True, lengths=lengths)
    np.testing.assert_allclose(np.where(real[..., None], y, 0), expected, 1e-6, 1e-6)


def test_any_batch_axes_order_and_direction():
    def calls(x, rnn_class):
        cell = nnx_cell("GRUCell")
        other = nnx_cell("LSTMCell")
        rnn = partial(rnn_class(cell, return_carry=True), rngs=nnx.Rngs(0))
        both = nnx.Bidirectional(rnn_class(cell), rnn_class(other), return_carry=True)
        return (
            rnn(x),
            rnn(jnp.moveaxis(x, 2, 0), time_major=True, reverse=True),
            rnn(x[0, 0], reverse=True),
            rnn(x[0], reverse=True, keep_order=True),
            both(x[0], seq_lengths=np.array([5, 2, 1]), rngs=nnx.Rngs(0)),
        )

    x = normal(2, 3, 5, 4, dtype=np.float32)
    ours, theirs = (jax.jit(partial(calls, rnn_class=cls))(x) for cls in (RNN, nnx.RNN))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(close, ours, theirs)


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize(
    "T, lengths", [(5, np.array([0, 9, 3])), (130, np.array([0, 127, 3], np.int8))]
)
def test_the_carry_after_lengths_that_flax_takes(T, lengths, time_major):
    """After no step and after more than T, Flax returns the carry after the last step.

    It does not take int8 for so many steps.
    """
    cell = nnx_cell("OptimizedLSTMCell")
    x = normal(3, T, 4, dtype=np.float32)
    x = x.swapaxes(0, 1) if time_major else x
    options = dict(return_carry=True, time_major=time_major)
    call = nnx.jit(lambda rnn, lengths: rnn(x, seq_lengths=lengths, **options))
    ours = call(RNN(cell), lengths)
    theirs = call(nnx.RNN(cell), lengths.astype(np.int32))
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("copied", [copy.deepcopy, nnx.clone])
def test_a_copy_of_a_module(copied):
    """`deepcopy` makes new objects of jax.nn.sigmoid and jnp.tanh, which have no names."""
    rnn = RNN(nnx_cell("GRUCell"))
    x = normal(3, 5, 4, dtype=np.float32)
    assert same_bits(copied(rnn)(x), rnn(x))
    hard = nnx_cell("GRUCell", gate_fn=jax.jit(jax.nn.hard_sigmoid))
    with pytest.raises(LibraryError, match="this GRUCell has gate_fn=.*; it must be sigmoid"):
        from_nnx(copied(hard))


def test_bfloat16_products_beside_a_float32_state():
    cell = nnx.GRUCell(4, 6, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = normal(3, 5, 4, dtype=np.float32)
    ours, theirs = (cls(cell, return_carry=True)(x) for cls in (RNN, nnx.RNN))
    assert [leaf.dtype for leaf in ours] == [leaf.dtype for leaf in theirs] == [np.float32] * 2
    np.testing.assert_allclose(ours[1], theirs[1], atol=0.05)  # Flax rounds the gates, too
    y, carry = Layer(from_nnx(cell), jnp.bfloat16)(x)
    np.testing.assert_allclose(y, ours[1], atol=1e-6)
    assert y.dtype == carry.dtype == np.float32


def test_it_is_trained_and_saved_like_flax():
    """The parameters, their names and the module's other state are those of `nnx.RNN`."""
    cell = nnx_cell("GRUCell")
    ours = RNN(cell)
    theirs = nnx.RNN(cell)
    assert isinstance(ours, nnx.RNN)
    x = normal(3, 5, 4, dtype=np.float32)
    for module in (ours, theirs):
        module(x)
    assert same_bits(
        jax.tree.map(jax.random.key_data, *[nnx.state(ours, nnx.RngKey)]),
        jax.tree.map(jax.random.key_data, nnx.state(theirs, nnx.RngKey)),
    )
    others = nnx.filterlib.Not(nnx.RngKey)
    assert same_bits(nnx.state(ours, others), nnx.state(theirs, others))
    gradient = nnx.jit(nnx.grad(lambda rnn: jnp.sum(rnn(x))))(ours)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))
    assert jax.tree.structure(gradient) == jax.tree.structure(nnx.state(ours, nnx.Param))


def test_a_layer_of_our_own_is_a_module_of_params():
    weights = layer("gru after, second bias")
    x = normal(3, 5, 4, dtype=np.float32)
    module = Layer(weights)
    matrices = nnx.to_flat_state(nnx.state(module, nnx.PathContains("kernel"))).leaves
    assert [m.ndim for m in matrices] == [2, 2]
    gradient = nnx.jit(nnx.grad(lambda module: jnp.sum(module(x)[0])))(module)
    assert len(jax.tree.leaves(gradient)) == len(jax.tree.leaves(weights)) == 5


def test_dropout_by_rngs_and_deterministic():
    weights = layer("gru")
    x = normal(3, 5, 4, dtype=np.float32)
    sites = [Dropout(None, 0.5, "output"), Dropout(None, 0.25, "state", "zoneout")]
    module = Layer(weights, dropout=sites, rngs=nnx.Rngs(1))
    stream = nnx.Rngs(1).dropout.fork()
    call = nnx.jit(lambda module: module(x))
    run = partial(jaxgru.unroll, weights, x)

    def drawn():
        return [site.replace(key=stream()) for site in sites]

    alike = partial(jax.tree.map, close)  # to rounding: within `jit`, it is another program
    for _ in range(2):
        alike(call(module), run(dropout=drawn()))
    of_call = module(x, rngs=nnx.Rngs(dropout=7))
    keys = nnx.Rngs(dropout=7)
    alike(of_call, run(dropout=[site.replace(key=keys.dropout()) for site in sites]))
    module.eval()
    mean = run(dropout=sites[1])  # as in the paper on zoneout
    alike(call(module), mean)
    alike(module(x, deterministic=True), mean)
    alike(module(x, deterministic=False), run(dropout=drawn()))
    module.train()
    alike(call(module), run(dropout=drawn()))
    plain = Layer(weights)
    alone = Layer(weights, dropout=sites[0])
    y = plain(x)[0]
    dropped = np.asarray(alone(x, rngs=nnx.Rngs(0))[0])
    kept = dropped != 0  # by 1/(1 − rate), as nnx.Dropout scales
    np.testing.assert_allclose(dropped, np.where(kept, y / 0.5, 0), rtol=1e-5)
    assert 0.2 < kept.mean() < 0.8
    alike(alone(x, deterministic=True), plain(x))
    with pytest.raises(LibraryError, match="the dropout of this Layer needs random numbers: give"):
        alone(x)
    own = Dropout(jax.random.key(3), 0.2, "input")
    alike(alone(x, dropout=own), run(dropout=own))


def test_integer_inputs():
    x = np.arange(60).reshape(3, 5, 4) % 7
    cell = nnx_cell("LSTMCell")
    options = dict(seq_lengths=jnp.array([1, 5, 2]), return_carry=True)
    with unchecked():  # the annotations say floats
        results = [cls(cell)(x, **options) for cls in (RNN, nnx.RNN)]
    chex.assert_trees_all_close(*results, rtol=2e-6, atol=2e-6)


X = np.ones((3, 5, 4), np.float32)


def rnn(cell_class="GRUCell", **options):
    return RNN(nnx_cell(cell_class, **options))


def altered(cell_class, part, name, weight):
    """A cell, one of whose weights is replaced."""
    cell = nnx_cell(cell_class)
    setattr(getattr(cell, part) if part else cell, name, weight)
    return lambda: from_nnx(cell)


ones = lambda *shape: nnx.Param(jnp.ones(shape))
gru = nnx.GRUCell
lora = nnx.LoRALinear(4, 18, lora_rank=2, rngs=nnx.Rngs(0))


def of_another_kind():
    """Its fields include those of a minGRU."""
    module = Layer(jaxgru.init_min_gru(jax.random.key(0), 4, 6))
    nnx.update(module, nnx.state(Layer(layer("gru"))))
    module.layer()


test_refusals = refused(
    (lambda: from_nnx(type("Own", (gru,), {})(2, 3, rngs=nnx.Rngs(0))), "Own; .* not a sub"),
    (lambda: from_nnx(layer("gru")), "ResetBeforeGRUCell; .*libraries.flax_nnx.Layer"),
    (lambda: rnn()(X, reset=resets(5, 3)), r"reset has shape \(5, 3\); it must be \(3, 5\)"),
    (lambda: rnn()(X, seq_lengths=np.arange(5)), r"seq_lengths has shape \(5,\); it must be"),
    (lambda: rnn()(X, seq_lengths=np.ones(3)), "seq_lengths are float32; they must be int"),
    (lambda: rnn("LSTMCell")(X, initial_carry=X[:, 0]), "carry must be a pair of arrays"),
    (lambda: rnn()(X[0, 0]), r"inputs has shape \(4,\); it must have steps"),
    (altered("GRUCell", "dense_i", "kernel", ones(4, 16)), r"dense_i.kernel .* be \(4, 18\)"),
    # As a hidden bias of the GRU, which google/flax PR 5595 proposes
    (altered("GRUCell", None, "bias_hn", ones(6)), "the tensor bias_hn does not belong there"),
    (altered("GRUCell", None, "dense_i", lora), "tensor dense_i.lora.lora_a does not belong"),
    (of_another_kind, "Cell.* does not belong there"),
)
