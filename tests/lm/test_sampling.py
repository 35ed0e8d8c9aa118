"""Generation: the state is carried exactly, one compilation a shape, the distribution asked for."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked
from conftest import slow
from random_models import random_params

import jaxgru
from jaxgru.lm import ModelConfig, apply, generate
from jaxgru.lm.sampling import _kth_largest_by_bisection, draw, filter_logits, kth_largest

V = 7
PROMPT = jnp.array([[1, 2, 3], [4, 5, 6]], jnp.int32)
KEY = jax.random.key(3)


@pytest.fixture(scope="module", params=["gru", "lstm", "rnn", "mlp"])
def params(request):
    memory = {"context_length": 4} if request.param == "mlp" else {}
    config = ModelConfig(request.param, V, embedding_dim=5, hidden_dim=8, num_layers=2, **memory)
    return random_params(config)  # large weights: the state speaks loudly in the logits


def test_greedy_is_the_argmax_of_apply_over_the_whole_text(params):
    """Each new token is what `apply` finds likeliest after reading everything before it."""
    tokens, carry, _ = generate(params, KEY, PROMPT, 12, temperature=0)
    text = jnp.concatenate([PROMPT, tokens], axis=1)
    logits, seen = apply(params, text[:, :-1])
    np.testing.assert_array_equal(tokens, jnp.argmax(logits, axis=-1)[:, 2:])
    chex.assert_trees_all_close(carry, seen, atol=1e-5, rtol=1e-7)


def test_stateless_depends_on_the_last_token_alone(params):
    tokens, _, _ = generate(params, KEY, PROMPT, 12, temperature=0, stateful=False)
    token = PROMPT[:, -1:]
    for t in range(12):
        logits, _ = apply(params, token)
        token = jnp.argmax(logits, axis=-1)
        np.testing.assert_array_equal(tokens[:, t : t + 1], token)
    other = jnp.concatenate([PROMPT[::-1, :2], PROMPT[:, 2:]], axis=1)
    same, _, _ = generate(params, KEY, other, 12, temperature=0, stateful=False)
    np.testing.assert_array_equal(tokens, same)


@pytest.mark.parametrize("params", ["gru", *slow("mlp", "lstm")], indirect=True)
@pytest.mark.parametrize("n, stateful", [(1, True), (5, False), *slow((9, True))])
def test_going_on_from_carry_and_key_is_exact(params, n, stateful):
    options = dict(temperature=0.8, top_k=5, top_p=0.9, stateful=stateful)
    whole, last, _ = generate(params, KEY, PROMPT, 10, **options)
    first, carry, key = generate(params, KEY, PROMPT, n, **options)
    rest, carry, _ = generate(params, key, first[:, -1:], 10 - n, carry, **options)
    np.testing.assert_array_equal(jnp.concatenate([first, rest], axis=1), whole)
    chex.assert_trees_all_close(carry, last, atol=1e-5, rtol=1e-7)


@pytest.mark.parametrize("params", ["gru"], indirect=True)
def test_the_second_call_of_a_shape_compiles_nothing(params, compilations):
    """Other values of everything that is not a shape: weights, prompt, key, carry, temperature."""
    other = jax.tree.map(lambda x: x + 1, params)
    prompt = PROMPT + 0
    key = jax.random.key(9)
    zeros = jaxgru.lm.initial_carry(params, len(PROMPT))
    _, carry, _ = generate(params, KEY, PROMPT, 6, zeros, temperature=0.8, top_k=3, top_p=0.9)
    compilations.clear()
    generate(other, key, prompt, 6, carry, temperature=0.5, top_k=3, top_p=0.4)
    assert compilations == []
    generate(params, key, prompt, 8, carry, temperature=0.5, top_k=3, top_p=0.4)
    assert compilations == []
    generate(params, key, prompt, 9, carry, temperature=0.5, top_k=3, top_p=0.4)
    assert compilations != []  # the listener does hear a compilation


@pytest.mark.parametrize("params", ["gru"], indirect=True)
@pytest.mark.parametrize("flag", [None, 0, jnp.array([True])])
def test_stateful_is_true_or_false(params, flag):
    says = "^stateful is [A-Z]?[a-z].*; it must be True or False"
    with unchecked(), pytest.raises(ValueError, match=says):
        generate(params, KEY, PROMPT, 3, stateful=flag)


@pytest.mark.parametrize("params", ["gru", *slow("lstm", "mlp")], indirect=True)
def test_generate_under_vmap(params):
    keys = jnp.stack([KEY, jax.random.key(4)])
    mapped = jax.vmap(lambda key: generate(params, key, PROMPT, 5, temperature=0.7)[0])(keys)
    for tokens, key in zip(mapped, keys, strict=True):
        np.testing.assert_array_equal(tokens, generate(params, key, PROMPT, 5, temperature=0.7)[0])


# probabilities 0.5, 0.25, 0.15, 0.1 in another order
LOGITS = jnp.log(jnp.array([[0.15, 0.5, 0.1, 0.25]]))


@pytest.mark.parametrize(
    "options, probabilities",
    [
        ({}, [0.15, 0.5, 0.1, 0.25]),
        ({"top_k": 2}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_p": 0.75}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_p": 0.76}, [1 / 6, 5 / 9, 0, 5 / 18]),
        ({"top_p": 1e-46}, [0, 1, 0, 0]),  # 0 in float32
        ({"temperature": 0.0}, [0, 1, 0, 0]),
        ({"temperature": 1e-40, "top_p": 0.5}, [0, 1, 0, 0]),
        ({"top_p": 1.0}, [0.15, 0.5, 0.1, 0.25]),
        # of what top_k left: 2/3 and 1/3, of which the first reaches 0.6
        ({"top_k": 2, "top_p": 0.6}, [0, 1, 0, 0]),
        # squared and normalised: 0.0225, 0.25, 0.01, 0.0625 over 0.345
        ({"temperature": 0.5}, [0.0225 / 0.345, 0.25 / 0.345, 0.01 / 0.345, 0.0625 / 0.345]),
        # 0.25 / 0.345 = 0.72 reaches 0.7 alone only after the temperature
        ({"temperature": 0.5, "top_p": 0.7}, [0, 1, 0, 0]),
    ],
)
def test_filtered_distribution_by_hand(options, probabilities):
    filtered = filter_logits(LOGITS, **{"temperature": 1.0} | options)
    np.testing.assert_allclose(jax.nn.softmax(filtered)[0], probabilities, atol=1e-6)


def test_top_p_1_leaves_no_token_out():
    """Though the float32 running sum of a thousand probabilities reaches 1 before the last."""
    logits = 3 * jax.random.normal(jax.random.key(0), (5, 1000))
    assert np.isfinite(filter_logits(logits, 1.0, top_p=1.0)).all()


@pytest.mark.parametrize("params", ["gru"], indirect=True)
@pytest.mark.parametrize("options, message", [
    ({"temperature": -0.1}, "temperature is -0.1"),
    ({"temperature": 10**400}, r"temperature is 1000.*; it must be a finite number"),
    ({"temperature": np.ones(2)}, r"temperature is an array, float64 \(2,\); it must be a f"),
    ({"temperature": np.True_}, "temperature is .*True.*; it must be a finite"),
    ({"top_p": 0.0}, "top_p is 0.0"),
    ({"top_k": 0}, "top_k is 0"),
    ({"top_k": V + 1}, f"top_k is {V + 1}.*vocabulary's {V}"),
    ({"top_k": 1.5}, "top_k is 1.5; it must be a whole number"),
    ({"num_tokens": 1.5}, "num_tokens is 1.5; it must be a whole number"),
    ({"num_tokens": 2**31}, "num_tokens is 2147483648; it must be a whole number from 1"),
    ({"prompt": PROMPT[:, :0]}, r"prompt is int32 \(2, 0\); it must be integers \(B, P\)"),
    ({"prompt": PROMPT[0]}, r"prompt is int32 \(\d,\); it must be"),
    ({"prompt": PROMPT.at[1, 0].set(-1)}, "contains -1; the vocabulary's tokens are 0 to 6"),
    ({"prompt": PROMPT.at[0, 2].set(V)}, "contains 7; the vocabulary's tokens are 0 to 6"),
    ({"prompt": np.array([[2**32 + 1]])}, f"contains {2**32 + 1}"),  # 1 in 32 bits
    ({"prompt": PROMPT > 2}, "prompt is bool"),
    ({"stop": [True]}, "stop is bool"),
    ({"prompt": PROMPT.astype(float)}, "prompt is float32"),
])  # fmt: skip
def test_refuses_what_cannot_be_sampled(params, options, message):
    options = {"prompt": PROMPT, "num_tokens": 3} | options
    with unchecked(), pytest.raises(jaxgru.UserError, match=message):
        generate(params, KEY, **options)


@pytest.mark.parametrize("params", ["gru"], indirect=True)
def test_a_carry_of_another_batch(params):
    with unchecked(), pytest.raises(ValueError, match="one entry per layer"):
        generate(params, KEY, PROMPT, 3, jaxgru.lm.initial_carry(params, 3))


@pytest.mark.parametrize("params", ["gru"], indirect=True)
def test_options_that_are_arrays_are_their_numbers(params):
    expected, _, _ = generate(
        params, KEY, PROMPT, 5, temperature=0.8, top_k=3, top_p=0.5, stateful=False
    )
    arrays = dict(temperature=jnp.float32(0.8), top_k=jnp.int32(3), top_p=jnp.float32(0.5))
    tokens, _, _ = generate(params, KEY, PROMPT, jnp.int32(5), **arrays, stateful=False)
    np.testing.assert_array_equal(tokens, expected)


@pytest.mark.parametrize("params", ["gru", "lstm", "mlp"], indirect=True)
def test_no_rows(params):
    tokens, carry, _ = generate(params, KEY, PROMPT[:0], 4, top_k=2, top_p=0.5)
    assert tokens.shape == (0, 4)
    chex.assert_trees_all_equal(carry, jaxgru.lm.initial_carry(params, 0))


@pytest.mark.parametrize("dtype", ["uint8", *slow("int8", "uint32")])
def test_the_prompts_dtype_is_not_the_tokens(dtype):
    """Tokens up to 999 do not fit into 8 bits."""
    params = random_params(ModelConfig("gru", 1000, 2, 3, 1))
    expected, _, _ = generate(params, KEY, PROMPT, 20)
    assert expected.max() > 255
    tokens, _, _ = generate(params, KEY, PROMPT.astype(dtype), 20)
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(tokens, expected)


OPTIONS = [
    {"temperature": 0}, {"temperature": 0.8}, {"temperature": 1e-40},
    {"top_k": 3}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("params", ["gru"], indirect=True)
@pytest.mark.parametrize("options", OPTIONS)
def test_where_logits_are_nan_the_token_is_minus_1(params, options):
    """One bad weight, a bad carry, a traced token outside the vocabulary: and only in its row."""

    @jax.jit
    def sampled(params, prompt, carry):
        return generate(params, KEY, prompt, 3, carry, **options)[0]

    carry = jaxgru.lm.initial_carry(params, 2)
    good = sampled(params, PROMPT, carry)
    assert (good >= 0).all()
    for bad in (-1, V):
        tokens = sampled(params, PROMPT.at[1, 0].set(bad), carry)
        np.testing.assert_array_equal(tokens[1], -1)
        if options == {"temperature": 0}:  # the draws of one row are not those of two
            np.testing.assert_array_equal(tokens[0], good[0])
    nan_carry = jax.tree.map(lambda h: h + jnp.nan, carry)
    np.testing.assert_array_equal(sampled(params, PROMPT, nan_carry), -1)
    head = params.head.replace(bo=params.head.bo.at[4].set(jnp.nan))
    np.testing.assert_array_equal(sampled(params.replace(head=head), PROMPT, carry), -1)


@pytest.mark.parametrize("params", ["rnn"], indirect=True)
def test_a_traced_temperature_that_is_none_gives_minus_1(params):
    sampled = jax.jit(lambda t: generate(params, KEY, PROMPT, 3, temperature=t)[0])
    for temperature in (-0.5, jnp.nan):
        np.testing.assert_array_equal(sampled(temperature), -1)


def carry_sum(carry):
    return sum(jnp.sum(jnp.sin(h)) for h in jax.tree.leaves(carry))


@jax.jit
@jax.grad
def gradients_over_a_text(params, text):
    return carry_sum(jaxgru.lm.apply(params, text)[1])


@pytest.mark.parametrize("params", ["lstm"], indirect=True)
@pytest.mark.parametrize("options", [OPTIONS[0], *slow(OPTIONS[2], OPTIONS[5])])
def test_gradients_take_the_sampled_tokens_as_constants(params, options):
    """Those of the carry are those of `apply` over the text that was sampled."""

    def sampled(params):
        tokens, carry, _ = generate(params, KEY, PROMPT, 4, **options)
        return carry_sum(carry), tokens

    gradients, tokens = jax.jit(jax.grad(sampled, has_aux=True))(params)
    text = np.concatenate([PROMPT, tokens], axis=1)[:, :-1]
    expected = gradients_over_a_text(params, text)
    chex.assert_trees_all_close(gradients, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("params", ["gru"], indirect=True)
def test_the_gradient_with_respect_to_the_temperature_is_zero(params):
    def sampled(temperature):
        options = dict(temperature=temperature, top_k=3, top_p=0.5)
        return carry_sum(generate(params, KEY, PROMPT, 3, **options)[1])

    assert jax.jit(jax.grad(sampled))(0.7) == 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float64])
@pytest.mark.parametrize("V", [1, 2, 65, 1000])
def test_the_kth_largest_is_top_ks(V, dtype):
    """Every k of rows with ties, both zeros, infinities, the tiniest and the hugest numbers."""
    with jax.enable_x64(dtype == jnp.float64):
        rng = np.random.default_rng(V)
        x = rng.normal(0, 3, (4, V))
        x[1] = np.round(x[1])
        x[2] = rng.choice([0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 3e38, -3e38, 1.0], V)
        x[3] = 0.5
        x = jnp.asarray(x, dtype)
        ks = [k for k in sorted({1, 2, 30, V // 2 + 1, V}) if k <= V]
        top_k = lambda x, k: jax.lax.top_k(x, k)[0][:, -1:]
        ways = _kth_largest_by_bisection, kth_largest, top_k
        by_bisection, seen, expected = jax.jit(lambda x: [[f(x, k) for k in ks] for f in ways])(x)
        np.testing.assert_array_equal(by_bisection, expected)
        np.testing.assert_array_equal(seen, expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_logits_of_16_bits_are_drawn_from_as_float32(dtype):
    """Their own sums would have a few hundred values: of 1,000 likely tokens, some had none."""
    logits = jnp.log(jnp.linspace(1, 2, 1000))[None].astype(dtype)
    keys = jax.random.split(KEY, 300)

    @jax.jit
    def tokens(logits):
        return jax.vmap(lambda key: draw(key, filter_logits(logits, 0.9, top_p=0.95)))(keys)

    np.testing.assert_array_equal(tokens(logits), tokens(logits.astype(jnp.float32)))


@pytest.mark.parametrize("u, expected", [(0.0, 1), (0.24, 1), (0.26, 3), (0.999, 4), (1.0, 4)])
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(u, expected, monkeypatch):
    """p = 0, 1/4, 0, 1/4, 1/2, 0, at the ends of the unit interval, too: u can round up to 1."""
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape, dtype: jnp.full(shape, u, dtype))
    logits = jnp.log(jnp.array([[0, 0.25, 0, 0.25, 0.5, 0]]))
    assert draw(KEY, logits).tolist() == [expected]


@pytest.mark.parametrize("temperature", [1e-6, 1e-20, 1e-30, 1e-37, 1e-38, 1e-40, 5e-324])
def test_next_to_no_temperature_is_greedy(temperature):
    """Through `generate`, whose program need not round l/temperature before it subtracts."""
    params = random_params(ModelConfig(vocab_size=30, embedding_dim=2, hidden_dim=3))
    prompts = jnp.arange(30, dtype=jnp.int32)[:, None]
    for row in prompts[:, None]:
        tokens, *_ = generate(params, jax.random.key(1), row, 1, temperature=temperature)
        greedy, *_ = generate(params, jax.random.key(1), row, 1, temperature=0)
        np.testing.assert_array_equal(tokens, greedy)


def test_a_traced_temperature_of_0_draws_from_equals():
    """Each of two equal largest logits half of the time, to 5 standard deviations."""
    n = 10_000
    logits = jnp.tile(jnp.array([[1.0, 3.0, -2.0, 3.0]]), (n, 1))
    tokens = jax.jit(lambda t: draw(KEY, filter_logits(logits, t)))(0.0)
    counts = np.bincount(tokens, minlength=4)
    assert counts[0] == counts[2] == 0 and abs(counts[1] - n / 2) < 5 * np.sqrt(n / 4)
