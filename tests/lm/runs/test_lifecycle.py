"""Real training processes: what a run leaves on disk, and that no interruption changes a bit."""

import json
import re
import shlex
import signal
import struct
import subprocess
import sys

import chex
import numpy as np
import pytest
from conftest import SCRIPTS
from tensorboardX.proto.event_pb2 import Event

import jaxgru
from jaxgru.lm.runs import commits, terminal

TRAIN = SCRIPTS / "train.py"
OPTIONS = {
    "model.embedding_dim": 4,
    "model.hidden_dim": 8,
    "training.epochs": 4,
    "training.steps_per_epoch": 40,
    "training.batch_size": 4,
    "training.sequence_length": 16,
    "training.patience": 4,
    "training.keep_epochs": "true",
    "training.tensorboard": "true",
}


def command(runs, text, *arguments):
    options = [part for name, value in OPTIONS.items() for part in (f"--{name}", str(value))]
    start = ["--config", "astra_alpha", "--name", "astra_alpha"]
    start += ["--data.corpus", str(text), *options]
    return [sys.executable, str(TRAIN), "--runs", str(runs), *(arguments or start)]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "my own.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 40)
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, text):
    runs = tmp_path_factory.mktemp("undisturbed")
    done = subprocess.run(command(runs, text), check=True, capture_output=True, text=True)
    (runs / "stdout.txt").write_text(done.stdout)
    return runs / "astra_alpha" / "v1"


def losses(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(r["epoch"], r["step"], r["train_loss"], r["val_loss"]) for r in records]


def models(run):
    return [jaxgru.lm.load(path)[0] for path in sorted((run / "epochs").iterdir())]


def scalars(run):
    """What TensorBoard shows: the values by name and step."""
    (file,) = (run / "tensorboard").iterdir()
    data, found = file.read_bytes(), {}
    while data:  # length, its checksum, an event, its checksum
        (length,) = struct.unpack_from("<Q", data)
        event = Event.FromString(data[12 : 12 + length])
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        data = data[16 + length :]
    return found


def test_a_run_leaves_everything_that_was_promised(undisturbed, text):
    names = {path.name for path in undisturbed.iterdir()}
    named = {commits.FILE_NAME} if commits.current_commit() else set()  # outside a checkout: none
    assert names - named == {"config.toml", "metrics.jsonl", "checkpoints", "tokenizer.json",
                             "samples.txt", "loss.png", "epochs", "run.json", ".lock",
                             "tensorboard"}  # fmt: skip
    assert commits.trained_by(undisturbed) == [commits.current_commit()] * len(named)
    first = json.loads((undisturbed / "metrics.jsonl").read_text().splitlines()[0])
    assert first.keys() >= {"epoch", "step", "learning_rate", "train_loss", "val_loss",
                            "tokens_per_second", "seconds"}  # fmt: skip
    assert (undisturbed / "loss.png").read_bytes().startswith(b"\x89PNG")
    params, config, tokenizer = jaxgru.lm.load(undisturbed.parent)
    assert tokenizer.vocabulary == "".join(sorted(set(text.read_text())))
    assert config.model.vocab_size == params.embedding.shape[0] == len(tokenizer.vocabulary)
    assert losses(undisturbed)[-1][3] < losses(undisturbed)[0][3] < np.log(28)


def recorded(run):
    """`scalars`, from metrics.jsonl; in float32."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {
        (name, record["step"]): np.float32(value)
        for record in records
        for name, value in record.items()
        if name != "step" and value is not None
    }


def test_tensorboard_shows_the_records(undisturbed):
    assert scalars(undisturbed) == recorded(undisturbed)


def test_the_printed_command_samples_from_a_text_without_the_usual_prompt(undisturbed, script):
    """The vocabulary has neither a capital letter nor a newline, but a space."""
    said = (undisturbed.parents[1] / "stdout.txt").read_text()
    options = shlex.split(re.search(r"^sample  python .*sample\.py (.*)", said, re.M)[1])
    assert options == [str(undisturbed)]
    done = script("sample", *options, "--num-tokens", 3)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(" ") and len(done.out) == 1 + 3 + 1


def test_each_model_has_the_loss_that_was_recorded(undisturbed):
    """The models of all epochs; and what `lm.load` gives, which is the best one of them."""
    from jaxgru.lm.data.dataset import load_dataset
    from jaxgru.lm.evaluation import window_loss

    result, config, tokenizer = jaxgru.lm.load(undisturbed)
    _, dataset = load_dataset(config, tokenizer)
    files = sorted((undisturbed / "epochs").iterdir())
    assert [file.name for file in files] == [f"00{i}.safetensors" for i in range(1, 5)]
    epochs = models(undisturbed)
    recorded = [loss for *_, loss in losses(undisturbed)]
    measured = [window_loss(params, dataset.validation, 16) for params in epochs]
    np.testing.assert_allclose(measured, recorded, rtol=1e-6)
    assert len(set(recorded)) == 4
    chex.assert_trees_all_equal(result, epochs[int(np.argmin(recorded))])


@pytest.mark.parametrize(
    "name",
    ["SIGKILL", *(pytest.param(name, marks=pytest.mark.slow) for name in ("SIGINT", "SIGTERM"))],
)
def test_a_run_interrupted_anywhere_ends_with_the_same_bits(name, tmp_path, text, undisturbed):
    (tmp_path / "disk").mkdir()
    (tmp_path / "astra_alpha").symlink_to("disk")  # where runs lie on another disk
    number = getattr(signal, name)
    process = subprocess.Popen(
        command(tmp_path, text), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while "epoch   2" not in process.stdout.readline():
        assert process.poll() is None, process.stderr.read()
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    run = tmp_path / "astra_alpha" / "v1"
    if name != "SIGKILL":
        assert process.returncode == 130 and "Traceback" not in errors
        assert f"--resume {run}" in output
        assert len(losses(run)) < OPTIONS["training.epochs"]
    resumed = command(tmp_path, text, "--resume", str(run))
    subprocess.run(resumed, check=True, capture_output=True)
    assert losses(run) == losses(undisturbed)
    assert scalars(run) == recorded(run)
    ours, expected = jaxgru.lm.load(run)[0], jaxgru.lm.load(undisturbed)[0]
    chex.assert_trees_all_equal(ours, expected)
    chex.assert_trees_all_equal(models(run), models(undisturbed))
    assert (run / "samples.txt").read_text() == (undisturbed / "samples.txt").read_text()


def test_a_path_is_printed_as_it_is(capsys):
    """Rich would take it for markup, and raise where it closes nothing: the fuzzer's find."""
    terminal.console.print("runs/[x]/[/red].txt")
    assert capsys.readouterr().out == "runs/[x]/[/red].txt\n"
