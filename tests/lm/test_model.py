"""The whole model: state in and out, dropout sites, transformations, refusals."""

import functools
from functools import partial
from typing import get_type_hints

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked
from conftest import slow
from jaxtyping import jaxtyped
from random_models import random_params

import jaxgru
from jaxgru import Dropout
from jaxgru.cells.products import embed
from jaxgru.lm import ModelConfig, apply, step
from jaxgru.lm.generation import Options
from jaxgru.lm.model import flatten, round_model, stepper, token_nll
from jaxgru.lm.processors import MinP

KINDS = {
    "gru": ModelConfig(vocab_size=5, embedding_dim=3, hidden_dim=4, num_layers=2),
    "lstm": ModelConfig("lstm", 5, 3, 4, num_layers=2, final_norm=True),
    "mlp": ModelConfig("mlp", 5, 3, 4, num_layers=2, context_length=3),
    "tied": ModelConfig("lstm", 5, 3, 4, num_layers=2, proj_size=3, tied_embedding=True),
    "smallest": ModelConfig("rnn", vocab_size=2, embedding_dim=1, hidden_dim=1, num_layers=1),
}
FEW_KINDS = ["lstm", "smallest", *slow("gru", "mlp", "tied")]
TOKENS = jnp.array([[0, 1, 1, 0, 1, 0], [1, 1, 0, 0, 0, 1]], jnp.int32)


@functools.cache
def perturbed(config, seed=0):
    """Parameters with nothing at a special value: no zero bias, no LayerNorm scale of one."""
    return random_params(config, seed, scale=0.5)


@pytest.fixture(params=KINDS)
def params(request):
    return perturbed(KINDS[request.param])


def test_apply_is_step_after_step(params):
    """`apply`'s fast unroll and `step`'s plain cells are two ways to the same numbers."""
    logits, carry = apply(params, TOKENS)
    state = jaxgru.lm.initial_carry(params, 2)
    for t in range(TOKENS.shape[1]):
        expected, state = step(params, TOKENS[:, t], state)
        np.testing.assert_allclose(logits[:, t], expected, rtol=2e-5, atol=2e-6)
    chex.assert_trees_all_close(carry, state, rtol=2e-5, atol=2e-6)


def test_parameters_have_the_shapes_of_their_annotations(params):
    """A typechecker cannot look: JAX builds the same classes with leaves of any kind."""
    for struct in (params, *params.layers, params.head, params.norm):
        with jaxtyped("context"):
            for name, hint in get_type_hints(type(struct)).items():
                value = getattr(struct, name)
                assert not isinstance(value, jax.Array) or isinstance(value, hint), name


def test_no_carry_is_a_carry_of_zeros(params):
    zeros = jaxgru.lm.initial_carry(params, 2)
    a = apply(params, TOKENS)
    b = apply(params, TOKENS, zeros)
    chex.assert_trees_all_close(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("params", ["lstm", "mlp"], indirect=True)
def test_a_reset_begins_a_row_anew(params):
    """By hand: the state is zero before each marked token, and goes on elsewhere."""
    reset = np.array([[0, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0]], bool)
    _, carry = apply(params, TOKENS[:, ::-1])
    logits, last = apply(params, TOKENS, carry, reset=reset)
    first = jax.tree.map(lambda c: c[:1], carry)
    pieces = [(0, 0, 1, first), (0, 1, 4, None), (0, 4, 6, None), (1, 0, 6, None)]
    for row, begin, end, before in pieces:
        alone, after = apply(params, TOKENS[row : row + 1, begin:end], before)
        np.testing.assert_allclose(logits[row, begin:end], alone[0], rtol=2e-5, atol=2e-6)
        if end == 6:
            ours = jax.tree.map(lambda c, row=row: c[row : row + 1], last)
            chex.assert_trees_all_close(ours, after, rtol=2e-5, atol=2e-6)
    says = r"reset is bool \(6, 2\); it must be bool \(2, 6\)"
    with unchecked(), pytest.raises(ValueError, match=says):
        apply(params, TOKENS, reset=reset.T)


def test_a_carry_handed_back_is_traced_once(params):
    """Its shapes, dtypes and weak types are those of `initial_carry`: a loop compiles once."""
    chex.clear_trace_counter()
    carry = jaxgru.lm.initial_carry(params, 2)
    apply = jax.jit(chex.assert_max_traces(jaxgru.lm.apply, n=1))
    step = jax.jit(chex.assert_max_traces(jaxgru.lm.step, n=1))
    for _ in range(3):
        _, carry = apply(params, TOKENS, carry)
        _, carry = step(params, TOKENS[:, 0], carry)


def test_the_state_matters_and_every_layer_has_its_own(params):
    """Resetting any one layer's entry to zero changes the logits: none is a passenger."""
    _, carry = apply(params, TOKENS)
    logits, _ = apply(params, TOKENS[:, :1], carry)
    for i, entry in enumerate(carry):
        lost = list(carry)
        lost[i] = jax.tree.map(jnp.zeros_like, entry)
        changed, _ = apply(params, TOKENS[:, :1], tuple(lost))
        assert np.abs(changed - logits).max() > 1e-4


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_outside_of_jit_the_second_call_of_a_shape_compiles_nothing(kind, compilations):
    """Nor does the second gradient. The numbers are those of a program."""
    params = perturbed(KINDS[kind])
    other = perturbed(KINDS[kind], seed=1)
    layers = (p.layers for p in (params, other))
    x = np.ones((2, 3, params.embedding.shape[1]))

    def outputs(params, layers):
        logits, carry = jaxgru.lm.apply(params, TOKENS)
        y, _ = jaxgru.unroll(layers, x)
        h, _ = jaxgru.step(layers, x[:, 0], jaxgru.initial_carry(layers, 2))
        return logits, jaxgru.lm.step(params, TOKENS[:, 0], carry)[0], y, h

    def loss(layers):
        return jaxgru.unroll(layers, x)[0].sum()

    first, second = layers
    outputs(params, first)
    jax.grad(loss)(first)
    compilations.clear()
    seen = outputs(other, second), jax.grad(loss)(second)
    assert compilations == []
    expected = jax.jit(outputs)(other, second), jax.jit(jax.grad(loss))(second)
    assert compilations != []
    chex.assert_trees_all_close(seen, expected, rtol=1e-5, atol=1e-6)  # float32's rounding


def test_the_public_functions_under_jit_vmap_grad_and_scan():
    params = perturbed(KINDS["gru"])
    expected, last = jaxgru.lm.apply(params, TOKENS)
    jitted, _ = apply(params, TOKENS)
    np.testing.assert_allclose(jitted, expected, rtol=1e-5, atol=1e-6)
    mapped, _ = jax.vmap(lambda row: apply(params, row[None]))(TOKENS)
    np.testing.assert_allclose(mapped[:, 0], expected, rtol=1e-5, atol=1e-6)

    def scanned(carry, tokens):
        logits, carry = apply(params, tokens[:, None], carry)
        return carry, logits[:, 0]

    carry, logits = jax.lax.scan(scanned, jaxgru.lm.initial_carry(params, 2), TOKENS.T)
    np.testing.assert_allclose(logits.swapaxes(0, 1), expected, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(carry, last, rtol=1e-5, atol=1e-6)
    grads = jax.grad(lambda p: apply(p, TOKENS)[0].sum())(params)
    assert all(np.isfinite(g).all() and g.any() for g in jax.tree.leaves(grads.layers))


@pytest.mark.parametrize("params", FEW_KINDS, indirect=True)
def test_forward_mode_through_the_plain_implementation(params):
    """A slope and a Hessian times a vector, against reverse mode through the fast one."""
    along = jax.tree.map(lambda leaf: jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), params)

    def loss(params, implementation="auto"):
        return jnp.sum(jnp.sin(apply(params, TOKENS, implementation=implementation)[0]))

    def slope(params):
        products = jax.tree.map(jnp.vdot, jax.grad(loss)(params), along)
        return sum(jax.tree.leaves(products))

    plain = partial(loss, implementation="autodiff")
    expected = jax.jit(jax.value_and_grad(slope))(params)
    _, seen = jax.jit(partial(jax.jvp, jax.value_and_grad(plain)))((params,), (along,))
    chex.assert_trees_all_close(seen, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("round", [lambda p: p, partial(round_model, dtype=jnp.bfloat16)])
def test_a_tied_embedding_is_one_array_used_twice(round):
    """Its gradient is the sum of those of an embedding and of a head of the same values."""
    tied = perturbed(KINDS["tied"])
    apart = tied.replace(head=tied.head.replace(Wo=tied.embedding.T))
    assert jaxgru.lm.num_params(tied) == jaxgru.lm.num_params(apart) - 5 * 3

    def loss(params):
        return token_nll(apply(round(params), TOKENS)[0], TOKENS).mean()

    (value, seen), (expected, grads) = (jax.jit(jax.value_and_grad(loss))(p) for p in (tied, apart))
    assert value == pytest.approx(float(expected), rel=1e-6)
    both = grads.embedding + grads.head.Wo.T
    assert min(jnp.abs(g).max() for g in (grads.embedding, grads.head.Wo)) > 0.01
    np.testing.assert_allclose(seen.embedding, both, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(seen.layers, grads.layers, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("small", [0, 256])
def test_a_token_outside_the_vocabulary_gives_nan_not_a_guess(small, monkeypatch):
    """With fewer tokens than the vocabulary and with more, and in both ways of a sampler."""
    monkeypatch.setattr("jaxgru.lm.model.SMALL_VOCABULARY", small)
    params = perturbed(KINDS["gru"])
    carry = jaxgru.lm.initial_carry(params, 2)
    run = jax.jit(partial(jaxgru.lm.apply, params))
    prepared = jax.jit(stepper(params))
    for outside in (-1, -5, 5):
        for T in (3, 6):
            logits, _ = run(TOKENS[:1, :T].at[0, 1].set(outside))
            assert np.isfinite(logits[0, 0]).all() and np.isnan(logits[0, 1:]).all()
        for logits, _ in (
            step(params, jnp.array([0, outside]), carry),
            prepared(jnp.array([0, outside]), carry),
        ):
            assert np.isfinite(logits[0]).all() and np.isnan(logits[1]).all()


@pytest.mark.parametrize("params", ["gru"], indirect=True)
@pytest.mark.parametrize("dtype", [bool, "uint8", "int8"])
def test_tokens_of_any_dtype_are_numbers(params, dtype):
    expected, _ = apply(params, TOKENS)
    logits, _ = apply(params, TOKENS.astype(dtype))
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("params", ["gru"], indirect=True)
def test_parameters_may_be_numpy_arrays(params):
    expected, _ = apply(params, TOKENS[:, :1])
    logits, _ = jaxgru.lm.apply(jax.tree.map(np.asarray, params), TOKENS[:, :1])
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("params", ["gru", "mlp"], indirect=True)
def test_no_rows(params):
    logits, carry = apply(params, TOKENS[:0])
    assert logits.shape == (0, 6, params.head.bo.size)
    assert jax.tree.map(jnp.shape, carry) == jax.tree.map(
        jnp.shape, jaxgru.lm.initial_carry(params, 0)
    )


H2 = jnp.zeros((2, 4))


@pytest.mark.parametrize("function, tokens, carry, says", [
    (apply, jnp.zeros(3, jnp.int32), None, r"\(B, T\)"),
    (apply, jnp.zeros((2, 0), jnp.int32), None, "at least 1"),
    (apply, jnp.zeros((2, 6)), None, r"tokens is float32 \(2, 6\); it must be integers"),
    (apply, "ROMEO", None, "tokens is str; it must be an array"),
    (apply, np.array([[2**32 + 1, 0]]), None, "contains 4294967297, which does not fit into int32"),
    (apply, TOKENS, (H2,), "one entry per layer"),
    (apply, TOKENS, (H2[:1], H2[:1]), "one entry per layer"),
    (apply, TOKENS, (H2, (H2, H2)), "one entry per layer"),
    (apply, TOKENS, (H2.astype(int),) * 2, "dtype is int32"),
    (step, TOKENS, (H2, H2), r"token is \(2, 6\); it must be \(B,\), one"),
    (step, jnp.zeros(2), (H2, H2), "token is float32 .*; it must be integers"),
    (step, TOKENS[:, 0], (H2,), "the carry's shapes .* one entry per layer"),
    (step, TOKENS[:1, 0], (H2, H2), "the carry's shapes .* one entry per layer"),
    (step, TOKENS[:, 0], (H2.astype("float16"),) * 2, "the carry's dtype is float16"),
])  # fmt: skip
def test_refuses_misshapen_tokens_and_carries(function, tokens, carry, says):
    """2³² + 1 would be 1 in 32 bits."""
    with unchecked(), pytest.raises(ValueError, match=says):
        function(perturbed(KINDS["gru"]), tokens, carry)


@pytest.mark.parametrize("small", [0, 256])
def test_a_stepper_is_step_after_step(params, small, monkeypatch):
    """With the embedding multiplied beforehand, and without."""
    monkeypatch.setattr("jaxgru.lm.model.SMALL_VOCABULARY", small)
    prepared = jax.jit(stepper(params))
    seen = expected = jaxgru.lm.initial_carry(params, 2)
    for t in range(3):
        ours, seen = prepared(TOKENS[:, t], seen)
        theirs, expected = step(params, TOKENS[:, t], expected)
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_rounded_weights_give_float32_to_the_precision_of_bfloat16(kind):
    """Logits and states are float32 and near; only matrices of recurrence and head are rounded."""
    params = perturbed(KINDS[kind])
    rounded = round_model(params, jnp.bfloat16)
    dtypes = {name: leaf.dtype for name, leaf in flatten(rounded).items()}
    matrices = {name for name, leaf in flatten(params).items() if leaf.ndim > 1} - {"embedding"}
    matrices |= {"head.Wo"}  # also of a tied model
    assert {name for name, dtype in dtypes.items() if dtype == jnp.bfloat16} == matrices
    logits, carry = apply(params, TOKENS)
    near, near_carry = apply(rounded, TOKENS)
    assert {leaf.dtype for leaf in jax.tree.leaves((near, near_carry))} == {jnp.dtype("float32")}
    error = np.abs(near - logits).max() / np.abs(logits).max()
    assert 0 < error < 4 * 2**-8, error  # a bfloat16 is within 2⁻⁹; some products follow each other


def test_an_embedding_in_half_precision_adds_up_the_gradients_of_many_tokens():
    table = jnp.ones((2, 1), jnp.bfloat16)
    ids = jnp.zeros(1024, jnp.int32)
    seen = jax.grad(lambda table: embed(table, ids).astype(jnp.float32).sum())(table)
    assert seen.tolist() == [[1024], [0]]  # where bfloat16 adds ones, their sum ends at 256


@pytest.mark.parametrize("T", [1, *slow(2, 3)])
@pytest.mark.parametrize("kind", ["gru", *slow(*(kind for kind in KINDS if kind != "gru"))])
def test_gradients_with_rounded_weights_of_any_number_of_steps(kind, T):
    """XLA's CPU back end has no code for every bfloat16 product that it makes of one step."""
    params = perturbed(KINDS[kind], seed=1)  # in which no gradient is a sum that cancels
    carry = jax.tree.map(lambda h: h + 0.3, jaxgru.lm.initial_carry(params, 2))

    def loss(params):
        logits, _ = apply(params, TOKENS[:, :T], carry)
        return jnp.sum(jnp.sin(logits))

    def rounded_loss(params):
        return loss(round_model(params, jnp.bfloat16))

    expected, gradients = (jax.jit(jax.grad(f))(params) for f in (loss, rounded_loss))
    for wanted, seen in zip(*map(jax.tree.leaves, (expected, gradients)), strict=True):
        assert np.abs(seen - wanted).max() <= 0.05 * np.abs(wanted).max()


def test_tokens_may_be_lists():
    params = perturbed(KINDS["gru"])
    carry = jaxgru.lm.initial_carry(params, 2)
    with unchecked():
        logits, _ = apply(params, TOKENS.tolist())
        first_logits, _ = step(params, TOKENS[:, 0].tolist(), carry)
    np.testing.assert_array_equal(logits, apply(params, TOKENS)[0])
    np.testing.assert_array_equal(first_logits, step(params, TOKENS[:, 0], carry)[0])


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("kind", ["gru", *slow(*(kind for kind in KINDS if kind != "gru"))])
def test_promotes_nothing_implicitly(kind, x64):
    """With matrices rounded to bfloat16: the loss's gradient, steps, sampling and beam search."""
    params = jax.eval_shape(lambda p: round_model(p, jnp.bfloat16), perturbed(KINDS[kind]))
    dropout = Dropout(jax.random.key(0), 0.3, "state")

    def loss(params, implementation):
        logits, _ = apply(params, TOKENS, None, dropout, implementation)
        return token_nll(logits, TOKENS).mean()

    def others(params):
        carry = jaxgru.lm.initial_carry(params, len(TOKENS))
        sampled = jaxgru.lm.generate(
            params, jax.random.key(1), TOKENS, 2, temperature=0.5, top_k=2, top_p=0.9,
            lengths=np.array([6, 2]), stop=[1], logits_processor=MinP(0.1), return_logprobs=True,
        )  # fmt: skip
        likeliest = jaxgru.lm.beam_search(params, TOKENS, 2, 2, stop=np.array([1]))
        return jaxgru.lm.step(params, TOKENS[:, 0], carry), sampled, likeliest

    strict_ranks = jax.numpy_rank_promotion("raise")
    strict_dtypes = jax.numpy_dtype_promotion("strict")
    with jax.enable_x64(x64), strict_ranks, strict_dtypes:
        for implementation in ("auto", "autodiff", "wavefront"):
            jax.eval_shape(jax.grad(partial(loss, implementation=implementation)), params)
        seen = jax.eval_shape(others, params)
    assert not any(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(seen))


@pytest.mark.parametrize("what", ["a list", "all that lm.load returns", "its layers"])
def test_what_is_no_parameters(what):
    lm = jaxgru.lm
    model = lm.load("elman_alpha")
    params, config, tokenizer = model
    wrong = {"a list": [1, 2], "its layers": params.layers}.get(what, model)
    tokens = [[1, 2]]
    for call in (
        lambda: lm.apply(wrong, tokens),
        lambda: lm.step(wrong, [1], None),
        lambda: lm.initial_carry(wrong, 1),
        lambda: lm.num_params(wrong),
        lambda: lm.generate(wrong, jax.random.key(0), tokens, 2),
        lambda: lm.beam_search(wrong, tokens, 2, 2),
        lambda: lm.score(wrong, tokenizer, "to be"),
        lambda: list(lm.score_lines(wrong, tokenizer, ["to be"])),
        lambda: lm.stream_text(wrong, tokenizer, "to be", Options()),
        lambda: lm.save("no.safetensors", wrong, config, tokenizer),
    ):
        with unchecked(), pytest.raises(jaxgru.UserError, match="^params is .*; it must be a jaxg"):
            call()


def test_without_jit():
    """`JAX_DISABLE_JIT=1`: the same tokens, greedy ones and drawn ones."""
    params = perturbed(KINDS["gru"])
    run = partial(jaxgru.lm.generate, params, jax.random.key(0), TOKENS[:, :2], 2)
    for options in ({"temperature": 0}, {"top_k": 3, "top_p": 0.9}):
        expected = run(**options)[0]
        with jax.disable_jit():
            np.testing.assert_array_equal(run(**options)[0], expected)
