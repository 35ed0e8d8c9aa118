"""What a run leaves on disk. tests/faults shows that no interruption changes a bit of it."""

import csv
import itertools
import re
import shlex
import struct

import chex
import numpy as np
import pytest
from conftest import TINY, numpy_gru_losses, slow
from tensorboardX.proto.event_pb2 import Event
from test_resuming import records

import jaxgru
from jaxgru.analysis import measures
from jaxgru.lm.config import load_config
from jaxgru.lm.data.dataset import load_dataset
from jaxgru.lm.evaluation import window_loss
from jaxgru.lm.runs import terminal
from jaxgru.lm.runs.lifecycle import resume_run, start_run


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """It has neither a capital letter nor a newline, but a space."""
    path = tmp_path_factory.mktemp("text") / "my own.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 40)
    return path


@pytest.fixture(scope="module")
def said_and_run(tmp_path_factory, text):
    options = TINY | {"training.epochs": 3, "training.steps_per_epoch": 20, "name": "tiny"}
    options |= {"training.patience": 3, "training.keep_epochs": True, "training.tensorboard": True}
    config = load_config("astra_alpha", options | {"data.corpus": str(text)})
    with terminal.console.capture() as said:
        run = start_run(config, tmp_path_factory.mktemp("runs"))
    return said.get(), run


@pytest.fixture(scope="module")
def run(said_and_run):
    return said_and_run[1]


def test_a_run_leaves_everything_that_was_promised(run, text):
    names = {path.name for path in run.iterdir()}
    assert names == {"config.toml", "metrics.jsonl", "checkpoints", "tokenizer.json", "samples.txt",
                     "loss.png", "epochs", "run.json", ".lock", "tensorboard"}  # fmt: skip
    assert records(run)[0].keys() >= {"epoch", "step", "learning_rate", "train_loss", "val_loss",
                                      "tokens_per_second", "seconds"}  # fmt: skip
    params, config, tokenizer = jaxgru.lm.load(run.parent)
    assert tokenizer.vocabulary == "".join(sorted(set(text.read_text())))
    assert config.model.vocab_size == params.embedding.shape[0] == len(tokenizer.vocabulary)
    assert records(run)[-1]["val_loss"] < records(run)[0]["val_loss"] < np.log(28)


def test_tensorboard_shows_the_records_also_of_a_resumed_run(run):
    for _ in range(2):
        (file,) = (run / "tensorboard").iterdir()
        data = file.read_bytes()
        found = {}
        while data:  # length, its checksum, an event, its checksum
            (length,) = struct.unpack_from("<Q", data)
            event = Event.FromString(data[12 : 12 + length])
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            data = data[16 + length :]
        assert found == {
            (name, record["step"]): np.float32(value)
            for record in records(run)
            for name, value in record.items()
            if name != "step" and value is not None
        }
        resume_run(run)


def test_the_printed_command_samples_from_a_text_without_the_usual_prompt(said_and_run, script):
    said, run = said_and_run
    command = shlex.split(said.splitlines()[-1])
    assert command == ["sample", "jaxgru", "sample", str(run)]
    done = script("sample", *command[3:], "--num-tokens", 3)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(" ") and len(done.out) == 1 + 3 + 1


def test_each_model_has_the_loss_that_was_recorded(run):
    """The models of all epochs; and what `lm.load` gives, which is the best one of them."""
    result, config, tokenizer = jaxgru.lm.load(run)
    _, dataset = load_dataset(config, tokenizer)
    files = sorted((run / "epochs").iterdir())
    assert [file.name for file in files] == [f"00{i}.safetensors" for i in range(1, 4)]
    epochs = [jaxgru.lm.load(file)[0] for file in files]
    recorded = [record["val_loss"] for record in records(run)]
    measured = [window_loss(params, dataset.validation, 16) for params in epochs]
    np.testing.assert_allclose(measured, recorded, rtol=1e-6)
    assert len(set(recorded)) == 3
    chex.assert_trees_all_equal(result, epochs[int(np.argmin(recorded))])


@pytest.mark.parametrize("batches", ["crops", *slow("streams")])
def test_a_run_of_units(tmp_path, script, monkeypatch, batches):
    """Validated, resumed, sampled and evaluated in lines; of both texts, each line by itself."""
    few = {name: row for name, row in measures.MEASURES.items() if row.needs != "own text"}
    monkeypatch.setattr(measures, "MEASURES", few)  # for the time that the others take
    lines = [f"{a} and {b}\n" for a in ("anna", "bob", "cy") for b in range(100)]
    (tmp_path / "lines.txt").write_text("".join(lines))
    options = {"data.separator": "line", "data.batches": batches, "name": "lines"}
    options |= {"data.corpus": str(tmp_path / "lines.txt")}
    run = start_run(load_config("astra_alpha", TINY | options), tmp_path)
    resume_run(run, {"training.epochs": 3})
    params, config, tokenizer = jaxgru.lm.load(run)
    _, dataset = load_dataset(config, tokenizer)

    def between(places):
        return [
            numpy_gru_losses(params, dataset.validation[begin : end + 1], 99)
            for begin, end in itertools.pairwise(places)
        ]

    ends = np.flatnonzero(dataset.validation == tokenizer.encode("\n"))
    each = between(ends)
    windows = between(sorted({*ends, *range(0, ends[-1], 16)}))
    assert len(each) == 30
    recorded = [record["val_loss"] for record in records(run)]
    assert recorded[-1] == pytest.approx(np.concatenate(windows).mean(), rel=1e-5)
    assert (run / "samples.txt").read_text().count("\n") == 4 * 2 + 3
    done = script("sample", run, "--prompt", "ann", "--temperature", 0)
    assert done.out.startswith("ann") and done.out.count("\n") == 1
    (tmp_path / "held.txt").write_text(tokenizer.decode(dataset.validation[1:]))
    scores = tmp_path / "scores.csv"
    for text in ((), ("--text", tmp_path / "held.txt")):
        done = script("evaluate", run, *text, "--output", scores)
        assert done.code == 0 and "only where a document begins" in done.out
        nats = [float(row[2]) for row in csv.reader(scores.open(newline="")) if row[2] != "nats"]
        np.testing.assert_allclose(nats, np.concatenate(each), rtol=1e-4)
        scores.unlink()
    counted = "evaluate", "--ngram", 2, "--config", run / "config.toml"
    own, held = (
        re.search("order 2 .*", script(*counted, *text).out)[0]
        for text in ((), ("--text", tmp_path / "held.txt"))
    )
    assert own == held
    done = script("evaluate", run, "--dynamic")
    assert done.code == 2 and "--dynamic reads a text as one stream" in done.err


def test_a_path_is_printed_as_it_is(capsys):
    """Rich would take it for markup, and raise where it closes nothing: the fuzzer's find."""
    terminal.console.print("runs/[x]/[/red].txt")
    assert capsys.readouterr().out == "runs/[x]/[/red].txt\n"
