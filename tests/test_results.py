"""docs/results.md, made from runs and from nothing else."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "results.py"


@pytest.fixture(scope="module")
def results():
    """scripts/results.py as a module."""
    spec = importlib.util.spec_from_file_location("results_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def records(losses):
    """A run's records with these training losses; a step every other second."""
    return [
        {"epoch": i + 1, "step": 10 * (i + 1), "train_loss": loss, "val_loss": loss + 0.1,
         "tokens_per_second": 4096.0 * (i + 1), "seconds": 20.0, "peak_memory_mb": 100.0 + i}
        for i, loss in enumerate(losses)
    ]  # fmt: skip


def test_a_short_run_is_shown_as_such_and_no_more(script, tiny_run, tmp_path):
    runs = tmp_path / "runs" / "astra_alpha"
    shutil.copytree(tiny_run, runs / "v1", symlinks=True)
    shutil.copytree(tiny_run, runs / "v2", symlinks=True)
    (runs / "v2" / "samples.txt").unlink()  # a run that is still going on
    done = script("results", "--runs", runs.parent, "--docs", tmp_path / "docs")
    assert done.code == 0, done.err
    numbers = json.loads((tmp_path / "docs" / "results.json").read_text())
    lines = (tiny_run / "metrics.jsonl").read_text().splitlines()
    (run,) = numbers["astra_alpha"]
    assert run["records"] == [json.loads(line) for line in lines] and not run["full"]
    page = (tmp_path / "docs" / "results.md").read_text()
    assert "## Shortened runs" in page and "## astra_alpha" not in page
    assert f"{run['records'][0]['train_loss']:.4f}" in page


def test_a_full_run_stands_beside_the_published_ones(results, tmp_path):
    losses = {unit: 2.0 for unit in ("nats_per_token", "nats_per_character", "bits_per_character")}
    stateless = losses | {"nats_per_token": 2.75}
    run = {
        "config": "astra_alpha", "seed": 7, "full": True, "records": records([2.25, 1.85, 1.72]),
        "evaluation": {"windows": losses, "stream": losses, "stateless": stateless},
        "greedy": {"stateless": "ROMEO: the the", "stateful": "ROMEO: the son"},
    }  # fmt: skip
    page = results.page({"astra_alpha": [run]}, tmp_path, "A note.")
    assert "| 2 | 1.8197 | 1.8198 | 1.8500 | – | – | 1.9500 |" in page
    assert "| 10 | 1.6276 | 1.6332 | – | 1.7015 | 1.6462 | – |" in page
    # from the 2nd epoch on: 1.85 − 1.8198 = 0.0302 and 1.7299 − 1.72 = 0.0099
    assert "nearer published run: 0.0302." in page
    assert "| astra_alpha | 7 | 2.0000 | 2.0000 | 2.0000 | 2.0000 | 2.7500 | 0.7500 |" in page
    # 4,096, 8,192 and 12,288 tokens a second are 0.5, 1 and 1.5 steps of 64 × 128
    assert "| astra_alpha | 7 | 30 | 1.00 | 0.50 … 1.50 | 1.0 | 102 |" in page
    assert "A note." in page and (tmp_path / "astra_alpha.png").stat().st_size > 5000


def test_the_recipe_decides_whether_a_run_is_full(results):
    published = results.load_config("astra_alpha", {"training.seed": "5"})
    assert results._is_full(published)
    for change in ("training.epochs", "model.hidden_dim", "training.batch_size"):
        assert not results._is_full(results.load_config("astra_alpha", {change: "3"}))


def test_no_runs_is_one_sentence(script, tmp_path):
    done = script("results", "--runs", tmp_path, "--docs", tmp_path / "docs")
    assert done.code == 2 and "there are no finished runs in" in done.err
    assert not (tmp_path / "docs").exists()
