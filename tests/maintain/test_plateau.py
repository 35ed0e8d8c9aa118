"""The first steps of training, by jaxgru and by the PyTorch reference, and the whole script."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
import tomli_w
import torch
from conftest import TINY
from torch.nn.functional import cross_entropy

from jaxgru.errors import UserError
from jaxgru.lm.config import load_config, to_dict
from jaxgru.lm.data.dataset import load_dataset
from jaxgru.lm.model import apply
from jaxgru.lm.runs.folders import load_run_config
from maintain import plateau
from study.records import load_metrics


@pytest.fixture
def config(tiny_text):
    options = TINY | {"data.corpus": str(tiny_text), "training.steps_per_epoch": 50}
    return load_config("astra_alpha", options)


def test_jaxgrus_losses_are_those_of_train_py(tiny_run):
    """Both epochs of tiny_run, of 3 steps each."""
    config, dataset = load_dataset(load_run_config(tiny_run))
    trainer = plateau.InJaxgru(config, dataset.train)
    epochs = [statistics.mean(trainer.train(3)) for _ in range(2)]
    recorded = [epoch.train_loss for epoch in load_metrics(tiny_run / "metrics.jsonl")]
    np.testing.assert_allclose(epochs, recorded, rtol=1e-6)


def test_pytorchs_losses_are_those_of_its_own_recipe(config):
    """Weights, batches and dropout are the numbers that the seed gives, in this order.

    In the 2nd of 2 epochs, the learning rate is half: (1 + cos(π/2))/2.
    """
    config = replace(config, training=replace(config.training, steps_per_epoch=2))
    config, dataset = load_dataset(config)
    t, m = config.training, config.model
    tokens = torch.from_numpy(dataset.train.astype(np.int64))
    trainer = plateau.InPyTorch(config, dataset.train)
    losses = trainer.train(1) + trainer.train(3)
    torch.manual_seed(t.seed)
    model = plateau.torchref.MyGRUModel(m.vocab_size, m.embedding_dim, m.hidden_dim, m.num_layers,
                                        t.dropout, second_bias=m.second_bias)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), t.learning_rate, weight_decay=t.weight_decay)
    for step, loss in enumerate(losses):
        optimizer.param_groups[0]["lr"] = t.learning_rate * (1 if step < 2 else 0.5)
        starts = torch.randint(0, len(tokens) - t.sequence_length - 1, (t.batch_size,)).tolist()
        inputs = torch.stack([tokens[i : i + t.sequence_length] for i in starts])
        targets = torch.stack([tokens[i + 1 : i + t.sequence_length + 1] for i in starts])
        expected = cross_entropy(model(inputs)[0].transpose(1, 2), targets)
        assert loss == pytest.approx(expected.item(), rel=1e-6)  # float32
        optimizer.zero_grad()
        expected.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), t.max_grad_norm)
        optimizer.step()


class Saturating:
    """A trainer whose second unit becomes constant in the second part."""

    def __init__(self, config, tokens):
        self.losses = iter([4.0] * 24 + [1.5] + [2.0] * 25 + [math.nan] * 25)
        self.parts = 0

    def train(self, steps):
        self.parts += 1
        return [next(self.losses) for _ in range(steps)]

    def states(self, tokens):
        states = np.random.default_rng(0).uniform(-1, 1, (*tokens.shape, 2))
        if self.parts > 1:
            states[..., 1] = 0.9
        return [states, states[..., :1]]


def test_each_part_is_measured_after_its_steps(config, monkeypatch):
    monkeypatch.setitem(plateau.TRAINERS, "jaxgru", Saturating)
    steps = plateau.first_steps(config, "jaxgru", 75)
    first, second = next(steps), next(steps)
    assert (first.losses, first.constant) == ([3.9], [[0.0, 0.0]])
    assert (second.losses, second.constant) == ([3.9, 2.0], [[0.0, 0.0], [0.5, 0.0]])
    with pytest.raises(UserError, match="loss is nan after 50 steps"):
        next(steps)


def test_the_heads_of_the_last_states_are_the_logits(config):
    config, dataset = load_dataset(config)
    tokens = plateau.windows(dataset.validation, 16)
    ours = plateau.InJaxgru(config, dataset.train)
    *_, last = ours.states(tokens)
    params = jax.device_get(ours.state.params)
    logits = last @ params.head.Wo + params.head.bo
    chex.assert_trees_all_close(logits, apply(params, tokens)[0], atol=1e-6)

    theirs = plateau.InPyTorch(config, dataset.train)
    *_, last = theirs.states(tokens)
    head = theirs.model.fc["linear_projection"]
    theirs.model.eval()
    expected, _ = theirs.model(torch.from_numpy(tokens.astype(np.int64)))
    torch.testing.assert_close(head(torch.from_numpy(last)), expected)


def test_windows_are_the_first_ones():
    tokens = np.arange(23)
    chex.assert_trees_all_equal(plateau.windows(tokens, 5), np.arange(20).reshape(4, 5))
    assert plateau.windows(np.arange(99), 3).shape == (8, 3)


def test_constant_units_are_counted():
    """By hand: of 4 units, one never moves and one only in the first eighth of the 16 steps."""
    states = np.zeros((2, 16, 4))
    states[:, :, 0] = 0.7
    states[:, :2, 1] = [[0.1, 0.2], [0.3, 0.4]]
    states[1, :, 2] = 0.0021  # constant in each row, but not over the rows: deviation 0.00105
    states[:, ::2, 3] = 0.5
    assert plateau.constant_units(states) == 0.5


@pytest.mark.slow
def test_the_whole_script(script, config, tmp_path):
    given, output = tmp_path / "tiny.toml", tmp_path / "plateau.json"
    given.write_text(tomli_w.dumps(to_dict(config)))
    options = ["--config", given, "--output", output]

    def message(*more):
        before = output.exists() and output.read_text()
        done = script("maintain/plateau", *options, *more)
        assert done.code == 2 and done.err.count("\n") == 1
        assert (output.exists() and output.read_text()) == before
        return done.err

    assert "a multiple of 25 and at most 100." in message("--steps", 30)
    assert "cannot be written" in message("--steps", 25, "--output", tmp_path / "none" / "p.json")
    for more in (
        ["--seeds", 0, 2, "--steps", 25],
        ["--seeds", 2, "--steps", 50],  # more steps of the same seed replace fewer
        ["--framework", "PyTorch", "--steps", 25],
        ["--batch-size", 5, "--steps", 25],
        ["--learning-rate", 0.01, "--steps", 25],
    ):
        done = script("maintain/plateau", *options, *more)
        assert (done.code, done.err) == (0, "")
    runs = json.loads(output.read_text())
    of_key = ("framework", "batch_size", "learning_rate", "seed")
    assert [(*map(r.get, of_key), len(r["losses"])) for r in runs] == [
        ("PyTorch", 4, 3e-3, 0, 1),
        ("jaxgru", 5, 3e-3, 0, 1),
        ("jaxgru", 4, 1e-2, 0, 1),
        ("jaxgru", 4, 3e-3, 0, 1),
        ("jaxgru", 4, 3e-3, 2, 2),
    ]
    for run in runs:
        assert run["config"] == config.name and run["constant"] == [[0.0, 0.0]] * len(run["losses"])
        assert np.log(config.model.vocab_size) > run["losses"][0] >= run["losses"][-1]
    assert "has 50 steps of seed 2; 25 would replace them" in message(
        "--steps", 25, "--seeds", 0, 2
    )


@pytest.mark.parametrize("field, value", [("data.batches", "streams"), ("training.beta1", 0.8)])
def test_another_recipe_is_refused(config, field, value):
    other = load_config("astra_alpha", {field: value})
    with pytest.raises(UserError, match=f"astra_alpha has {field} .*{value}'?; it must be"):
        plateau.check(other, 25)


def test_another_cell_is_refused(script):
    done = script("maintain/plateau", "--config", "leviathan")
    assert done.code == 2 and "leviathan has model.cell 'lstm'; it must be 'gru'" in done.err
