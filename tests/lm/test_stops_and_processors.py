"""Stops, processors, log-probabilities and lengths, against a plain loop over `lm.step`."""

from __future__ import annotations

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked
from conftest import slow
from random_models import random_params

import jaxgru
from jaxgru.lm import ModelConfig, generate, step
from jaxgru.lm.processors import (
    MOST,
    Exempt,
    FrequencyPenalty,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Typical,
)
from jaxgru.lm.sampling import draw

V = 7
N = 12
KEY = jax.random.key(5)
PROMPT = jnp.array([[1, 2, 3, 3], [4, 0, 0, 0], [5, 6, 2, 0]], jnp.int32)
LENGTHS = np.array([4, 1, 3])


@pytest.fixture(scope="module", params=["gru", "lstm", "mlp"])
def params(request):
    memory = {"context_length": 3} if request.param == "mlp" else {}
    return random_params(ModelConfig(request.param, V, 5, 8, num_layers=2, **memory), scale=0.7)


def softmax(logits):
    p = np.exp(logits - logits.max())
    return p / p.sum()


def repetition(penalty):
    """Keskar et al., with the negative logits of Hugging Face's."""

    def process(logits, text):
        for token in set(text):
            logits[token] *= penalty if logits[token] < 0 else 1 / penalty
        return logits

    return process


def openai(frequency, presence, exempt=()):
    """mu[j] − c[j]·frequency − [c[j] > 0]·presence, over the whole text."""

    def process(logits, text):
        for token in set(text) - set(exempt):
            logits[token] -= text.count(token) * frequency + presence
        return logits

    return process


def min_p(fraction):
    def process(logits, text):
        p = softmax(logits)
        return np.where(p < fraction * p.max(), -np.inf, logits)

    return process


def typical(mass):
    """Meister et al., eq. 10: tokens in the order of | −log p − H | until they reach the mass."""

    def process(logits, text):
        p = softmax(logits)
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.nansum(p * np.log(p))
            order = np.argsort(np.abs(-np.log(p) - entropy), kind="stable")
        kept = []
        total = 0.0
        while total < mass:
            kept.append(order[len(kept)])
            total += p[kept[-1]]
        return np.where(np.isin(np.arange(len(p)), kept), logits, -np.inf)

    return process


PROCESSORS = {
    "none": ((), []),
    "repetition": (RepetitionPenalty(1.7), [repetition(1.7)]),
    "OpenAI's": ((FrequencyPenalty(0.4), PresencePenalty(0.9)), [openai(0.4, 0.9)]),
    "exempt": ((Exempt(FrequencyPenalty(-1.5), np.array([3, 5])), PresencePenalty(2)),
               [openai(-1.5, 0, exempt=(3, 5)), openai(0, 2)]),
    "min_p": ((MinP(0.3),), [min_p(0.3)]),
    "typical": (Typical(0.6), [typical(0.6)]),
    "all": ((RepetitionPenalty(3), MinP(0.1), Typical(0.8)),
            [repetition(3), min_p(0.1), typical(0.8)]),
}  # fmt: skip


def by_hand(params, rows, num_tokens, processors=(), stop=(), temperature=0.8):
    """Row by row, token by token; NumPy in float64 but for `step` and `draw`."""
    carries = []
    logprobs = [[] for _ in rows]
    key = KEY
    texts = [list(row) for row in rows]
    new = [[] for _ in rows]
    done = [False] * len(rows)
    for text in texts:
        carry = jaxgru.lm.initial_carry(params, 1)
        for token in text[:-1]:
            _, carry = step(params, jnp.array([token]), carry)
        carries.append(carry)
    for _ in range(num_tokens):
        key, subkey = jax.random.split(key)
        raw = []
        processed = []
        after = []
        for text, carry in zip(texts, carries, strict=True):
            logits, carry = step(params, jnp.array(text[-1:]), carry)
            raw.append(np.array(logits[0], np.float64))
            logits = raw[-1].copy()
            for process in processors:
                logits = process(logits, text)
            processed.append(logits)
            after.append(carry)
        drawn = draw(subkey, jnp.asarray(np.array(processed) / temperature, jnp.float32))
        for i, token in enumerate(drawn.tolist()):
            if done[i]:
                new[i].append(texts[i][-1])
                logprobs[i].append(0.0)
                continue
            carries[i] = after[i]
            texts[i].append(token)
            new[i].append(token)
            logprobs[i].append(np.log(softmax(raw[i])[token]))
            done[i] = token in stop
    carry = jax.tree.map(lambda *rows: np.concatenate(rows), *carries)
    return np.array(new), carry, key, np.array(logprobs)


@pytest.mark.parametrize("params, name, stop", [
    *(("gru", name, (3, 6)) for name in PROCESSORS),
    *slow(*(("gru", name, ()) for name in PROCESSORS),
          ("lstm", "all", (3, 6)), ("mlp", "all", (3, 6))),
], indirect=["params"])  # fmt: skip
def test_are_those_of_a_plain_loop(params, name, stop):
    """Compiled for 16 tokens, of which 12 are drawn; the prompts have 4, 1 and 3 tokens."""
    processor, numpys = PROCESSORS[name]
    rows = [row[:n] for row, n in zip(PROMPT.tolist(), LENGTHS, strict=True)]
    expected, carry_by_hand, key_by_hand, logprobs_by_hand = by_hand(params, rows, N, numpys, stop)
    tokens, carry, key, logprobs = generate(
        params, KEY, PROMPT, N, temperature=0.8, lengths=LENGTHS, stop=stop,
        logits_processor=processor, return_logprobs=True,
    )  # fmt: skip
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_allclose(logprobs, logprobs_by_hand, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(carry, carry_by_hand, rtol=1e-4, atol=1e-5)
    assert (jax.random.key_data(key) == jax.random.key_data(key_by_hand)).all()


@pytest.mark.parametrize("params", ["gru"], indirect=True)
class TestGenerate:
    def test_these_rows_stop_at_different_times_and_one_not_at_all(self, params):
        """Without this, the loop above might have shown nothing."""
        tokens, *_ = generate(params, KEY, PROMPT, N, temperature=0.8, lengths=LENGTHS, stop=[3, 6])
        ends = [np.flatnonzero(np.isin(row, [3, 6]))[:1].tolist() for row in np.asarray(tokens)]
        assert len({str(end) for end in ends}) > 1

    def test_compiled_within_another_program_it_is_the_same(self, params):
        """A scan over N steps, which cannot end early, and not a program for 16."""
        options = dict(stop=[3, 6], logits_processor=RepetitionPenalty(1.5), return_logprobs=True)

        def run(key, lengths):
            return generate(params, key, PROMPT, N, lengths=lengths, **options)

        lengths = jnp.array(LENGTHS)
        tokens, carry, key, logprobs = run(KEY, lengths)
        seen, seen_carry, seen_key, seen_logprobs = jax.jit(run)(KEY, lengths)
        np.testing.assert_array_equal(seen, tokens)
        alike = partial(chex.assert_trees_all_close, rtol=1e-4, atol=1e-5)
        alike(seen_carry, carry)
        alike(seen_logprobs, logprobs)
        assert (jax.random.key_data(seen_key) == jax.random.key_data(key)).all()

    def test_it_ends_with_the_last_row(self, params):
        """Every token is a stop: one step of 10,000, and the token fills the rest."""
        steps = []

        def count(logits, counts):
            jax.debug.callback(lambda: steps.append(1))
            return logits

        options = dict(stop=list(range(V)), logits_processor=count)
        tokens, carry, _ = generate(params, KEY, PROMPT, 10_000, **options)
        jax.effects_barrier()
        assert len(steps) == 1 and tokens.shape == (3, 10_000)
        first, before, _ = generate(params, KEY, PROMPT, 1)
        np.testing.assert_array_equal(tokens, np.repeat(first, 10_000, axis=1))
        chex.assert_trees_all_close(carry, before, rtol=1e-5, atol=1e-6)

    def test_without_a_state_the_last_real_token_decides(self, params):
        options = dict(stateful=False, temperature=0)
        tokens, *_ = generate(params, KEY, PROMPT, N, lengths=LENGTHS, **options)
        expected, *_ = generate(params, KEY, jnp.array([[3], [4], [2]]), N, **options)
        np.testing.assert_array_equal(tokens, expected)

    def test_with_a_key_per_row_each_row_is_a_call_of_its_own(self, params):
        """In its tokens, its carry and its key, also after a stop; within `jit`, too."""
        keys = jax.random.split(KEY, 3)
        options = dict(stop=[3, 6], logits_processor=MinP(0.01))

        def run(keys):
            return generate(params, keys, PROMPT, N, lengths=LENGTHS, **options)

        with jax.debug_key_reuse(True):
            seen, carries, keys_after = run(keys)
        for i, (key, n) in enumerate(zip(keys, LENGTHS, strict=True)):
            tokens, carry, key = generate(params, key, PROMPT[i : i + 1, :n], N, **options)
            np.testing.assert_array_equal(seen[i], tokens[0])
            of_row = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], carries)
            chex.assert_trees_all_close(of_row, carry, rtol=1e-4, atol=1e-5)
            assert (jax.random.key_data(keys_after[i]) == jax.random.key_data(key)).all()
        np.testing.assert_array_equal(jax.jit(run)(keys)[0], seen)
        shared, *_ = generate(params, keys[0], PROMPT, N, lengths=LENGTHS, **options)
        assert (shared[1:] != seen[1:]).any()

    def test_counts_continue_a_text_exactly(self, params):
        """8 tokens and 4 more are the 12, given how often the text so far has each token."""
        options = dict(temperature=0.8, logits_processor=RepetitionPenalty(30))
        whole, *_ = generate(params, KEY, PROMPT, N, **options)
        first, carry, key = generate(params, KEY, PROMPT, 8, **options)
        text = np.concatenate([PROMPT, first], axis=1)
        counts = np.stack([np.bincount(row, minlength=V) for row in text])
        rest, *_ = generate(params, key, first[:, -1:], 4, carry, counts=counts, **options)
        np.testing.assert_array_equal(np.concatenate([first, rest], axis=1), whole)
        none, *_ = generate(params, key, first[:, -1:], 4, carry, **options)
        assert (none != rest).any()

    def test_equal_processors_and_other_values_compile_nothing(self, params, compilations):
        def call(n, penalty, lengths, stop, key):
            return generate(
                params, key, PROMPT, n, lengths=np.array(lengths), stop=np.array(stop),
                logits_processor=(RepetitionPenalty(penalty), MinP(0.1)), return_logprobs=True,
            )  # fmt: skip

        call(N, 1.5, [4, 1, 3], [2, 3], KEY)
        key = jax.random.key(9)
        compilations.clear()
        call(16, 1.5, [1, 2, 2], [5, 0], key)
        call(N, 1.5, [4, 1, 3], [5, 0], KEY)
        call(16, 1.5, [1, 2, 2], [5, 0], key)
        assert compilations == []

    @pytest.mark.parametrize(
        "options, says",
        [
            ({"stop": [V]}, f"stop contains {V}; the vocabulary's tokens are 0 to {V - 1}"),
            ({"stop": [1.5]}, r"stop is float.* \(1,\); it must be integers"),
            ({"lengths": [4, 0, 3]}, "lengths range from 0 to 4; they must be in 1 … 4"),
            ({"lengths": [4, 4]}, r"lengths is .* \(2,\); it must be integers \(3,\)"),
            ({"logits_processor": lambda logits, counts: None}, "a processor returned None"),
            (
                {"logits_processor": lambda logits, counts: logits[:, :2]},
                rf"returned an array, float32 \(3, 2\); it must .* logits \(B, V\), \(3, {V}\)",
            ),
            ({"logits_processor": MinP(1), "counts": np.ones((3, V))}, r"float64 .* be integers"),
            ({"key": jax.random.split(KEY)}, r"key is key<fry> \(2,\); it must .* per row, \(3,\)"),
            ({"logits_processor": MinP(1), "counts": -np.ones((3, V), int)}, "range from -1"),
        ],
        ids=lambda given: given if isinstance(given, str) else "-".join(given),
    )
    def test_refusals(self, params, options, says):
        with unchecked(), pytest.raises(jaxgru.UserError, match=says):
            generate(params, **{"key": KEY, "prompt": PROMPT, "num_tokens": 3} | options)


@pytest.mark.parametrize("make, says", [
    (lambda: RepetitionPenalty(0), "repetition_penalty is 0; it must be a number from 1e-06 to"),
    (lambda: FrequencyPenalty(float("nan")), "frequency_penalty is nan; it must be a number from"),
    (lambda: PresencePenalty(1e38), "presence_penalty is 1e.38; it must be a number from -1e.06"),
    (lambda: Exempt(MinP(1), [V])(jnp.zeros((1, V)), jnp.zeros((1, V), int)),
     f"exempt contains {V}; the vocabulary's tokens are 0 to"),
    (lambda: MinP(1.5), "min_p is 1.5; it must be a number above 0 and at most 1"),
    (lambda: Typical(0.0), "typical is 0.0"),
])  # fmt: skip
def test_refused_processors(make, says):
    with unchecked(), pytest.raises(jaxgru.UserError, match=says):
        make()


@pytest.mark.parametrize("temperature", [0, 1e-19, 1e-6, 1.0])
@pytest.mark.parametrize("processor", [
    RepetitionPenalty(MOST), RepetitionPenalty(1 / MOST), FrequencyPenalty(MOST),
    FrequencyPenalty(-MOST), PresencePenalty(MOST), PresencePenalty(-MOST),
])  # fmt: skip
def test_the_largest_penalties_leave_a_token(params, processor, temperature):
    """So that no sentence says that the model is damaged."""
    options = dict(temperature=temperature, logits_processor=processor)
    counts = np.full((3, V), 2**30)
    new, *_ = generate(params, KEY, PROMPT, 3, counts=counts, **options)
    assert (new >= 0).all()


def test_nan_stays_nan():
    """So that its token is −1."""
    logits = jnp.array([[0.0, jnp.nan, 1.0]])
    penalties = RepetitionPenalty(2.0), FrequencyPenalty(1), Exempt(PresencePenalty(1), [0])
    for processor in (*penalties, MinP(0.5), Typical(0.5)):
        assert jnp.isnan(processor(logits, jnp.ones((1, 3), int))).any()
