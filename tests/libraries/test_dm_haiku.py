"""What is dm-haiku's own: getters, precision policies, compilations, the forget bias, refusals."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against import layer, normal, randomized, refused, resets
from conftest import slow
from random_models import same_bits

hk = pytest.importorskip("haiku")
jmp = pytest.importorskip("jmp")

from jaxgru.libraries.dm_haiku import dynamic_unroll, from_haiku, to_haiku  # noqa: E402


class Model(hk.Module):
    """A core, with resets or without, from zeros; which dynamic_unroll is the one changed line."""

    def __init__(self, unroll, kind, dones=None):
        super().__init__()
        self.unroll = unroll
        self.core = getattr(hk, kind)(6)
        self.dones = dones

    def __call__(self, x):
        core = self.core if self.dones is None else hk.ResetCore(self.core)
        inputs = x if self.dones is None else (x, self.dones)
        return self.unroll(core, inputs, core.initial_state(x.shape[1]))


def test_parameters_as_the_core_sees_them():
    """A getter of the user's own, for mixed precision, say, acts as before."""
    x = normal(5, 3, 4, dtype=np.float32)
    halved = lambda getter, value, context: getter(value) / 2

    def function(unroll):
        def run(x):
            with hk.custom_getter(halved):
                return Model(unroll, "GRU")(x)

        return hk.transform(run)

    params = function(hk.dynamic_unroll).init(jax.random.key(0), x)
    both = (function(f).apply(params, None, x) for f in (dynamic_unroll, hk.dynamic_unroll))
    chex.assert_trees_all_close(*both, rtol=1e-5, atol=1e-5)


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
    x = normal(5, 3, 4, dtype=np.float32)
    dones = resets(5, 3) if where == "ResetCore" else None
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

        ours = results(dynamic_unroll)
        theirs = results(hk.dynamic_unroll)
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, theirs)
    exact = policy.compute_dtype == policy.output_dtype == jnp.float32

    def as_float32(tree):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)

    d_ours, ours = as_float32(ours)
    d_theirs, theirs = as_float32(theirs)
    chex.assert_trees_all_close(ours, theirs, rtol=0, atol=1e-6 if exact else 0.03)
    for d, e in zip(jax.tree.leaves(d_ours), jax.tree.leaves(d_theirs), strict=True):
        assert np.linalg.norm(d - e) < (0.01 if exact else 0.05) * np.linalg.norm(e)


def test_an_lstms_weights_there_and_back():
    """The forget bias is Haiku's plus one: up to rounding, and exact from one half to two.

    By Sterbenz's lemma; zeros in Haiku are ones here, the usual start of both.
    """
    p = layer("lstm")
    q = from_haiku(to_haiku(p))
    assert same_bits(q.replace(b=p.b), p) and same_bits(q.b[6:], p.b[6:])
    np.testing.assert_allclose(q.b, p.b, rtol=0, atol=2 * np.finfo(np.float32).eps)
    forget = jnp.asarray([0.5, 1, 2, 1 + 2**-23, 0.7, np.float32(np.pi / 2)])
    p = p.replace(b=jnp.concatenate([forget, p.b[6:]]))
    assert same_bits(from_haiku(to_haiku(p)), p)


def test_a_pair_that_is_no_lstm_state():
    x = normal(5, 3, 4, dtype=np.float32)
    h = jnp.ones((3, 6))
    c = jnp.zeros((3, 6))

    def results(state):
        model = hk.transform(lambda: dynamic_unroll(hk.LSTM(6), x, state))
        return model.apply(model.init(jax.random.key(0)), None)

    assert same_bits(results((h, c)), results(hk.LSTMState(h, c)))


X = np.zeros((5, 3, 4), np.float32)
DONES = resets(5, 3)
H = np.zeros((3, 6), np.float32)
KEY = jax.random.key(0)
gru = lambda: hk.GRU(6)
GRU = hk.transform(lambda: dynamic_unroll(gru(), X, H))


def drawn(core, *args):
    return lambda: hk.transform(lambda: dynamic_unroll(core(), *args)).init(KEY)


def of_shapes(**shapes):
    return lambda: from_haiku({name: jnp.zeros(shape) for name, shape in shapes.items()})


test_refusals = refused(
    (drawn(lambda: hk.ResetCore(gru()), (X, DONES.T), H), r"should_reset has shape \(3, 5\)"),
    (drawn(gru, X, H[:2]), r"initial_state has shape \(2, 6\); it must be \(3, 6\)"),
    (drawn(lambda: hk.LSTM(6), X, H), r"must be a pair of arrays \(3, 6\), as an LSTM has"),
    (drawn(gru, None, H), "input_sequence is NoneType; it must be an array"),
    (of_shapes(w_i=(5, 12), w_h=(3, 12), b=12), r"w_h has shape \(3, 12\); it must be \(4, 12\)"),
    (of_shapes(w=(9, 20), b=12), r"w has shape \(9, 20\); it must be \(9, 12\)"),
    (lambda: GRU.apply({"gru": {"w": jnp.zeros(1)}}, None), "'w_i' for module 'gru'"),  # Haiku's
)
