"""study.json in a run's folder, and the best of the epochs that a run has kept."""

import json

import jax
import pytest
from conftest import numpy_gru_losses

import jaxgru
from jaxgru.lm.formats.safetensors import save_safetensors
from jaxgru.lm.runs import study_record
from jaxgru.lm.runs.folders import RunError


def test_a_record_is_saved_with_the_day_and_the_hardware(tmp_path, monkeypatch):
    study_record.save_record(tmp_path, {"stream": 1.5})
    saved = json.loads((tmp_path / "study.json").read_text())
    assert saved["stream"] == 1.5
    assert len(saved["date"]) == 10 and "JAX" in saved["hardware"]

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(study_record, "write_text", full)
    with pytest.raises(RunError, match="study.json cannot be written: No space left on device"):
        study_record.save_record(tmp_path, {})
    assert json.loads((tmp_path / "study.json").read_text()) == saved


def test_the_best_epoch_is_that_of_the_lowest_loss(tiny_run, tiny_text, tmp_path):
    params, config, tokenizer = jaxgru.lm.load(tiny_run)
    validation = tokenizer.encode(tiny_text.read_text())[2700:]
    assert study_record.best_kept_epoch(tmp_path, validation, 16) is None
    (tmp_path / "epochs").mkdir()
    losses = {}
    for epoch, scale in ((1, 20.0), (2, 1.0), (10, 9.0)):
        scaled = jax.tree.map(lambda leaf, by=scale: by * leaf, params)
        save_safetensors(tmp_path / f"epochs/{epoch:03}.safetensors", scaled, config, tokenizer)
        losses[epoch] = numpy_gru_losses(scaled, validation, 16).mean()
    for name in ("1 (copy)", "12", "best", "2.5", "\u0661\u0661\u0661"):  # of somebody else
        (tmp_path / f"epochs/{name}.safetensors").touch()
    best, found = study_record.best_kept_epoch(tmp_path, validation, 16)
    assert losses[best] == min(losses.values())
    again = numpy_gru_losses(found, validation, 16).mean()
    assert again == losses[best]
