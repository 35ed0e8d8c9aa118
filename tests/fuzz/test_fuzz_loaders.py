"""Some cases of every kind, in this process; `campaign.py` runs 10,000 of each in workers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fuzzing import KINDS, Finding, Made, check, quick_cases, run_kind

pytest.importorskip("torch")

FEW = {"prompts": 6, "safetensors": 40, "checkpoints": 6, "pth": 30}  # else 20
MANY = {"prompts": 12, "safetensors": 40, "checkpoints": 16}  # else 50


@pytest.mark.parametrize(
    "counts, others", [(FEW, 20), pytest.param(MANY, 50, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_is_used_or_refused_in_one_line(kind, counts, others, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    outcomes = quick_cases(kind, counts.get(kind, others), tmp_path)
    assert min(outcomes.values()) > 0, outcomes  # neither all nonsense nor all harmless


@pytest.mark.slow
def test_a_worker_tells_what_was_found(tmp_path, monkeypatch):
    """A crash, a file that is written, a program that is run, memory, a message: each is told."""
    source = Path(__file__).parent / "planted.py"
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(filter(None, sys.path))}")
    (tmp_path / "kind_planted.py").write_text(source.read_text())
    tally = run_kind("planted", 1, 0, 9, tmp_path / "out", lambda tally: None)
    said = [finding["said"] for finding in tally.findings]
    for what, text in zip(
        ("KeyError", "outside: open", "outside: os.system", "memory: ", "several lines",
         "process ended", "no more of it"), said, strict=True,
    ):  # fmt: skip
        assert what in text
    assert (tally.used, tally.refused) == (1, 1)


def test_a_message_is_one_printable_line():
    from jaxgru.errors import UserError

    def load(message):
        raise UserError(message)

    for message in ("a\nb", "\x1b[31m", "x" * 10**6, "\ud800", "\u202e"):
        assert check(load, Made(message)) == "refused"
    with pytest.raises(Finding, match="message of several lines"):
        check(load, Made(""))
