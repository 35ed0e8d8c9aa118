"""The first losses of the PyTorch reference: its own loop, and the whole script."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tomli_w
import torch
from conftest import TINY
from torch.nn.functional import cross_entropy

from jaxgru.config import load_config, to_dict
from maintain import plateau


@pytest.fixture
def config(tiny_text):
    options = TINY | {"data.corpus": str(tiny_text), "training.steps_per_epoch": "50"}
    return load_config("astra_alpha", options)


def test_the_first_loss_is_that_of_pytorchs_initial_model(config, tiny_text):
    """The model's weights and the batch are the first numbers that the seed gives."""
    text = tiny_text.read_text()
    known = sorted(set(text))
    tokens = torch.tensor([known.index(character) for character in text])
    V, T, B = config.model.vocab_size, config.training.sequence_length, config.training.batch_size
    first, second = plateau.train(config, tokens, 5, 2)
    torch.manual_seed(5)
    m = config.model
    model = plateau.torchref.MyGRUModel(V, m.embedding_dim, m.hidden_dim, m.num_layers,
                                        m.dropout, second_bias=m.second_bias)  # fmt: skip
    starts = torch.randint(0, len(tokens) - T - 1, (B,)).tolist()
    inputs = torch.stack([tokens[i : i + T] for i in starts])
    targets = torch.stack([tokens[i + 1 : i + T + 1] for i in starts])
    logits, _ = model(inputs)
    assert first == cross_entropy(logits.transpose(1, 2), targets).item()
    assert second != first


def test_the_whole_script(script, config, tmp_path):
    given, output = tmp_path / "tiny.toml", tmp_path / "plateau.json"
    given.write_text(tomli_w.dumps(to_dict(config)))
    options = ["--config", given, "--output", output]
    done = script("maintain/plateau", *options, "--steps", 30)
    assert done.code == 2 and "a multiple of 25 and at most 50" in done.err
    done = script("maintain/plateau", *options, "--steps", 50, "--seed", 2)
    assert (done.code, done.err) == (0, "")
    result = json.loads(output.read_text())
    assert (result["config"], result["seed"]) == (config.name, 2)
    assert len(result["losses"]) == 2
    assert np.log(config.model.vocab_size) > result["losses"][0] > result["losses"][1]


def test_another_cell_is_refused(script):
    done = script("maintain/plateau", "--config", "leviathan")
    assert done.code == 2 and "leviathan is not a GRU" in done.err
