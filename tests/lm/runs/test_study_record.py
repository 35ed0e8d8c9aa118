"""study.json in a run's folder, and which epoch is the best."""

import json

import pytest

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


@pytest.mark.parametrize(
    "text, why",
    [
        (None, "No such file or directory"),
        ("", "it lists no epoch"),
        ("{}\n", "missing required field `epoch`"),
    ],
)
def test_a_run_without_a_best_epoch(text, why, tmp_path):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(RunError, match=f"metrics.jsonl cannot be read: .*{why}"):
        study_record.best_epoch(tmp_path)
