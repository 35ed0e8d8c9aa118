"""Many devices and many processes train as one device does, and read each other's checkpoints."""

import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxgru
from jaxgru.lm.data.dataset import load_dataset
from jaxgru.lm.runs import lifecycle
from jaxgru.lm.training import Observer, Progress, fit, init_state
from jaxgru.parallel import processes
from jaxgru.parallel.processes import all_or_raise, join
from jaxgru.parallel.sharding import partition_spec

TESTS = Path(__file__).parent
TRAIN = TESTS.parent / "scripts" / "train.py"
ULP = 2**-23  # float32's, relative


def on_eight_devices(part):
    """A fixture: what on_eight_devices.py has seen of this part."""

    @pytest.fixture(scope="module")
    def seen(tmp_path_factory):
        command = [
            sys.executable,
            TESTS / "on_eight_devices.py",
            tmp_path_factory.mktemp("x"),
            part,
        ]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return seen


seen = on_eight_devices("most")
rest = on_eight_devices("the rest")


class TestDevices:
    """Eight virtual devices, in one process of their own: see on_eight_devices.py."""

    @pytest.mark.slow
    def test_devices_and_parts_of_a_batch_do_not_change_the_numbers(self, rest):
        """12 steps with dropout, float64: the losses, relative, and the parameters, absolute."""
        assert len(rest["differences"]) == 3
        for name, differences in rest["differences"].items():
            assert max(differences) < 1e-11, name

    @pytest.mark.slow
    def test_accumulation_takes_the_memory_of_one_part(self, rest):
        assert rest["memory"]["three parts"] < 0.6 * rest["memory"]["one"]

    def test_float32_agrees_to_the_last_bits(self, seen):
        """20 steps: 3 units in the last place of a loss, as measured; 16 are allowed."""
        for name, (losses, params) in seen["float32"]["differences"].items():
            assert losses < 16 * ULP and params < 16 * ULP, name

    def test_each_device_has_its_share_of_parameters_and_moments(self, seen):
        whole = seen["float32"]["bytes"]["1"][0]
        held = {kind: most for kind, (_, most) in seen["float32"]["bytes"].items()}
        assert held == {"1": whole, "8 sharded": whole // 8}

    @pytest.mark.parametrize("way", ["1 -> 8 sharded", "8 sharded -> 1"])
    def test_a_checkpoint_is_read_on_other_devices(self, seen, way):
        """What comes back has every bit; the 12 losses after it those of the undisturbed run."""
        same_state, _, losses, params = seen["float32"]["resumed"][way]
        assert same_state and losses < 16 * ULP and params < 16 * ULP
        on_as_many = seen["float32"]["resumed"]["8 sharded -> 8 sharded"]
        assert on_as_many == [True, True, 0, 0]  # the end has the same bits

    @pytest.mark.slow
    def test_streams_are_shared_out_with_their_carry(self, rest):
        """Each of 8 devices has one row's; the numbers are those of one device, resumed, too."""
        streams = rest["streams"]
        assert max(streams["differences"]) < 16 * ULP and max(streams["resumed"]) < 16 * ULP
        assert streams["carry a device"] == [1, 16]

    def test_rows_sampled_on_their_own_devices_are_the_same(self, seen):
        """Tokens of float64 logits; no device waits for another."""
        assert seen["sampling"] == {"same": True, "sent": []}

    def test_validation_is_spread_over_the_devices_and_has_the_same_bits(self, seen):
        """Predictions and their mean. Of 10 batches, padded to 16, each of 8 devices has 2."""
        assert seen["validation"] == {
            "same": {"1": True, "2": True, "8": True, "8 sharded": True},
            "predictions": 499,
            "batches per device": 2,
        }


@pytest.mark.parametrize("shape, n, expected", [
    ((24, 16), 8, P("data")), ((16, 24), 8, P(None, "data")), ((16, 16), 8, P("data")),
    ((65, 16), 8, P(None, "data")),  # the longest that divides
    ((65,), 8, P()), ((), 8, P()), ((24, 16), 1, P()),
])  # fmt: skip
def test_an_array_is_cut_along_its_longest_axis_that_divides(shape, n, expected):
    assert partition_spec(shape, n) == expected


# --- Processes

OPTIONS = {
    "model.embedding_dim": 4, "model.hidden_dim": 8, "training.state_dropout": 0.2,
    "training.epochs": 8, "training.steps_per_epoch": 20, "training.batch_size": 4,
    "training.gradient_accumulation": 2, "training.shard_parameters": "true",
    "training.sequence_length": 16, "training.patience": 8,
}  # fmt: skip


def two_processes(log, *arguments):
    """Starts both with these arguments; their output goes to files named by their numbers."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    pair = []
    for process in range(2):
        command = [sys.executable, TRAIN, *arguments]
        command += ["--distributed.coordinator", f"localhost:{port}"]
        command += ["--distributed.processes", 2, "--distributed.process", process]
        words = list(map(str, command))
        with open(log / f"{process}.err", "w") as errors:
            pair.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True))
    return pair


def start(tmp_path, tiny_text):
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    options += ["--data.corpus", tiny_text, "--runs", tmp_path, "--name", "astra_alpha"]
    return two_processes(tmp_path, "--config", "astra_alpha", *options)


def end(tmp_path, pair, limit=300):
    """Both processes' exit codes and what they wrote; neither may take longer than `limit`."""
    try:
        outputs = [process.communicate(timeout=limit)[0] for process in pair]
    finally:
        for process in pair:
            process.kill()
    errors = [(tmp_path / f"{process}.err").read_text() for process in range(2)]
    return [process.returncode for process in pair], outputs, errors


def signalled(tmp_path, pair, victim, number):
    """Sends one of them a signal after the first epoch reported; both must end in a minute."""
    limit = threading.Timer(300, lambda: [process.kill() for process in pair])
    limit.start()
    for line in iter(pair[0].stdout.readline, ""):
        if line.startswith("epoch"):
            break
    else:
        pytest.fail((tmp_path / "0.err").read_text())
    limit.cancel()
    pair[victim].send_signal(number)
    return end(tmp_path, pair, limit=60)


def losses(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[r["train_loss"], r["val_loss"]] for r in records]


def assert_as_undisturbed(run):
    """The run's losses and result are those of one process on one device, to rounding."""
    params, config, tokenizer = jaxgru.lm.load(run)
    _, dataset = load_dataset(config, tokenizer)
    progress = Progress()
    state = init_state(config.model, config.training)
    observer = Observer()
    tokens = (dataset.train, dataset.validation)
    _, result = fit(config, state, None, progress, *tokens, observer)
    undisturbed = [[r.train_loss, r.val_loss] for r in progress.records]
    np.testing.assert_allclose(losses(run), undisturbed, rtol=1e-6)
    chex.assert_trees_all_close(params, result, atol=1e-5, rtol=1e-7)
    assert (run / "samples.txt").exists() and (run / "loss.png").exists()


@pytest.mark.slow
def test_one_of_two_processes_dies_and_the_run_goes_on_in_one(tmp_path, tiny_text):
    codes, outputs, errors = signalled(tmp_path, start(tmp_path, tiny_text), 1, signal.SIGKILL)
    assert codes == [1, -signal.SIGKILL]
    assert "another process of this run seems to have died" in errors[0]
    assert "--resume" in errors[0] and "Traceback" not in errors[0]
    assert "epoch" not in outputs[1]
    run = tmp_path / "astra_alpha" / "v1"
    assert [path.name for path in run.parent.glob("v*")] == ["v1"]
    assert 1 <= len(losses(run)) < 8
    lifecycle.resume_run(run)
    assert_as_undisturbed(run)


@pytest.mark.slow
def test_two_processes_stop_together_and_go_on(tmp_path, tiny_text):
    """SIGTERM to one saves in both; then process 0 is killed; then both are resumed to the end."""
    codes, outputs, _ = signalled(tmp_path, start(tmp_path, tiny_text), 1, signal.SIGTERM)
    run = tmp_path / "astra_alpha" / "v1"
    assert codes == [130, 130] and f"--resume {run}" in outputs[0]
    resumed = two_processes(tmp_path, "--resume", run)
    codes, _, errors = signalled(tmp_path, resumed, 0, signal.SIGKILL)
    assert codes[0] == -signal.SIGKILL and codes[1] not in (0, None)
    assert "another" in errors[1] and "died" in errors[1]  # our sentence, or JAX's before it
    codes, outputs, errors = end(tmp_path, two_processes(tmp_path, "--resume", run))
    assert codes == [0, 0], errors
    assert "\nsample  " in outputs[0] and "\nsample  " not in outputs[1]
    assert_as_undisturbed(run)


@pytest.mark.slow
def test_a_failure_in_one_process_is_told_in_the_other(tmp_path, tiny_text):
    """Process 0 cannot make the run folder."""
    (tmp_path / "astra_alpha").write_text("in the way")
    codes, _, errors = end(tmp_path, start(tmp_path, tiny_text))
    assert codes == [2, 2]
    assert "cannot be written" in errors[0]
    assert "process 0 has failed" in errors[1]


@pytest.mark.parametrize("length", [0, 4096, 5000, 100_000])
def test_a_message_of_any_length_reaches_the_other_processes(length, monkeypatch):
    """Process 0's broadcasts, played back to process 1: all processes must send equal shapes."""
    path = "ü" * length
    sent = []
    monkeypatch.setattr(processes, "is_distributed", lambda: True)
    monkeypatch.setattr(processes, "is_first", lambda: True)
    monkeypatch.setattr(processes, "broadcast_one_to_all", lambda x: sent.append(x) or x)
    assert processes.from_first(path) == path

    def receive(x):
        message = sent.pop(0)
        assert x.shape == message.shape and x.dtype == message.dtype
        return message

    monkeypatch.setattr(processes, "is_first", lambda: False)
    monkeypatch.setattr(processes, "broadcast_one_to_all", receive)
    assert processes.from_first("another") == path


class TestJoining:
    @pytest.mark.parametrize("given, says", [
        (("localhost", 2, 0), "coordinator is 'localhost'; it must be HOST:PORT"),
        (("localhost:1234", 2, 2), "cannot connect .*process_id < num_processes"),
        (("localhost:1234", 2, None), "cannot connect .*process id .*--distributed.process"),
        ((None, None, None), "cannot connect .*SLURM"),
    ])  # fmt: skip
    def test_what_is_missing_or_wrong_is_said(self, given, says, monkeypatch):
        """Before JAX would look for the others, or is asked whether it computes already."""
        monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)
        for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(jaxgru.UserError, match=says):
            join(*given)

    def test_the_environment_says_what_is_not_given(self, monkeypatch):
        """While JAX waits, in C++, Ctrl-C ends the process; then it is Python's again."""
        seen = []
        before = signal.getsignal(signal.SIGINT)

        def initialize(*given, **_):
            seen.append((*given, signal.getsignal(signal.SIGINT)))

        monkeypatch.setattr(jax.distributed, "initialize", initialize)
        for name, value in (("COORDINATOR_ADDRESS", "there:1"), ("NUM_PROCESSES", "3"),
                            ("PROCESS_ID", "1")):  # fmt: skip
            monkeypatch.setenv(f"JAX_{name}", value)
        join()
        join(process=0)
        of_system = signal.SIG_DFL
        assert seen == [("there:1", 3, 1, of_system), ("there:1", 3, 0, of_system)]
        assert signal.getsignal(signal.SIGINT) is before

    def test_others_that_never_come_end_it(self, monkeypatch, capsys):
        ended = threading.Event()
        monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: ended.wait(60))
        monkeypatch.setattr(processes.os, "_exit", lambda code: ended.set())
        join("there:1", 2, 0, seconds=1)
        assert ended.is_set()
        assert "have not connected within 1 s; start all of them" in capsys.readouterr().err

    def test_one_process_needs_no_others(self):
        assert all_or_raise(lambda: 3) == 3
        with pytest.raises(jaxgru.UserError, match="wrong"):
            all_or_raise(lambda: (_ for _ in ()).throw(jaxgru.UserError("wrong")))
