"""Generation: the state is carried exactly, one compilation a shape, the distribution asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgru
from jaxgru import ModelConfig, generate
from jaxgru.sampling import _kth_largest_by_bisection, draw, filter_logits, kth_largest

V = 7
PROMPT = jnp.array([[1, 2, 3], [4, 5, 6]], jnp.int32)
KEY = jax.random.key(3)


@pytest.fixture(scope="module", params=["gru", "lstm", "rnn", "mlp"])
def params(request):
    memory = {"context_length": 4} if request.param == "mlp" else {}
    config = ModelConfig(request.param, V, embedding_dim=5, hidden_dim=8, num_layers=2, **memory)
    # far from initialisation, so that the state speaks loudly in the logits
    return jax.tree.map(lambda x: 3 * x, jaxgru.init(jax.random.key(0), config))


def test_greedy_is_the_argmax_of_apply_over_the_whole_text(params):
    """Each new token is what `apply` finds likeliest after reading everything before it."""
    tokens, carry, _ = generate(params, KEY, PROMPT, 12, temperature=0)
    text = jnp.concatenate([PROMPT, tokens], axis=1)
    logits, seen = jaxgru.apply(params, text[:, :-1])
    np.testing.assert_array_equal(tokens, jnp.argmax(logits, axis=-1)[:, 2:])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), carry, seen)


def test_stateless_depends_on_the_last_token_alone(params):
    tokens, _, _ = generate(params, KEY, PROMPT, 12, temperature=0, stateful=False)
    token = PROMPT[:, -1:]
    for t in range(12):
        logits, _ = jaxgru.apply(params, token)
        token = jnp.argmax(logits, axis=-1)
        np.testing.assert_array_equal(tokens[:, t : t + 1], token)
    other = jnp.concatenate([PROMPT[::-1, :2], PROMPT[:, 2:]], axis=1)
    same, _, _ = generate(params, KEY, other, 12, temperature=0, stateful=False)
    np.testing.assert_array_equal(tokens, same)


@pytest.mark.parametrize("n, stateful", [(1, True), (5, False), (9, True)])
def test_going_on_from_carry_and_key_is_exact(params, n, stateful):
    options = dict(temperature=0.8, top_k=5, top_p=0.9, stateful=stateful)
    whole, last, _ = generate(params, KEY, PROMPT, 10, **options)
    first, carry, key = generate(params, KEY, PROMPT, n, **options)
    rest, carry, _ = generate(params, key, first[:, -1:], 10 - n, carry, **options)
    np.testing.assert_array_equal(jnp.concatenate([first, rest], axis=1), whole)
    jax.tree.map(np.testing.assert_array_equal, carry, last)


def test_the_carry_handed_in_is_read(params):
    _, carry = jaxgru.apply(params, PROMPT)
    with_carry, _, _ = generate(params, KEY, PROMPT[:, -1:], 20, carry)
    without, _, _ = generate(params, KEY, PROMPT[:, -1:], 20)
    assert (with_carry != without).any()


def test_the_second_call_of_a_shape_compiles_nothing(params):
    """Other values of everything that is not a shape: weights, prompt, key, carry, temperature."""
    compiled = []

    def listener(event, duration, **_):
        if "backend_compile" in event:
            compiled.append(event)

    other = jax.tree.map(lambda x: x + 1, params)
    prompt, key = PROMPT + 0, jax.random.key(9)
    _, carry, _ = generate(params, KEY, PROMPT, 6, temperature=0.8, top_k=3, top_p=0.9)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        generate(other, key, prompt, 6, temperature=0.5, top_k=3, top_p=0.4)
        assert compiled == []
        generate(params, key, prompt, 8, temperature=0.5, top_k=3, top_p=0.4)
        assert compiled != []  # the listener does hear a compilation
    finally:
        jax.monitoring.clear_event_listeners()


def test_generate_under_jit_and_vmap(params):
    expected, _, _ = generate(params, KEY, PROMPT, 5, temperature=0.7)
    jitted = jax.jit(lambda key, t: generate(params, key, PROMPT, 5, temperature=t)[0])
    np.testing.assert_array_equal(jitted(KEY, 0.7), expected)
    keys = jnp.stack([KEY, jax.random.key(4)])
    mapped = jax.vmap(lambda key: generate(params, key, PROMPT, 5, temperature=0.7)[0])(keys)
    np.testing.assert_array_equal(mapped[0], expected)


def test_top_k_1_is_greedy(params):
    greedy, _, _ = generate(params, KEY, PROMPT, 9, temperature=0)
    top, _, _ = generate(params, KEY, PROMPT, 9, temperature=2.0, top_k=1)
    np.testing.assert_array_equal(top, greedy)


# probabilities 0.5, 0.25, 0.15, 0.1 in another order
LOGITS = jnp.log(jnp.array([[0.15, 0.5, 0.1, 0.25]]))


@pytest.mark.parametrize(
    "options, probabilities",
    [
        ({}, [0.15, 0.5, 0.1, 0.25]),
        ({"top_k": 2}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_k": 4}, [0.15, 0.5, 0.1, 0.25]),
        ({"top_p": 0.75}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_p": 0.76}, [1 / 6, 5 / 9, 0, 5 / 18]),
        ({"top_p": 0.01}, [0, 1, 0, 0]),
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


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": V + 1}, f"top_k is {V + 1}.*vocabulary's {V}"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"num_tokens": 0}, "num_tokens is 0"),
        ({"prompt": PROMPT[:, :0]}, "prompt must be"),
        ({"prompt": PROMPT[0]}, "prompt must be"),
    ],
)
def test_refuses_what_cannot_be_sampled(params, options, message):
    options = {"prompt": PROMPT, "num_tokens": 3} | options
    with pytest.raises(ValueError, match=message):
        generate(params, KEY, **options)


def test_vocabulary_of_two_and_one_unit():
    params = jaxgru.init(jax.random.key(0), ModelConfig("gru", 2, 1, 1, 1))
    tokens, carry, _ = generate(params, KEY, jnp.array([[1]]), 30, temperature=1.0, top_k=2)
    assert tokens.shape == (1, 30) and set(tokens[0].tolist()) == {0, 1}
    assert carry[0].shape == (1, 1)


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
        for k in sorted({1, 2, 30, V // 2 + 1, V}):
            if k <= V:
                expected = jax.lax.top_k(x, k)[0][:, -1:]
                np.testing.assert_array_equal(_kth_largest_by_bisection(x, k), expected)
                np.testing.assert_array_equal(kth_largest(x, k), expected)


def test_draws_follow_the_softmax():
    """20,000 draws: each count within 5 standard deviations; never what has no probability."""
    p = np.array([0.5, 0.0, 0.3, 0.001, 0.199, 0.0])
    with np.errstate(divide="ignore"):
        logits = jnp.asarray(np.log(p) + 7, jnp.float32)
    n = 20_000
    tokens = jax.jit(draw)(KEY, jnp.tile(logits, (n, 1)))
    counts = np.bincount(tokens, minlength=6)
    assert (np.abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p))).all()
    assert counts[1] == counts[5] == 0


@pytest.mark.parametrize("u, expected", [(0.0, 1), (0.24, 1), (0.26, 3), (0.999, 4), (1.0, 4)])
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(u, expected, monkeypatch):
    """p = 0, 1/4, 0, 1/4, 1/2, 0, at the ends of the unit interval, too: u can round up to 1."""
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape, dtype: jnp.full(shape, u, dtype))
    logits = jnp.log(jnp.array([[0, 0.25, 0, 0.25, 0.5, 0]]))
    assert draw(KEY, logits).tolist() == [expected]


@pytest.mark.parametrize("temperature", [1e-6, 1e-20, 1e-30, 1e-37])
def test_next_to_no_temperature_is_greedy(temperature):
    """Through `generate`, whose program need not round l/temperature before it subtracts."""
    params = jaxgru.init(
        jax.random.key(0), ModelConfig(vocab_size=30, embedding_dim=2, hidden_dim=3)
    )
    prompts = jnp.arange(30, dtype=jnp.int32)[:, None]
    for row in prompts[:, None]:
        tokens, *_ = generate(params, jax.random.key(1), row, 1, temperature=temperature)
        greedy, *_ = generate(params, jax.random.key(1), row, 1, temperature=0)
        np.testing.assert_array_equal(tokens, greedy)
