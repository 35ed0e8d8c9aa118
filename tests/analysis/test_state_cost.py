"""A model's record: its numbers against NumPy and against counting, its text against the chain."""

from __future__ import annotations

import json
import math
import re
from collections import Counter

import jax
import numpy as np
import pytest
from conftest import numpy_gru_losses

import jaxgru
from jaxgru.analysis import state_cost
from jaxgru.lm import evaluation
from jaxgru.lm.data.dataset import Dataset

# Fewer windows, and the shapes of the text to read, so that each program is compiled once
SHAPES = {
    "RESETS": (1, 2, 64, 1024), "NUM_PROMPTS": 1, "PROMPT_LENGTH": 7, "GREEDY_TOKENS": 200,
    "SAMPLED_TOKENS": 300,
}  # fmt: skip


@pytest.fixture(autouse=True)
def shapes(monkeypatch):
    for name, value in SHAPES.items():
        monkeypatch.setattr(state_cost, name, value)


@pytest.fixture(scope="module")
def measured(tiny_run, tiny_text):
    """The tiny run's parameters (larger, so that the state matters), data and record."""
    params, _, tokenizer = jaxgru.lm.load(tiny_run)
    params = jax.tree.map(lambda leaf: 2 * leaf, params)
    tokens = tokenizer.encode(tiny_text.read_text())
    dataset = Dataset(tokens[:2700], tokens[2700:], tokenizer, "a test", 301, "")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHAPES.items():
            patch.setattr(state_cost, name, value)
        said: list[str] = []
        record = state_cost.measure(params, tokenizer, dataset, 16, said.append)
        return params, dataset, record, said


def test_losses_are_numpys(measured):
    params, dataset, record, _ = measured
    for what, window in (("windows", 16), ("stream", 300), ("stateless", 1)):
        expected = numpy_gru_losses(params, dataset.validation, window).mean()
        assert getattr(record, what) == pytest.approx(expected, rel=1e-5), what
    assert record.sensitivity == pytest.approx(record.stateless - record.stream)
    assert (record.num_tokens, record.num_characters) == (299, 301)
    curve = dict(map(tuple, record.memory_curve))
    assert list(curve) == [1, 2, 64, 1024] and evaluation.RESETS == tuple(2**i for i in range(11))
    for every in (2, 64, 1024):
        expected = numpy_gru_losses(params, dataset.validation, every).mean()
        assert curve[every] == pytest.approx(expected, rel=1e-5)


def test_random_batches_are_those_of_evaluation(measured, monkeypatch):
    """Their mean and its standard error; test_evaluation.py checks the losses themselves."""
    params, dataset, record, _ = measured
    assert record.random_batches is None
    said: list[str] = []
    losses = np.array([1.0, 2.0, 4.5, 2.5])
    monkeypatch.setattr(state_cost, "random_batch_losses", lambda *a, end: losses)
    monkeypatch.setattr(state_cost, "_text", lambda *a: {})
    record = state_cost.measure(
        params, dataset.tokenizer, dataset, 16, said.append, random_batches=True
    )
    assert said[0] == "random batches"  # the text can be too short for them
    # deviations −1.5, −0.5, 2 and 0: a variance of 6.5 / 3
    assert record.random_batches.mean == 2.5
    assert record.random_batches.standard_error == pytest.approx((6.5 / 3 / 4) ** 0.5)


def test_a_large_vocabulary_is_measured_without_its_chain(measured, monkeypatch):
    params, dataset, record, _ = measured
    monkeypatch.setattr(state_cost, "_text", lambda *a: {})
    V = dataset.tokenizer.vocab_size
    for limit, known in ((V - 1, False), (V, True)):
        monkeypatch.setattr(state_cost, "MAX_CHAIN", limit)
        seen = state_cost.measure(params, dataset.tokenizer, dataset, 16)
        assert (seen.chain is not None) == known
        assert seen.stateless == record.stateless


def test_the_chains_distance_is_what_it_loses_beyond_the_bigrams_entropy(measured):
    """KL(bigram ‖ chain) = stateless loss on the training text − the entropy of its bigrams."""
    params, dataset, record, _ = measured
    pairs = Counter(zip(dataset.train[:-1].tolist(), dataset.train[1:].tolist(), strict=True))
    firsts = Counter(dataset.train[:-1].tolist())
    entropy = -sum(n * math.log(n / firsts[v]) for (v, _), n in pairs.items()) / firsts.total()
    stateless = numpy_gru_losses(params, dataset.train, 1).mean()
    assert record.chain.kl_to_bigram == pytest.approx(stateless - entropy, abs=1e-5)


def test_greedy_stateless_text_is_a_cycle_of_the_chain(measured):
    *_, record, _ = measured
    assert record.text["stateless"].share_that_loops == 1
    assert record.text["stateless"].median_period in {c.period for c in record.chain.cycles}


def test_treatments_differ_and_their_measures_are_shares(measured):
    _, dataset, record, _ = measured
    text = record.text
    assert set(text) == {"validation text", *state_cost.TREATMENTS}
    assert len({str(text[name]) for name in state_cost.TREATMENTS}) == 3
    for values in text.values():
        assert 0 <= values.known_words <= 1 and 0 < values.distinct_1 <= 1
    # the words of the text itself, all of which occur in its training part; cut ones left out
    whole = re.sub(r"\A\S*|\S*\Z", "", dataset.tokenizer.decode(dataset.validation).lower())
    expected = re.findall("[a-z]+", whole)
    validation = text["validation text"]
    assert validation.known_words == 1 and validation.num_words == len(expected)
    assert validation.distinct_1 == len(set(expected)) / len(expected)


def test_progress_is_told_and_the_record_is_json(measured):
    _, dataset, record, said = measured
    assert said == ["one stream", "the memory curve", "the stateless chain", "text"]
    written = json.loads(json.dumps(record.to_dict()))
    assert written["memory_curve"] == [list(point) for point in record.memory_curve]
    assert written["text"]["validation text"].keys() == {
        "num_words", "known_words", "distinct_1", "distinct_2", "distinct_3"
    }  # fmt: skip


def test_whole_words():
    """A sample begins and ends with a whole word; without words it has no measure of words."""
    assert state_cost._whole_words("eet the king of Eng") == " the king of "
    assert state_cost._whole_words(" the king.\n") == " the king.\n"
    assert state_cost._whole_words("unbroken") == ""
    assert state_cost._words("… 1 2 3!", frozenset()) == {"num_words": 0}
    known = state_cost._words("zzz ROMEO zzz. Soft", frozenset({"soft", "romeo"}))["known_words"]
    assert known == 2 / 4  # each time counts, not each word once
