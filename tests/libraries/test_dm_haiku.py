"""hk.dynamic_unroll, also of hk.ResetCore, and ours: the same numbers; weights both ways."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import (
    CASES,
    alike_under_strict_promotion,
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
from conftest import slow
from random_models import same_bits

from jaxgru.libraries import InteropError

hk = pytest.importorskip("haiku")
jmp = pytest.importorskip("jmp")

from jaxgru.libraries.dm_haiku import dynamic_unroll, from_haiku, to_haiku  # noqa: E402

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
            unroll(hk.ResetCore(core), batch_major, state, False, True, return_all_states=True),
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


class Model(hk.Module):
    """A core, with resets or without, from zeros; which dynamic_unroll is the one changed line."""

    def __init__(self, unroll, kind, dones=None):
        super().__init__()
        self.unroll, self.core, self.dones = unroll, getattr(hk, kind)(6), dones

    def __call__(self, x, **options):
        core = self.core if self.dones is None else hk.ResetCore(self.core)
        inputs = x if self.dones is None else (x, self.dones)
        return self.unroll(core, inputs, core.initial_state(x.shape[1]), **options)


@pytest.mark.parametrize(
    "kind, policy, where",
    [
        *((kind, "p=f32,c=bf16,o=bf16", kind) for kind in ("GRU", "LSTM")),
        ("GRU", "p=f32,c=f32,o=bf16", "GRU"),
        ("GRU", "p=f32,c=bf16,o=bf16", "ResetCore"),
        ("LSTM", "p=f32,c=bf16,o=f32", "Linear"),
        ("GRU", "p=f32,c=bf16,o=bf16", "Model"),
        *slow(
            ("LSTM", "p=f32,c=bf16,o=f32", "Model"),
            ("LSTM", "p=f32,c=bf16,o=bf16", "Linear"),
            ("GRU", "p=f16,c=f16,o=f32", "GRU"),
            ("LSTM", "p=f32,c=f32,o=bf16", "LSTM"),
            ("LSTM", "p=f32,c=bf16,o=bf16", "ResetCore"),
            *((kind, "p=f32,c=bf16,o=f32", kind) for kind in ("GRU", "LSTM")),
        ),
        ("GRU", "p=bf16,c=f32,o=f32", "GRU"),
    ],
)
def test_policies_of_mixed_precision(kind, policy, where):
    """Values, to the rounding of the narrowest dtype, all dtypes, those of gradients, too."""
    x, dones = normal(5, 3, 4, dtype=np.float32), resets(5, 3) if where == "ResetCore" else None
    policy = jmp.get_policy(policy)
    with hk.mixed_precision.push_policy(Model if where == "Model" else getattr(hk, where), policy):

        def results(unroll):
            model = hk.without_apply_rng(hk.transform(lambda x: Model(unroll, kind, dones)(x)))
            params = jax.eval_shape(model.init, jax.random.key(0), x)

            def loss(params, x):
                outputs = model.apply(params, x)
                return sum(jnp.sum(jnp.float32(y) ** 2) for y in jax.tree.leaves(outputs)), outputs

            gradients = jax.grad(loss, argnums=(0, 1), has_aux=True)
            return jax.jit(gradients)(randomized(params), x)

        ours, theirs = results(dynamic_unroll), results(hk.dynamic_unroll)
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, theirs)
    exact = policy.compute_dtype == policy.output_dtype == jnp.float32
    as_float32 = lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
    (d_ours, ours), (d_theirs, theirs) = as_float32(ours), as_float32(theirs)
    chex.assert_trees_all_close(ours, theirs, rtol=0, atol=1e-6 if exact else 0.03)
    for d, e in zip(jax.tree.leaves(d_ours), jax.tree.leaves(d_theirs), strict=True):
        assert np.linalg.norm(d - e) < (0.01 if exact else 0.05) * np.linalg.norm(e)


def test_it_compiles_once_outside_of_jit(compilations):
    """Also with keys, which a scan would reserve; a second call of Haiku's compiles again."""
    x = normal(5, 3, 4, dtype=np.float32)

    def function(x):
        return Model(dynamic_unroll, "GRU")(x), hk.next_rng_key()

    model, key = hk.transform(function), jax.random.key(0)
    params = model.init(key, x)
    model.apply(params, key, x)
    assert compilations
    compilations.clear()
    model.apply(params, key, x)
    assert not compilations


def test_forward_mode_of_the_plain_implementation():
    x = normal(3, 2, 4, dtype=np.float32)

    def derivative(unroll, **options):
        model = hk.transform(lambda x: Model(unroll, "LSTM")(x, **options)[0])
        params = randomized(jax.eval_shape(model.init, jax.random.key(0), x))
        return jax.jit(jax.jacfwd(lambda x: model.apply(params, None, x)))(x)

    ours = derivative(dynamic_unroll, implementation="autodiff")
    np.testing.assert_allclose(ours, derivative(hk.dynamic_unroll), 1e-5, 1e-5)


def test_strict_promotion():
    x, dones = normal(5, 3, 4, dtype=np.float32), resets(5, 3)
    model = hk.transform(lambda x: Model(dynamic_unroll, "LSTM", dones)(x, reverse=True))
    params = randomized(jax.eval_shape(model.init, jax.random.key(0), x))
    alike_under_strict_promotion(lambda: model.apply(params, None, x))


def test_weights_there_and_back():
    p = layer("gru")
    assert same_bits(from_haiku(to_haiku(p)), p)
    p = layer("gru, second bias")
    q = from_haiku(to_haiku(p))
    assert same_bits((q.b[:12], q.b[12:], q.c), (p.b[:12] + p.c, p.b[12:], None))
    p = layer("lstm")
    q = from_haiku(to_haiku(p))
    assert same_bits(q.replace(b=p.b), p) and same_bits(q.b[6:], p.b[6:])
    np.testing.assert_allclose(q.b, p.b, rtol=0, atol=2 * np.finfo(np.float32).eps)


def test_the_forget_bias_is_exact_from_one_half_to_two():
    """Sterbenz's lemma; zeros in Haiku are ones here, the usual start of both."""
    forget = jnp.asarray([0.5, 1, 2, 1 + 2**-23, 0.7, np.float32(np.pi / 2)])
    p = layer("lstm")
    p = p.replace(b=jnp.concatenate([forget, p.b[6:]]))
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
            (
                np.zeros((1, 5, 3, 4)),
                r"is float64 \(1, 5, 3, 4\); it must .* with or without a batch axis",
            ),
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

    @pytest.mark.parametrize("core", ["GRU", "LSTM"])
    def test_parameters_that_haiku_may_add(self, core):
        x = np.zeros((5, 3, 4), np.float32)
        model = hk.transform(lambda x: Model(dynamic_unroll, core)(x))
        params = model.init(jax.random.key(0), x)
        module = "model/~/gru" if core == "GRU" else "model/~/lstm/linear"
        more = params | {module: params[module] | {"b_h": jnp.ones(6)}}
        with pytest.raises(InteropError, match=f"{module} has a parameter b_h, but the parameters"):
            model.apply(more, None, x)
        more = params | {f"{module}/linear_1": {"w": jnp.ones(6)}}
        with pytest.raises(InteropError, match=f"{module}/linear_1 has a parameter w, but the"):
            model.apply(more, None, x)
        other = params | {"model/~/gru_1": {"w": jnp.ones(6)}, "model/~/lstm_1/linear": {}}
        model.apply(other, None, x)

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
        with pytest.raises(InteropError, match="an RNNParams cannot .* a VanillaRNN with ReLU"):
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
