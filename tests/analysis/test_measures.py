"""A model's measures: numbers against NumPy and against counting, text against the chain."""

from __future__ import annotations

import json
import math
import re
from collections import Counter

import jax
import numpy as np
import pytest
from conftest import numpy_gru_losses
from random_models import random_params

import jaxgru
from jaxgru.analysis import measures
from jaxgru.analysis.measures import Subject, measure
from jaxgru.errors import UserError
from jaxgru.lm.config import ModelConfig
from jaxgru.lm.data.dataset import Dataset
from jaxgru.lm.data.tokenizers import CharacterTokenizer

# Fewer windows, and the shapes of the text to read, so that each program is compiled once
SHAPES = {
    "RESETS": (1, 2, 64, 1024), "NUM_PROMPTS": 1, "PROMPT_LENGTH": 7, "GREEDY_TOKENS": 200,
    "SAMPLED_TOKENS": 300, "NUM_BATCHES": 400, "BATCH_SIZE": 8, "BATCH_WINDOW": 4,
}  # fmt: skip
V = 7
N = 59  # 58 predictions
TOKENS = np.random.default_rng(1).integers(0, V, N).astype(np.int32)
GRU = {"num_layers": 2, "second_bias": True, "reset_gate": "before"}


@pytest.fixture(autouse=True)
def shapes(monkeypatch):
    for name, value in SHAPES.items():
        monkeypatch.setattr(measures, name, value)


@pytest.fixture(scope="module")
def measured(tiny_run, tiny_text):
    """The tiny run's parameters (larger, so that the state matters), data and record."""
    params, _, tokenizer = jaxgru.lm.load(tiny_run)
    params = jax.tree.map(lambda leaf: 2 * leaf, params)
    tokens = tokenizer.encode(tiny_text.read_text())
    dataset = Dataset(tokens[:2700], tokens[2700:], tokenizer, "a test", 301, "")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHAPES.items():
            patch.setattr(measures, name, value)
        said: list[str] = []
        record = measure(Subject(params, dataset, 16), ["random_batches"], said.append)
        return params, dataset, record, said


def subject(tokens=TOKENS, end=None, **model) -> Subject:
    """Of large weights: a model whose state matters. The text is not its own."""
    config = ModelConfig(vocab_size=V, embedding_dim=3, hidden_dim=5, **model or GRU)
    tokenizer = CharacterTokenizer("abcdefg")
    none = np.zeros(0, np.int32)
    text = Dataset(none, tokens, tokenizer, "", len(tokens) - 1, "", end)
    return Subject(random_params(config), text, 13)


def test_losses_are_numpys(measured):
    params, dataset, record, _ = measured
    for what, window in (("windows", 16), ("stream", 300), ("stateless", 1)):
        expected = numpy_gru_losses(params, dataset.validation, window).mean()
        assert getattr(record, what) == pytest.approx(expected, rel=1e-5), what
    assert record.sensitivity == pytest.approx(record.stateless - record.stream)
    assert (record.num_tokens, record.num_characters) == (299, 301)
    curve = dict(record.memory_curve)
    assert list(curve) == [1, 2, 64, 1024]
    for every in (2, 64, 1024):
        expected = numpy_gru_losses(params, dataset.validation, every).mean()
        assert curve[every] == pytest.approx(expected, rel=1e-5)


def test_of_another_text_there_are_losses_alone():
    record = measure(subject()).to_dict()
    assert {"windows", "stream", "stateless", "sensitivity"} <= record.keys()
    assert not {"memory_curve", "chain", "text", "random_batches"} & record.keys()


def test_random_batches_come_near_the_mean_over_all_windows():
    starts = range(N - 4 - 1)
    s = subject()
    every = [numpy_gru_losses(s.params, TOKENS[i : i + 5], 4).mean() for i in starts]
    loss = measures.random_batch_loss(s)
    error = np.std(every) / np.sqrt(400 * 8)
    assert abs(loss.mean - np.mean(every)) < 4 * error
    assert loss.standard_error == pytest.approx(error, rel=0.2)


def test_random_batches_of_a_text_with_room_for_one_are_that_one(monkeypatch):
    s = subject(tokens=TOKENS[:6])
    loss = measures.random_batch_loss(s)
    expected = numpy_gru_losses(s.params, TOKENS[:5], 4).mean()
    assert loss.mean == pytest.approx(expected, rel=1e-5) and loss.standard_error < 1e-7
    with pytest.raises(UserError, match="has 5 tokens, but windows of 4 need 6"):
        measures.random_batch_loss(subject(tokens=TOKENS[:5]))


def test_recovery(monkeypatch):
    """Resets at 0, 7, …, 49 (the last with 9 predictions left), 9 predictions after each."""
    monkeypatch.setattr(measures, "RECOVERY", 9)
    monkeypatch.setattr(measures, "STRIDE", 7)
    s = subject()
    stream = numpy_gru_losses(s.params, TOKENS, N)
    excess = [
        numpy_gru_losses(s.params, TOKENS[i : i + 10], N) - stream[i : i + 9]
        for i in range(0, 50, 7)
    ]
    expected = np.mean(excess, axis=0)
    np.testing.assert_allclose(measures.recovery_of(s), expected, rtol=1e-4, atol=2e-6)
    assert abs(expected[0]) > 1e-3 and len(expected) == 9


def test_recovery_is_over_once_a_short_memory_is_full(monkeypatch):
    """An MLP of 3 tokens has forgotten a reset after 2 of them."""
    monkeypatch.setattr(measures, "RECOVERY", 6)
    monkeypatch.setattr(measures, "STRIDE", 5)
    excess = measures.recovery_of(subject(cell="mlp", context_length=3))
    assert np.abs(excess[:2]).min() > 1e-3
    np.testing.assert_allclose(excess[2:], 0, atol=1e-5)  # roundings of losses of about 10


def test_recovery_in_a_text_shorter_than_its_length():
    """One reset fits, the beginning of the text, where the stream begins, too."""
    np.testing.assert_allclose(measures.recovery_of(subject()), np.zeros(N - 1), atol=1e-5)


def test_each_unit_is_a_text_of_its_own(monkeypatch):
    """A text of one unit, written eight times: each measure is that of the unit alone."""
    monkeypatch.setattr(measures, "BATCH_WINDOW", 39)
    monkeypatch.setattr(measures, "RECOVERY", 7)
    monkeypatch.setattr(measures, "STRIDE", 5)
    unit = np.array([2, 5, 0, 1, 6], np.int32)
    s = subject(tokens=np.append(np.tile(unit, 8), np.int32(2)), end=2)
    losses = numpy_gru_losses(s.params, np.append(unit, 2), N)
    assert [s.stream, s.loss(10)] == pytest.approx([losses.mean()] * 2, rel=1e-5)
    np.testing.assert_allclose(measures.recovery_of(s), 0, atol=1e-5)
    expected = (8 * losses.sum() - losses[-1]) / 39
    assert measures.random_batch_loss(s).mean == pytest.approx(expected, rel=1e-5)


def test_a_large_vocabulary_has_no_chain(measured, monkeypatch):
    params, dataset, record, _ = measured
    V = dataset.tokenizer.vocab_size
    for limit, chain in ((V - 1, None), (V, record.chain)):
        monkeypatch.setattr(measures, "MAX_CHAIN", limit)
        assert measures.chain_of(Subject(params, dataset)) == chain


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
    assert set(text) == {"validation text", *measures.TREATMENTS}
    assert len({str(text[name]) for name in measures.TREATMENTS}) == 3
    for values in text.values():
        assert 0 <= values.known_words <= 1 and 0 < values.distinct_1 <= 1
    # the words of the text itself, all of which occur in its training part; cut ones left out
    whole = re.sub(r"\A\S*|\S*\Z", "", dataset.tokenizer.decode(dataset.validation).lower())
    expected = re.findall("[a-z]+", whole)
    validation = text["validation text"]
    assert validation.known_words == 1 and validation.num_words == len(expected)
    assert validation.distinct_1 == len(set(expected)) / len(expected)


def test_progress_is_told_and_the_record_is_json(measured):
    """What is asked for comes first: the text can be too short for it."""
    _, dataset, record, said = measured
    assert said[0] == "random batches" and {"stream", "memory curve", "text"} <= {*said}
    written = json.loads(json.dumps(record.to_dict()))
    assert written["memory_curve"] == [list(point) for point in record.memory_curve]
    assert written["text"]["validation text"].keys() == {
        "num_words", "known_words", "distinct_1", "distinct_2", "distinct_3"
    }  # fmt: skip


def test_words():
    """A sample begins and ends with a whole word; without words it has no measure of words."""
    vocabulary = frozenset({"soft", "romeo", "the", "king", "of"})
    assert measures.words_in(["eet the king of Eng", " O"], vocabulary)["num_words"] == 3
    assert measures.words_in([" the king.\n"], vocabulary)["num_words"] == 2
    assert measures.words_in(["unbroken", " … 1 2 3! "], vocabulary) == {"num_words": 0}
    known = measures.words_in([" zzz ROMEO zzz. Soft "], vocabulary)["known_words"]
    assert known == 2 / 4  # each time counts, not each word once
