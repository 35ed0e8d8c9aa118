"""The ablation of best_gru's recipe: what it trains on, what it changes, and what it keeps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import jaxgru
from jaxgru.lm.data.corpus import load_corpus
from jaxgru.lm.data.dataset import load_dataset
from jaxgru.lm.runs.folders import load_run_config
from maintain import ablation


def test_the_validation_text_is_in_neither_text(tmp_path, shakespeare):
    """By hand: of 1,003,854 characters for training, the last tenth begins at 903,468."""
    config = ablation.changed(tmp_path, ablation.CHANGES["LSTM, 222 units"], 3)
    text = load_corpus("tiny_shakespeare").text
    of = lambda path: Path(path).read_text(encoding="utf-8")
    assert of(config.data.corpus) == text[903_468 - 276_000 : 903_468]
    assert of(config.data.validation) == text[903_468:1_003_854]
    assert (config.model.hidden_dim, config.training.seed) == (222, 3)


def test_changes_are_of_the_recipe(tmp_path, shakespeare):
    recipe = ablation.changed(tmp_path, ablation.CHANGES["none"], 0)
    configs = [ablation.changed(tmp_path, changes, 0) for changes in ablation.CHANGES.values()]
    assert recipe == configs[0] and all(config != recipe for config in configs[1:])


@pytest.mark.slow
def test_a_loss_is_that_of_windows_from_zeros(tiny_run, tmp_path, monkeypatch, shakespeare):
    """Here of 16 tokens, on the run's own validation text; the newest of a seed is kept."""
    trained = []
    monkeypatch.setattr(ablation, "start_run", lambda config, _: trained.append(config) or tiny_run)
    monkeypatch.setattr(ablation, "WINDOW", 16)
    params, _, tokenizer = jaxgru.lm.load(tiny_run)
    tokens = load_dataset(load_run_config(tiny_run), tokenizer)[1].validation
    losses = []
    for i in range(0, len(tokens) - 1, 16):
        piece = tokens[i : i + 17]
        logits, _ = jaxgru.lm.apply(params, piece[None, :-1])
        logits = np.asarray(logits[0], float)
        of_target = logits[np.arange(len(logits)), piece[1:]]
        losses.extend(np.log(np.exp(logits).sum(1)) - of_target)

    output = tmp_path / "ablation.json"
    lost = dict(title="a row of old", seed=0, loss=9.0, date="", hardware="")
    output.write_text(json.dumps([lost]))
    monkeypatch.setattr("sys.argv", ["ablation", "no weight drop", "none", f"--output={output}"])
    for _ in range(2):
        ablation.main()
    rows = json.loads(output.read_text())
    assert [row["title"] for row in rows] == ["none", "no weight drop", "a row of old"]
    assert rows[0]["loss"] == pytest.approx(np.mean(losses), abs=1e-4)  # four digits are kept
    assert [config.training.weight_drop for config in trained] == [0.0, 0.2] * 2
