"""Batches: slices of the text and nothing else, every start that is allowed and no other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgru.errors import UserError
from jaxgru.lm.config import TrainingConfig
from jaxgru.lm.data import batching
from jaxgru.lm.data.batching import check_length

# As one program each: done one by one, operations are compiled one by one
random_crops = jax.jit(batching.random_crops, static_argnums=(2, 3))
stream_windows = jax.jit(batching.stream_windows, static_argnums=(2, 3))
windows = jax.jit(batching.windows, static_argnums=(1, 2))


class TestRandomCrops:
    def test_crops_are_the_texts_own_slices_and_targets_come_one_later(self):
        tokens = np.random.default_rng(0).integers(0, 1000, 500).astype(np.int32)
        inputs, targets = random_crops(jax.random.key(0), jnp.asarray(tokens), 40, 7)
        assert inputs.shape == targets.shape == (40, 7)
        slices = {tuple(tokens[i : i + 8]) for i in range(len(tokens) - 7)}
        for x, y in zip(np.asarray(inputs), np.asarray(targets), strict=True):
            assert (*x, y[-1]) in slices
            assert (x[0], *y) in slices

    @pytest.mark.parametrize("n, length", [(20, 6), (9, 3), (12, 1), (8, 6)])
    def test_starts_cover_all_of_0_to_n_minus_t_minus_1(self, n, length):
        """The text is its own positions, so an input's first token is the crop's start."""
        inputs, targets = random_crops(jax.random.key(1), jnp.arange(n), 2000, length)
        assert set(np.asarray(inputs[:, 0]).tolist()) == set(range(n - length - 1))
        np.testing.assert_array_equal(targets, np.asarray(inputs) + 1)

    def test_starts_are_uniform(self):
        """Of 10 starts in 20,000 draws each comes 2,000 times, within 6 standard deviations."""
        inputs, _ = random_crops(jax.random.key(2), jnp.arange(14), 20_000, 3)
        counts = np.bincount(np.asarray(inputs[:, 0]), minlength=10)
        assert np.abs(counts - 2000).max() < 6 * np.sqrt(20_000 * 0.1 * 0.9)


RECIPE = TrainingConfig(batch_size=3, gradient_accumulation=2, sequence_length=5)


class TestCheckLength:
    @pytest.mark.parametrize("length", [1, 5, 128])
    def test_the_shortest_text_has_exactly_one_crop(self, length):
        check_length(length + 2, TrainingConfig(sequence_length=length), "crops", "the text")
        inputs, targets = random_crops(jax.random.key(0), jnp.arange(length + 2), 50, length)
        np.testing.assert_array_equal(inputs, np.tile(np.arange(length), (50, 1)))
        np.testing.assert_array_equal(targets, np.asarray(inputs) + 1)

    def test_streams_need_a_window_each(self):
        check_length(31, RECIPE, "streams", "the text")
        inputs, targets, _ = stream_windows(jnp.arange(31), jnp.int32(9), 6, 5)
        np.testing.assert_array_equal(inputs.ravel(), np.arange(30))
        np.testing.assert_array_equal(targets.ravel(), np.arange(1, 31))

    @pytest.mark.parametrize("n, recipe, batches, says", [
        (129, TrainingConfig(), "crops", "the text has 129 tokens.*128.*at least 130"),
        (30, RECIPE, "streams", "has 30 tokens, but 6 streams .* of 5 need at least 31"),
    ])  # fmt: skip
    def test_one_token_less_is_refused_with_the_numbers(self, n, recipe, batches, says):
        with pytest.raises(UserError, match=says):
            check_length(n, recipe, batches, "the text")


@pytest.mark.parametrize("key", [None, jax.random.key(3)])
@pytest.mark.parametrize("n, B, T", [(30, 2, 3), (2, 1, 1), (40, 1, 7), (101, 5, 4), (64, 3, 21)])
def test_a_rows_windows_of_a_stream_are_one_piece_of_the_text(n, B, T, key):
    """In each of three passes: from the text's start, or with a key from a token of a ring."""
    tokens = jnp.arange(n)  # each token is its place
    length = (n - 1) // B
    for number in range(3):
        steps = number * (length // T) + jnp.arange(length // T)
        seen = [stream_windows(tokens, step, B, T, key) for step in steps]
        assert [bool(first) for _, _, first in seen] == [True] + [False] * (len(seen) - 1)
        inputs, targets = (np.concatenate([s[i] for s in seen], axis=1) for i in (0, 1))
        start = inputs[0, 0] if key is not None else 0
        places = start + length * np.arange(B)[:, None] + np.arange(length // T * T)
        np.testing.assert_array_equal(inputs, places % n)
        np.testing.assert_array_equal(targets, (places + 1) % n)


def test_each_pass_of_a_ring_begins_at_a_token_of_its_own():
    passes = [stream_windows(jnp.arange(30), 4 * i, 2, 3, jax.random.key(3)) for i in range(3)]
    assert len({int(inputs[0, 0]) for inputs, _, _ in passes}) == 3


@pytest.mark.parametrize("n, window, batch_size", [
    (2, 1, 1), (2, 5, 3), (13, 4, 1), (13, 4, 3), (14, 4, 3), (50, 7, 2), (9, 70, 2),
])  # fmt: skip
def test_every_prediction_is_in_one_window_and_in_order(n, window, batch_size):
    tokens = np.arange(100, 100 + n)
    inputs, targets = map(np.asarray, windows(tokens, window, batch_size))
    assert inputs.shape == targets.shape and inputs.shape[1:] == (batch_size, window)
    np.testing.assert_array_equal(inputs.ravel()[: n - 1], tokens[:-1])
    np.testing.assert_array_equal(targets.ravel()[: n - 1], tokens[1:])
    assert not inputs.ravel()[n - 1 :].any() and not targets.ravel()[n - 1 :].any()
    assert inputs[0].any() and inputs[-1].any()  # no batch of padding alone
