"""hk.dynamic_unroll, also of hk.ResetCore, and ours: the same numbers; weights both ways."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import (
    CASES,
    carry_of,
    layer,
    normal,
    precision,
    randomized,
    resets,
    same_cost,
    same_numbers,
)
from annotations import unchecked
from random_models import same_bits

from jaxgru.interop import InteropError

hk = pytest.importorskip("haiku")

from jaxgru.interop.dm_haiku import dynamic_unroll, from_haiku, to_haiku  # noqa: E402

CORES = pytest.mark.parametrize("kind", ["GRU", "LSTM"])


def states(kind, B, H, dtype):
    carry = carry_of(B, H, dtype, kind == "LSTM")
    return hk.LSTMState(*carry) if kind == "LSTM" else carry


def model(kind, H, unroll, everything=True):
    """A user's model; which dynamic_unroll is the one changed line."""

    def function(x, state, dones):
        core = getattr(hk, kind)(H)
        plain = unroll(core, x, state)
        noise = hk.dropout(hk.next_rng_key(), 0.5, hk.Linear(2)(plain[0]))
        if not everything:
            return plain, noise
        batch_major = x.swapaxes(0, 1), dones.T
        return (
            unroll(hk.ResetCore(core), (x, dones), state),
            unroll(core, x[:, 0], jax.tree.map(lambda s: s[0], state), reverse=True),
            unroll(hk.ResetCore(core), batch_major, state, False, return_all_states=True),
            noise,
        )

    return hk.transform(function)


@CORES
@pytest.mark.parametrize("dtype, sizes", CASES)
def test_the_same_call_gives_the_same_numbers(kind, dtype, sizes):
    """With resets, backwards, batch-major; random draws that follow are the same, too."""
    with precision(dtype):
        T, B, E, H = sizes
        x, state, dones = normal(T, B, E, dtype=dtype), states(kind, B, H, dtype), resets(T, B)
        everything = dtype == np.float64 and T > 1
        ours, theirs = (model(kind, H, f, everything) for f in (dynamic_unroll, hk.dynamic_unroll))
        key = jax.random.key(0)
        params = randomized(jax.eval_shape(theirs.init, key, x, state, dones))
        same_numbers(
            lambda params, x, state: ours.apply(params, key, x, state, dones),
            lambda params, x, state: theirs.apply(params, key, x, state, dones),
            *(params, x, state),
        )


@CORES
def test_the_same_initial_parameters(kind):
    x, state = normal(5, 3, 4, dtype=np.float32), states(kind, 3, 6, np.float32)
    ours, theirs = (
        jax.jit(model(kind, 6, unroll, False).init)(jax.random.key(1), x, state, resets(5, 3))
        for unroll in (dynamic_unroll, hk.dynamic_unroll)
    )
    assert same_bits(ours, theirs)


def test_the_cost_is_that_of_unroll():
    x, state = normal(5, 3, 4, dtype=np.float32), jnp.zeros((3, 6))
    model = hk.transform(lambda x: dynamic_unroll(hk.GRU(6), x, state)[0])
    params = randomized(jax.eval_shape(model.init, jax.random.key(0), x))
    module = lambda params, x: model.apply(params, None, x)
    same_cost(module, params, from_haiku(params["gru"]), x, time_major=True)


def test_lists_of_numbers_and_a_pair_that_is_no_lstm_state():
    x, (h, c) = normal(5, 3, 4, dtype=np.float32), states("LSTM", 3, 6, np.float32)

    def results(*args):
        model = hk.transform(lambda: dynamic_unroll(hk.LSTM(6), *args))
        return model.apply(model.init(jax.random.key(0)), None)

    assert same_bits(results(x.tolist(), (h.tolist(), c)), results(x, hk.LSTMState(h, c)))


def test_parameters_as_the_core_sees_them():
    """A getter of the user's own, for mixed precision, say, acts as before."""
    x, state = normal(5, 3, 4, dtype=np.float32), states("GRU", 3, 6, np.float32)

    def function(unroll):
        def halved(getter, value, context):
            return getter(value) / 2

        def run(x):
            with hk.custom_getter(halved):
                return unroll(hk.GRU(6), x, state)

        return hk.transform(run)

    params = function(hk.dynamic_unroll).init(jax.random.key(0), x)
    ours, theirs = (function(f).apply(params, None, x) for f in (dynamic_unroll, hk.dynamic_unroll))
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_weights_there_and_back():
    p = layer("gru")
    assert same_bits(from_haiku(to_haiku(p)), p)
    p = layer("gru, second bias")
    q = from_haiku(to_haiku(p))
    assert same_bits((q.bz, q.br, q.cz), (p.bz + p.cz, p.br + p.cr, None))
    p = layer("lstm")
    q = from_haiku(to_haiku(p))
    assert same_bits(q.replace(bf=p.bf), p)
    np.testing.assert_allclose(q.bf, p.bf, rtol=0, atol=2 * np.finfo(np.float32).eps)


def test_the_forget_bias_is_exact_from_one_half_to_two():
    """Sterbenz's lemma; zeros in Haiku are ones here, the usual start of both."""
    p = layer("lstm").replace(bf=jnp.asarray([0.5, 1, 2, 1 + 2**-23, 0.7, np.float32(np.pi / 2)]))
    assert same_bits(from_haiku(to_haiku(p)), p)


class TestRefusals:
    def test_cores(self):
        def run(core, x):
            return hk.transform(lambda: dynamic_unroll(core(), x, None)).init(jax.random.key(0))

        x = normal(5, 3, 4, dtype=np.float32)
        with pytest.raises(InteropError, match="the core is a VanillaRNN; .* has ReLU where"):
            run(lambda: hk.VanillaRNN(6), x)
        with pytest.raises(InteropError, match="the core is a VanillaRNN"):
            run(lambda: hk.ResetCore(hk.VanillaRNN(6)), (x, resets(5, 3)))
        with pytest.raises(InteropError, match="an hk.ResetCore takes a pair"):
            run(lambda: hk.ResetCore(hk.GRU(6)), x)
        with pytest.raises(InteropError, match="should_reset has more than one part"):
            parts = hk.LSTMState(resets(5, 3), resets(5, 3))
            run(lambda: hk.ResetCore(hk.LSTM(6)), (x, parts))

    @pytest.mark.parametrize(
        "core, state, says",
        [
            (hk.GRU, None, "initial_state is a NoneType; it must be an array"),
            (hk.GRU, np.zeros((2, 6)), r"initial_state has shape \(2, 6\); it must be \(3, 6\)"),
            (hk.LSTM, np.zeros((3, 6)), r"must be a pair of arrays \(3, 6\), as an LSTM has"),
            (hk.GRU, np.ones((3, 6), bool), "initial_state is bool; it must be floating-point"),
        ],
    )
    def test_a_state_that_does_not_fit(self, core, state, says):
        x = np.zeros((5, 3, 4))
        with pytest.raises(ValueError, match=says):
            hk.transform(lambda: dynamic_unroll(core(6), x, state)).init(None)  # draws nothing

    @pytest.mark.parametrize(
        "x, says",
        [
            (None, "input_sequence is a NoneType; it must be an array"),
            (
                np.zeros((5, 3, 4), int),
                r"input_sequence is int64 \(5, 3, 4\); it must be floating-",
            ),
            (np.zeros((1, 5, 3, 4)), r"is float64 \(1, 5, 3, 4\); it must .* a batch axis or none"),
            (
                np.zeros((0, 3, 4)),
                r"input_sequence has shape \(0, 3, 4\); it must have at least one step",
            ),
        ],
    )
    def test_inputs(self, x, says):
        model = hk.transform(lambda: dynamic_unroll(hk.GRU(6), x, np.zeros((3, 6))))
        with pytest.raises(ValueError, match=says):
            model.init(None)

    def test_one_sequence_that_is_not_time_major(self):
        """Haiku exchanges its steps and features."""
        model = hk.transform(
            lambda: dynamic_unroll(hk.GRU(6), np.zeros((4, 4)), np.zeros(6), time_major=False)
        )
        with pytest.raises(InteropError, match=r"one sequence, \(4, 4\); .* needs time_major=True"):
            model.init(None)

    @pytest.mark.parametrize("params", [{}, {"gru": {"w": jnp.zeros(1)}}])
    def test_the_parameters_of_another_module(self, params):
        model = hk.transform(
            lambda: dynamic_unroll(hk.GRU(6), np.zeros((5, 3, 4)), np.zeros((3, 6)))
        )
        with pytest.raises(InteropError, match="the parameters are not those of gru: w_i, w_h, b"):
            model.apply(params, None)

    def test_resets(self):
        x = np.zeros((5, 3, 4)), resets(3, 5)
        core = lambda: hk.ResetCore(hk.GRU(6))
        with pytest.raises(
            InteropError, match=r"should_reset has shape \(3, 5\); it must be \(5, 3"
        ):
            hk.transform(lambda: dynamic_unroll(core(), x, np.zeros((3, 6)))).init(None)

    def test_weights(self):
        with pytest.raises(
            InteropError, match="hk.GRU applies the reset gate before the product, this GRU after"
        ):
            to_haiku(layer("gru after"))
        with pytest.raises(InteropError, match="a RNNParams cannot .* a VanillaRNN with ReLU"):
            to_haiku(layer("rnn"))
        with pytest.raises(InteropError, match="the parameters b, w_i are not those of an hk.GRU"):
            from_haiku({"b": jnp.zeros(1), "w_i": jnp.zeros(1)})
        with unchecked(), pytest.raises(InteropError, match="the parameters are a NoneType; they"):
            from_haiku(None)
        with unchecked(), pytest.raises(ValueError, match="w is a NoneType; it must be an array"):
            from_haiku({"w": None, "b": jnp.zeros(4)})

    @pytest.mark.parametrize(
        "shapes, says",
        [
            (dict(w_i=(5, 12), w_h=(4, 9), b=12), r"w_h has shape \(4, 9\); it must be \(4, 12\)"),
            (dict(w_i=(5, 12), w_h=(4, 12), b=9), r"b has shape \(9,\); it must be \(12,\)"),
            (dict(w_i=12, w_h=(4, 12), b=12), r"w_i has shape \(12,\); it must be \(12, 12\)"),
            (dict(w=(9, 20), b=12), r"w has shape \(9, 20\); it must be \(9, 12\)"),
            (dict(w=(3, 20), b=20), r"w has shape \(3, 20\); it must be \(6, 20\)"),
            (dict(w=(3, 5), b=5), r"b has shape \(5,\); it must be \(4,\)"),
            (dict(w=(), b=()), r"the tensor b has shape \(\); it must be \(0,\)"),
        ],
    )
    def test_weights_of_other_shapes(self, shapes, says):
        with pytest.raises(InteropError, match=says):
            from_haiku({name: jnp.zeros(shape) for name, shape in shapes.items()})
