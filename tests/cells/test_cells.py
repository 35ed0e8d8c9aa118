"""The initial distributions, and the carry before the first step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked
from random_models import by_gate

from jaxgru import cells

EVERY_INIT = pytest.mark.parametrize("init", [cells.init_gru, cells.init_lstm, cells.init_rnn])


def test_an_mlp_starts_as_a_linear_layer_of_all_its_inputs():
    p = cells.init_mlp(jax.random.key(0), 16, 50, context_length=4)
    assert p.W.shape == (4, 16, 50)
    for value in (p.W, p.b):  # fan_in 64: within ±1/8, and close to both bounds
        assert np.abs(value).max() <= 0.125 and value.max() > 0.11 and value.min() < -0.11
    assert np.var(p.W) == pytest.approx(0.125**2 / 3, rel=0.12)


@EVERY_INIT
def test_initializers_of_ones_own(init):
    """Each gate has draws of its own, of these distributions and this dtype."""
    given = dict(
        kernel_init=jax.nn.initializers.constant(2.0),
        recurrent_kernel_init=jax.nn.initializers.orthogonal(),
        bias_init=jax.nn.initializers.normal(),
    )
    with jax.enable_x64(True):
        p = vars(by_gate(init(jax.random.key(0), 3, 4, dtype="float64", **given)))
    values = {name: np.asarray(v) for name, v in p.items() if isinstance(v, jax.Array)}
    assert {v.dtype for v in values.values()} == {np.dtype("float64")}
    for name, value in values.items():
        if name[0] == "W":
            np.testing.assert_array_equal(value, np.full((3, 4), 2.0))
        elif name[0] == "U":
            np.testing.assert_allclose(value @ value.T, np.eye(4), atol=1e-14)
    drawn = [v for name, v in values.items() if name[0] in "Ub"]
    assert len({v.tobytes() for v in drawn}) == len(drawn)


@EVERY_INIT
@pytest.mark.parametrize("name", ["kernel_init", "recurrent_kernel_init", "bias_init"])
@pytest.mark.parametrize(
    "given, says",
    [
        (0.0, "is float; it must be an initializer, such as"),
        (np.zeros(1), "is ndarray; it must be an initializer"),
        (jax.nn.initializers.orthogonal, "returns function; it must return floating-point numbers"),
        (lambda *_: None, "returns NoneType; it must"),
        (lambda *_: jnp.ones((2, 2)), r"returns float32 \(2, 2\); it must return .* numbers \("),
        (lambda key, shape, dtype: jnp.ones(shape, int), r"returns int32 \(4"),
        (lambda key, shape, dtype: jnp.ones(shape, complex), r"returns complex64 \(4"),
        (jax.nn.initializers.delta_orthogonal(), r"cannot draw numbers \(4.*: Delta .* 5D"),
    ],
)
def test_what_is_no_initializer(init, name, given, says):
    with unchecked(), pytest.raises(ValueError, match=f"^{name} {says}"):
        init(jax.random.key(0), 4, 4, **{name: given})


@EVERY_INIT
def test_an_initializer_that_draws_no_narrow_numbers(init):
    """JAX's orthogonal() cannot draw bfloat16: float32 is drawn, then rounded."""
    given = dict(recurrent_kernel_init=jax.nn.initializers.orthogonal())
    wide, narrow = (
        init(jax.random.key(0), 3, 4, dtype=d, **given) for d in ("float32", "bfloat16")
    )
    for name, value in vars(wide).items():
        if name[0] == "U":
            np.testing.assert_array_equal(getattr(narrow, name), value.astype("bfloat16"))


@EVERY_INIT
def test_zero_carry(init):
    carry = init(jax.random.key(0), 3, 5).zero_carry(2)
    assert isinstance(carry, tuple) == (init is cells.init_lstm)
    for h in jax.tree.leaves(carry):
        assert h.shape == (2, 5) and h.dtype == jnp.float32 and not h.any()


@pytest.mark.parametrize("K", [1, 4])
def test_zero_carry_of_an_mlp_is_its_empty_memory(K):
    h, context = cells.init_mlp(
        jax.random.key(0), 3, 5, context_length=K, dtype=jnp.float16
    ).zero_carry(2)
    assert h.shape == (2, 5) and context.shape == (2, K - 1, 3)
    assert h.dtype == context.dtype == jnp.float16 and not h.any() and not context.any()
