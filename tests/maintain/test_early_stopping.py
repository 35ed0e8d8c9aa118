"""Early stopping by random batches: losses against NumPy, draws and best epochs by hand."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from conftest import numpy_gru_losses

import jaxgru
from jaxgru.lm.formats.safetensors import save_safetensors
from maintain import early_stopping


@pytest.mark.parametrize(
    "losses, patience, best",
    [
        ([3, 2, 4, 5, 1], 2, 2),  # stops after epoch 4
        ([3, 2, 4, 5, 1], 3, 5),
        ([3, 2, 2, 4], 2, 2),  # an equal loss is no better
        ([3], 5, 1),
        ([1, 2, 3, 4], 5, 1),  # does not stop before the last epoch
    ],
)
def test_the_best_epoch_before_training_stops(losses, patience, best):
    assert early_stopping.best_before_stopping(losses, patience) == best


def test_windows_are_those_of_numpy(tiny_run, tiny_text):
    params, _, tokenizer = jaxgru.lm.load(tiny_run)
    tokens = tokenizer.encode(tiny_text.read_text())[:300]
    losses = early_stopping.window_losses(params, tokens, 16)
    assert len(losses) == 71  # from 0, 4, …, 280 on; 283 is the last possible
    for i in (0, 1, 64, 70):
        expected = numpy_gru_losses(params, tokens[4 * i : 4 * i + 17], 16).mean()
        assert losses[i] == pytest.approx(expected, rel=1e-5)


def test_a_draw_is_a_mean_of_windows_of_its_epoch():
    """Of 0 and 1 with equal probability, a mean of 25 has a standard deviation of 0.5 / √25."""
    losses = np.stack([np.arange(10) % 2, np.full(10, 7.0)])
    drawn = early_stopping.draw(losses, 4000, 25)
    assert drawn.shape == (4000, 2)
    np.testing.assert_array_equal(drawn[:, 1], 7)
    np.testing.assert_array_equal(np.round(drawn[:, 0] * 25) / 25, drawn[:, 0])
    # 5 standard errors: 0.1 / √4000 of the mean, 0.1 / √8000 of the standard deviation
    assert drawn[:, 0].mean() == pytest.approx(0.5, abs=0.008)
    assert drawn[:, 0].std() == pytest.approx(0.1, abs=0.006)


def test_the_whole_script(script, run_copy, tmp_path):
    """A model that is better by far than the other is the best in every draw."""
    output = tmp_path / "result.json"
    options = ["--output", output, "--draws", 50, "--patience", 1]
    done = script("maintain/early_stopping", run_copy, *options)
    assert done.code == 2 and "has not kept the model of each of its epochs" in done.err
    params, config, tokenizer = jaxgru.lm.load(run_copy)
    (run_copy / "epochs").mkdir()
    for epoch, scale in ((1, 1), (2, 30)):
        scaled = jax.tree.map(lambda leaf, by=scale: by * leaf, params)
        save_safetensors(run_copy / f"epochs/00{epoch}.safetensors", scaled, config, tokenizer)
    done = script("maintain/early_stopping", run_copy, *options)
    assert (done.code, done.err) == (0, "")
    result = json.loads(output.read_text())
    assert result["best"] == [50, 0] and result["draws"] == 50 and result["patience"] == 1
    assert result["losses"][0] < result["losses"][1]
