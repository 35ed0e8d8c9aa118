"""The first steps of training, by jaxgru and by the PyTorch reference, and the whole script."""

from __future__ import annotations

import json
import statistics

import chex
import jax
import numpy as np
import pytest
import tomli_w
import torch
from conftest import TINY
from torch.nn.functional import cross_entropy

from jaxgru.config import load_config, to_dict
from jaxgru.data.dataset import load_dataset
from jaxgru.model import apply
from maintain import plateau
from pages.records import load_metrics


@pytest.fixture
def config(tiny_text):
    options = TINY | {"data.corpus": str(tiny_text), "training.steps_per_epoch": "50"}
    return load_config("astra_alpha", options)


def test_jaxgrus_losses_are_those_of_train_py(config, tiny_run):
    """tiny_run's first epoch has 3 steps of the same recipe."""
    config, dataset = load_dataset(config)
    losses = plateau.InJaxgru(config, dataset.train).train(3)
    np.testing.assert_allclose(
        statistics.mean(losses), load_metrics(tiny_run / "metrics.jsonl")[0].train_loss, rtol=1e-6
    )


def test_pytorchs_first_loss_is_that_of_its_initial_model(config):
    """The model's weights and the batch are the first numbers that the seed gives."""
    config, dataset = load_dataset(config)
    tokens = torch.from_numpy(dataset.train.astype(np.int64))
    V, T, B = config.model.vocab_size, config.training.sequence_length, config.training.batch_size
    first, second = plateau.InPyTorch(config, dataset.train).train(2)
    torch.manual_seed(config.training.seed)
    m = config.model
    model = plateau.torchref.MyGRUModel(V, m.embedding_dim, m.hidden_dim, m.num_layers,
                                        m.dropout, second_bias=m.second_bias)  # fmt: skip
    starts = torch.randint(0, len(tokens) - T - 1, (B,)).tolist()
    inputs = torch.stack([tokens[i : i + T] for i in starts])
    targets = torch.stack([tokens[i + 1 : i + T + 1] for i in starts])
    logits, _ = model(inputs)
    assert first == cross_entropy(logits.transpose(1, 2), targets).item()
    assert second != first


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


def test_the_whole_script(script, config, tmp_path):
    given, output = tmp_path / "tiny.toml", tmp_path / "plateau.json"
    given.write_text(tomli_w.dumps(to_dict(config)))
    options = ["--config", given, "--output", output]
    done = script("maintain/plateau", *options, "--steps", 30)
    assert done.code == 2 and "a multiple of 25 and at most 50" in done.err
    for more in (
        ["--seeds", 0, 2],
        ["--framework", "PyTorch"],
        ["--batch-size", 5],
        ["--learning-rate", 0.01],
        ["--steps", 25],  # the seed 0 again: its training is replaced
    ):
        done = script("maintain/plateau", *options, "--steps", 50, *more)
        assert (done.code, done.err) == (0, "")
    runs = json.loads(output.read_text())
    of_key = ("framework", "batch_size", "learning_rate", "seed")
    assert [(*map(r.get, of_key), len(r["losses"])) for r in runs] == [
        ("PyTorch", 4, 3e-3, 0, 2),
        ("jaxgru", 5, 3e-3, 0, 2),
        ("jaxgru", 4, 1e-2, 0, 2),
        ("jaxgru", 4, 3e-3, 0, 1),
        ("jaxgru", 4, 3e-3, 2, 2),
    ]
    for run in runs:
        assert run["config"] == config.name and run["constant"] == [0.0, 0.0]
        assert np.log(config.model.vocab_size) > run["losses"][0] >= run["losses"][-1]


def test_another_cell_is_refused(script):
    done = script("maintain/plateau", "--config", "leviathan")
    assert done.code == 2 and "leviathan is not a GRU" in done.err
