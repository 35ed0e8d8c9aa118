"""docs/study.md: its numbers are the records', and runs of several machines come together."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import msgspec
import pytest

import jaxgru
import report
from jaxgru.analysis import measures
from jaxgru.errors import UserError
from jaxgru.lm.config import load_config
from jaxgru.lm.data.dataset import load_dataset
from jaxgru.lm.runs.folders import RunInfo, save_config, save_info
from pages.markdown import DOCS, table
from pages.measurements import dumps, load
from study.figures import in_quarter_octaves
from study.study_page import FILLED, Page, first_below
from study.study_records import Run, Study

ALPHA = "GRU 1 × 128 (astra_alpha)"
SCRIBE = "GRU 2 × 256, subwords (scribe_alpha)"
NGRAMS = {"astra_alpha": [3.3, 2.5, 2.0, 1.7, 1.6, 1.55, 1.54, 1.54], "scribe_alpha": [2.2] * 8}


def run(*values, **fields):
    """A record of `run_json` as the page takes it."""
    return msgspec.convert(run_json(*values, **fields), Run)


def run_json(
    config="astra_alpha",
    seed=0,
    changes=None,
    stream=1.5,
    cost=1.0,
    losses=(2.25, 1.85, 1.72),
    characters_per_token=1,
):
    """A record in which every number can be told from the others, as docs/study.json holds it."""
    return {
        "config": config,
        "changes": changes or {},
        "seed": seed,
        "parameters": 86_913,
        "epochs": [epoch_json(i, loss) for i, loss in enumerate(losses, 1)],
        "study": measures_json(stream, cost, characters_per_token),
    }


def epoch_json(number, loss):
    """A line of metrics.jsonl."""
    return {
        "epoch": number,
        "step": 10 * number,
        "learning_rate": 1e-3,
        "train_loss": loss,
        "val_loss": loss + 0.1,
        "tokens_per_second": 4096.0 * number,
        "seconds": 20.0,
    }


def measures_json(stream, cost, characters_per_token):
    """A run's study.json."""
    text = {"median_period": 4, "known_words": 0.25, "sampled": "ROMEO: | hath"}
    cycles = [
        {"text": "-", "period": 1, "basin": 0.02},
        {"text": " the", "period": 4, "basin": 0.98},
    ]
    return {
        "num_tokens": 100,
        "num_characters": 100 * characters_per_token,
        "windows": stream + 0.02,
        "stream": stream,
        "stateless": stream + cost,
        "sensitivity": cost,
        "memory_curve": [[2**i, stream + cost / 2**i] for i in range(11)],
        "recovery": [cost / 2**i for i in range(256)],
        "chain": {"kl_to_bigram": 0.125, "cycles": cycles},
        "text": {
            "validation text": {"known_words": 0.9375},
            "stateless": text,
            "stateful": text | {"known_words": 0.75, "sampled": "ROMEO: O"},
        },
        "date": "2026-01-02",
        "hardware": "a machine",
    }


def page(*runs):
    """The page's tables."""
    return "\n".join(Page(runs, NGRAMS).tables().values())


def test_the_numbers_are_the_records():
    text = page(run(seed=7))
    row = f"| {ALPHA} | 86,913 | 1.628, 1.633 | 1.720 | 1.500 | 2.500 | 1.000 | 1.0 |"
    assert row in text  # 3 times 20 seconds
    # 1/2⁶ = 0.016 is the last excess of 0.01 or more: 7 predictions
    assert f"| {ALPHA} | 1 | 1.720 | 1.520 | 1.500 | 1.000 | 7 |" in text
    assert f"| {ALPHA} | 2.500 | 1.750 | 1.562 | 1.531 |" in text
    assert "| characters | 3.300 | 2.500 | 2.000 |" in text
    assert f'| {ALPHA} | 0.125 | `" the"` (98%) | 94% | 75% | 25% | 4 |' in text


def test_means_and_ranges_are_over_the_seeds_of_a_config_and_its_changes():
    changes = {"training.state_dropout": 0.0}
    text = page(
        run(),
        run(seed=1, stream=1.75, losses=[1.5]),
        run(changes=changes, cost=0.5),
        run(changes={"model.hidden_dim": 32}),
        run("best_gru"),
    )
    assert f"| {ALPHA} | 2 | 1.610 (1.500 … 1.720) | 1.645 (1.520 … 1.770) |" in text
    assert "| GRU 1 × 128 (astra_alpha, no dropout) | 1 | 1.720 | 1.520 | 1.500 | 0.500 |" in text
    assert "| GRU 1 × 32 (astra_alpha, hidden_dim 32) | 1 | 1.720" in text
    assert "| Mogrifier GRU 2 × 416 (best_gru) | 86,913 | – | 1.720 |" in text


def test_a_character_is_not_a_token():
    """Half the nats a character where a token is two."""
    text = page(run(), run("scribe_alpha", characters_per_token=2))
    assert f"| {SCRIBE} | 86,913 | 2.950 | 1.720 | 0.750 | 1.250 | 0.500 |" in text
    assert f"| {SCRIBE} | 1.250 | 0.875 | 0.781 |" in text


def test_the_loss_on_random_batches_is_that_of_the_record():
    records = [run_json("astra_beta"), run_json("astra_beta", 1)]
    for record, mean in zip(records, (1.5, 1.25), strict=True):
        best = {"epoch": 7, "mean": mean - 0.125, "standard_error": 0.00151}
        measured = {"mean": mean, "standard_error": 0.00053, "best": best}
        record["study"]["random_batches"] = measured
    text = page(run(), *(msgspec.convert(record, Run) for record in records))
    assert "| 86,913 | 1.375 (1.250 … 1.500) | 1.250 (1.125 … 1.375) |" in text


def test_the_records_are_written_as_they_were_read():
    lines = {line.removesuffix(",") for line in (DOCS / "study.json").read_text().splitlines()}
    assert {*map(dumps, load(DOCS / "study.json", Study).runs)} <= lines


def test_a_record_that_holds_something_else_is_one_sentence(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"runs": [run_json(losses=())]}))
    with pytest.raises(UserError, match="a.json is not .*length >= 1 - at `.*epochs`"):
        load(tmp_path / "a.json", Study)


def test_first_below():
    assert first_below([0.5, 0.02, 0.009, 0.0]) == 2
    assert first_below([0.5, 0.001, -0.02, 0.0]) == 3  # it came back
    assert first_below([0.0, 0.0]) == 0
    assert first_below([0.5, 0.5]) == "more than 2"
    # one prediction of 0.03 among the 16th to 18th leaves their mean, 0.01, and here just below it
    assert first_below([0.5] + [0.0] * 15 + [0.03] + [0.0] * 10) == 18
    assert first_below([0.5] + [0.0] * 15 + [0.029] + [0.0] * 10) == 1
    assert FILLED == 0.01


@pytest.mark.parametrize(
    "n, expected",
    [
        (1, [(1, 1, 1)]),
        (15, [(1, 1, 1), (15, 15, 15)]),
        (18, [(1, 1, 1), (15, 15, 15), (16, 18, 17)]),
        (256, [(1, 1, 1), (15, 15, 15), (16, 18, 17), (215, 256, 235.5)]),
    ],
)
def test_quarters_of_an_octave(n, expected):
    """Of the numbers 1 … n: a mean of neighbours is the middle of the first and the last."""
    seen = in_quarter_octaves(range(1, n + 1))
    assert [k for first, last, _ in seen for k in range(first, last + 1)] == list(range(1, n + 1))
    assert set(expected) <= set(seen) and seen[-1] == expected[-1]


def test_a_bar_does_not_break_a_table():
    assert table(["a", "b"], [["x|y", 1]]) == "| a | b |\n| --- | --- |\n| x\\|y | 1 |\n"


# --- The script


def make_run(folder: Path, name="astra_alpha", hardware="a machine", **fields) -> None:
    """A finished and measured run, without its checkpoints: the report needs none."""
    folder.mkdir(parents=True)
    save_info(folder, RunInfo())
    config = load_config(name, {name.replace("__", "."): value for name, value in fields.items()})
    save_config(folder, config)
    record = run_json(name)
    lines = "".join(json.dumps(epoch) + "\n" for epoch in record["epochs"])
    (folder / "metrics.jsonl").write_text(lines)
    (folder / "study.json").write_text(json.dumps(record["study"] | {"hardware": hardware}))
    (folder / "samples.txt").touch()


def test_runs_of_several_machines_come_together(script, tmp_path, monkeypatch, drawn):
    here = tmp_path / "here"
    there = tmp_path / "there"
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "study.json").write_text(json.dumps({"runs": [], "ngrams": NGRAMS}))
    done = script("report", "--runs", here, "--docs", docs)
    assert done.code == 2 and "there are no finished runs of the study in" in done.err
    for name in ("astra_alpha", "astra_beta", "astra_gamma", "elman_alpha"):  # those of figures
        make_run(here / name / "v1", name)
    make_run(here / "astra_alpha" / "v2", training__seed=1)
    make_run(here / "astra_alpha" / "v3", training__epochs=2)  # not the study's
    make_run(here / "astra_alpha" / "v4", training__seed=2)
    (here / "astra_alpha" / "v4" / "samples.txt").unlink()  # not finished
    with monkeypatch.context() as at_first:
        at_first.setattr(Page, "draw", lambda *_: None)  # which takes longest
        assert script("report", "--runs", here, "--docs", docs).code == 0
    make_run(there / "astra_alpha" / "v1", hardware="another machine")
    done = script("report", "--runs", there, "--docs", docs)
    assert done.code == 0 and "made from 5 runs" in done.out
    kept = [r for r in load(docs / "study.json", Study).runs if r.config == "astra_alpha"]
    seen = [(r.seed, r.parameters, r.measured.hardware) for r in kept]
    assert seen == [(0, 86_913, "another machine"), (1, 86_913, "a machine")]
    assert f"| {ALPHA} | 2 | 1.720 (1.720 … 1.720)" in ((docs / "study.md").read_text())
    for figure in ("memory", "recovery", "sensitivity", "epochs"):
        assert (docs / "figures" / f"{figure}.svg").stat().st_size > 5000


def test_the_best_epoch_is_measured_as_nanogpt_is(run_copy, monkeypatch):
    """Without what needs the training text, and of two batches."""
    params, config, tokenizer = jaxgru.lm.load(run_copy)
    best = jax.tree.map(lambda leaf: 2 * leaf, params)
    monkeypatch.setattr(report, "NANOGPT", (config.name,))

    def load_model(run, epoch=None):
        return best if epoch == "best" else params, config, tokenizer

    monkeypatch.setattr(report.lm, "load", load_model)
    monkeypatch.setattr(measures, "NUM_BATCHES", 2)
    monkeypatch.setattr(measures, "TOP_K", 8)  # of the tiny run's 28 characters
    texts = dict.fromkeys(measures.TREATMENTS, measures.Text())
    for name, value in (("text", texts), ("chain", None)):
        row = measures.Measure("", lambda _, value=value: value, "own text")
        monkeypatch.setitem(measures.MEASURES, name, row)
    record = report.measure(run_copy, 1)
    assert len(record["date"]) == 10 and "JAX" in record["hardware"]
    assert len(record["recovery"]) == 256
    texts = []
    for name in measures.TREATMENTS:
        texts += [record["text"][name]["greedy"], record["text"][name]["sampled"]]
    assert [len(text) for text in texts] == 3 * [7 + 200, 7 + 300] and len(set(texts)) == 6
    assert all(text.startswith("ROMEO: ") for text in texts)
    _, dataset = load_dataset(config, tokenizer)
    last_loss = measures.random_batch_loss(measures.Subject(params, dataset)).to_dict()
    best_loss = measures.random_batch_loss(measures.Subject(best, dataset)).to_dict()
    assert record["random_batches"] == last_loss | {"best": best_loss | {"epoch": 1}}
